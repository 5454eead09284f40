"""Our number for each of the paper's: looked up in result files, with what made it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from paper_figures.layer_memory_table import as_trained
from paper_figures.paper_values import SCORES, layer_setting, num_probes, utility_setting
from paper_figures.tolerances import PAPER_DEVICE, TOLERANCES
from paper_figures.utility_table import runs_of

PAPER_TOKENS = 4096


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
    noise: pd.DataFrame  # of noise_rows
    errors: pd.DataFrame  # of error_rows
    envelope: pd.DataFrame  # of envelope_rows


def find_ours(row: Any, evidence: Evidence) -> Ours | None:
    """Look up our number for a row of the paper; None where nothing made one."""
    return _MAKERS[row.quantity](row, evidence) if row.quantity in _MAKERS else None


def _judged(row: Any, value: float, made_by: str, *, std: float = math.nan) -> Ours:
    """Judge a number by the rule of its kind."""
    rule = TOLERANCES[row.quantity]
    accepted = rule.accepts(value, row, std)
    if accepted is None:
        verdict = "differs: one seed, no standard deviation"
    elif accepted:
        verdict = "within noise" if rule.deviations else "reproduced"
    elif rule.bound:
        verdict = f"differs: {'larger' if rule.bound < 0 else 'smaller'} than the paper's"
    else:
        verdict = f"differs: by {value - row.value:+.3g}"
    return Ours(value, made_by, verdict, std)


# --- operations, memory, time --------------------------------------------------------------------


def _layer_row(
    rows: pd.DataFrame, estimator: str, in_features: int, out_features: int, tokens: int, k: int
) -> pd.Series | None:
    """Find what one estimator costs on one layer."""
    found = rows[
        (rows["estimator"] == estimator)
        & (rows["in_features"] == in_features)
        & (rows["out_features"] == out_features)
        & (rows["tokens"] == tokens)
        & (rows["num_probes"].isna() | (rows["num_probes"] == k))
    ]
    return None if found.empty else found.iloc[0]


def _flops_saving(row: Any, evidence: Evidence) -> Ours | None:
    """Look up the counted saving of one estimator on one layer."""
    layer, probes = layer_setting(row.setting), num_probes(row.method)
    cost = _layer_row(evidence.flops, row.method.split()[0], *layer, probes)
    if cost is None:
        return None
    exact = _layer_row(evidence.flops, "exact", *layer, probes)
    saving = 100 * (1 - cost["flops_counted"] / exact["flops_counted"])
    made_by = f"count_flops, {layer[0]}x{layer[1]}, {layer[2]} tokens, {probes} probes"
    return _judged(row, saving, made_by)


def _ghost_ratio(row: Any, evidence: Evidence) -> Ours | None:
    """Divide the operations of ghost norms by those of Hutchinson: tokens over probes."""
    probes = num_probes(row.method)
    for layer in evidence.flops[["in_features", "out_features", "tokens"]].itertuples(index=False):
        ghost, ours = (
            _layer_row(evidence.flops, name, *layer, probes) for name in ("ghost", "hutchinson")
        )
        if ghost is not None and ours is not None and f"T={layer.tokens}," in row.setting:
            ratio = ghost["flops_counted"] / ours["flops_counted"]
            return _judged(row, ratio, f"count_flops, {layer.in_features}x{layer.out_features}")
    return None


def _memory_saving(row: Any, evidence: Evidence) -> Ours | None:
    """Look up the simulated saving of one estimator on one layer.

    The paper does not say what it counts. Ours is everything, against an exact norm that squares
    in place; if that is not the paper's number and another reading is, we report that by its name.
    """
    layer, probes = layer_setting(row.setting), num_probes(row.method)
    trained = as_trained(evidence.memory)
    cost = _layer_row(trained, row.method.split()[0], *layer, probes)
    if cost is None:
        return None
    if row.quantity == "peak_memory_saving_including_inputs":
        readings = {
            "an exact norm that squares in place": cost["saving_including_inputs"],
            "an exact norm that squares a copy": cost["saving_including_inputs_copied"],
        }
    else:
        readings = {
            "all it takes": cost["saving_excluding_inputs"],
            "only what has a row for each token": cost["saving_token_workspace"],
        }
    percent = {name: 100 * value for name, value in readings.items() if pd.notna(value)}
    made_by = f"simulate_layer_memory, {layer[0]}x{layer[1]}, {layer[2]} tokens, {probes} probes"
    made_by += f", {cost['dtype']}, shared sketch"
    rule = TOLERANCES[row.quantity]
    for name, value in percent.items():
        if rule.accepts(value, row):
            verdict = f"simulated: within {rule.absolute:g} point, counting {name}"
            return Ours(value, made_by, verdict)
    first = next(iter(percent))
    counted = "; ".join(f"{value:.2f} counting {name}" for name, value in percent.items())
    return Ours(percent[first], made_by, f"differs: simulated, {counted}")


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
        return Ours(found.ratio, made_by, verdict)
    return _judged(row, found.ratio, made_by)


# --- noise, and the laws of estimates -------------------------------------------------------------


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
            made_by = (
                f"calibrate_noise, sample rate {privacy['sample_rate']:.4g},"
                f" {privacy['steps']} steps (not published; chosen so that exact clipping fits)"
            )
            return _judged(row, privacy["noise_multiplier"], made_by)
    return None


def _noise_overhead(row: Any, evidence: Evidence) -> Ours | None:
    """Find how much more noise than exact clipping the paper's analysis asks for."""
    wanted = utility_setting(row.method, row.setting)
    found = evidence.noise[
        (evidence.noise["method"] == wanted.method)
        & (evidence.noise["epsilon"] == wanted.epsilon)
        & (evidence.noise["num_probes"] == num_probes(row.method))
    ]
    if found.empty:
        return None
    made_by = f"sweep_noise, epsilon {wanted.epsilon:g}, {num_probes(row.method)} probes, envelope"
    return _judged(row, 100 * found["noise_overhead"].iloc[0], made_by)


