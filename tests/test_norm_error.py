"""Errors of estimated norms: gradients against autograd, deviations against theory."""

import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dprc.models
import dprc.tasks
from dprc import estimators
from dprc.cli import main
from dprc.losses import causal_lm_loss
from dprc.profiling.norm_error import (
    ALL_LAYERS,
    LayerGradient,
    choose_layers,
    estimated_squared_norms,
    first_long_documents,
    layer_gradients,
    measure_norm_error,
    middle_block,
)
from dprc.tasks import Dataset, Example

REPEATS = 1000


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def gradient_of_rank(rank, *, tokens=6, d=12, p=9):
    """Make a gradient with so many equal singular values."""
    activations, grads = torch.zeros(tokens, d), torch.zeros(tokens, p)
    for i in range(rank):
        activations[i, i] = grads[i, i] = 2.0
    return LayerGradient("layer", 0, activations, grads)


def test_factors_multiply_to_the_gradient_that_autograd_gives():
    model = tiny_llama()
    layers = choose_layers(model, middle_block(model))
    assert len(layers) == 7
    assert all(".layers.1." in name for name in layers)
    documents = [torch.arange(11), torch.arange(7) + 3]
    gradients = list(layer_gradients(model, documents, layers))
    assert [(g.layer, g.document) for g in gradients] == [(n, i) for i in (0, 1) for n in layers]
    for index, ids in enumerate(documents):
        model.zero_grad()
        batch = {"input_ids": ids[None], "labels": ids[None]}
        torch.autograd.backward(causal_lm_loss(model, batch).sum())
        for gradient in (g for g in gradients if g.document == index):
            expected = model.get_submodule(gradient.layer).weight.grad
            found = gradient.output_grads.t() @ gradient.activations
            torch.testing.assert_close(found, expected)
            assert float(gradient.energies().sum()) == pytest.approx(float(expected.norm() ** 2))


@pytest.mark.parametrize("rank", [1, 4])
def test_the_deviation_is_what_theory_gives(rank):
    k = 8
    rows = measure_norm_error([gradient_of_rank(rank)], [k], repeats=REPEATS)
    (row,) = [r for r in rows if r["estimator"] == "hutchinson" and r["layer"] == "layer"]
    # With r equal singular values the ratio is χ² of rk degrees, divided by rk.
    expected, degrees = math.sqrt(2 / (rank * k)), rank * k
    assert row["squared_error_std_expected"] == pytest.approx(expected)
    assert row["squared_error_std_bound"] == pytest.approx(math.sqrt(2 / k))
    # The deviation of a sample deviation, from the kurtosis 3 + 12/degrees.
    relative = 5 * math.sqrt((2 + 12 / degrees) / (4 * REPEATS))
    assert relative < math.sqrt(2) - 1  # half the probes would be seen
    assert row["squared_error_std"] == pytest.approx(expected, rel=relative)
    assert abs(row["squared_error_mean"]) < 5 * expected / math.sqrt(REPEATS)
    quantiles = list(row["squared_error_quantiles"].values())
    assert quantiles == sorted(quantiles)


def test_a_head_as_wide_as_the_gradient_leaves_no_error():
    rows = measure_norm_error([gradient_of_rank(4)], [2, 5], repeats=20)
    spread = {
        (row["estimator"], row["num_probes"]): row["squared_error_std"]
        for row in rows
        if row["layer"] == "layer"
    }
    assert spread["hutchpp", 5] < 1e-6 < spread["hutchpp", 2] < spread["hutchinson", 2]
    assert spread["tiled", None] == 0


def test_repeats_draw_sketches_of_their_own():
    estimator = estimators.get("hutchinson", num_probes=3)
    generator = torch.Generator().manual_seed(0)
    estimates = estimated_squared_norms(gradient_of_rank(2), estimator, 20, generator)
    assert estimates.unique().numel() == 20


def test_a_narrow_layer_has_no_row_and_counts_as_exact_in_the_sum():
    wide, narrow = gradient_of_rank(3), gradient_of_rank(2, p=3)
    rows = measure_norm_error([wide, narrow], [4], repeats=50)
    estimated = [row for row in rows if row["estimator"] == "hutchinson"]
    assert [(row["layer"], row.get("out_features")) for row in estimated] == [
        ("layer", 9),
        (ALL_LAYERS, None),
    ]
    one, together = (row["squared_error_std"] for row in estimated)
    share = 3 / (3 + 2)  # of squared singular values, all of them equal
    assert together == pytest.approx(one * share)


