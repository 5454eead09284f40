"""A training run, from settings to the result file, on real text and a very small model."""

import json
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml

import dprc
from dprc import accounting, tasks
from dprc.models import MeanPooledClassifier, TinyLlama, load_classifier, principal_components
from dprc.privacy_target import calibrated_noise
from dprc.saved_models import load_classifier_folder
from dprc.settings import RunSettings
from dprc.train import train
from dprc.workload import TokenisedExamples
from tests.articles import TRAIN, FewArticles, save_few_articles

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed", "ignore:num_probes")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A few real articles and a very small model."""
    root = tmp_path_factory.mktemp("prepared")
    save_few_articles(root)
    return root


def settings(prepared, **changes):
    raw = {
        "task": {"name": "bbc_offline", "data": str(prepared / "data"), "max_tokens": 40},
        "model": {"path": str(prepared / "model")},
        "method": {"estimator": "hutchinson", "num_probes": 8},
        "privacy": {"epsilon": 8.0, "delta": 1e-5, "max_grad_norm": 1.0},
        "training": {"sample_rate": 0.2, "steps": 20, "learning_rate": 0.01},
        "output": {"log_every": 20, "checkpoint_every": None},
        "seed": 0,
        "privacy_seed": 3,
    }
    return RunSettings.model_validate(raw | changes)


class TestARun:
    def test_reports_what_it_did_and_the_epsilon_of_its_parameters(self, prepared, tmp_path):
        metrics = train(settings(prepared), tmp_path)
        result = json.loads((tmp_path / "metrics.json").read_text())
        assert result["metrics"] == metrics
        assert result["valid"] is True
        assert result["config"]["training"]["steps"] == 20
        privacy = result["privacy"]
        assert privacy["releasable"] is False
        assert privacy["steps"] == 20
        same = {
            name: privacy[name]
            for name in ("noise_multiplier", "sample_rate", "steps", "estimator", "num_probes")
        }
        assert privacy["epsilon"] == accounting.epsilon(delta=1e-5, **same)
        assert 0.99 * 8 < privacy["epsilon"] <= 8
        assert metrics["train_documents"] == TRAIN
        assert 0 <= metrics["test_accuracy"] <= 1
        lines = (tmp_path / "steps.csv").read_text().splitlines()
        assert lines[0] == (
            "step,learning_rate,nonprivate_batch_size,nonprivate_mean_loss,nonprivate_seconds"
        )
        assert len(lines) == 21
        # Only weights, tokenizer and what they promise: no seed, key or state of a generator.
        assert {path.name for path in (tmp_path / "model").iterdir()} == {
            "PRIVACY.md", "classifier.json", "config.json", "head.safetensors",
            "model.safetensors", "privacy.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        model, tokenizer = load_classifier_folder(tmp_path / "model")
        test = TokenisedExamples(FewArticles().read().test, tokenizer, 40)
        batch = test.collate([test[i] for i in range(len(test))])
        right = model(batch["input_ids"], batch["attention_mask"]).logits.argmax(-1)
        right = right == batch["labels"]
        assert float(right.float().mean()) == pytest.approx(metrics["test_accuracy"])

    @pytest.mark.slow
    def test_same_seeds_same_numbers_and_others_otherwise(self, prepared, tmp_path):
        def losses_of(name, **changes):
            train(settings(prepared, **changes), tmp_path / name)
            rows = (tmp_path / name / "steps.csv").read_text().splitlines()[1:]
            return [row.rsplit(",", 1)[0] for row in rows]

        first = losses_of("first")
        assert losses_of("again") == first
        assert losses_of("noise", privacy_seed=4) != first
        assert losses_of("initialisation", seed=1) != first

    def test_a_non_private_run_learns_and_claims_nothing(self, prepared, tmp_path):
        training = {"sample_rate": 1.0, "steps": 40, "learning_rate": 0.02}
        changes = {"method": None, "privacy": None, "training": training}
        train(settings(prepared, **changes), tmp_path)
        assert json.loads((tmp_path / "metrics.json").read_text())["privacy"] is None
        rows = [line.split(",") for line in (tmp_path / "steps.csv").read_text().splitlines()[1:]]
        assert float(rows[-1][3]) < float(rows[0][3]) / 2

    def test_both_schedules_train_alike(self, prepared, tmp_path):
        rows = []
        for schedule in ("two_pass", "book_keeping"):
            method = {"estimator": "hutchinson", "num_probes": 8, "schedule": schedule}
            train(settings(prepared, method=method), tmp_path / schedule)
            text = (tmp_path / schedule / "steps.csv").read_text().splitlines()[1:]
            rows.append([float(line.split(",")[3]) for line in text])
        torch.testing.assert_close(rows[0], rows[1], rtol=1e-3, atol=1e-3)


class TestRefusals:
    def test_noise_that_misses_the_target(self, prepared):
        run = settings(prepared)
        privacy = run.privacy.model_copy(update={"noise_multiplier": 0.4})
        with pytest.raises(dprc.PrivacyError, match=r"0.4 gives epsilon .* above the target 8"):
            calibrated_noise(privacy, run.training, run.method.accounting())

    def test_data_or_model_that_is_not_there(self, prepared, tmp_path):
        task = {"name": "bbc_offline", "data": str(tmp_path), "max_tokens": 40}
        with pytest.raises(FileNotFoundError, match="dprc prepare-data"):
            train(settings(prepared, task=task), tmp_path / "out")
        with pytest.raises(FileNotFoundError, match="dprc prepare-model"):
            train(settings(prepared, model={"path": str(tmp_path)}), tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())

    def test_an_output_that_is_no_folder_before_anything_is_trained(self, prepared, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(FileExistsError):
            train(settings(prepared), tmp_path / "file")

    def test_more_tokens_than_the_model_has_positions(self, prepared, tmp_path):
        task = {"name": "bbc_offline", "data": str(prepared / "data"), "max_tokens": 9000}
        with pytest.raises(ValueError, match="8192 positions, got 9000"):
            train(settings(prepared, task=task), tmp_path)


class TestParts:
    @pytest.mark.slow
    def test_padding_changes_no_prediction(self, prepared):
        model, tokenizer = load_classifier(prepared / "model", 5, seed=0)
        model.eval()
        examples = TokenisedExamples(tasks.get("bbc_offline").read().test[:4], tokenizer, 30)
        items = [(examples[i][0][: 10 + 5 * i], examples[i][1]) for i in range(4)]
        together = examples.collate(items)
        together.pop("labels")
        logits = model(**together).logits
        for row, item in enumerate(items):
            alone = examples.collate([item])
            alone.pop("labels")
            torch.testing.assert_close(model(**alone).logits[0], logits[row], rtol=1e-4, atol=1e-5)

    def test_the_public_embedding_is_frozen_and_the_rest_follows_the_seed(self, prepared):
        (one, _), (other, _) = (load_classifier(prepared / "model", 5, seed=s) for s in (0, 1))
        assert torch.equal(one.backbone.embed_tokens.weight, other.backbone.embed_tokens.weight)
        assert not one.backbone.embed_tokens.weight.requires_grad
        assert not torch.equal(one.head.weight, other.head.weight)
        block = "layers.0.mlp.up_proj.weight"
        assert not torch.equal(
            one.backbone.get_parameter(block), other.backbone.get_parameter(block)
        )

    def test_pooling_ignores_masked_positions(self):
        class Backbone(torch.nn.Module):
            config = type("Config", (), {"hidden_size": 4})

            def forward(self, input_ids, attention_mask):
                states = input_ids.unsqueeze(-1).float().expand(-1, -1, 4)
                return type("Output", (), {"last_hidden_state": states})

        model = MeanPooledClassifier(Backbone(), 2, seed=0)
        ids, mask = torch.tensor([[1, 3, 100]]), torch.tensor([[1, 1, 0]])
        expected = model.head(torch.full((1, 4), 2.0))
        torch.testing.assert_close(model(ids, mask).logits, expected)

    def test_principal_components_keep_what_varies_most(self):
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor([5.0, 0.1, 3.0, 0.1])
        matrix = (torch.randn(500, 4, generator=generator) * scales).numpy()
        projected = principal_components(matrix, 2)
        assert projected.shape == (500, 2)
        assert abs((projected**2).mean() - 1) < 1e-5
        assert abs(np.corrcoef(projected[:, 0], matrix[:, 0])[0, 1]) > 0.99
        with pytest.raises(ValueError, match="at most 4 components"):
            principal_components(matrix, 5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"heads": 3}, "heads: .* got 3"), ({"layers": 0}, "layers: .* got 0")],
    )
    def test_impossible_sizes_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            TinyLlama(**options)


