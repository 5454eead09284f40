"""`dprc check`: right models pass, a wrong capture is caught."""

import json

import pytest
import torch

from dprc import checking, losses
from dprc.cli import main
from dprc.sites import EmbeddingSite
from tests import tiny, zoo

pytestmark = pytest.mark.filterwarnings("ignore:`torch_dtype`")


@pytest.fixture
def folder(tmp_path):
    zoo.build("llama_tied").config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("chunk_tokens", ["3", "1024"])
def test_a_right_model_passes(folder, chunk_tokens, capsys):
    assert main(["check", "--model", str(folder), "--chunk-tokens", chunk_tokens, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["max_relative_error"] < 1e-6
    names = [row["name"] for row in report["parameters"]]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied: one parameter
    kinds = {row["name"]: row["captured_as"] for row in report["parameters"]}
    assert kinds["model.embed_tokens.weight"] == "embedding+linear"


def test_the_estimator_of_training_is_shown_as_the_loss_uses_it(tmp_path, capsys):
    tiny.save_causal_lm(tmp_path, hidden_size=168, num_hidden_layers=1)
    head = ["--estimator", "hutchpp", "--num-probes", "26", "--head-rank", "2"]
    assert main(["check", "--model", str(tmp_path), *head]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    # Tied to the head of the chunked loss: several uses have no head, so more probes.
    assert "hutchinson 160" in lines["model.embed_tokens.weight"]
    assert "hutchpp 26" in lines["model.layers.0.self_attn.q_proj.weight"]
    assert main(["check", "--model", str(tmp_path), "--estimator", "hutch"]) == 2
    assert "got 'hutch'" in capsys.readouterr().err


def test_a_wrong_capture_fails(folder, capsys, monkeypatch):
    right = EmbeddingSite.weight_use
    monkeypatch.setattr(
        EmbeddingSite, "weight_use", lambda self, ids, grads: right(self, ids, 2 * grads)
    )
    assert main(["check", "--model", str(folder)]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_the_users_batch_is_used(folder, tmp_path, capsys):
    (tmp_path / "batch.json").write_text(json.dumps({"input_ids": [[3, 4, 5], [6, 7, 8]]}))
    assert main(["check", "--model", str(folder), "--batch", str(tmp_path / "batch.json")]) == 0
    (tmp_path / "batch.json").write_text("[1]")
    assert main(["check", "--model", str(folder), "--batch", str(tmp_path / "batch.json")]) == 2
    assert "must hold an object with 'input_ids'" in capsys.readouterr().err


def test_a_missing_model_is_named(capsys, tmp_path):
    assert main(["check", "--model", str(tmp_path / "none")]) == 2
    assert "neither the preset smollm2-135m nor a folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "opt", "lora"])
def test_other_models_pass(name):
    model = zoo.build(name)
    batch = checking.random_batch(zoo.VOCABULARY)
    rows = checking.check_model(model, batch, losses.causal_lm_loss)
    assert max(row["max_relative_error"] for row in rows) < 1e-5
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.slow
def test_smollm2_is_right_and_trains_with_chunks_in_float32():
    from dprc.models import load_causal_lm
    from tests.test_engine import make_engine

    model = load_causal_lm("smollm2-135m", torch.float64).eval()
    batch = checking.random_batch(model.config.vocab_size, samples=2, tokens=33)
    rows = checking.check_model(model, batch, lambda m, b: losses.causal_lm_loss(m, b, 16))
    assert len(rows) == 272
    assert max(row["max_relative_error"] for row in rows) < 1e-6
    model.float()
    engine = make_engine(model, estimator="hutchinson", num_probes=32, noise_multiplier=1.0)
    engine.backward(losses.causal_lm_loss(model, batch, 16))
    before = model.model.embed_tokens.weight.detach().clone()
    engine.step()
    assert not torch.equal(model.model.embed_tokens.weight, before)
