"""The planner's table and recommendation, and the command line."""

import argparse
import json
from dataclasses import replace
from functools import partial

import pytest

from dprc.accounting import planner
from dprc.commands import accounting as command

TARGET = {"epsilon": 2.0, "delta": 1e-5, "sample_rate": 0.02, "steps": 200}
LAYERS = (planner.LayerShape(4096, 2048, 512), planner.LayerShape(4096, 2048, 8192))


@pytest.fixture(scope="module")
def options():
    return planner.compare(**TARGET, layers=LAYERS, batch=2, probes=(32, 64), heads=((2, 26),))


def test_work_follows_the_published_savings(options):
    """At T = 4096, k = 32: 98.05 % less for 8192x2048, 92.19 % for 2048x512."""
    for layer, saving in zip(LAYERS, (0.9219, 0.9805), strict=True):
        exact = layer.tokens * layer.in_features * layer.out_features
        sketched = layer.tokens * 32 * (layer.in_features + layer.out_features)
        assert 1 - sketched / exact == pytest.approx(saving, abs=5e-5)
    assert options[0].norm_flops == sum(
        2 * 2 * s.tokens * s.in_features * s.out_features for s in LAYERS
    )


def test_overheads_are_ordered(options):
    overhead = {(o.num_probes, o.sketch, o.analysis): o.noise_overhead for o in options}
    assert overhead[None, None, "tight"] == 0.0
    assert 0 < overhead[26, "per_sample", "tight"] < overhead[64, "per_sample", "tight"]
    assert overhead[26, "per_sample", "tight"] < overhead[26, "shared", "tight"]
    assert (
        0
        < overhead[64, "per_sample", "tight"]
        < overhead[32, "per_sample", "tight"]
        < overhead[32, "shared", "tight"]
        < overhead[32, "shared", "envelope"]
    )


def test_recommendation_is_cheap_and_acceptable(options):
    choice = planner.recommend(options)
    # A head of rank 2 with 26 probes is the work of 32 probes, to a thousandth, and less noise.
    assert (choice.estimator, choice.head_rank, choice.num_probes) == ("hutchpp", 2, 26)
    assert choice.sketch == "per_sample"
    assert choice.noise_overhead <= planner.ACCEPTABLE_OVERHEAD
    assert choice.norm_flops < 1.001 * min(o.norm_flops for o in options[1:])
    headless = planner.recommend([o for o in options if o.head_rank is None])
    assert (headless.estimator, headless.num_probes) == ("hutchinson", 32)
    assert planner.recommend([replace(o, norm_flops=0) for o in options]) == replace(
        choice, norm_flops=0
    )
    strict = planner.recommend(options, overhead=0.0)
    assert strict.noise_overhead == min(o.noise_overhead for o in options[1:])


def test_exact_clipping_is_recommended_for_small_layers():
    small = planner.compare(
        **TARGET, layers=[planner.LayerShape(128, 16, 16)], probes=(), heads=(), envelope=False
    )
    costly = replace(small[0], estimator="hutchinson", num_probes=32, norm_flops=10**9)
    assert planner.recommend([*small, costly]).estimator == "exact"


@pytest.mark.slow
def test_figure_data_has_a_column_for_each_analysis():
    (row,) = planner.noise_by_epsilon([2.0], delta=1e-5, sample_rate=0.02, steps=200)
    assert set(row) == {"epsilon", "exact", "per_sample_tight", "shared_tight", "shared_envelope"}


@pytest.mark.parametrize("values", [(0, 1, 1), (1, True, 1), (1, 1, 2.0)])
def test_impossible_shapes_are_refused(values):
    with pytest.raises(ValueError, match="must be an int of at least 1"):
        planner.LayerShape(*values)


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_parsers(parser.add_subparsers(required=True))
    args = parser.parse_args(words)
    return args.run(args)


SCHEDULE = ("--delta", "1e-5", "--sample-rate", "0.02", "--steps", "200")


