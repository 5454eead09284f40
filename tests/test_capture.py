"""Capture on the layers and habits of real code, against brute force; and what it refuses."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dprc
from dprc.capture import Capture
from dprc.sites import LoopSite
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

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
            self.norm = nn.LayerNorm(6)

        def forward(self, ids):
            h = self.mix(self.embed(ids)).relu_()
            h = self.norm(h).mul_(2)
            h[:, 0] = 0
            return h

    class TwoTables(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = TwoTableEmbedding(11, 6)

        def forward(self, ids):
            return self.embed(ids).tanh()

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

        def forward(self, ids):
            return self.mix(self.embed(ids)).tanh()

    class MergedLora(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(11, 6), MergedLinear()

        def forward(self, ids):
            return self.mix(self.embed(ids)).tanh()


class TwoTableEmbedding(nn.Embedding):
    """A look-up of its own weight and of a second, frozen table."""

    def __init__(self, rows, width):
        super().__init__(rows, width)
        self.table = nn.Parameter(torch.randn(rows, width), requires_grad=False)

    def forward(self, ids):
        return F.embedding(ids, self.weight) + F.embedding(ids, self.table)


class MergedLinear(nn.Module):
    """Looks like Conv1D as long as its trained factors are zero."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(6))
        self.a, self.b = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.zeros(2, 6))

    def forward(self, x):
        return x @ (self.weight + self.a @ self.b) + self.bias


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


def test_an_evaluation_between_steps_is_not_taken_for_a_batch():
    model = perturb_(Habits.Positions()).double()
    engine = make_engine(model)
    with torch.no_grad():
        model(IDS[:1])
    with pytest.raises(dprc.PrivacyError, match=f"called with {len(IDS)} samples"):
        engine.backward(model(IDS).square().flatten(1).sum(1)[:1])


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(6, 4, 3, groups=2), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Looking(nn.Module):
    """Its way depends on the sample, which vmap cannot follow."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3, 6))

    def forward(self, x):
        rows = [row * self.a if bool(row.sum() > 0) else row @ self.b.t() @ self.b for row in x]
        return torch.stack(rows)


@pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
@pytest.mark.parametrize(("kind", "vmaps"), [(Grouped, True), (Looking, False)])
def test_samples_run_at_once_or_in_a_loop_and_are_right(kind, vmaps, schedule):
    model = perturb_(kind()).double()
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x[1] *= -1
    check(model, lambda m: m(x).square().flatten(1).sum(1), schedule=schedule)
    engine = make_engine(model)
    model(x)
    (loop,) = (site for site in engine._capture.sites if isinstance(site, LoopSite))
    assert loop.vmaps == [vmaps]


def test_samples_run_at_once_under_checkpointing():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), Grouped()

        def forward(self, x):
            return checkpoint(self.second, self.first(x), use_reentrant=False)

    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    check(perturb_(Whole()).double(), lambda m: m(x).square().flatten(1).sum(1))


class Sometimes(nn.Module):
    """Looks at its numbers only where a text is long."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 6))

    def forward(self, x):
        y = x * self.w[0]
        return y + self.w[1] if x.shape[1] > 8 and bool(y.sum() > -1e9) else y


def test_a_way_that_vmap_cannot_follow_is_looped_over_when_it_comes():
    model = Sometimes().double()
    engine = make_engine(model)
    for tokens in (7, 9):
        engine.backward(model(torch.ones(3, tokens, 6).double()).square().flatten(1).sum(1))
    (loop,) = engine._capture.sites
    assert loop.vmaps == [False]


def test_a_parameter_without_axes():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return self.layer(x) * self.scale

    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    check(Scaled().double(), lambda m: m(x).square().sum(1))


