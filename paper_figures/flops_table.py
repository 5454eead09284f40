"""Table: floating-point operations of the norm estimators, the paper's savings beside ours."""

import argparse
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
from paper_figures.style import ESTIMATORS, RANDOMIZED, layer_name, sort_layers

COLUMNS = [
    "in_features",
    "out_features",
    "tokens",
    "num_probes",
    "estimator",
    "flops_counted",
    "flops_formula",
    "saving_vs_exact",
]
KEYS = COLUMNS[:5]


def flops_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Order the counted operations by layer, as given, tokens, probes and estimator."""
    return sort_layers(pd.DataFrame(result["metrics"]["rows"])[COLUMNS])


def published_savings(paper: pd.DataFrame) -> pd.DataFrame:
    """Select the paper's savings in percent, with the layer and estimator each is about."""
    rows = [
        {
            **dict(zip(KEYS[:3], layer_setting(row.setting), strict=True)),
            "num_probes": num_probes(row.method),
            "estimator": row.method.split()[0],
            "paper_saving_percent": row.value,
        }
        for row in paper.itertuples(index=False)
        if row.quantity == "flops_saving_vs_exact"
    ]
    return pd.DataFrame(rows, columns=[*KEYS, "paper_saving_percent"])


def at_the_papers_setting(rows: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """Keep the rows with as many tokens and probes as the paper's table has.

    Raises:
        ValueError: There are none.
    """
    settings = published[["tokens", "num_probes"]].drop_duplicates()
    kept = rows.merge(settings).merge(published, how="left", on=KEYS)
    if kept.empty:
        wanted = " or ".join(f"T={t}, k={k}" for t, k in settings.itertuples(index=False))
        raise ValueError(f"the operations counted have no row at {wanted}, the paper's setting")
    return kept


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "layer": [layer_name(*layer) for layer in rows[KEYS[:2]].to_numpy()],
            "tokens": rows["tokens"],
            "estimator": rows["estimator"].map(lambda name: ESTIMATORS[name].label),
            "probes": rows["num_probes"].astype(str).where(rows["estimator"].isin(RANDOMIZED), ""),
            "GFLOP, counted": (rows["flops_counted"] / 1e9).map("{:,.3f}".format),
            "GFLOP, formula": (rows["flops_formula"] / 1e9).map("{:,.3f}".format),
            "saving against exact (%)": (100 * rows["saving_vs_exact"]).map("{:.2f}".format),
            "the paper's saving (%)": rows["paper_saving_percent"]
            .map("{:.2f}".format)
            .replace("nan", ""),
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    result = load_result(arguments.flops)
    rows = flops_rows(result)
    published = published_savings(load_paper_values(arguments.paper))
    write_csv(arguments.csv, rows)
    write_markdown(
        arguments.markdown,
        _for_readers(at_the_papers_setting(rows, published)),
        title="Floating-point operations of one layer's squared norm",
        note="For one sample; a multiply-add counts as two. A negative saving is a cost. The CSV"
        " has the other lengths and probe counts.",
        source=inputs_note([result]),
    )


if __name__ == "__main__":
    parser = make_table_parser("flops_table", "Tabulate what the estimators cost and save.")
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--paper", required=True, help="the paper's values")
    raise SystemExit(run_command(parser, _command))
