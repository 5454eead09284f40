"""Table: floating-point operations of the norm estimators for the paper's layers."""

import argparse
from typing import Any

import pandas as pd

from paper_figures.files import load_result, make_parser, run_command, write_csv, write_markdown
from paper_figures.style import ESTIMATORS

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


def flops_rows(result: dict[str, Any]) -> pd.DataFrame:
    """Order the counted operations by layer, as given, and estimator."""
    rows = pd.DataFrame(result["metrics"]["rows"])[COLUMNS]
    layers = rows[["in_features", "out_features"]].drop_duplicates().reset_index(drop=True)
    order = rows.merge(layers.assign(layer=layers.index)).assign(
        place=rows["estimator"].map(ESTIMATORS.index)
    )
    return order.sort_values(["layer", "place"])[COLUMNS].reset_index(drop=True)


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "layer": rows["in_features"].astype(str) + " × " + rows["out_features"].astype(str),
            "tokens": rows["tokens"],
            "estimator": rows["estimator"],
            "probes": [
                k if name in ("hutchinson", "hutchpp") else ""
                for k, name in zip(rows["num_probes"], rows["estimator"], strict=True)
            ],
            "GFLOP, counted": (rows["flops_counted"] / 1e9).map("{:,.3f}".format),
            "GFLOP, formula": (rows["flops_formula"] / 1e9).map("{:,.3f}".format),
            "saving against exact (%)": (100 * rows["saving_vs_exact"]).map("{:.2f}".format),
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    rows = flops_rows(load_result(arguments.flops))
    write_csv(arguments.csv, rows)
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="Floating-point operations of one layer's squared norm",
        note="For one sample; a multiply-add counts as two. A negative saving is a cost.",
    )


if __name__ == "__main__":
    parser = make_parser("flops_table", "Tabulate what the estimators cost and save.")
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--csv", required=True, help="CSV to write")
    parser.add_argument("--markdown", required=True, help="Markdown to write")
    raise SystemExit(run_command(parser, _command))