def _norm_error(row: Any, evidence: Evidence) -> Ours | None:
    """Find the largest deviation of a layer's squared norm on real gradients."""
    found = evidence.errors[
        (evidence.errors["estimator"] == row.method.split()[0])
        & (evidence.errors["num_probes"] == num_probes(row.method))
    ]
    if found.empty:
        return None
    worst = found.loc[found["squared_error_std"].idxmax()]
    probes = num_probes(row.method)
    made_by = f"measure_norm_error, the worst layer ({worst['layer']}), {probes} probes"
    return _judged(row, worst["squared_error_std"], made_by)


def _envelope(row: Any, evidence: Evidence) -> Ours | None:
    """Find the envelope at ratio 1, the largest over ranks."""
    rows = evidence.envelope
    found = rows[(rows["num_probes"] == num_probes(row.method)) & (rows["ratio"] == 1.0)]
    if found.empty:
        return None
    ranks = ", ".join(map(str, sorted(found["rank"].unique())))
    return _judged(row, found["cdf"].max(), f"envelope_cdf, ranks {ranks}")


# --- scores --------------------------------------------------------------------------------------


def _runs_of(
    evidence: Evidence, task: str, mode: str, method: str, epsilon: float | None = None
) -> pd.DataFrame:
    """Select the runs of a task of the paper: the task itself, else its offline twin."""
    chosen = evidence.summary[evidence.summary["method"] == method]
    if epsilon is not None:
        chosen = chosen[chosen["epsilon"] == epsilon]
    return runs_of(chosen, task, mode)


def _scored(row: Any, value: float, run: Any, *, std: float = math.nan) -> Ours:
    """Judge a score, but call a run of an offline twin no reproduction, whatever its number."""
    seeds = "1 seed" if run.seeds == 1 else f"{run.seeds} seeds"
    made_by = f"train_model, {run.task}, {run.mode}, {run.method}, epsilon {run.epsilon:g}, {seeds}"
    if run.task.endswith("_offline"):
        verdict = f"differs: offline twin (small model, {run.max_tokens} tokens)"
        return Ours(value, made_by, verdict, std)
    return _judged(row, value, made_by, std=std)


def _score(row: Any, evidence: Evidence) -> Ours | None:
    """Find our mean score for a score of the paper."""
    runs = _runs_of(evidence, *utility_setting(row.method, row.setting))
    if runs.empty:
        return None
    run = next(runs.itertuples(index=False))
    return _scored(row, run.mean, run, std=run.std)


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
    return _scored(row, drops.max(), run)


def _hutchpp_gain(row: Any, evidence: Evidence) -> Ours | None:
    """Find what Hutch++ gains over Hutchinson at the row's budget."""
    wanted = utility_setting(row.method, row.setting)
    head = _runs_of(evidence, *wanted)
    plain = _runs_of(evidence, *wanted._replace(method="hutchinson_paper"))
    if head.empty or plain.empty:
        return None
    run = next(head.itertuples(index=False))
    return _scored(row, run.mean - plain["mean"].iloc[0], run)


_MAKERS: dict[str, Callable[[Any, Evidence], Ours | None]] = {
    **dict.fromkeys(SCORES, _score),
    **dict.fromkeys((f"{score}_drop_vs_exact" for score in SCORES), _drop),
    "accuracy_gain_hutchpp_vs_hutch": _hutchpp_gain,
    "flops_saving_vs_exact": _flops_saving,
    "flops_ratio_ghost_over_hutch": _ghost_ratio,
    "peak_memory_saving_including_inputs": _memory_saving,
    "peak_memory_saving_excluding_inputs": _memory_saving,
    "latency_ratio_hutchpp_over_hutch": _latency_ratio,
    "compute_saving": _latency_ratio,
    "noise_multiplier": _noise_multiplier,
    "noise_overhead": _noise_overhead,
    "squared_norm_deviation": _norm_error,
    "envelope_cdf": _envelope,
}
