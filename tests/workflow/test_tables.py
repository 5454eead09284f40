"""Tables that put the paper's numbers beside ours, and formulas beside measurements."""

import math

import pandas as pd
import pytest

from dprc import estimators
from paper_figures.complexity_table import COMPLEXITIES, check_formulas
from paper_figures.efficiency_table import efficiency_rows
from paper_figures.lora_table import lora_rows
from paper_figures.low_budget_table import low_budget_rows, noise_by_method
from paper_figures.paper_values import load_paper_values
from paper_figures.utility_table import utility_rows
from tests.workflow.conftest import ROOT
from tests.workflow.test_figures import PAPER, write_calibration

SCALE = {"bbc": 100.0, "billsum": 1.0, "hotpotqa": 100.0, "bbc_offline": 100.0}


def summary(*runs):
    """Give a summary of runs: (task, mode, method, epsilon, mean, std)."""
    names = ["task", "mode", "method", "epsilon", "mean", "std"]
    rows = pd.DataFrame(runs, columns=names)
    return rows.assign(seeds=2, max_tokens=64, steps=100, noise_multiplier=9.5)


def test_utility_has_three_tasks_at_two_budgets_with_ours_beside_the_papers():
    runs = summary(
        ("bbc_offline", "full", "exact", 9.0, 78.0, 1.5),
        ("bbc_offline", "full", "hutchinson", 9.0, 77.0, 1.0),
        ("bbc_offline", "lora", "exact", 2.0, 50.0, 1.0),
    )
    rows = utility_rows(runs, load_paper_values(PAPER))
    assert len(rows) == 3 * (1 + 2 * 4)
    assert rows["task"].drop_duplicates().tolist() == ["bbc", "billsum", "hotpotqa"]
    table = rows.set_index(["task", "epsilon", "method"])
    exact = table.loc[("bbc", 9.0, "exact")]
    assert exact[["our_mean", "our_std", "paper_mean", "paper_std"]].tolist() == [
        78.0,
        1.5,
        96.33,
        0.59,
    ]
    assert exact["our_task"] == "bbc_offline"
    # Our variant stands beside, without a number of the paper.
    ours = table.loc[("bbc", 9.0, "hutchinson")]
    assert ours["our_mean"] == 77.0
    assert math.isnan(ours["paper_mean"])
    assert math.isnan(table.loc[("bbc", 2.0, "exact"), "our_mean"])  # that run was LoRA
    assert table.loc[("billsum", math.inf, "nonprivate"), "paper_mean"] == 0.4928


def test_a_run_of_the_task_itself_is_preferred_to_its_twin():
    runs = summary(
        ("bbc", "full", "exact", 9.0, 96.0, 0.5),
        ("bbc_offline", "full", "exact", 9.0, 78.0, 1.5),
        ("bbc_offline", "full", "exact", 2.0, 54.0, 1.5),
    )
    table = utility_rows(runs, load_paper_values(PAPER)).set_index(["task", "epsilon", "method"])
    assert table.loc[("bbc", 9.0, "exact"), "our_mean"] == 96.0
    assert math.isnan(table.loc[("bbc", 2.0, "exact"), "our_mean"])


def test_lora_drops_are_taken_against_exact_clipping_at_the_same_budget():
    runs = summary(
        ("bbc_offline", "lora", "exact", 9.0, 79.0, 1.0),
        ("bbc_offline", "lora", "exact", 2.0, 60.0, 1.0),
        ("bbc_offline", "lora", "hutchinson_paper", 9.0, 78.5, 1.0),
        ("bbc_offline", "lora", "hutchinson", 9.0, 79.5, 1.0),
    )
    rows = lora_rows(runs, load_paper_values(PAPER)).set_index(["task", "method", "epsilon"])
    theirs = rows.loc[("bbc", "hutchinson_paper", 9.0)]
    assert (theirs["our_drop"], theirs["paper_drop"]) == (0.5, 0.4)
    assert rows.loc[("bbc", "hutchinson", 9.0), "our_drop"] == -0.5
    assert math.isnan(rows.loc[("bbc", "hutchinson", 9.0), "paper_drop"])
    (billsum,) = [row for row in rows.itertuples() if row.Index[0] == "billsum"]
    assert billsum.paper_drop == 0.005
    assert math.isnan(billsum.our_mean)


