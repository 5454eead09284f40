"""Capture on the layers and habits of real code, against brute force; and what it refuses."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dprc
from dprc.capture import Capture
from tests import zoo
from tests.test_engine import assert_same, make_engine, released_sum
from tests.truth import clipped_sum, per_sample_gradients, perturb_, squared_norms

pytestmark = pytest.mark.filterwarnings("ignore:privacy_seed")


def check(model, loss_fn, *, estimator="exact", schedule="two_pass", rtol=1e-6, **options):
    """Compare every parameter's norm and the clipped sum with brute force."""
    truth = per_sample_gradients(model, loss_fn(model))
    bound = float(squared_norms(truth).sqrt().median()) * 0.9
    engine = make_engine(
        model, estimator=estimator, schedule=schedule, max_grad_norm=bound, **options
    )
    got = released_sum(engine, lambda e: e.backward(loss_fn(model)))
    if estimator == "exact":
        for name, gradient in truth.items():
            if name in engine.squared_norms_by_parameter:
                torch.testing.assert_close(
                    engine.squared_norms_by_parameter[name].double(),
                    squared_norms({name: gradient}),
                    rtol=rtol,
                    atol=1e-9 * float(squared_norms(truth).max()),
                    msg=name,
                )
            else:
                assert gradient.abs().max() == 0, name
    norms = engine.squared_norms.double().sqrt()
    torch.testing.assert_close(norms, squared_norms(truth).sqrt(), rtol=1, atol=0)
    slack = 1e-5 if next(model.parameters()).dtype == torch.float32 else 0
    assert_same(got, clipped_sum(truth, norms / (1 - slack), bound), rtol=max(rtol, 10 * slack))
    engine.detach()


@pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
@pytest.mark.parametrize("name", zoo.MORE_MODELS)
def test_other_architectures_are_right(name, estimator, schedule):
    inputs = zoo.batch()
    rtol = 1e-4 if name in zoo.FLOAT32_ONLY else 1e-6
    options = {"num_probes": 5} if estimator == "hutchinson" else {}
    check(
        zoo.build(name),
        lambda m: zoo.losses(m, inputs),
        estimator=estimator, schedule=schedule, rtol=rtol, **options,
    )  # fmt: skip


class Habits:
    """Small modules, each with one habit that breaks hooks elsewhere."""

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)

        def forward(self, ids):
            return F.linear(self.mix(self.embed(ids)), self.embed.weight)

    class FunctionalLookUp(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 11, bias=False)

        def forward(self, ids):
            return self.head(F.embedding(ids, self.head.weight))

    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)

        def forward(self, ids):
            return self.mix(self.mix(self.embed(ids)).tanh())

    class Keywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)

        def forward(self, ids):
            return self.norm(input=self.mix(input=self.embed(input=ids)))

    class FourAxes(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(2, 3)
            self.norm = nn.RMSNorm(3)

        def forward(self, ids):
            h = self.embed(ids)
            return self.norm(self.mix(h.view(*h.shape[:2], 3, 2)))

    class TwoAxes(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)

        def forward(self, ids):
            return self.mix(self.embed(ids[:, 0]))

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.place = nn.Embedding(11, 6, padding_idx=3), nn.Embedding(9, 6)

        def forward(self, ids):
            places = torch.arange(ids.shape[1]).unsqueeze(0)
            return (self.embed(ids) + self.place(places)).tanh()

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.scale = nn.Embedding(11, 6), nn.Parameter(torch.ones(6, 6))

        def forward(self, ids):
            return (self.embed(ids) @ self.scale).tanh()

    class BiasOnly(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.mix.weight.requires_grad_(False)

        def forward(self, ids):
            return self.mix(self.embed(ids)).tanh()

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Bilinear(6, 6, 5)

        def forward(self, ids):
            h = self.embed(ids)
            return self.mix(h, h.flip(1))

    class Convolutions(nn.Module):
        def __init__(self, groups=1):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.line = nn.Conv1d(6, 4, 3, stride=2, padding=2, dilation=2, groups=groups)
            self.plane = nn.Conv2d(1, 3, (2, 3), stride=(1, 2), padding=(1, 0), bias=False)

        def forward(self, ids):
            h = self.line(self.embed(ids).transpose(1, 2)).tanh()
            return self.plane(h.unsqueeze(1))

    class GroupedConvolution(Convolutions):
        def __init__(self):
            super().__init__(groups=2)

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.spare = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, ids):
            return self.mix(self.embed(ids))

    class Dictionary(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(6))})

        def forward(self, ids):
            return (self.embed(ids) * self.table["a"]).tanh()