def test_what_cannot_be_measured_is_refused_by_name():
    with pytest.raises(ValueError, match="repeats: a deviation needs at least 2, got 1"):
        measure_norm_error([gradient_of_rank(1)], [4], repeats=1)
    with pytest.raises(ValueError, match="gradients: must be at least one"):
        measure_norm_error([], [4], repeats=2)
    with pytest.raises(ValueError, match=r"no linear layer is called '\*.q'; there are model"):
        choose_layers(tiny_llama(), "*.q")
    with pytest.raises(ValueError, match="no linear layer is called 'lm_head'"):
        choose_layers(tiny_llama(), "lm_head")
    with pytest.raises(ValueError, match="layers: the model does not say"):
        middle_block(torch.nn.Linear(2, 2))


def characters(text, *, truncation, max_length):
    assert truncation
    return {"input_ids": [ord(c) % 50 for c in text][:max_length]}


def test_documents_are_the_first_that_are_long_enough():
    texts = ["abc", "defghi", "jk", "lmnopq", "rstuvwx"]
    found = first_long_documents(texts, characters, tokens=5, count=2)
    assert [len(ids) for ids in found] == [5, 5]
    assert found[1].tolist() == [ord(c) % 50 for c in "lmnop"]
    with pytest.raises(ValueError, match=r"4 documents of at least 5 tokens are needed, .* 3"):
        first_long_documents(texts, characters, tokens=5, count=4)


def test_the_command_measures_the_middle_block(capsys, tmp_path, monkeypatch):
    example = Example("1", "the quick brown fox jumps", 0)
    dataset = Dataset((example,), (example,), ("a",), 2)
    monkeypatch.setattr("dprc.tasks.load_dataset", lambda folder, task: dataset)
    monkeypatch.setattr(dprc.models, "load_causal_lm", lambda name: tiny_llama())
    monkeypatch.setattr(dprc.models, "load_tokenizer", lambda name: characters)
    words = ["measure-norm-error", "--model", "x", "--data", "y", "--tokens", "20"]
    options = ["--num-probes", "4,8", "--repeats", "3", "--out", str(tmp_path / "e.json")]
    assert main([*words, *options, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    # seven layers and their sum; k and v have 8 columns, so 8 probes are no estimate for them
    assert len(rows) == 7 + 2 * (7 + 1) + 2 * (5 + 1)
    result = json.loads((tmp_path / "e.json").read_text())
    assert result["metrics"]["rows"] == rows
    assert len(result["config"]["layers"]) == 7
    assert main([*words, "--tokens", "1"]) == 2
    assert "--tokens: must be at least 2, got 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_gradient_scatters_as_its_singular_values_say():
    model = dprc.models.load_causal_lm("smollm2-135m")
    texts = [example.text for example in dprc.tasks.get("bbc_offline").read().train]
    tokenizer = dprc.models.load_tokenizer("smollm2-135m")
    documents = first_long_documents(texts, tokenizer, tokens=128, count=1)
    gradients = list(layer_gradients(model, documents, choose_layers(model, "*.15.*.v_proj")))
    rows = measure_norm_error(gradients, [16], repeats=REPEATS)
    (row,) = [r for r in rows if r["estimator"] == "hutchinson" and r["layer"] != ALL_LAYERS]
    # No gradient has a wider law than χ² of k degrees, whose kurtosis is 3 + 12/k.
    relative = 5 * math.sqrt((2 + 12 / 16) / (4 * REPEATS))
    expected = row["squared_error_std_expected"]
    assert row["squared_error_std"] == pytest.approx(expected, rel=relative)
    assert expected < 0.95 * row["squared_error_std_bound"]
    assert abs(row["squared_error_mean"]) < 5 * expected / math.sqrt(REPEATS)
    (head,) = [r for r in rows if r["estimator"] == "hutchpp" and r["layer"] != ALL_LAYERS]
    assert head["squared_error_std"] < expected
