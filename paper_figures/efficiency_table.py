"""Table: memory, operations and time of the largest and the smallest layer, the paper's beside."""

import argparse

import pandas as pd

from paper_figures.files import (
    inputs_note,
    load_result,
    make_table_parser,
    run_command,
    write_csv,
    write_markdown,
)
from paper_figures.flops_table import flops_rows
from paper_figures.flops_table import published_savings as published_flops
from paper_figures.layer_latency_table import profile_rows
from paper_figures.layer_memory_table import as_trained, memory_rows
from paper_figures.layer_memory_table import published_savings as published_memory
from paper_figures.paper_values import load_paper_values
from paper_figures.style import ESTIMATORS, layer_name, sort_layers

KEYS = ["in_features", "out_features", "tokens", "num_probes", "estimator"]
PAPER_TOKENS, PAPER_PROBES = 4096, 32


def efficiency_rows(
    flops: pd.DataFrame, memory: pd.DataFrame, profiles: pd.DataFrame, paper: pd.DataFrame
) -> pd.DataFrame:
    """Join what the paper's two layers cost, at its tokens and probes.

    Args:
        flops: Of ``flops_rows``.
        memory: Of ``memory_rows``.
        profiles: Of ``profile_rows``.
        paper: The paper's values.

    Returns:
        A row for each layer of the paper's table and each of its estimators and baselines, without
        the small head. Deterministic norms have no probes. What was not measured is empty.
    """
    without_head = profiles[profiles["estimator"] != "hutchpp_small_head"]
    counted, weighed, timed = (
        _at_the_papers_setting(rows) for rows in (flops, as_trained(memory), without_head)
    )
    published = published_flops(paper).merge(published_memory(paper), how="outer", on=KEYS)
    published = _at_the_papers_setting(published)
    layers = published[KEYS[:2]].drop_duplicates()
    columns = {
        "flops": counted[[*KEYS, "flops_counted", "saving_vs_exact"]],
        "memory": weighed[
            [
                *KEYS,
                "input_bytes",
                "workspace_bytes",
                "saving_excluding_inputs",
                "saving_including_inputs",
                "saving_including_inputs_copied",
                "saving_token_workspace",
            ]
        ],
        "time": timed[
            [
                *KEYS,
                "latency_seconds",
                "latency_low_seconds",
                "latency_high_seconds",
                "latency_ratio_to_exact",
                "device",
            ]
        ],
    }
    joined = columns["flops"].merge(columns["memory"], how="outer", on=KEYS)
    joined = joined.merge(columns["time"], how="outer", on=KEYS)
    joined = joined.merge(published, how="left", on=KEYS).merge(layers)
    work = joined["in_features"] * joined["out_features"]
    ordered = joined.assign(work=-work).sort_values("work", kind="stable").drop(columns="work")
    return sort_layers(ordered)


def _at_the_papers_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep one row for each layer and estimator, probes empty where there are none."""
    random = rows["estimator"].isin(["hutchinson", "hutchpp"])
    chosen = rows[
        (rows["tokens"] == PAPER_TOKENS) & (~random | (rows["num_probes"] == PAPER_PROBES))
    ]
    random = random[chosen.index]
    probes = chosen["num_probes"].astype(float).where(random)
    return chosen.assign(num_probes=probes).drop_duplicates(KEYS)


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    def number(name: str, scale: float = 1.0, digits: int = 2) -> pd.Series:
        return (scale * rows[name]).map(f"{{:,.{digits}f}}".format).replace("nan", "")

    return pd.DataFrame(
        {
            "layer": [layer_name(*layer) for layer in rows[KEYS[:2]].to_numpy()],
            "estimator": rows["estimator"].map(lambda name: ESTIMATORS[name].label),
            "GFLOP": number("flops_counted", 1e-9, 3),
            "saving (%)": number("saving_vs_exact", 100),
            "the paper's saving (%)": number("paper_saving_percent"),
            "MiB beyond inputs": number("workspace_bytes", 2**-20),
            "saving without inputs (%)": number("saving_excluding_inputs", 100),
            "… of what has a row per token (%)": number("saving_token_workspace", 100),
            "the paper's, without inputs (%)": number("paper_excluding_percent"),
            "saving with inputs (%)": number("saving_including_inputs", 100),
            "… if exact squares a copy (%)": number("saving_including_inputs_copied", 100),
            "the paper's, with inputs (%)": number("paper_including_percent"),
            "ms": number("latency_seconds", 1e3),
            "time / exact": number("latency_ratio_to_exact", 1.0, 3),
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    flops, memory = load_result(arguments.flops), load_result(arguments.memory)
    timed = [load_result(path) for path in arguments.profiles]
    rows = efficiency_rows(
        flops_rows(flops),
        memory_rows(memory),
        profile_rows(timed),
        load_paper_values(arguments.paper),
    )
    write_csv(arguments.csv, rows)
    devices = ", ".join(rows["device"].dropna().unique()) or "no device"
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="Operations, memory and time of one layer's norm",
        note=f"One sample, {PAPER_TOKENS} tokens, {PAPER_PROBES} probes, a shared sketch, the"
        " largest and the smallest layer of the paper's table. Operations are counted, memory is"
        " simulated, time is measured on"
        f" {devices}. Savings are against an exact norm that squares the gradient in place, or,"
        " where it says so, in a copy. The paper does not say what it counts without inputs; its"
        " numbers are those of the tensors with a row for each token, without projection matrix"
        " and sketched gradient.",
        source=inputs_note([flops, memory, *timed]),
    )


if __name__ == "__main__":
    parser = make_table_parser("efficiency_table", "Tabulate what the paper's two layers cost.")
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--memory", required=True, help="result of dprc simulate-memory --layers")
    parser.add_argument("--profiles", nargs="+", required=True, help="of dprc profile-layer")
    parser.add_argument("--paper", required=True, help="the paper's values")
    raise SystemExit(run_command(parser, _command))