def test_low_budget_joins_noise_and_accuracy_of_each_method(tmp_path):
    paths = [
        write_calibration(tmp_path, method, 0.7, noise)
        for method, noise in (("exact", 4.06), ("hutchinson_paper", 4.35), ("hutchpp_paper", 4.35))
    ]
    paths.append(write_calibration(tmp_path, "exact", 9, 1.0))
    noise = noise_by_method(paths)
    assert noise == {"exact": 4.06, "hutchinson_paper": 4.35, "hutchpp_paper": 4.35}
    runs = summary(("bbc_offline", "full", "hutchpp_paper", 0.7, 30.0, 2.0))
    rows = low_budget_rows(noise, runs, load_paper_values(PAPER)).set_index("method")
    assert rows.index.tolist() == ["exact", "hutchinson_paper", "hutchpp_paper"]
    empty = low_budget_rows({}, summary(), load_paper_values(PAPER))
    assert empty["method"].tolist() == rows.index.tolist()  # the paper's rows stay
    assert rows["paper_mean"].tolist() == [67.07, 64.29, 70.59]
    assert rows["paper_std"].tolist() == [5.26, 6.77, 3.49]
    head = rows.loc["hutchpp_paper"]
    assert head[["paper_noise", "our_noise", "paper_mean", "our_mean"]].tolist() == [
        4.354,
        4.35,
        70.59,
        30.0,
    ]
    assert head["our_noise_multiplier"] == 9.5  # of the run, which is not at the paper's rate


def counted(d, p, t, k, **costs):
    """Give rows of counted operations of one layer."""
    layer = {"in_features": d, "out_features": p, "tokens": t, "num_probes": k}
    return [{**layer, "estimator": name, "flops_counted": cost} for name, cost in costs.items()]


def weighed(d, p, t, estimator, workspace, k=None):
    """Give a row of simulated memory in numbers of four bytes, as the engine works."""
    random = k is not None
    return {
        "in_features": d,
        "out_features": p,
        "tokens": t,
        "num_probes": k,
        "estimator": estimator,
        "dtype": "fp32",
        "convention": "in_place",
        "sketch": "shared" if random else None,
        "projection": "by_block" if random else None,
        "workspace_bytes": 4 * workspace,
        "input_bytes": 4 * t * (d + p),
        **dict.fromkeys(
            (
                "saving_excluding_inputs",
                "saving_including_inputs",
                "saving_including_inputs_copied",
                "saving_token_workspace",
            ),
            0.5,
        ),
    }


@pytest.fixture
def measurements():
    """Give operations and memory of a small layer, worked out by hand: d, p, T, k = 6, 4, 10, 2."""
    flops = counted(6, 4, 10, 2, exact=480, tiled=480, ghost=2000, hutchinson=400, hutchpp=1680)
    memory = [
        weighed(6, 4, 10, "exact", 24),
        weighed(6, 4, 10, "tiled", 24),
        weighed(6, 4, 10, "ghost", 200),
        weighed(6, 4, 10, "hutchinson", 32, k=2),  # 2(10 + max(4, 6))
        weighed(6, 4, 10, "hutchpp", 84, k=2),  # max(48, 80, 24) + 4
    ]
    return pd.DataFrame(flops), pd.DataFrame(memory)


def test_formulas_agree_with_what_was_worked_out_by_hand(measurements):
    rows = check_formulas(*measurements)
    assert rows["estimator"].tolist() == ["exact", "tiled", "ghost", "hutchinson", "hutchpp"]
    assert rows["operations_off_by"].tolist() == [0.0] * 5
    assert rows["numbers_off_by"].tolist() == [0.0] * 5
    assert rows["operations_checked"].tolist() == [1] * 5


