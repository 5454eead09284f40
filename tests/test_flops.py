"""Counted operations equal closed formulas, and the savings the paper publishes."""

import pytest

from dprc import estimators
from dprc.profiling.flops import LayerShape, count_flops, flops_table

# The linear layers of Llama-3.2-1B: q and o, k and v, gate and up, down, and the head.
LLAMA = [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048), (2048, 128256)]


def closed_form(name, shape, k, rank=None):
    """Give the operations of one norm in the paper's terms, written out once more."""
    b, t, d, p = shape.batch, shape.tokens, shape.in_features, shape.out_features
    if name in ("exact", "tiled"):
        return 2 * b * t * d * p
    if name == "ghost":
        return 2 * b * t * t * (d + p)
    if name == "hutchinson":
        return 2 * b * t * k * (d + p)
    r = min(rank or k, d, p)  # a basis has no more vectors than the matrix has directions
    power_and_head, tail, deflation = 3 * r * t, k * t, r * k
    return 2 * b * (power_and_head + tail + deflation) * (d + p)


@pytest.mark.parametrize("name", estimators.names())
@pytest.mark.parametrize("shape", [LayerShape(37, 53, 29, batch=3), LayerShape(53, 37, 29)])
@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
def test_the_count_equals_the_formula(name, shape, sketch):
    estimator = estimators.get(name, num_probes=11, sketch=sketch)
    formula = estimator.flops(shape.batch, shape.tokens, shape.in_features, shape.out_features)
    assert count_flops(estimator, shape) == formula == closed_form(name, shape, 11)


def test_a_small_head_costs_what_its_formula_says():
    estimator, shape = estimators.get("hutchpp", num_probes=26, head_rank=2), LayerShape(64, 96, 50)
    assert count_flops(estimator, shape) == closed_form("hutchpp", shape, 26, rank=2)
    assert count_flops(estimator, shape) != closed_form("hutchpp", shape, 26)


def test_every_layer_of_the_model_at_both_ends_of_the_range():
    # 128k tokens against 128k words: nothing of that size may be allocated or looped over.
    rows = flops_table(LLAMA, [512, 131072], [8, 4096])
    assert len(rows) == len(LLAMA) * 2 * 2 * len(estimators.names())
    for row in rows:
        shape = LayerShape(row["in_features"], row["out_features"], row["tokens"])
        expected = closed_form(row["estimator"], shape, row["num_probes"])
        assert row["flops_counted"] == row["flops_formula"] == expected


def test_the_papers_table():
    rows = flops_table([(8192, 2048), (2048, 512)], [4096], [32])
    saved = {
        (row["in_features"], row["estimator"]): round(100 * row["saving_vs_exact"], 2)
        for row in rows
    }
    assert saved[8192, "hutchinson"] == 98.05
    assert saved[2048, "hutchinson"] == 92.19
    assert saved[8192, "hutchpp"] == 92.17
    assert saved[2048, "hutchpp"] == 68.69
    assert saved[8192, "tiled"] == saved[8192, "exact"] == 0
    counts = {row["estimator"]: row["flops_counted"] for row in rows if row["in_features"] == 8192}
    assert counts["ghost"] / counts["hutchinson"] == 4096 / 32


@pytest.mark.parametrize("size", ["in_features", "out_features", "tokens", "batch"])
def test_a_layer_without_size_is_refused(size):
    sizes = {"in_features": 3, "out_features": 3, "tokens": 3, "batch": 3}
    with pytest.raises(ValueError, match=f"{size}: must be at least 1, got 0"):
        LayerShape(**(sizes | {size: 0}))
