"""Per-sample losses."""

import pytest
import torch

from dprc import estimators, losses
from dprc.capture import capture_of
from dprc.contributions import MatrixUse
from dprc.schedules import NormPass
from tests import zoo
from tests.test_capture import check
from tests.test_engine import make_engine


def test_classification_loss_is_each_samples_cross_entropy():
    model, inputs = zoo.build("bert"), zoo.batch()
    got = losses.classification_loss(model, inputs)
    for row in range(zoo.BATCH):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        label = alone.pop("labels")
        expected = torch.log_softmax(model(**alone).logits, -1)[0, label].neg()
        torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-6, atol=0)


def test_missing_labels_and_token_logits_are_refused():
    inputs = zoo.batch()
    with pytest.raises(ValueError, match="has no 'labels'"):
        losses.classification_loss(zoo.build("bert"), {"input_ids": inputs["input_ids"]})
    with pytest.raises(ValueError, match=r"logits \(B, classes\)"):
        losses.classification_loss(zoo.build("llama"), inputs)


DECODERS = ("llama", "llama_tied", "gpt2", "lora", *(
    name for name in zoo.MORE_MODELS if name not in ("t5", "vit")
))  # fmt: skip


def causal_batch(size=zoo.BATCH):
    inputs = zoo.batch(size)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, losses.IGNORED)
    labels[0, :2] = losses.IGNORED  # a masked prompt
    return inputs | {"labels": labels}


def from_logits(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), targets, reduction="none", ignore_index=losses.IGNORED
    )
    return each.sum(1) / (targets != losses.IGNORED).sum(1).clamp(min=1)


class TestCausalLm:
    @pytest.mark.parametrize("chunk_tokens", [1, 4, 1024])
    @pytest.mark.parametrize("name", DECODERS)
    def test_equals_the_loss_of_the_models_logits(self, name, chunk_tokens):
        model, batch = zoo.build(name), causal_batch()
        got = losses.causal_lm_loss(model, batch, chunk_tokens)
        torch.testing.assert_close(got, from_logits(model, batch), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma2"])
    def test_plain_gradients_equal_those_of_the_models_logits(self, name):
        model, batch = zoo.build(name), causal_batch()
        parameters = list(model.parameters())
        losses.causal_lm_loss(model, batch, 3).sum().backward()
        got = [p.grad.clone() for p in parameters]
        expected = torch.autograd.grad(from_logits(model, batch).sum(), parameters)
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)

    @pytest.mark.filterwarnings("ignore:privacy_seed")
    @pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
    @pytest.mark.parametrize("estimator", ["exact", "ghost", "tiled", "hutchinson", "hutchpp"])
    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "lora"])
    def test_chunks_clip_like_brute_force(self, name, estimator, schedule):
        batch = causal_batch()

        def loss_fn(model):  # brute force, before the engine holds the model, has its own loss
            held = any(capture_of(module) for module in model.modules())
            return losses.causal_lm_loss(model, batch, 3) if held else from_logits(model, batch)

        check(zoo.build(name), loss_fn, estimator=estimator, schedule=schedule, num_probes=4)

    @pytest.mark.filterwarnings("ignore:privacy_seed")
    def test_book_keeping_keeps_no_gradient_of_logits(self):
        model, batch = zoo.build("llama"), causal_batch()
        engine = make_engine(model, schedule="book_keeping")
        kept = []
        original = NormPass.add_totals_

        def spy(self, *args):
            kept.extend(c.use.left.shape[-1] for _, c in self._kept if isinstance(c, MatrixUse))
            original(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NormPass, "add_totals_", spy)
            engine.backward(losses.causal_lm_loss(model, batch, 3))
        assert kept
        assert zoo.VOCABULARY not in kept

    @pytest.mark.filterwarnings("ignore:privacy_seed")
    def test_the_heads_estimator_does_not_depend_on_the_length_of_the_batch(self):
        model = zoo.build("llama")
        engine = make_engine(model, estimator="hutchpp", num_probes=4)
        head = engine._capture.names.index("lm_head.weight")
        for chunk in (1024, 2):
            losses.causal_lm_loss(model, causal_batch(), chunk)
            assert isinstance(engine._plan.estimator_of(head), estimators.Hutchinson)

    def test_a_sample_without_labels_has_loss_zero(self):
        batch = causal_batch()
        batch["labels"][1] = losses.IGNORED
        model = zoo.build("llama")
        assert losses.causal_lm_loss(model, batch)[1] == 0
        assert (losses.causal_lm_loss(model, batch)[[0, 2]] > 0).all()

    def test_autocast_is_remembered_in_the_backward_pass(self):
        model, batch = zoo.build("llama", torch.float32), causal_batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = losses.causal_lm_loss(model, batch, 3)
            whole = from_logits(model, batch)
        torch.testing.assert_close(values, whole.float(), rtol=0.02, atol=0.02)
        values.sum().backward()
        assert model.lm_head.weight.grad.isfinite().all()

    def test_unknown_code_after_the_head_is_refused(self):
        model = zoo.build("llama")
        forward = model.forward

        def shifted(*args, **kwargs):
            output = forward(*args, **kwargs)
            output.logits = output.logits + 1
            return output

        model.forward = shifted
        with pytest.raises(ValueError, match="makes its logits in a way that is not known"):
            losses.causal_lm_loss(model, causal_batch())

    @pytest.mark.parametrize(
        ("model", "changes", "options", "message"),
        [
            ("llama", {"labels": None}, {}, "has no 'labels'"),
            (
                "llama",
                {"labels": torch.zeros(3, 5, dtype=torch.long)},
                {},
                r"labels must .*\(3, 7\)",
            ),
            ("llama", {}, {"chunk_tokens": 0}, "chunk_tokens .* got 0"),
            ("t5", {}, {}, "not a decoder"),
        ],
    )
    def test_bad_input_is_refused(self, model, changes, options, message):
        with pytest.raises(ValueError, match=message):
            losses.causal_lm_loss(zoo.build(model), causal_batch() | changes, **options)

    def test_a_plain_module_is_refused(self):
        with pytest.raises(ValueError, match="must be a Hugging Face causal language model"):
            losses.causal_lm_loss(torch.nn.Linear(2, 2), causal_batch())