@pytest.mark.slow
def test_the_real_public_embedding_makes_the_real_model(tmp_path):
    from dprc.models import save_tiny_llama

    save_tiny_llama(TinyLlama(hidden_size=32, heads=2, intermediate_size=48), tmp_path)
    model, tokenizer = load_classifier(tmp_path, 5, seed=0)
    assert model.backbone.embed_tokens.weight.shape == (49152, 32)
    assert tokenizer.decode(tokenizer("Hello world")["input_ids"]) == "Hello world"


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [{}, {"method": None, "privacy": None}])
def test_a_command_killed_at_random_ends_as_one_that_was_not(prepared, tmp_path, chosen):
    """A process of its own, real text, and no mercy: SIGKILL whenever a step was reported."""
    output = {"log_every": 1, "checkpoint_every": 3, "evaluate_every": 7}
    run = settings(prepared, output=output, **chosen)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run.model_dump()))
    words = [sys.executable, "-m", "dprc", "train", "--resume", "--config", tmp_path / "run.yaml"]

    def started(name):
        return subprocess.Popen(
            [*words, "--out", tmp_path / name], stderr=subprocess.PIPE, text=True
        )

    def ended(name):
        result = json.loads((tmp_path / name / "metrics.json").read_text())
        del result["metrics"]["train_seconds"]
        steps = (tmp_path / name / "steps.csv").read_text().splitlines()
        return (
            result,
            [row.rsplit(",", 1)[0] for row in steps],
            (tmp_path / name / "evaluations.csv").read_text(),
            (tmp_path / name / "model" / "model.safetensors").read_bytes(),
            (tmp_path / name / "model" / "head.safetensors").read_bytes(),
        )

    whole = started("whole")
    whole.communicate()
    assert whole.returncode == 0
    for step in sorted(random.Random(5).sample(range(4, 20), 3)):
        process = started("cut")
        for line in process.stderr:
            if f"step {step}/20  nonprivate" in line:
                break
        else:
            pytest.fail(f"step {step} was not reported")
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "cut" / "metrics.json").exists()
    last = started("cut")
    _, said = last.communicate()
    assert last.returncode == 0, said
    assert "starting anew" not in said
    assert ended("cut") == ended("whole")
