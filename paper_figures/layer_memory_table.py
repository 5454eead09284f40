"""Table: simulated memory of one layer's norm, with and without its inputs, the paper's beside."""

import argparse
import re
from typing import Any

import pandas as pd

from paper_figures.files import (
    inputs_note,
    load_result,
    make_table_parser,
    run_command,
    write_csv,
    write_markdown,
)
from paper_figures.paper_values import layer_setting, load_paper_values, num_probes
from paper_figures.style import ESTIMATORS, layer_name, sort_layers

KEYS = ["in_features", "out_features", "tokens", "num_probes", "estimator"]
COLUMNS = [
    *KEYS,
    "dtype",
    "sketch",
    "projection",
    "convention",
    "input_bytes",
    "workspace_bytes",
    "token_workspace_bytes",
    "peak_bytes",
    "saving_excluding_inputs",
    "saving_including_inputs",
    "saving_including_inputs_copied",
    "saving_token_workspace",
]
PUBLISHED = {
    "peak_memory_saving_including_inputs": "paper_including_percent",
    "peak_memory_saving_excluding_inputs": "paper_excluding_percent",
}


def memory_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Order the layers of a result file of ``dprc simulate-memory --layers``."""
    return sort_layers(pd.DataFrame(result["metrics"]["rows"])[COLUMNS])


def as_trained(rows: pd.DataFrame, sketch: str = "shared") -> pd.DataFrame:
    """Keep what the engine does: exact norms squared in place, sketches made by block.

    Args:
        rows: Of ``memory_rows``.
        sketch: Kind of sketch of the randomized estimators; ``shared`` is the paper's.
    """
    return rows[
        (rows["convention"] == "in_place")
        & (rows["sketch"].isna() | (rows["sketch"] == sketch))
        & (rows["projection"].isna() | (rows["projection"] == "by_block"))
    ]


def published_savings(paper: pd.DataFrame) -> pd.DataFrame:
    """Select the paper's savings in percent, with the layer and estimator each is about."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in paper.itertuples(index=False):
        if row.quantity in PUBLISHED:
            key = (*layer_setting(row.setting), num_probes(row.method), row.method.split()[0])
            found.setdefault(key, dict(zip(KEYS, key, strict=True)))[PUBLISHED[row.quantity]] = (
                row.value
            )
    return pd.DataFrame(found.values(), columns=[*KEYS, *PUBLISHED.values()])


def at_the_papers_setting(rows: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Keep what the engine does at the paper's tokens and probes, the paper's savings beside it.

    Raises:
        ValueError: There is nothing.
    """
    settings = published[["tokens", "num_probes"]].drop_duplicates()
    trained = as_trained(rows)
    kept = trained[
        trained["tokens"].isin(settings["tokens"])
        & (trained["num_probes"].isna() | trained["num_probes"].isin(settings["num_probes"]))
    ]
    if kept.empty:
        wanted = " or ".join(f"T={t}, k={k}" for t, k in settings.itertuples(index=False))
        raise ValueError(f"the memory simulated has no row at {wanted}, the paper's setting")
    return kept.merge(published, how="left", on=KEYS)


def _percent(values: pd.Series, scale: float = 100.0) -> pd.Series:
    return (scale * values).map("{:.2f}".format).replace("nan", "")


def _mebibytes(values: pd.Series) -> pd.Series:
    return (values / 2**20).map("{:,.2f}".format)


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "layer": [layer_name(*layer) for layer in rows[KEYS[:2]].to_numpy()],
            "estimator": rows["estimator"].map(lambda name: ESTIMATORS[name].label),
            "inputs (MiB)": _mebibytes(rows["input_bytes"]),
            "beyond inputs (MiB)": _mebibytes(rows["workspace_bytes"]),
            "saving without inputs (%)": _percent(rows["saving_excluding_inputs"]),
            "… of what has a row per token (%)": _percent(rows["saving_token_workspace"]),
            "the paper's, without inputs (%)": _percent(rows["paper_excluding_percent"], 1.0),
            "saving with inputs (%)": _percent(rows["saving_including_inputs"]),
            "… if exact squares a copy (%)": _percent(rows["saving_including_inputs_copied"]),
            "the paper's, with inputs (%)": _percent(rows["paper_including_percent"], 1.0),
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.memory)
    rows = memory_rows(result)
    published = published_savings(load_paper_values(arguments.paper))
    shown = at_the_papers_setting(rows, published)
    write_csv(arguments.csv, rows)
    setting = ", ".join(
        f"{tokens:.0f} tokens, {probes:.0f} probes"
        for tokens, probes in shown[["tokens", "num_probes"]].dropna().drop_duplicates().to_numpy()
    )
    write_markdown(
        arguments.markdown,
        _for_readers(shown),
        title="Memory of one layer's norm",
        note=re.sub(
            r"\s+",
            " ",
            f"""One sample, {setting}, {", ".join(shown["dtype"].unique())}, shared sketch made by
            block; simulated on tensors that have a shape and no memory. Savings are against an
            exact norm that squares the gradient in place, or, where it says so, in a second
            matrix. The CSV has other lengths, probe counts and sketches.""",
        ),
        source=inputs_note([result]),
    )


if __name__ == "__main__":
    parser = make_table_parser("layer_memory_table", "Tabulate the memory of one layer's norm.")
    parser.add_argument("--memory", required=True, help="result of dprc simulate-memory --layers")
    parser.add_argument("--paper", required=True, help="the paper's values")
    raise SystemExit(run_command(parser, _command))
