"""Counted operations equal the formulas, and the savings the paper publishes."""

import pytest

from dprc import estimators
from dprc.profiling.flops import LayerShape, count_flops, flops_table


@pytest.mark.parametrize("name", estimators.names())
@pytest.mark.parametrize("shape", [LayerShape(37, 53, 29, batch=3), LayerShape(53, 37, 29)])
@pytest.mark.parametrize("sketch", ["shared", "per_sample"])
def test_the_count_equals_the_formula(name, shape, sketch):
    estimator = estimators.get(name, num_probes=11, sketch=sketch)
    formula = estimator.flops(shape.batch, shape.tokens, shape.in_features, shape.out_features)
    assert count_flops(estimator, shape) == formula


def test_a_small_head_costs_what_its_formula_says():
    estimator = estimators.get("hutchpp", num_probes=26, head_rank=2)
    assert count_flops(estimator, LayerShape(64, 96, 50)) == estimator.flops(1, 50, 64, 96)


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
