"""Compare each number of the paper with ours, and say what the comparison is worth."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from paper_figures.accuracy_table import summarize_runs
from paper_figures.files import (
    load_result,
    load_runs,
    make_parser,
    run_command,
    write_csv,
    write_markdown,
)
from paper_figures.flops_table import flops_rows
from paper_figures.layer_latency_table import profile_rows
from paper_figures.layer_memory_table import COLUMNS as MEMORY_COLUMNS
from paper_figures.layer_memory_table import as_trained, memory_rows
from paper_figures.paper_values import (
    layer_setting,
    load_paper_values,
    num_probes,
    utility_setting,
)
from paper_figures.style import TASKS

NOT_RUN = "not run in this configuration"
# The noise multipliers are compared on top of unpublished sample rates, steps and accountants.
NOISE_TOLERANCE = 0.005
# Of approximate ratios of times, on the paper's device.
LATENCY_TOLERANCE = 0.25
PAPER_DEVICE, PAPER_TOKENS = "A100", 4096


@dataclass(frozen=True)
class Ours:
    """Our number for one row of the paper."""

    value: float
    made_by: str
    verdict: str
    std: float = math.nan


@dataclass(frozen=True)
class Evidence:
    """The results a comparison draws on."""

    summary: pd.DataFrame  # of summarize_runs
    flops: pd.DataFrame  # of flops_rows
    calibrations: Sequence[dict[str, Any]]  # result files, none of a training run
    profiles: pd.DataFrame  # of profile_rows
    memory: pd.DataFrame  # of memory_rows


def compare_values(paper: pd.DataFrame, evidence: Evidence, configuration: str) -> pd.DataFrame:
    """Put our number beside each of the paper's.

    Args:
        paper: The paper's values.
        evidence: Our results.
        configuration: Name of the configuration that made them.

    Returns:
        One row for each of the paper's, in its order: our value is empty where nothing made one.
    """
    rows = []
    for row in paper.itertuples(index=False):
        make = _MAKERS.get(row.quantity)
        ours = make(row, evidence) if make else None
        doubt = _doubt(row, paper)
        rows.append(
            {
                "id": row.id,
                "where": row.where,
                "quantity": row.quantity,
                "method": row.method,
                "setting": row.setting,
                "unit": row.unit,
                "paper_value": row.value,
                "paper_std": row.std,
                "our_value": ours.value if ours else math.nan,
                "our_std": ours.std if ours else math.nan,
                "difference": ours.value - row.value if ours else math.nan,
                "configuration": f"{configuration}: {ours.made_by}" if ours else configuration,
                "verdict": doubt or (ours.verdict if ours else NOT_RUN),
            }
        )
    return pd.DataFrame(rows)


def _doubt(row: Any, paper: pd.DataFrame) -> str | None:
    """Say where a number of the paper's summary is not what its own tables give."""
    values = paper.set_index("id")["value"]
    if row.id == "billsum_drop":
        drops = [values[f"billsum_fgc_eps{e}"] - values[f"billsum_rc_eps{e}"] for e in (9, 2)]
        claimed = " and ".join(f"{drop:.4f}" for drop in drops)
        agrees = any(math.isclose(drop, row.value, abs_tol=5e-4) for drop in drops)
    elif row.id == "bbc_hutchpp_gain":
        gain = values["lowbudget_hutchpp_acc"] - values["lowbudget_hutch_acc"]
        claimed = f"{gain:.2f}"
        agrees = math.isclose(gain, row.value, abs_tol=0.5)
    else:
        return None
    return None if agrees else f"source inconsistent: its tables give {claimed}"


def _exact_verdict(ours: float, published: float, digits: int) -> str:
    """Judge a number without randomness: it must round to what was printed."""
    if round(ours, digits) == round(published, digits):
        return "reproduced"
    return f"differs: rounds to {ours:.{digits}f}"


def _flops_saving(row: Any, evidence: Evidence) -> Ours | None:
    """Look up the counted saving of one estimator on one layer."""
    layer, probes = layer_setting(row.setting), num_probes(row.method)
    cost = _layer_row(evidence.flops, row.method.split()[0], *layer, probes)
    if cost is None:
        return None
    exact = _layer_row(evidence.flops, "exact", *layer, probes)
    saving = 100 * (1 - cost["flops_counted"] / exact["flops_counted"])
    made_by = f"count_flops, {layer[0]}x{layer[1]}, {layer[2]} tokens, {probes} probes"
    return Ours(saving, made_by, _exact_verdict(saving, row.value, 2))


