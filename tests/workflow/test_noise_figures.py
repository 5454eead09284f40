"""Figures about noise, the envelope, long context and memory against time."""

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from paper_figures.envelope_cdf import envelope_rows, plot_envelope
from paper_figures.files import save_figure
from paper_figures.layer_latency_table import profile_rows
from paper_figures.layer_memory_time import plot_plane
from paper_figures.long_context import model_flops, plot_long_context
from paper_figures.noise_overhead import overhead_rows, plot_overhead
from paper_figures.noise_rows import noise_rows, published_noise
from paper_figures.noise_vs_epsilon import plot_noise as plot_noise_vs_epsilon
from paper_figures.noise_vs_probes import panel_epsilons
from paper_figures.noise_vs_probes import plot_noise as plot_noise_vs_probes
from paper_figures.paper_values import load_paper_values
from paper_figures.style import LLAMA_COUNTS, METHODS
from tests.workflow.test_figures import PAPER, profile

NAMES = ("exact", "hutchinson_paper", "hutchinson_shared", "hutchinson")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def sweep(epsilons=(0.7, 9.0), probes=(16, 32), **config):
    """Give a result of `dprc sweep-noise`: overheads of 3/k, 2/k and 1/k over 10/epsilon."""
    rows = []
    for epsilon in epsilons:
        for k in (None, *probes):
            kinds = [("shared", "envelope"), ("shared", "tight"), ("per_sample", "tight")]
            for place, (sketch, analysis) in enumerate(kinds if k else [(None, "tight")]):
                overhead = (3 - place) / k if k else 0.0
                rows.append(
                    {
                        "epsilon": epsilon,
                        "estimator": "hutchinson" if k else "exact",
                        "num_probes": k,
                        "sketch": sketch,
                        "analysis": analysis,
                        "noise_multiplier": 10 / epsilon * (1 + overhead),
                        "noise_overhead": overhead,
                    }
                )
    settings = {"sample_rate": 0.01, "steps": 1000, "delta": 1e-5}
    return {"config": settings | config, "metrics": {"rows": rows}}


def lines_of(axis, method):
    color = METHODS[method].color
    return [line for line in axis.get_lines() if line.get_color() == color]


def test_each_sketch_and_analysis_is_one_method():
    rows = noise_rows(sweep())
    assert set(rows["method"]) == set(NAMES)
    at = rows[(rows["epsilon"] == 0.7) & (rows["num_probes"] == 32)].set_index("method")
    assert at.loc["hutchinson_paper", "noise_overhead"] == 3 / 32
    assert at.loc["hutchinson", "noise_overhead"] == 1 / 32


def test_the_papers_noise_is_read_once_for_each_law():
    published = published_noise(load_paper_values(PAPER))
    assert published["method"].tolist() == ["exact", "hutchinson_paper"]
    assert published["noise_multiplier"].tolist() == [4.073, 4.354]


def test_noise_is_drawn_against_probes_with_exact_clipping_level_and_the_paper_hollow():
    rows = noise_rows(sweep())
    figure = plot_noise_vs_probes(rows, load_paper_values(PAPER))
    low, high = figure.axes
    assert (low.get_title(), high.get_title()) == ("ε = 0.7", "ε = 9")
    line, hollow = lines_of(low, "hutchinson_paper")
    assert line.get_xdata().tolist() == [16, 32]
    assert line.get_ydata()[1] == pytest.approx(10 / 0.7 * (1 + 3 / 32))
    assert hollow.get_markerfacecolor() == "none"
    assert (hollow.get_xdata()[0], hollow.get_ydata()[0]) == (32, 4.354)
    assert len(lines_of(high, "hutchinson_paper")) == 1  # the paper has no number there
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [*(METHODS[name].label for name in NAMES), "hollow: the paper"]


def test_panels_hold_the_papers_budget_and_the_ends():
    rows = pd.DataFrame({"epsilon": [0.5, 0.7, 1.0, 2.0, 4.0, 9.0]})
    assert panel_epsilons(rows, load_paper_values(PAPER)) == [0.7, 2.0, 9.0]


def test_noise_is_drawn_against_the_budget_with_its_cost():
    figure = plot_noise_vs_epsilon(noise_rows(sweep()), load_paper_values(PAPER))
    _, cost = figure.axes
    line, hollow = lines_of(cost, "hutchinson_paper")
    assert line.get_ydata().tolist() == pytest.approx([100 * 3 / 32] * 2)
    assert hollow.get_ydata()[0] == pytest.approx(100 * (4.354 / 4.073 - 1))
    assert lines_of(cost, "exact") == []
    with pytest.raises(ValueError, match="no row with 32 probes"):
        plot_noise_vs_epsilon(noise_rows(sweep(probes=(16,))), load_paper_values(PAPER))


