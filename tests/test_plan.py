"""The plan: what it prints, what it recommends, and what it refuses."""

import json

import pytest

from dprc import accounting
from dprc.cli import main
from dprc.commands.planning import parse_bytes
from dprc.profiling.memory import Step, simulate_step
from dprc.profiling.presets import ModelShape, load_shape
from dprc.profiling.recommend import Target, make_plan
from tests.test_memory import SMALL

MODEL = ModelShape(
    "small", SMALL | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1}
)


def plan(**options):
    return make_plan(MODEL, **({"tokens": 512, "batch": 4} | options))


def test_the_peaks_are_those_of_simulated_steps():
    answer = plan(batch=2)
    private = {"estimator": "hutchinson", "tokens": 512, "batch": 2}
    for name, options in (
        ("nonprivate", private | {"estimator": None}),
        ("two_pass", private),
        ("book_keeping", private | {"schedule": "book_keeping"}),
    ):
        truth = simulate_step(MODEL.config(), Step(**options)).peak_bytes
        assert answer["peak_bytes"][name] == truth
        ratio = truth / answer["peak_bytes"]["nonprivate"]
        assert answer["peaks"][name]["ratio_to_nonprivate"] == pytest.approx(ratio)


def test_long_samples_take_projections_and_short_ones_gram_matrices():
    assert plan()["recommendation"]["estimator"] == "hutchinson"
    assert plan(tokens=8)["recommendation"]["estimator"] == "ghost"


@pytest.mark.slow
def test_a_target_chooses_probes_by_the_noise_they_cost():
    target = Target(epsilon=2.0, delta=1e-5, sample_rate=0.01, steps=100)
    chosen = plan(target=target)["recommendation"]
    # The work of 32 probes without a head, and a fraction of their noise.
    assert (chosen["estimator"], chosen["num_probes"], chosen["head_rank"]) == ("hutchpp", 26, 2)
    assert 0 < chosen["noise_overhead"] <= 0.02


class TestHead:
    def test_a_head_is_planned_for_when_asked_for(self):
        target = Target(epsilon=2.0, delta=1e-5, sample_rate=0.01, steps=100)
        answer = plan(tokens=64, batch=1, head=(2, 26), target=target)
        chosen = answer["recommendation"]
        assert (chosen["estimator"], chosen["num_probes"], chosen["head_rank"]) == (
            "hutchpp",
            26,
            2,
        )
        noise = {
            name: accounting.noise_multiplier(
                epsilon=2.0, delta=1e-5, sample_rate=0.01, steps=100, **options
            )
            for name, options in {
                "exact": {"estimator": "exact"},
                "head": {"estimator": "hutchpp", "head_rank": 2, "num_probes": 26},
            }.items()
        }
        assert chosen["noise_multiplier"] == noise["head"]
        assert chosen["noise_overhead"] == pytest.approx(noise["head"] / noise["exact"] - 1)
        # 32 columns pass the layer: three times the head's two, and the tail's.
        layer = next(row for row in answer["layers"] if row["out_features"] == 1024)
        flops = 2 * (64 * (3 * 2 + 26) + 2 * 26) * (256 + 1024)
        assert layer["estimators"]["hutchpp"]["flops"] == flops
        step = Step(64, estimator="hutchpp", num_probes=26, head_rank=2, schedule="book_keeping")
        truth = simulate_step(MODEL.config(), step).peak_bytes
        assert answer["peak_bytes"]["book_keeping"] == truth
        assert any("take hutchinson with 160 probes" in note for note in answer["notes"])

    def test_half_a_head_is_refused(self, tmp_path, capsys):
        words = ["plan", "--model", "llama-3.2-1b", "--tokens", "64", "--batch", "1"]
        assert main([*words, "--head-rank", "2"]) == 2
        assert "give both, or none" in capsys.readouterr().err
        assert main([*words, "--head-rank", "0", "--num-probes", "26"]) == 2
        assert "head_rank: must be at least 1, got 0" in capsys.readouterr().err