def _ghost_ratio(row: Any, evidence: Evidence) -> Ours | None:
    """Divide the operations of ghost norms by those of Hutchinson: tokens over probes."""
    probes = num_probes(row.method)
    for layer in evidence.flops[["in_features", "out_features", "tokens"]].itertuples(index=False):
        ghost, ours = (
            _layer_row(evidence.flops, name, *layer, probes) for name in ("ghost", "hutchinson")
        )
        if ghost is not None and ours is not None and f"T={layer.tokens}," in row.setting:
            ratio = ghost["flops_counted"] / ours["flops_counted"]
            made_by = f"count_flops, {layer.in_features}x{layer.out_features}"
            return Ours(ratio, made_by, _exact_verdict(ratio, row.value, 0))
    return None


def _memory_saving(row: Any, evidence: Evidence) -> Ours | None:
    """Look up the simulated saving of one estimator on one layer.

    The paper does not say what it counts. Ours is everything, against an exact norm that squares
    in place; if another reading gives the paper's number, that is what we report, by its name.
    """
    layer, probes = layer_setting(row.setting), num_probes(row.method)
    trained = as_trained(evidence.memory)
    cost = _layer_row(trained, row.method.split()[0], *layer, probes)
    if cost is None:
        return None
    if row.quantity == "peak_memory_saving_including_inputs":
        readings = {
            "exact squares in place": cost["saving_including_inputs"],
            "exact squares a copy": cost["saving_including_inputs_copied"],
        }
    else:
        readings = {
            "all it takes": cost["saving_excluding_inputs"],
            "only what has a row for each token": cost["saving_token_workspace"],
        }
    percent = {name: 100 * value for name, value in readings.items() if pd.notna(value)}
    digits = 0 if "approximate" in row.source else 2
    made_by = f"simulate_layer_memory, {layer[0]}x{layer[1]}, {layer[2]} tokens, {probes} probes"
    made_by += f", {cost['dtype']}, shared sketch"
    for name, value in percent.items():
        if round(value, digits) == round(row.value, digits):
            return Ours(value, f"{made_by}, {name}", f"reproduced: counting {name}")
    first, *others = percent
    verdict = f"differs: counting {first}"
    verdict += "".join(f"; {percent[name]:.2f} counting {name}" for name in others)
    return Ours(percent[first], made_by, verdict)


def _latency_ratio(row: Any, evidence: Evidence) -> Ours | None:
    """Divide the times of two estimators on the largest layer, at the paper's length if we have it.

    Hutch++ over Hutchinson, or exact over Hutchinson for what the paper calls compute saving.
    """
    above = "hutchpp" if row.quantity == "latency_ratio_hutchpp_over_hutch" else "exact"
    probes = num_probes(row.method)
    timed = evidence.profiles
    timed = timed[timed["num_probes"].isna() | (timed["num_probes"] == probes)]
    timed = timed.pivot_table(
        index=["in_features", "out_features", "tokens", "device", "dtype"],
        columns="estimator",
        values="latency_seconds",
    )
    if not {above, "hutchinson"} <= set(timed.columns):
        return None
    ratios = (timed[above] / timed["hutchinson"]).dropna().reset_index(name="ratio")
    if ratios.empty:
        return None
    ratios["work"] = ratios["in_features"] * ratios["out_features"]
    largest = ratios[ratios["work"] == ratios["work"].max()].sort_values("tokens")
    at_4096 = largest[largest["tokens"] == PAPER_TOKENS]
    found = next((largest if at_4096.empty else at_4096).tail(1).itertuples(index=False))
    made_by = (
        f"profile_layer, {found.in_features}x{found.out_features}, {found.tokens} tokens,"
        f" {probes} probes, {found.dtype}, {found.device}"
    )
    if PAPER_DEVICE not in found.device:
        verdict = f"differs: measured on another device ({found.device})"
    elif abs(found.ratio / row.value - 1) <= LATENCY_TOLERANCE:
        verdict = f"reproduced within {100 * LATENCY_TOLERANCE:g} %"
    else:
        verdict = f"differs: by {100 * (found.ratio / row.value - 1):+.0f} %"
    return Ours(found.ratio, made_by, verdict)