def test_overheads_of_runs_stand_under_each_other():
    runs = [sweep(epsilons=(0.7, 2.0, 9.0)), sweep(sample_rate=0.001, steps=20000, delta=1e-6)]
    rows = overhead_rows(runs)
    assert set(rows["epsilon"]) == {0.7, 9.0}  # what both have
    figure = plot_overhead(rows)
    (axis,) = figure.axes
    labels = [text.get_text() for text in axis.get_yticklabels()]
    assert labels[0] == "q = 0.01, 1,000 steps, δ = 1e-5, ε = 0.7"
    assert labels[-1] == "q = 0.001, 20,000 steps, δ = 1e-6, ε = 9"
    (points,) = lines_of(axis, "hutchinson_shared")
    assert points.get_xdata().tolist() == pytest.approx([100 * 2 / 32] * 4)
    assert points.get_ydata().tolist() == [0, 1, 2, 3]


def test_the_envelope_has_a_line_for_each_rank():
    rows = [
        {"num_probes": 32, "rank": rank, "ratio": ratio, "cdf": ratio / 3}
        for rank in (64, 1)
        for ratio in (1.5, 0.5, 1.0)
    ]
    figure = plot_envelope(envelope_rows({"metrics": {"rows": rows}}))
    whole, _ = figure.axes
    assert whole.get_lines()[0].get_xdata().tolist() == [0.5, 1.0, 1.5]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["rank 1: the law of χ²/k", "rank 64"]


def test_every_estimator_is_a_point_of_memory_against_time_at_the_longest_text(tmp_path):
    seconds = {"exact": 0.010, "tiled": 0.011, "hutchinson": 0.002, "hutchpp_small": 0.003}
    results = [profile(tmp_path, seconds, tokens=tokens) for tokens in (1024, 4096)]
    figure = plot_plane(profile_rows(results))
    (axis,) = figure.axes
    assert "T = 4096" in axis.get_title()
    points = [container.lines[0] for container in axis.containers]
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in points]
    assert drawn[0] == ([pytest.approx(10)], [0.5])
    assert [len(x) for x, _ in drawn] == [1, 1, 0, 1, 0, 1]
    assert drawn[-1][0] == [pytest.approx(3)]


def layers_of_the_model(estimators=("exact", "hutchinson"), k=32):
    costs = {"exact": lambda d, p: 2 * d * p, "hutchinson": lambda d, p: 2 * k * (d + p)}
    return pd.DataFrame(
        [
            {
                "in_features": d,
                "out_features": p,
                "tokens": t,
                "num_probes": k,
                "estimator": name,
                "flops_counted": t * costs[name](d, p),
            }
            for d, p in LLAMA_COUNTS
            for t in (4096, 131072)
            for name in estimators
        ]
    )


def test_norms_of_a_model_are_compared_with_the_products_of_its_step():
    # All linear layers of Llama-3.2-1B, the head among them.
    weights = 16 * (3 * 2048 * 8192 + 2 * 2048 * 2048 + 2 * 2048 * 512) + 2048 * 128256
    flops = model_flops(layers_of_the_model()).set_index(["estimator", "tokens"])
    step = 6 * weights * 4096
    assert flops.loc[("exact", 4096), "step_flops"] == step
    assert flops.loc[("exact", 4096), "norm_flops"] == step / 3
    widths = 16 * (3 * 10240 + 2 * 4096 + 2 * 2560) + 2048 + 128256
    assert flops.loc[("hutchinson", 4096), "norm_flops"] == 2 * 4096 * 32 * widths
    rows = layers_of_the_model()
    with pytest.raises(ValueError, match="lack layers 2048x512 at 32 probes"):
        model_flops(rows[rows["out_features"] != 512])


def test_long_context_shows_operations_and_memory():
    steps = [
        {
            "model": "m",
            "mode": mode,
            "estimator": estimator,
            "schedule": "two_pass",
            "tokens": t,
            "batch": 1,
            "dtype": "bf16",
            "checkpointing": False,
            "peak_bytes": factor * t * 2**20,
        }
        for mode, estimator, factor in (("nonprivate", None, 1), ("exact_two_pass", "exact", 2))
        for t in (4096, 131072)
    ]
    figure = plot_long_context(model_flops(layers_of_the_model()), pd.DataFrame(steps))
    operations, memory = figure.axes
    assert operations.containers[0].lines[0].get_ydata() == pytest.approx([100 / 3] * 2)
    assert [line.get_ydata().tolist() for line in memory.get_lines()] == [[4, 128], [8, 256]]


def test_small_print_stands_below_everything_and_moves_nothing(tmp_path):
    figure = plot_envelope(
        envelope_rows(
            {"metrics": {"rows": [{"num_probes": 4, "rank": 1, "ratio": 1.0, "cdf": 0.5}]}}
        )
    )
    save_figure(figure, tmp_path / "plain.png", source="Made on cpu by dprc.x (code 0).")
    (text,) = figure.texts
    (legend,) = figure.legends
    assert text.get_window_extent().y1 <= legend.get_window_extent().y0
    assert legend.get_window_extent().y1 <= min(
        axis.xaxis.label.get_window_extent().y0 for axis in figure.axes
    )
    assert (tmp_path / "plain.png").stat().st_size