class TestFit:
    @pytest.mark.slow
    def test_the_largest_batch_that_fits_is_taken(self):
        roomy = plan()["peaks"]
        limit = roomy["book_keeping"]["peak_bytes"] - 1
        chosen = plan(memory_bytes=limit)["recommendation"]
        assert chosen["fits"]
        assert chosen["physical_batch"] == 3
        assert chosen["schedule"] == "book_keeping"
        assert chosen["peak_bytes"] <= limit

    @pytest.mark.slow
    def test_checkpointing_is_what_is_left(self):
        deep = ModelShape("deep", MODEL.settings | {"num_hidden_layers": 4})
        config = deep.config()
        one = Step(tokens=512, estimator="hutchinson")
        kept = simulate_step(config, one).peak_bytes
        recomputed = simulate_step(
            config, Step(tokens=512, estimator="hutchinson", checkpointing=True)
        ).peak_bytes
        assert recomputed < kept
        chosen = make_plan(deep, tokens=512, batch=4, memory_bytes=recomputed)["recommendation"]
        assert (chosen["schedule"], chosen["checkpointing"]) == ("two_pass", True)
        assert (chosen["physical_batch"], chosen["peak_bytes"]) == (1, recomputed)

    @pytest.mark.slow
    def test_a_model_that_does_not_fit_is_said_so(self):
        chosen = plan(memory_bytes=10**6)["recommendation"]
        assert (chosen["fits"], chosen["physical_batch"]) == (False, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("24 GB", 24 * 10**9), ("1.5mib", 3 * 2**19), ("1000b", 1000)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0GB", "80", "80 bananas", "1e9", "8KI"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="--memory"):
        parse_bytes(text)


class TestCommand:
    @pytest.fixture
    def model(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(MODEL.settings))
        return str(tmp_path / "config.json")

    def test_prints_one_object(self, model, capsys):
        words = ["plan", "--model", model, "--tokens", "64", "--batch", "2", "--json"]
        assert main(words) == 0
        answer = json.loads(capsys.readouterr().out)
        assert {"layers", "peak_bytes", "recommendation", "excluded"} <= set(answer)
        assert set(answer["peak_bytes"]) == {"nonprivate", "two_pass", "book_keeping"}
        layer = next(row for row in answer["layers"] if row["out_features"] == 1024)
        assert layer["count"] == 2
        assert layer["estimators"]["exact"]["flops"] == 2 * 2 * 64 * 256 * 1024

    def test_prints_a_table_with_what_it_excludes(self, model, capsys):
        assert main(["plan", "--model", model, "--tokens", "64", "--batch", "1"]) == 0
        text = capsys.readouterr().out
        assert "256 x 1024" in text
        assert "CUDA context" in text
        assert "recommended:" in text

    def test_warns_of_more_tokens_than_positions(self, model, capsys):
        assert main(["plan", "--model", model, "--tokens", "4097", "--batch", "1"]) == 0
        assert "4097 tokens are more than the model's 4096" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"model_type": "t5"}, "'t5' is no causal language model"),
            ({"model_type": "nonsense"}, "'nonsense' is no causal language model"),
            ({"hidden_size": 8}, "has no model_type"),
            (SMALL | {"hidden_size": "wide"}, "--model"),
        ],
    )
    def test_bad_configurations_are_one_line(self, settings, message, tmp_path, capsys):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(settings))
        assert main(["plan", "--model", str(file), "--tokens", "64", "--batch", "1"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1

    def test_a_file_that_is_no_json_is_one_line(self, tmp_path, capsys):
        (tmp_path / "config.json").write_text("{")
        assert main(["plan", "--model", str(tmp_path), "--tokens", "64", "--batch", "1"]) == 2
        assert "is not JSON" in capsys.readouterr().err

    def test_simulate_memory_prints_and_writes_the_same_rows(self, model, tmp_path, capsys):
        out = tmp_path / "memory.json"
        for words in (
            ["--layers", "64x32", "--num-probes", "4,8"],
            ["--model", model, "--modes", "exact_two_pass,forward"],
        ):
            words = ["simulate-memory", "--tokens", "16", *words, "--json", "--out", str(out)]
            assert main(words) == 0
            rows = json.loads(capsys.readouterr().out)["rows"]
            assert json.loads(out.read_text())["metrics"]["rows"] == rows
            assert all(row["peak_bytes"] > 0 for row in rows)


@pytest.mark.slow
def test_a_long_plan_of_a_real_model():
    answer = make_plan(
        load_shape("llama-3.2-1b"), tokens=131072, batch=1, memory_bytes=80 * 2**30, dtype="bf16"
    )
    assert answer["recommendation"]["checkpointing"]
    assert answer["recommendation"]["fits"]


def test_a_model_that_does_not_run_on_tensors_without_memory_is_said_so(tmp_path, capsys):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=0, num_hidden_layers=1).save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--tokens", "64", "--batch", "1"]) == 2
    error = capsys.readouterr().err
    assert "cannot be simulated" in error
    assert len(error.splitlines()) == 1
