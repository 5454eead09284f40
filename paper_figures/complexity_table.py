"""Table: operations and memory of each norm estimator as formulas, checked against measurements."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

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
from paper_figures.layer_memory_table import as_trained, memory_rows
from paper_figures.style import ESTIMATORS

# Rows of a sketch made at once, and rows of the gradient formed at once by the tiled norm.
_BLOCK, _TILE = 2048, 128


class Formula(NamedTuple):
    """A formula in words, and as a function of d, p, T and k."""

    text: str
    value: Callable[[int, int, int, int], int]


class Complexity(NamedTuple):
    """What one sample's squared norm of one layer costs."""

    operations: Formula
    numbers: Formula  # held beyond the inputs
    exact: bool


def _hutchpp_numbers(d: int, p: int, t: int, k: int) -> int:
    """Count the sketch, made for the larger side, and what lives beside it at the largest moment.

    While it is made a block of it; in the power step a thin factor, what goes in and what comes
    out; at the QR its input and output; in the last pass a thin factor and the sketched gradient.
    """
    large, small = max(d, p), min(d, p)
    made, powered = 2 * k * min(large, _BLOCK), k * (d + p + t)
    orthogonal, last = k * (2 * large + k), 2 * k * (t + small) + k * k
    return 2 * k * large + max(made, powered, orthogonal, last)


COMPLEXITIES = {
    "exact": Complexity(
        Formula("2Tdp", lambda d, p, t, k: 2 * t * d * p),
        Formula("dp", lambda d, p, t, k: d * p),
        exact=True,
    ),
    "tiled": Complexity(
        Formula("2Tdp", lambda d, p, t, k: 2 * t * d * p),
        Formula(f"d · min(p, {_TILE})", lambda d, p, t, k: d * min(p, _TILE)),
        exact=True,
    ),
    "ghost": Complexity(
        Formula("2T²(d+p)", lambda d, p, t, k: 2 * t * t * (d + p)),
        Formula("2T²", lambda d, p, t, k: 2 * t * t),
        exact=True,
    ),
    "hutchinson": Complexity(
        Formula("2Tk(d+p)", lambda d, p, t, k: 2 * t * k * (d + p)),
        Formula(
            f"k(T + max(min(d,p), min(max(d,p), {_BLOCK})))",
            lambda d, p, t, k: k * (t + max(min(d, p), min(max(d, p), _BLOCK))),
        ),
        exact=False,
    ),
    "hutchpp": Complexity(
        Formula("8Tk(d+p) + 2k²(d+p)", lambda d, p, t, k: (8 * t * k + 2 * k * k) * (d + p)),
        Formula(
            f"2kM + max(2k·min(M, {_BLOCK}), k(d+p+T), k(2M+k), 2k(T+min(d,p)) + k²), M = max(d,p)",
            _hutchpp_numbers,
        ),
        exact=False,
    ),
}


def check_formulas(flops: pd.DataFrame, memory: pd.DataFrame) -> pd.DataFrame:
    """Compare formulas with operations counted and memory simulated.

    Args:
        flops: Of ``flops_rows``.
        memory: Of ``memory_rows``.

    Returns:
        A row for each estimator: formulas, how often each was checked, and by how much it is off at
        most, relative to what was measured. Probe counts above a side of the layer are left out:
        there a norm is taken exactly.
    """
    trained = as_trained(memory)
    # Inputs of low precision add the copy of a block of tokens; the formulas are about the rest.
    trained = trained[trained["dtype"] == "fp32"]
    trained = trained.assign(numbers=trained["workspace_bytes"] / 4)
    rows = []
    for name, style in ESTIMATORS.items():
        if name not in COMPLEXITIES:
            continue
        complexity = COMPLEXITIES[name]
        counted, weighed = _fitting(flops, name), _fitting(trained, name)
        operations = _deviations(counted, "flops_counted", complexity.operations)
        numbers = _deviations(weighed, "numbers", complexity.numbers)
        rows.append(
            {
                "estimator": name,
                "label": style.label,
                "exact": complexity.exact,
                "operations": complexity.operations.text,
                "operations_checked": len(operations),
                "operations_off_by": operations.max(),
                "numbers": complexity.numbers.text,
                "numbers_checked": len(numbers),
                "numbers_off_by": numbers.max(),
            }
        )
    return pd.DataFrame(rows)


def _fitting(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Select the rows of an estimator whose probes are fewer than either side."""
    own = rows[rows["estimator"] == name]
    keys = ["in_features", "out_features", "tokens"]
    if COMPLEXITIES[name].exact:
        return own.drop_duplicates(keys)
    own = own[own["num_probes"] < own[["in_features", "out_features"]].min(axis=1)]
    return own.drop_duplicates([*keys, "num_probes"])


def _deviations(rows: pd.DataFrame, measured: str, formula: Formula) -> pd.Series:
    """Give the relative distance of a formula from each measured value."""
    sizes = rows[["in_features", "out_features", "tokens", "num_probes"]].fillna(0).astype(int)
    values = [formula.value(*size) for size in sizes.itertuples(index=False, name=None)]
    return (pd.Series(values, index=rows.index, dtype=float) / rows[measured] - 1).abs()


def _checked(count: int, off_by: float) -> str:
    if count == 0:
        return "not checked"
    how = "equal" if off_by == 0 else f"within {100 * off_by:.2g} %"
    return f"{how} in {count} {'size' if count == 1 else 'sizes'}"


def _for_readers(rows: pd.DataFrame) -> pd.DataFrame:
    def checks(kind: str) -> list[str]:
        pairs = zip(rows[f"{kind}_checked"], rows[f"{kind}_off_by"], strict=True)
        return [_checked(*pair) for pair in pairs]

    return pd.DataFrame(
        {
            "estimator": rows["label"],
            "norm": rows["exact"].map({True: "exact", False: "unbiased estimate"}),
            "operations": rows["operations"],
            "counted": checks("operations"),
            "numbers held beyond the inputs": rows["numbers"],
            "simulated": checks("numbers"),
        }
    )


def _command(arguments: argparse.Namespace) -> None:
    results = [load_result(arguments.flops), load_result(arguments.memory)]
    rows = check_formulas(flops_rows(results[0]), memory_rows(results[1]))
    write_csv(arguments.csv, rows)
    write_markdown(
        arguments.markdown,
        _for_readers(rows),
        title="Operations and memory of one layer's squared norm",
        note="One sample of T tokens, a layer of d inputs and p outputs, k probes (Hutch++: a head"
        " of rank k and k more), a shared sketch. A multiply-add counts as two; the QR of Hutch++"
        " is not counted. Inputs are T(d+p) numbers, which the backward pass has anyway. Each"
        " formula was compared with operations that were counted and memory that was simulated, at"
        " every size of `results/flops/layers.json` and `results/memory/layers.json` where k is"
        " below d and p.",
        source=inputs_note(results),
    )


if __name__ == "__main__":
    parser = make_table_parser(
        "complexity_table", "Tabulate and check the formulas of the estimators."
    )
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--memory", required=True, help="result of dprc simulate-memory --layers")
    raise SystemExit(run_command(parser, _command))