def _layer_row(
    flops: pd.DataFrame, estimator: str, in_features: int, out_features: int, tokens: int, k: int
) -> pd.Series | None:
    """Find the count of one estimator on one layer."""
    found = flops[
        (flops["estimator"] == estimator)
        & (flops["in_features"] == in_features)
        & (flops["out_features"] == out_features)
        & (flops["tokens"] == tokens)
        & (flops["num_probes"].isna() | (flops["num_probes"] == k))
    ]
    return None if found.empty else found.iloc[0]


def _noise_multiplier(row: Any, evidence: Evidence) -> Ours | None:
    """Find the calibration of the paper's mechanism and analysis at the row's budget."""
    wanted = utility_setting(row.method, row.setting)
    estimator = row.method.split()[0]
    for calibration in evidence.calibrations:
        privacy = calibration["privacy"]
        same = privacy["estimator"] == estimator and privacy["epsilon"] == wanted.epsilon
        if estimator != "exact":
            same = same and privacy["analysis"] == "envelope"
            same = same and privacy["num_probes"] == num_probes(row.method)
        if same and f"delta {privacy['delta']:g}".replace("e-05", "e-5") in row.setting:
            sigma = privacy["noise_multiplier"]
            made_by = (
                f"calibrate_noise, sample rate {privacy['sample_rate']:.4g},"
                f" {privacy['steps']} steps (not published; chosen so that exact clipping fits)"
            )
            return Ours(sigma, made_by, _noise_verdict(sigma, row.value))
    return None


def _noise_verdict(ours: float, published: float) -> str:
    relative = ours / published - 1
    if abs(relative) <= NOISE_TOLERANCE:
        return f"reproduced within {100 * NOISE_TOLERANCE:g} %"
    return f"differs: by {100 * relative:+.1f} %"


def _runs_of(
    evidence: Evidence, task: str, mode: str, method: str, epsilon: float | None = None
) -> pd.DataFrame:
    """Select the runs of a task of the paper: the task itself, else its offline twin."""
    chosen = evidence.summary[
        (evidence.summary["mode"] == mode) & (evidence.summary["method"] == method)
    ]
    if epsilon is not None:
        chosen = chosen[chosen["epsilon"] == epsilon]
    real = chosen[chosen["task"] == task]
    return real if not real.empty else chosen[chosen["task"] == f"{task}_offline"]


def _twin_verdict(run: Any) -> str | None:
    """Say that a run of an offline twin is no reproduction, whatever its number."""
    if not run.task.endswith("_offline"):
        return None
    return f"differs: offline twin (small model, {run.max_tokens} tokens)"


def _score(row: Any, evidence: Evidence) -> Ours | None:
    """Find our mean score for a score of the paper."""
    wanted = utility_setting(row.method, row.setting)
    runs = _runs_of(evidence, *wanted)
    if runs.empty:
        return None
    run = next(runs.itertuples(index=False))
    margin = 2 * math.hypot(row.std, run.std)
    if abs(run.mean - row.value) <= margin:
        measured = "within noise"
    else:
        measured = "differs: by more than two standard deviations"
    if math.isnan(margin):
        measured = "differs: one seed, no standard deviation"
    return Ours(run.mean, _made_by(run), _twin_verdict(run) or measured, std=run.std)


def _made_by(run: Any) -> str:
    seeds = "1 seed" if run.seeds == 1 else f"{run.seeds} seeds"
    return f"train_model, {run.task}, {run.mode}, {run.method}, epsilon {run.epsilon:g}, {seeds}"


def _drop(row: Any, evidence: Evidence) -> Ours | None:
    """Find the largest drop from exact to randomized clipping over the budgets."""
    wanted = utility_setting(row.method, row.setting)
    exact = _runs_of(evidence, wanted.task, wanted.mode, "exact")
    ours = _runs_of(evidence, wanted.task, wanted.mode, "hutchinson_paper")
    pairs = exact.merge(ours, on=["task", "mode", "epsilon"], suffixes=("_exact", ""))
    if pairs.empty:
        return None
    drops = pairs["mean_exact"] - pairs["mean"]
    run = next(pairs.loc[[drops.idxmax()]].itertuples(index=False))
    kept = drops.max() <= row.value
    measured = "reproduced: at most the paper's" if kept else "differs: larger than the paper's"
    return Ours(drops.max(), _made_by(run), _twin_verdict(run) or measured)


