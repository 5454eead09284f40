"""Figure: what norms cost in a whole model at long context, against a training step."""

import argparse

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures.files import inputs_note, load_result, make_parser, run_command, save_figure
from paper_figures.flops_table import flops_rows
from paper_figures.panels import draw_lines, estimator_legend, make_panels
from paper_figures.step_memory import draw_step_memory, step_rows
from paper_figures.style import LLAMA_COUNTS

PAPER_PROBES = 32
_STEP = {"color": "black", "linestyle": ":", "linewidth": 1.6}


def model_flops(rows: pd.DataFrame) -> pd.DataFrame:
    """Add up the operations of the norms of all linear layers of Llama-3.2-1B.

    Args:
        rows: Of ``flops_rows``.

    Returns:
        estimator, tokens, norm_flops and step_flops: the products with weights of one training step
        without privacy, which are three times those of the forward pass.

    Raises:
        ValueError: A layer of the model was not counted, or not at the paper's number of probes.
    """
    own = rows[rows["num_probes"] == PAPER_PROBES]
    missing = [f"{d}x{p}" for d, p in LLAMA_COUNTS if own[_is_layer(own, d, p)].empty]
    if missing:
        raise ValueError(
            f"the operations counted lack layers {', '.join(missing)} at {PAPER_PROBES} probes"
        )
    parts = []
    for (d, p), count in LLAMA_COUNTS.items():
        layer = own[_is_layer(own, d, p)]
        forward = 2 * layer["tokens"] * d * p
        parts.append(
            layer.assign(norm_flops=count * layer["flops_counted"], step_flops=3 * count * forward)
        )
    together = pd.concat(parts)
    return together.groupby(["estimator", "tokens"], as_index=False)[
        ["norm_flops", "step_flops"]
    ].sum()


def _is_layer(rows: pd.DataFrame, in_features: int, out_features: int) -> pd.Series:
    return (rows["in_features"] == in_features) & (rows["out_features"] == out_features)


def plot_long_context(flops: pd.DataFrame, steps: pd.DataFrame) -> Figure:
    """Draw operations of all norms over those of a step, and the memory of the step.

    Args:
        flops: Of ``model_flops``.
        steps: Of ``step_rows``.
    """
    figure, (axes,) = make_panels(1, 2, width=4.4)
    percent = flops.assign(percent=100 * flops["norm_flops"] / flops["step_flops"])
    draw_lines(axes[0], percent, "tokens", "percent")
    axes[0].axhline(100, **_STEP)
    axes[0].set(
        xlabel="tokens T",
        ylabel="norms / products of a step (%)",
        title=f"Llama-3.2-1B, operations, k = {PAPER_PROBES}",
    )
    draw_step_memory(axes[1], steps)
    extra = [
        Line2D([], [], label="a step without privacy", **_STEP),
        Line2D([], [], label="dashed, right: book-keeping", color="#555555", linestyle="--"),
    ]
    estimator_legend(figure, flops["estimator"], extra, columns=4)
    return figure


def _command(arguments: argparse.Namespace) -> None:
    flops, memory = load_result(arguments.flops), load_result(arguments.memory)
    figure = plot_long_context(model_flops(flops_rows(flops)), step_rows(memory))
    save_figure(figure, arguments.png, arguments.pdf, source=inputs_note([flops, memory]))


if __name__ == "__main__":
    parser = make_parser("long_context", "Draw what norms cost in a model at long context.")
    parser.add_argument("--flops", required=True, help="result file of dprc count-flops")
    parser.add_argument("--memory", required=True, help="result of dprc simulate-memory --model")
    parser.add_argument("--png", required=True, help="PNG to write")
    parser.add_argument("--pdf", required=True, help="PDF to write")
    raise SystemExit(run_command(parser, _command))