class Centred(nn.Module):
    """Mixes the samples of a batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = self.a(x)
        return self.b(h - h.mean(0, keepdim=True))


class TestIndependence:
    def test_a_first_batch_without_labels_shows_nothing(self):
        model = Centred()
        engine = make_engine(model)
        engine.backward(model(torch.randn(3, 6)).square().sum(1) * 0)
        with pytest.raises(dprc.PrivacyError, match=r"a: the loss of one sample depends"):
            engine.backward(model(torch.randn(3, 6)).square().sum(1))

    def test_a_buffer_that_is_replaced_in_the_forward_pass(self):
        class Averaging(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 2)
                self.register_buffer("mean", torch.zeros(6))

            def forward(self, x):
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                return self.a(x)

        model = Averaging()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="mean: is a buffer that the model writes"):
            engine.backward(model(torch.randn(3, 6)).square().sum(1))

    def test_a_layer_that_mixes_samples_is_found(self):
        model = Centred()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match=r"a: the loss of one sample depends"):
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

    def test_a_loss_that_depends_on_the_samples_before_it_is_found(self):
        model = zoo.build("llama")
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="depends on other samples"):
            engine.backward(zoo.losses(model, zoo.batch()).cumsum(0))


class TestRefusals:
    def test_a_layer_that_is_unfrozen_or_replaced_after_wrapping(self):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        model[0].requires_grad_(False)
        engine = make_engine(model)
        model[0].requires_grad_(True)
        x = torch.randn(3, 6)
        with pytest.raises(dprc.PrivacyError, match=r"0\.weight: became a trained parameter"):
            engine.backward(model(x).sum(1))
        model[0].requires_grad_(False)
        engine.optimizer.add_param_group({"params": list(model[0].parameters())})
        with pytest.raises(dprc.PrivacyError, match="holds other parameters than when"):
            engine.step()

    def test_token_losses_taken_for_samples(self):
        model = zoo.build("llama")
        model.requires_grad_(False)
        model.lm_head.requires_grad_(True)
        engine = make_engine(model)
        inputs = zoo.batch()
        logits = model(input_ids=inputs["input_ids"]).logits
        each = F.cross_entropy(
            logits.flatten(0, 1), inputs["input_ids"].flatten(), reduction="none"
        )
        with pytest.raises(
            dprc.PrivacyError, match="has 21 entries, but the model was called with 3"
        ):
            engine.backward(each)

    def test_float16(self):
        model = nn.Linear(6, 2).half()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match=r"float16: scaled gradients underflow"):
            engine.backward(model(torch.randn(3, 6).half()).sum(1))

    def test_statistics_written_in_the_forward_pass(self):
        class Tracking(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 2)
                self.register_buffer("mean", torch.zeros(6))

            def forward(self, x):
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                return self.a(x)

        model = Tracking()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="mean: is a buffer that the model writes"):
            engine.backward(model(torch.randn(3, 6)).sum(1))
        with pytest.raises(dprc.PrivacyError, match="running statistics"):
            make_engine(nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)))

    def test_a_looped_module_that_is_not_the_same_sample_by_sample(self):
        class Biased(nn.Module):  # three heads, and by chance three samples
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(5, 5))

            def forward(self, x, bias):
                return x @ self.scale + bias.sum(0)

        model = Biased()
        make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="something else for its samples one by one"):
            model(torch.randn(3, 5, 5), torch.randn(3, 5, 5))

    def test_a_parameter_that_no_site_reaches(self):
        class Extra(nn.Linear):
            def __init__(self):
                super().__init__(6, 6)
                self.extra = nn.Parameter(torch.zeros(6))

        model = perturb_(nn.Sequential(Extra())).double()
        x = torch.randn(3, 6).double()
        engine = make_engine(model)
        engine.backward(model(x).sum(1))  # run in a loop: its unused parameter counts zero
        assert {row["captured_as"] for row in engine.plan()} == {"loop"}

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

    def test_a_model_that_another_engine_holds(self):
        model = zoo.build("llama")
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="another PrivacyEngine holds this model"):
            make_engine(model)
        engine.detach()
        make_engine(model)

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