def test_a_formula_that_does_not_agree_is_shown_with_its_error(measurements):
    flops, memory = measurements
    wrong = flops.assign(flops_counted=2 * flops["flops_counted"])
    assert check_formulas(wrong, memory)["operations_off_by"].tolist() == [0.5] * 5
    # As many probes as the layer is wide: taken exactly, so no formula is about it.
    wide = check_formulas(flops.assign(num_probes=4), memory).set_index("estimator")
    assert wide.loc["hutchinson", "operations_checked"] == 0
    assert wide.loc["exact", "operations_checked"] == 1


def test_efficiency_joins_counts_memory_and_time_of_the_papers_two_layers():
    flops, memory, times = [], [], []
    for d, p in ((2048, 512), (8192, 2048), (2048, 2048)):
        for k in (32, 64):
            costs = counted(d, p, 4096, k, exact=100, hutchinson=k)
            flops += [{**row, "saving_vs_exact": 1 - row["flops_counted"] / 100} for row in costs]
        memory += [weighed(d, p, 4096, "exact", d * p), weighed(d, p, 4096, "hutchinson", 9, k=32)]
        shape = {"in_features": d, "out_features": p, "tokens": 4096, "device": "cpu"}
        shape |= {"latency_low_seconds": 0.9, "latency_high_seconds": 1.1}
        for name, k, seconds in (("exact", None, 1.0), ("hutchinson", 32, 0.1)):
            time = {"latency_seconds": seconds, "latency_ratio_to_exact": seconds}
            times.append({**shape, **time, "estimator": name, "num_probes": k})
    tables = (pd.DataFrame(rows) for rows in (flops, memory, times))
    rows = efficiency_rows(*tables, load_paper_values(PAPER))
    assert rows[["in_features", "estimator"]].to_numpy().tolist() == [
        [8192, "exact"],
        [8192, "hutchinson"],
        [2048, "exact"],
        [2048, "hutchinson"],
    ]
    largest = rows.iloc[1]
    assert largest["flops_counted"] == 32
    assert largest["workspace_bytes"] == 36
    assert largest["latency_seconds"] == 0.1
    published = ["paper_saving_percent", "paper_excluding_percent", "paper_including_percent"]
    assert largest[published].tolist() == [98.05, 99.22, 39.18]
    assert rows.iloc[3][published].tolist()[:1] == [92.19]


def test_the_papers_numbers_stand_in_one_file_only():
    # A number of the paper with four digits is nowhere else in what makes tables and figures.
    values = load_paper_values(PAPER)["value"]
    written = [f"{value:g}" for value in values]
    precise = {text for text in written if len(text.replace(".", "").lstrip("0")) >= 4}
    assert len(precise) > 20
    for path in [*ROOT.glob("paper_figures/*.py"), *ROOT.glob("workflows/**/*.smk")]:
        text = path.read_text()
        assert not [number for number in precise if number in text], path.name


@pytest.mark.parametrize("name", list(COMPLEXITIES))
@pytest.mark.parametrize("k", [2, 8, 32, 400])
@pytest.mark.parametrize("layer", [(512, 2048), (2048, 512), (8192, 2048), (600, 600)])
@pytest.mark.parametrize("tokens", [1, 33, 4096, 20000])
def test_formulas_are_those_of_the_estimators(name, k, layer, tokens):
    options = {"num_probes": k, "sketch": "shared"} if name.startswith("hutch") else {}
    estimator = estimators.get(name, **options)
    formulas, (d, p) = COMPLEXITIES[name], layer
    assert formulas.operations.value(d, p, tokens, k) == estimator.flops(1, tokens, d, p)
    held = estimator.workspace_elements(1, tokens, d, p)
    assert formulas.numbers.value(d, p, tokens, k) == held