def test_calibrate_prints_and_writes_what_it_found(capsys, tmp_path):
    out = tmp_path / "noise.json"
    run("calibrate", "--epsilon", "2", *SCHEDULE, "--json", "--out", str(out), "--num-probes", "16")
    answer = json.loads(capsys.readouterr().out)
    assert {
        "noise_multiplier", "epsilon", "delta", "sample_rate", "steps", "estimator", "num_probes",
        "sketch", "analysis",
    } <= set(answer)  # fmt: skip
    assert answer["epsilon_spent"] <= answer["epsilon"] == 2.0
    written = json.loads(out.read_text())
    assert written["privacy"]["noise_multiplier"] == answer["noise_multiplier"]
    assert written["privacy"]["epsilon"] == 2.0


def test_epsilon_prints_both_bounds(capsys):
    run("epsilon", "--noise-multiplier", "1", *SCHEDULE, "--estimator", "exact", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert 0 < answer["epsilon_lower"] <= answer["epsilon_upper"]


def test_sizes_and_epochs_stand_for_rate_and_steps(capsys):
    sizes = ("--dataset-size", "1000", "--batch-size", "20", "--epochs", "4", "--delta", "1e-5")
    run("calibrate", "--epsilon", "2", *sizes, "--json", "--estimator", "exact")
    answer = json.loads(capsys.readouterr().out)
    assert (answer["sample_rate"], answer["steps"]) == (0.02, 200)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sample-rate", "0.1"), "give either --sample-rate and --steps"),
        (("--sample-rate", "0.1", "--steps", "1", "--epochs", "1"), "give either"),
        (("--dataset-size", "10", "--batch-size", "20", "--epochs", "1"), "batch_size must be"),
        (("--dataset-size", "10", "--batch-size", "2", "--epochs", "-1"), "epochs must be above 0"),
    ],
)
def test_contradicting_schedules_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        run("calibrate", "--epsilon", "1", "--delta", "1e-5", *words)


def test_infinite_epsilon_is_refused_in_words():
    with pytest.raises(ValueError, match=r"infinite at noise_multiplier=0.0"):
        run("epsilon", "--noise-multiplier", "0", *SCHEDULE)


def test_compare_prints_the_table(capsys, monkeypatch, options):
    monkeypatch.setattr(planner, "compare", lambda **settings: options)
    run("calibrate", "--epsilon", "2", *SCHEDULE, "--compare", "--estimator", "exact")
    table = capsys.readouterr().out
    assert "per_sample" in table
    assert "envelope" in table


def test_compare_counts_the_work_of_the_given_layers(capsys, monkeypatch):
    few = partial(planner.compare, probes=(32,), heads=(), envelope=False)
    monkeypatch.setattr(planner, "compare", few)
    words = ["--compare", "--estimator", "exact", "--layers", "64x32", "--tokens", "10", "--json"]
    run("calibrate", "--epsilon", "2", *SCHEDULE, *words)
    answer = json.loads(capsys.readouterr().out)
    work = {option["estimator"]: option["norm_flops"] for option in answer["options"]}
    assert work == {"exact": 2 * 10 * 64 * 32, "hutchinson": 2 * 10 * 32 * (64 + 32)}
    assert answer["recommendation"]["estimator"] == "exact"  # cheaper, at so narrow a layer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "64x32"], "--layers and --tokens: give both"),
        (["--layers", "64", "--tokens", "10"], "--layers: each must be INxOUT, got '64'"),
        (["--layers", "64x32", "--tokens", "0"], "tokens must be an int of at least 1, got 0"),
    ],
)
def test_bad_layers_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        run("calibrate", "--epsilon", "2", *SCHEDULE, "--compare", "--estimator", "exact", *words)


@pytest.mark.parametrize("words", [["--layers", "64x32"], ["--tokens", "10"]])
def test_work_that_nothing_compares_is_refused(words):
    with pytest.raises(ValueError, match=f"{words[0]}: is the work that --compare compares, and"):
        run("calibrate", "--epsilon", "2", *SCHEDULE, *words)
