"""Compare each number of the paper with ours, and say what the comparison is worth."""

import argparse
import math
from typing import Any

import pandas as pd

from paper_figures.accuracy_table import summarize_runs
from paper_figures.envelope_cdf import envelope_rows
from paper_figures.evidence import Evidence, find_ours
from paper_figures.files import (
    inputs_note,
    load_result,
    load_runs,
    make_table_parser,
    run_command,
    runs_note,
    write_csv,
    write_markdown,
)
from paper_figures.flops_table import flops_rows
from paper_figures.layer_latency_table import profile_rows
from paper_figures.layer_memory_table import memory_rows
from paper_figures.noise_rows import noise_rows
from paper_figures.norm_error_vs_probes import error_rows
from paper_figures.paper_values import load_paper_values, published_scores, utility_setting
from paper_figures.tolerances import TOLERANCES, rules_table

NOT_RUN = "not run here"


def compare_values(paper: pd.DataFrame, evidence: Evidence, configuration: str) -> pd.DataFrame:
    """Put our number beside each of the paper's.

    Args:
        paper: The paper's values.
        evidence: Our results.
        configuration: Name of the configuration that made them.

    Returns:
        One row for each of the paper's, in its order: our value is empty where nothing made one.
        The verdict begins with reproduced, within noise, simulated, differs, not run here, or
        source inconsistent, and gives the reason.
    """
    rows = []
    for row in paper.itertuples(index=False):
        ours = find_ours(row, evidence)
        verdict = ours.verdict if ours else NOT_RUN
        doubt = _doubt(row, paper)
        rows.append(
            {
                "id": row.id,
                "where": row.where,
                "source": row.source,
                "quantity": row.quantity,
                "method": row.method,
                "setting": row.setting,
                "unit": row.unit,
                "paper_value": row.value,
                "paper_std": row.std,
                "our_value": ours.value if ours else math.nan,
                "our_std": ours.std if ours else math.nan,
                "difference": ours.value - row.value if ours else math.nan,
                "tolerance": TOLERANCES[row.quantity].words,
                "configuration": f"{configuration}: {ours.made_by}" if ours else configuration,
                "verdict": f"{doubt}; ours {verdict}" if doubt else verdict,
            }
        )
    return pd.DataFrame(rows)


def _doubt(row: Any, paper: pd.DataFrame) -> str | None:
    """Say where a number of the paper's text is not what its own tables give."""
    changes = _changes_in_tables(row, paper)
    if not changes:
        return None
    # Half a unit of the last printed digit.
    rounding = 0.5 * 10.0**-row.digits
    largest = max(changes.values())
    bound = "at most" in row.setting
    if largest - row.value <= rounding and (bound or row.value - largest <= rounding):
        return None
    digits = 4 if row.unit == "fraction" else 2
    tables = " and ".join(
        f"{change:.{digits}f} at epsilon {epsilon:g}" for epsilon, change in changes.items()
    )
    text = f"{'at most ' if bound else ''}{row.value:g}"
    return f"source inconsistent: the text says {text}, its tables give {tables}"