HABITS = [value for name, value in vars(Habits).items() if isinstance(value, type)]
IDS = torch.tensor([[1, 3, 3, 10, 0], [2, 2, 3, 2, 9], [4, 5, 6, 7, 8]])


def habit_losses(model):
    return model(IDS).square().flatten(1).sum(1)


@pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
@pytest.mark.parametrize("estimator", ["exact", "ghost", "tiled", "hutchinson", "hutchpp"])
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_habits_of_real_code_are_right(habit, estimator, schedule):
    torch.manual_seed(0)
    model = perturb_(habit()).double()
    check(model, habit_losses, estimator=estimator, schedule=schedule, num_probes=4)


def test_the_batch_is_known_to_whoever_calls_with_keywords():
    model = perturb_(Habits.Positions()).double()
    check(model, lambda m: m(ids=IDS).square().flatten(1).sum(1))


class TestIndependence:
    def test_a_layer_that_mixes_samples_is_found(self):
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

            def forward(self, x):
                h = self.a(x)
                return self.b(h - h.mean(0, keepdim=True))

        model = Centred()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match=r"a: the loss of the first sample depends"):
            engine.backward(model(torch.randn(3, 6)).square().sum(1))

    def test_samples_on_the_second_axis_are_found_even_when_the_axes_are_equal(self):
        class TimeFirst(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 6)

            def forward(self, x):
                return self.a(x.transpose(0, 1)).transpose(0, 1)

        model = TimeFirst()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="another axis"):
            engine.backward(model(torch.randn(4, 4, 6)).square().sum((1, 2)))

    def test_tokens_merged_in_another_order_are_found(self):
        class Shuffled(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 6)

            def forward(self, x):
                flat = self.a(x.transpose(0, 1).reshape(-1, 6))
                return flat.view(x.shape[1], x.shape[0], 6).transpose(0, 1)

        model = Shuffled()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="depends on other samples"):
            engine.backward(model(torch.randn(3, 4, 6)).square().sum((1, 2)))

    def test_a_loss_over_the_batch_is_found(self):
        model = zoo.build("llama")
        engine = make_engine(model)
        values = zoo.losses(model, zoo.batch())
        with pytest.raises(dprc.PrivacyError, match="depends on other samples"):
            engine.backward(values - values.mean())


class TestRefusals:
    def test_a_trained_relative_position_table(self):
        model = zoo.build("t5")
        model.requires_grad_(True)
        with pytest.raises(dprc.PrivacyError, match=r"relative_attention_bias\.weight: one table"):
            make_engine(model)

    def test_a_load_balancing_loss(self):
        model = zoo.build("mixtral")
        model.config.output_router_logits = True
        with pytest.raises(dprc.PrivacyError, match="output_router_logits"):
            make_engine(model)

    def test_a_weight_shared_with_a_module_that_is_looped_over(self):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 6, bias=False), Inner()
                self.b.bare = self.a.weight

        class Inner(nn.Module):
            def forward(self, x):
                return x @ self.bare

        with pytest.raises(dprc.PrivacyError, match=r"a\.weight: is shared with a module whose"):
            make_engine(Shared())

    def test_a_copy_of_a_held_model(self):
        model = zoo.build("llama")
        engine = make_engine(model)
        for copier in (copy.deepcopy, pickle.dumps):
            with pytest.raises(dprc.PrivacyError, match="cannot be copied or pickled"):
                copier(model)
        engine.detach()
        copy.deepcopy(model)

    def test_a_looped_module_that_takes_an_object(self):
        class Cached(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.ones(6))

            def forward(self, x, cache):
                return x * self.w

        model = Cached()
        make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="got an argument of type object"):
            model(torch.randn(3, 6), object())


def test_construction_warns_of_nothing_and_leaves_no_trace():
    class Silent:
        def receive(self, parameter, contribution): ...

    model = zoo.build("gemma2")
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Capture(model, Silent()).detach()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_a_model_cast_or_changed_after_wrapping_is_followed():
    def change_(model):
        model.float()
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        return model

    inputs = zoo.batch()
    plain = change_(zoo.build("llama"))
    truth = squared_norms(per_sample_gradients(plain, zoo.losses(plain, inputs)))
    model = zoo.build("llama")
    engine = make_engine(model)
    engine.backward(zoo.losses(change_(model), inputs))
    torch.testing.assert_close(engine.squared_norms.double(), truth, rtol=1e-4, atol=0)