def _hutchpp_gain(row: Any, evidence: Evidence) -> Ours | None:
    """Find what Hutch++ gains over Hutchinson at the row's budget."""
    wanted = utility_setting(row.method, row.setting)
    head = _runs_of(evidence, *wanted)
    plain = _runs_of(evidence, *wanted._replace(method="hutchinson_paper"))
    if head.empty or plain.empty:
        return None
    run = next(head.itertuples(index=False))
    gain = run.mean - plain["mean"].iloc[0]
    measured = "reproduced" if gain >= row.value else "differs: smaller than the paper's"
    return Ours(gain, _made_by(run), _twin_verdict(run) or measured)


_MAKERS: dict[str, Callable[[Any, Evidence], Ours | None]] = {
    **{task.metric: _score for task in TASKS.values()},
    **{f"{task.metric}_drop_vs_exact": _drop for task in TASKS.values()},
    "accuracy_gain_hutchpp_vs_hutch": _hutchpp_gain,
    "flops_saving_vs_exact": _flops_saving,
    "flops_ratio_ghost_over_hutch": _ghost_ratio,
    "peak_memory_saving_including_inputs": _memory_saving,
    "peak_memory_saving_excluding_inputs": _memory_saving,
    "latency_ratio_hutchpp_over_hutch": _latency_ratio,
    "compute_saving": _latency_ratio,
    "noise_multiplier": _noise_multiplier,
}


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    def number(value: float, std: float) -> str:
        if pd.isna(value):
            return ""
        return f"{value:.4g}" if pd.isna(std) else f"{value:.4g} ± {std:.2g}"

    return pd.DataFrame(
        {
            "id": rows["id"],
            "quantity": rows["quantity"].str.replace("_", " "),
            "setting": rows["method"] + "; " + rows["setting"],
            "unit": rows["unit"],
            "paper": [number(*pair) for pair in zip(rows.paper_value, rows.paper_std, strict=True)],
            "ours": [number(*pair) for pair in zip(rows.our_value, rows.our_std, strict=True)],
            "difference": [number(value, math.nan) for value in rows["difference"]],
            "made by": rows["configuration"].where(rows["our_value"].notna(), ""),
            "verdict": rows["verdict"],
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    evidence = Evidence(
        summary=summarize_runs(load_runs(arguments.metrics)),
        flops=flops_rows(load_result(arguments.flops)),
        calibrations=[load_result(path) for path in arguments.calibrations],
        profiles=profile_rows(load_result(path) for path in arguments.profiles),
        memory=pd.concat(
            [memory_rows(load_result(path)) for path in arguments.memory]
            or [pd.DataFrame(columns=MEMORY_COLUMNS)]
        ),
    )
    rows = compare_values(load_paper_values(arguments.paper), evidence, arguments.configuration)
    write_csv(arguments.csv, rows)
    kinds = rows["verdict"].str.split(":").str[0].value_counts()
    counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="The paper's numbers and ours",
        note=f"Configuration `{arguments.configuration}`. {len(rows)} numbers: {counts}.\n\n"
        "An offline twin is a much smaller model on shorter texts: its scores show that the"
        " pipeline works and how the methods compare, and reproduce no number of the paper.",
    )


if __name__ == "__main__":
    parser = make_parser("compare_paper", "Compare the paper's numbers with ours.")
    parser.add_argument("--configuration", required=True, help="name of the configuration")
    parser.add_argument("--paper", required=True, help="the paper's values")
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--calibrations", nargs="*", default=[], help="calibrations without a run")
    parser.add_argument("--profiles", nargs="*", default=[], help="of dprc profile-layer")
    parser.add_argument("--memory", nargs="*", default=[], help="of dprc simulate-memory")
    parser.add_argument("--csv", required=True, help="CSV to write")
    parser.add_argument("--markdown", required=True, help="Markdown to write")
    raise SystemExit(run_command(parser, _command))