def _changes_in_tables(row: Any, paper: pd.DataFrame) -> dict[float, float]:
    """Compute by budget, from the paper's tables, the change that a row of its text is about."""
    wanted = utility_setting(row.method, row.setting)
    scores = published_scores(paper)
    scores = scores[(scores["task"] == wanted.task) & (scores["mode"] == wanted.mode)]
    by_method = scores.pivot(index="epsilon", columns="method", values="mean")
    if row.quantity.endswith("_drop_vs_exact"):
        above, below = "exact", "hutchinson_paper"
    elif row.quantity.endswith("_gain_hutchpp_vs_hutch"):
        above, below = "hutchpp_paper", "hutchinson_paper"
    else:
        return {}
    if not {above, below} <= set(by_method.columns):
        return {}
    changes = (by_method[above] - by_method[below]).dropna()
    if math.isfinite(wanted.epsilon):
        changes = changes[changes.index == wanted.epsilon]
    return {float(epsilon): float(change) for epsilon, change in changes.items()}


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    def number(value: float, std: float) -> str:
        if pd.isna(value):
            return ""
        return f"{value:.4g}" if pd.isna(std) else f"{value:.4g} ± {std:.2g}"

    return pd.DataFrame(
        {
            "id": rows["id"],
            "where": rows["where"],
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


def _note(rows: pd.DataFrame, configuration: str) -> str:
    kinds = rows["verdict"].str.split(":").str[0]
    reasons = {"differs": _reasons(rows["verdict"][kinds == "differs"])}
    counts = ", ".join(
        f"{count} × {kind}{reasons.get(kind, '')}" for kind, count in kinds.value_counts().items()
    )
    sources = "".join(f"\n- {source}" for source in sorted(rows["source"].unique()))
    rules = rules_table().to_markdown(index=False, disable_numparse=True)
    return f"""Configuration `{configuration}`. {len(rows)} numbers: {counts}.

The paper's numbers are those of `paper_figures/paper_values.csv`. They were not checked against the
published article; `where` is the place that they are said to stand at. They come from
{sources}

A number is reproduced, within noise, or simulated as in the paper by the rule of its kind:

{rules}

What is simulated is weighed on tensors that have a shape and no memory. An offline twin is a much
smaller model on shorter texts: its scores show that the pipeline works and how the methods compare,
and reproduce no number of the paper. Where the paper's text and its tables contradict each other,
both are named."""


def _reasons(verdicts: pd.Series) -> str:
    """Count the reasons of what differs, since an offline twin differs in another way."""
    found = {name: verdicts.str.contains(name).sum() for name in ("offline twin", "another device")}
    counts = [f"{count} {name}" for name, count in found.items() if count]
    return f" ({', '.join(counts)})" if counts else ""


def _command(arguments: argparse.Namespace) -> None:
    runs = load_runs(arguments.metrics)
    single = {
        name: load_result(getattr(arguments, name))
        for name in ("flops", "memory", "noise", "errors", "envelope")
    }
    calibrations = [load_result(path) for path in arguments.calibrations]
    profiles = [load_result(path) for path in arguments.profiles]
    evidence = Evidence(
        summary=summarize_runs(runs),
        flops=flops_rows(single["flops"]),
        calibrations=calibrations,
        profiles=profile_rows(profiles),
        memory=memory_rows(single["memory"]),
        noise=noise_rows(single["noise"]),
        errors=error_rows(single["errors"]),
        envelope=envelope_rows(single["envelope"]),
    )
    rows = compare_values(load_paper_values(arguments.paper), evidence, arguments.configuration)
    write_csv(arguments.csv, rows)
    sources = [runs_note(runs), inputs_note([*single.values(), *calibrations, *profiles])]
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="The paper's numbers and ours",
        note=_note(rows, arguments.configuration),
        source=" ".join(sources),
    )


if __name__ == "__main__":
    parser = make_table_parser("compare_paper", "Compare the paper's numbers with ours.")
    parser.add_argument("--configuration", required=True, help="name of the configuration")
    parser.add_argument("--paper", required=True, help="the paper's values")
    parser.add_argument("--metrics", required=True, help="CSV of collect_metrics")
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--calibrations", nargs="*", default=[], help="calibrations without a run")
    parser.add_argument("--profiles", nargs="*", default=[], help="of dprc profile-layer")
    parser.add_argument("--memory", required=True, help="of dprc simulate-memory --layers")
    parser.add_argument("--noise", required=True, help="of dprc sweep-noise")
    parser.add_argument("--errors", required=True, help="of dprc measure-norm-error")
    parser.add_argument("--envelope", required=True, help="of dprc envelope")
    raise SystemExit(run_command(parser, _command))
