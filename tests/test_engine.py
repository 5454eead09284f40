"""The engine against brute-force per-sample gradients in float64, and its refusals."""

import math
from contextlib import nullcontext

import pytest
import torch
from scipy import stats
from torch import nn

import dprc
from dprc import estimators
from dprc.precision import SLACK
from dprc.recompute import recompute_blocks
from dprc.schedules import Totals
from tests import zoo
from tests.truth import clipped_sum, per_sample_gradients, squared_norms

# The models are narrow: their heads and tails are smaller than any that have a certified law.
pytestmark = [
    pytest.mark.filterwarnings("ignore:privacy_seed"),
    pytest.mark.filterwarnings("ignore:head_rank=2 with num_probes=5"),
]
BOUND = 0.3
HEADS = {
    "hutchinson": {"estimator": "hutchinson"},
    "hutchpp": {"estimator": "hutchpp"},
    "small head": {"estimator": "hutchpp", "head_rank": 2},
}


def make_engine(model, *, lr=1.0, **options):
    chosen = {
        "max_grad_norm": BOUND,
        "noise_multiplier": 0.0,
        "sample_rate": 0.1,
        "expected_batch_size": 1,
        "estimator": "exact",
        "privacy_seed": 0,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lr)
    return dprc.PrivacyEngine(model, optimizer, **(chosen | options))


def parameters(model):
    return {n: p.detach().double().clone() for n, p in model.named_parameters() if p.requires_grad}


def released_sum(engine, backward):
    """Run backward and step with a learning rate of 1: the change is the released gradient."""
    before = parameters(engine.model)
    backward(engine)
    engine.step()
    after = parameters(engine.model)
    return {name: before[name] - after[name] for name in before}


def assert_same(got, expected, *, rtol=1e-6):
    assert got.keys() == expected.keys()
    scale = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=rtol * float(scale), msg=name)


class TestAgainstBruteForce:
    @pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
    @pytest.mark.parametrize("estimator", ["exact", "ghost", "tiled"])
    @pytest.mark.parametrize("name", zoo.MODELS)
    def test_norms_and_clipped_sum_are_exact(self, name, estimator, schedule):
        model, inputs = zoo.build(name), zoo.batch()
        truth = per_sample_gradients(model, zoo.losses(model, inputs))
        engine = make_engine(model, estimator=estimator, schedule=schedule)
        got = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))
        # transformers' RMSNorm computes in float32 whatever the model's dtype: hence not 1e-10.
        torch.testing.assert_close(engine.squared_norms, squared_norms(truth), rtol=1e-6, atol=0)
        for parameter, gradient in truth.items():
            torch.testing.assert_close(
                engine.squared_norms_by_parameter[parameter],
                squared_norms({parameter: gradient}),
                rtol=1e-6,
                atol=1e-12,
                msg=parameter,
            )
        assert (engine.squared_norms.sqrt() > BOUND).any(), "somebody must be clipped"
        assert_same(got, clipped_sum(truth, squared_norms(truth).sqrt(), BOUND))

    @pytest.mark.parametrize("name", zoo.MODELS)
    def test_a_parameter_missing_from_the_norm_would_be_noticed(self, name):
        model, inputs = zoo.build(name), zoo.batch()
        truth = per_sample_gradients(model, zoo.losses(model, inputs))
        whole = squared_norms(truth)
        for dropped in truth:
            if dropped.endswith("key.bias"):  # softmax ignores it: its gradient is zero
                assert truth[dropped].abs().max() < 1e-12
                continue
            rest = squared_norms({n: g for n, g in truth.items() if n != dropped})
            assert not torch.allclose(rest, whole, rtol=1e-6, atol=0), dropped

    @pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
    @pytest.mark.parametrize("estimator", ["hutchinson", "hutchpp", "small head"])
    @pytest.mark.parametrize("name", zoo.MODELS)
    def test_randomized_clipping_uses_the_norms_it_reports(self, name, estimator, schedule):
        model, inputs = zoo.build(name), zoo.batch()
        truth = per_sample_gradients(model, zoo.losses(model, inputs))
        engine = make_engine(model, num_probes=5, schedule=schedule, **HEADS[estimator])
        got = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))
        ratio = engine.squared_norms / squared_norms(truth)
        assert ((ratio > 0.3) & (ratio < 3)).all()
        assert_same(got, clipped_sum(truth, engine.squared_norms.sqrt(), BOUND))

    @pytest.mark.parametrize(
        ("name", "estimator", "sketch"),
        [
            ("llama_tied", "hutchinson", "shared"),
            pytest.param("llama_tied", "hutchinson", "per_sample", marks=pytest.mark.slow),
            pytest.param("gpt2", "hutchinson", "shared", marks=pytest.mark.slow),
            pytest.param("gpt2", "hutchinson", "per_sample", marks=pytest.mark.slow),
            pytest.param("llama_tied", "small head", "shared", marks=pytest.mark.slow),
            ("gpt2", "small head", "per_sample"),
        ],
    )
    def test_norms_of_a_whole_model_are_unbiased(self, name, estimator, sketch):
        model, inputs = zoo.build(name), zoo.batch()
        truth = squared_norms(per_sample_gradients(model, zoo.losses(model, inputs)))
        engine = make_engine(model, num_probes=5, sketch=sketch, **HEADS[estimator])
        ratios = []
        for _ in range(150):
            engine.backward(zoo.losses(model, inputs))
            ratios.append(engine.squared_norms / truth)
            engine._sum.forget()  # look at another step's sketch without moving the weights
            engine._step_index += 1
        sample = torch.stack(ratios)
        error = sample.std(0) / math.sqrt(len(ratios))
        assert (error > 1e-4).all(), "the norm must be random"
        assert ((sample.mean(0) - 1).abs() < 5 * error).all()

    def test_uses_of_a_tied_weight_are_summed_before_the_norm(self):
        model, inputs = zoo.build("llama_tied"), zoo.batch()
        engine = make_engine(model)
        engine.backward(zoo.losses(model, inputs))
        tied = engine.squared_norms
        untied = zoo.build("llama_tied")
        untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
        apart = squared_norms(per_sample_gradients(untied, zoo.losses(untied, inputs)))
        assert not torch.allclose(tied, apart, rtol=1e-3)


class TestMicroBatches:
    @pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    @pytest.mark.parametrize(
        ("estimator", "cut"),
        [("hutchinson", 1), ("hutchinson", 2), ("hutchinson", 4), ("small head", 2)],
    )
    def test_the_cut_of_a_logical_batch_changes_nothing(self, estimator, cut, sketch, schedule):
        inputs = zoo.batch(size=8)
        results = []
        for size in (8, cut):
            model = zoo.build("llama")
            options = {"num_probes": 5, "schedule": schedule, **HEADS[estimator]}
            engine = make_engine(model, sketch=sketch, **options)

            def backward(e, size=size, model=model):
                for start in range(0, 8, size):
                    part = {k: v[start : start + size] for k, v in inputs.items()}
                    e.backward(zoo.losses(model, part))

            results.append(released_sum(engine, backward))
        assert_same(results[1], results[0])

    def test_the_next_step_takes_a_fresh_sketch(self):
        model, inputs = zoo.build("llama"), zoo.batch()
        engine = make_engine(model, lr=0.0, estimator="hutchinson", num_probes=5)
        seen = []
        for _ in range(2):
            engine.backward(zoo.losses(model, inputs))
            engine.step()
            seen.append(engine.squared_norms)
        assert (seen[0] != seen[1]).all()

    def test_nothing_stays_from_the_step_before(self):
        model, inputs = zoo.build("llama"), zoo.batch()
        engine = make_engine(model, lr=0.0)
        first = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))
        assert all(p.grad is None for p in model.parameters())
        second = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))
        assert_same(second, first, rtol=1e-12)


class TestNoise:
    def noise(self, model, **options):
        engine = make_engine(model, max_grad_norm=0.5, noise_multiplier=3.0, **options)
        got = released_sum(engine, lambda e: None)
        return torch.cat([value.flatten() for value in got.values()]), engine

    def test_an_empty_batch_still_gets_noise_and_is_accounted(self):
        sample, engine = self.noise(zoo.build("llama"), expected_batch_size=4)
        assert engine.accountant.steps == 1
        scale = 3.0 * 0.5 / 4
        assert stats.kstest(sample.numpy(), stats.norm(scale=scale).cdf).pvalue > 1e-3
        for wrong in (0.9 * scale, 1.1 * scale):
            assert stats.kstest(sample.numpy(), stats.norm(scale=wrong).cdf).pvalue < 1e-6

    def test_noise_is_new_each_step_and_for_each_parameter(self):
        model = zoo.build("llama")
        engine = make_engine(model, noise_multiplier=1.0)
        steps = [released_sum(engine, lambda e: None) for _ in range(2)]
        layers = [steps[0][f"model.layers.{i}.mlp.up_proj.weight"].flatten() for i in (0, 1)]
        again = steps[1]["model.layers.0.mlp.up_proj.weight"].flatten()
        for first, second in ((layers[0], layers[1]), (layers[0], again)):
            correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
            assert abs(correlation) < 5 / math.sqrt(first.numel())

    def test_noise_is_added_once_whatever_the_number_of_micro_batches(self):
        inputs, results = zoo.batch(size=4), []
        for size in (4, 1):
            model = zoo.build("llama")
            engine = make_engine(model, noise_multiplier=1.0)

            def backward(e, size=size, model=model):
                for start in range(0, 4, size):
                    part = {k: v[start : start + size] for k, v in inputs.items()}
                    e.backward(zoo.losses(model, part))

            results.append(released_sum(engine, backward))
        assert_same(results[1], results[0])

    def test_torchs_global_generator_is_neither_used_nor_moved(self):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first, _ = self.noise(zoo.build("llama"))
        torch.set_rng_state(before)
        model = zoo.build("llama")
        state = torch.get_rng_state()
        second, _ = self.noise(model)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first, second)

    def test_without_a_seed_two_runs_differ(self):
        first, engine = self.noise(zoo.build("llama"), privacy_seed=None)
        second, _ = self.noise(zoo.build("llama"), privacy_seed=None)
        assert engine.releasable
        assert not torch.equal(first, second)

    def test_a_fixed_seed_warns_and_is_not_releasable(self):
        with pytest.warns(UserWarning, match="privacy_seed=7 .* not releasable"):
            engine = make_engine(zoo.build("llama"), privacy_seed=7)
        assert not engine.releasable


class TestSpecialSamples:
    @pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
    @pytest.mark.parametrize("broken", ["loss", "gradient"])
    def test_a_sample_that_is_not_finite_contributes_exactly_zero(self, broken, schedule):
        model, inputs = zoo.build("llama"), zoo.batch()
        truth = per_sample_gradients(model, zoo.losses(model, inputs))
        for gradient in truth.values():
            gradient[1] = 0
        engine = make_engine(model, schedule=schedule)

        def backward(e):
            values = zoo.losses(model, inputs)
            if broken == "loss":
                second = values[1] * math.nan
            else:  # finite, but its gradient is 0 times infinity
                second = values[1] + (values[1] * 0).sqrt()
            e.backward(torch.stack([values[0], second, values[2]]))

        got = released_sum(engine, backward)
        assert engine.excluded_samples == 1
        assert_same(got, clipped_sum(truth, squared_norms(truth).sqrt(), BOUND))

    def test_a_frozen_parameter_stays_and_does_not_count(self):
        model, inputs = zoo.build("llama"), zoo.batch()
        model.model.layers[0].requires_grad_(False)
        frozen = model.model.layers[0].mlp.up_proj.weight.clone()
        truth = per_sample_gradients(model, zoo.losses(model, inputs))
        engine = make_engine(model)
        engine.backward(zoo.losses(model, inputs))
        engine.step()
        torch.testing.assert_close(engine.squared_norms, squared_norms(truth), rtol=1e-6, atol=0)
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight, frozen)

    def test_an_unused_parameter_gets_noise_and_no_stale_gradient(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

            def forward(self, x, use_b):
                return self.b(x) if use_b else self.a(x)

        model, x = Two().double(), torch.randn(3, 6).double()
        engine = make_engine(model, lr=0.0)
        for use_b in (True, False):
            engine.backward(model(x, use_b).sum(1))
            engine.step()
        expected = (x.square().sum(1) + 1) * 2  # only a: two rows of x, two ones
        torch.testing.assert_close(engine.squared_norms, expected)
        noisy = make_engine(Two().double(), noise_multiplier=1.0)
        released = released_sum(noisy, lambda e: e.backward(noisy.model(x, False).sum(1)))
        assert released["b.weight"].abs().min() > 0

    def test_a_zero_gradient_is_not_clipped(self):
        model = nn.Linear(6, 2).double()
        engine = make_engine(model)
        engine.backward(model(torch.randn(3, 6).double()).sum(1) * 0)
        assert engine.clipped_samples == 0
        assert torch.equal(engine.squared_norms, torch.zeros(3).double())


class TestSurroundings:
    @pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_gradient_checkpointing_changes_nothing(self, reentrant, schedule):
        inputs, results = zoo.batch(), []
        for checkpointing in (False, True):
            model = zoo.build("llama")
            if checkpointing:
                recompute_blocks(model, use_reentrant=reentrant)
            options = {"estimator": "hutchinson", "num_probes": 5, "schedule": schedule}
            engine = make_engine(model, **options)
            results.append(
                released_sum(engine, lambda e, m=model: e.backward(zoo.losses(m, inputs)))
            )
        assert_same(results[1], results[0])

    def test_offloaded_activations_change_nothing(self):
        inputs, results = zoo.batch(), []
        for offload in (False, True):
            model = zoo.build("llama")
            engine = make_engine(model, estimator="hutchinson", num_probes=5)

            def backward(e, model=model, offload=offload):
                with torch.autograd.graph.save_on_cpu() if offload else nullcontext():
                    values = zoo.losses(model, inputs)
                e.backward(values)

            results.append(released_sum(engine, backward))
        assert_same(results[1], results[0], rtol=1e-12)

    @pytest.mark.slow
    def test_a_compiled_model_is_right(self):
        model, inputs = zoo.build("llama"), zoo.batch()
        truth = per_sample_gradients(model, zoo.losses(model, inputs))
        engine = make_engine(model)
        compiled = torch.compile(model, backend="aot_eager")
        got = released_sum(engine, lambda e: e.backward(zoo.losses(compiled, inputs)))
        assert_same(got, clipped_sum(truth, squared_norms(truth).sqrt(), BOUND))

    def test_no_bound_and_no_noise_is_plain_training_bit_for_bit(self):
        inputs = zoo.batch(size=4)
        private, plain = zoo.build("llama", torch.float32), zoo.build("llama", torch.float32)
        engine = make_engine(private, max_grad_norm=math.inf, expected_batch_size=4, lr=0.5)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        for _ in range(3):
            engine.backward(zoo.losses(private, inputs))
            engine.step()
            (zoo.losses(plain, inputs).sum() / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, a), b in zip(private.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b), name

    def test_the_model_computes_what_it_computed(self):
        for name in zoo.MODELS:
            model, inputs = zoo.build(name), zoo.batch()
            before = zoo.losses(model, inputs)
            engine = make_engine(model)
            torch.testing.assert_close(zoo.losses(model, inputs), before, rtol=1e-6, atol=0)
            with torch.no_grad():
                torch.testing.assert_close(zoo.losses(model, inputs), before, rtol=1e-6, atol=0)
            engine.detach()

    def test_detach_leaves_the_plain_model(self):
        model, inputs = zoo.build("llama"), zoo.batch()
        state = {n: dict(m.__dict__) for n, m in model.named_modules()}
        engine = make_engine(model)
        engine.detach()
        for name, module in model.named_modules():
            assert module.__dict__.keys() == state[name].keys(), name
            assert not module._forward_pre_hooks
        zoo.losses(model, inputs).sum().backward()
        assert model.lm_head.weight.grad is not None
        engine.optimizer.step()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_clipped_norms_stay_below_the_bound(self, dtype):
        for seed in range(5):
            model, inputs = zoo.build("llama", dtype), zoo.batch(size=1, seed=seed)
            engine = make_engine(model, max_grad_norm=0.01)
            engine.backward(zoo.losses(model, inputs))
            total = sum(t.double().square().sum() for _, t in engine._sum.totals.items()).sqrt()
            assert total <= 0.01
            assert total >= 0.01 * (1 - 2.5 * SLACK[dtype])

    def test_bfloat16_parameters_train_with_float32_sums(self):
        model, inputs = zoo.build("llama", torch.bfloat16), zoo.batch()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine = dprc.PrivacyEngine(
            model, optimizer, max_grad_norm=1.0, noise_multiplier=1.0, sample_rate=0.1,
            expected_batch_size=3, privacy_seed=0,
        )  # fmt: skip
        engine.backward(zoo.losses(model, inputs).float())
        assert all(total.dtype == torch.float32 for _, total in engine._sum.totals.items())
        engine.step()
        assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())

    def test_autocast_is_clipped_as_computed(self):
        model, inputs = zoo.build("llama", torch.float32), zoo.batch(size=1)
        engine = make_engine(model, max_grad_norm=0.01)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = zoo.losses(model, inputs)
        engine.backward(values)
        total = sum(t.double().square().sum() for _, t in engine._sum.totals.items()).sqrt()
        assert 0.01 * (1 - 2.5 * SLACK[torch.bfloat16]) <= total <= 0.01

    def test_a_scheduler_acts_on_the_optimizer(self):
        model, inputs = zoo.build("llama"), zoo.batch()
        engine = make_engine(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: float(step))
        got = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))
        assert all(value.abs().max() == 0 for value in got.values())  # rate 0 at first
        scheduler.step()
        got = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))
        assert all(value.abs().max() > 0 for value in got.values())

    @pytest.mark.parametrize("kind", ["lora on bfloat16", "bfloat16 losses"])
    def test_what_is_rounded_on_the_way_counts_for_the_slack(self, kind):
        for seed in range(4):
            if kind == "lora on bfloat16":
                model = zoo.build("lora", torch.bfloat16)
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.data = parameter.data.float()
            else:
                model = zoo.build("llama", torch.float32)
            engine = make_engine(model, max_grad_norm=0.01)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind.startswith("lora")):
                values = zoo.losses(model, zoo.batch(size=1, seed=seed))
            engine.backward(values.bfloat16() if kind == "bfloat16 losses" else values)
            total = sum(t.double().square().sum() for _, t in engine._sum.totals.items()).sqrt()
            assert 0.01 * (1 - 2.5 * SLACK[torch.bfloat16]) <= total <= 0.01

    def test_a_users_matmul_precision_is_left_as_it_was(self):
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            model, inputs = zoo.build("llama", torch.float32), zoo.batch()
            engine = make_engine(model)
            engine.backward(zoo.losses(model, inputs))
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)


class TestState:
    def test_another_mechanism_is_refused(self):
        saved = make_engine(zoo.build("llama"), noise_multiplier=1.0).state_dict()
        other = make_engine(zoo.build("llama"), noise_multiplier=2.0)
        with pytest.raises(dprc.PrivacyError, match=r"noise_multiplier was 1.0 .* is 2.0 here"):
            other.load_state_dict(saved)

    @pytest.mark.parametrize("name", [*dprc.estimators.names(), "auto", "own"])
    def test_a_state_is_known_again_whatever_the_estimator(self, name):
        class Own(dprc.estimators.Exact):
            """An estimator of a user's, without a text of its own."""

        def make():
            chosen = {
                "own": {"estimator": Own()},
                "auto": {"estimator": "auto", "max_tokens": 9},
            }
            return make_engine(zoo.build("llama"), **chosen.get(name, {"estimator": name}))

        first, second = make(), make()
        first.step()
        second.load_state_dict(first.state_dict())
        assert second.accountant.steps == 1

    def test_another_estimator_is_refused(self):
        saved = make_engine(zoo.build("llama"), estimator="exact").state_dict()
        other = make_engine(zoo.build("llama"), estimator="ghost")
        with pytest.raises(dprc.PrivacyError, match=r"estimator was 'Exact\(\)' .* is 'Ghost\(\)'"):
            other.load_state_dict(saved)

    def test_going_back_would_repeat_noise_and_is_refused(self):
        engine = make_engine(zoo.build("llama"), noise_multiplier=1.0)
        saved = engine.state_dict()
        engine.step()
        engine.step()
        later = engine.state_dict()
        engine.load_state_dict(later)
        with pytest.raises(dprc.PrivacyError, match="has taken 2 steps, whose noise"):
            engine.load_state_dict(saved)

    def test_a_reset_accountant_does_not_repeat_noise(self):
        model = zoo.build("llama")
        engine = make_engine(model, noise_multiplier=1.0)
        first = released_sum(engine, lambda e: None)
        engine.accountant = dprc.accounting.Accountant()
        second = released_sum(engine, lambda e: None)
        assert all((first[name] != second[name]).all() for name in first)

    def test_keys_do_not_show_in_logs(self):
        engine = make_engine(zoo.build("llama"), privacy_seed=None)
        assert not any(str(word) in repr(engine._streams) for word in engine._streams.noise.key)

    def test_a_resumed_engine_repeats_noise_and_sketches(self):
        inputs = zoo.batch()
        model = zoo.build("llama")
        options = {"estimator": "hutchinson", "num_probes": 5, "noise_multiplier": 1.0}
        engine = make_engine(model, privacy_seed=None, **options)
        engine.backward(zoo.losses(model, inputs))
        engine.step()
        weights, state = model.state_dict(), engine.state_dict()
        weights = {name: value.clone() for name, value in weights.items()}
        straight = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))

        other = zoo.build("llama")
        other.load_state_dict(weights)
        resumed = make_engine(other, privacy_seed=None, **options)
        resumed.load_state_dict(state)
        assert resumed.accountant.steps == 1
        again = released_sum(resumed, lambda e: e.backward(zoo.losses(other, inputs)))
        assert_same(again, straight, rtol=1e-12)

    @pytest.mark.parametrize("schedule", ["two_pass", "book_keeping"])
    def test_after_a_sum_that_failed_midway_only_a_saved_state_goes_on(self, schedule, monkeypatch):
        model, inputs = zoo.build("llama"), zoo.batch()
        engine = make_engine(model, schedule=schedule)
        saved = engine.state_dict()
        calls = []

        def fails(self, parameter, contribution):
            calls.append(parameter)
            if len(calls) == 5:
                raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(Totals, "add", fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.backward(zoo.losses(model, inputs))
        for attempt in (lambda: engine.backward(zoo.losses(model, inputs)), engine.step):
            with pytest.raises(dprc.PrivacyError, match="partly in the sum"):
                attempt()
        engine.load_state_dict(saved)
        engine.backward(zoo.losses(model, inputs))
        engine.step()

    def test_state_in_the_middle_of_a_batch_is_refused(self):
        model = zoo.build("llama")
        engine = make_engine(model)
        engine.backward(zoo.losses(model, zoo.batch()))
        with pytest.raises(dprc.PrivacyError, match="under way"):
            engine.state_dict()


class TestAccounting:
    def test_with_epsilon_reaches_its_target_and_stops(self):
        model = zoo.build("llama")
        engine = dprc.PrivacyEngine.with_epsilon(
            model, torch.optim.SGD(model.parameters(), lr=0.1), epsilon=3.0, delta=1e-5, steps=2,
            sample_rate=0.1, max_grad_norm=1.0, expected_batch_size=3, num_probes=16,
            privacy_seed=0,
        )  # fmt: skip
        for _ in range(2):
            engine.step()
        assert 2.9 < engine.epsilon(1e-5) <= 3.0
        with pytest.raises(dprc.PrivacyError, match="calibrated for 2 steps"):
            engine.step()

    def test_a_model_without_randomized_norms_pays_for_none(self):
        model = zoo.build("lora")
        trained = [p for p in model.parameters() if p.requires_grad]
        target = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 20}
        engine = dprc.PrivacyEngine.with_epsilon(
            model, torch.optim.SGD(trained, lr=0.1), max_grad_norm=1.0, expected_batch_size=3,
            privacy_seed=0, **target,
        )  # fmt: skip
        exact = dprc.accounting.noise_multiplier(estimator="exact", **target)
        assert engine.noise_multiplier == exact
        assert exact < dprc.accounting.noise_multiplier(**target)

    def test_a_narrow_matrix_and_an_embedding_are_exact(self):
        model = zoo.build("lora")
        engine = make_engine(model, estimator="hutchinson", num_probes=5)
        assert engine.law.is_exact, "LoRA factors have rank 2, below 5 probes"
        engine.detach()
        engine = make_engine(model, estimator="hutchinson", num_probes=1)
        assert engine.law.num_probes == 1

    def test_an_estimator_object_brings_its_options(self):
        engine = make_engine(zoo.build("llama"), estimator=estimators.Hutchinson(7, "shared"))
        assert (engine.sketch, engine.law.num_probes) == ("shared", 7)
        engine.detach()
        with pytest.raises(ValueError, match="brings its own num_probes"):
            make_engine(zoo.build("llama"), estimator=estimators.Exact(), num_probes=8)


class TestRefusals:
    def engine_with_losses(self):
        model = zoo.build("llama")
        return make_engine(model), zoo.losses(model, zoo.batch())

    def test_a_scalar_or_token_loss(self):
        engine, values = self.engine_with_losses()
        with pytest.raises(dprc.PrivacyError, match=r"shape \(batch,\), got \(\): a mean or sum"):
            engine.backward(values.mean())
        with pytest.raises(dprc.PrivacyError, match=r"got \(3, 2\)"):
            engine.backward(values.unsqueeze(1).expand(3, 2))

    def test_a_backward_that_bypasses_the_engine(self):
        _, values = self.engine_with_losses()
        with pytest.raises(dprc.PrivacyError, match=r"Use engine.backward"):
            values.sum().backward()

    def test_an_optimizer_step_that_bypasses_the_engine(self):
        engine, values = self.engine_with_losses()
        engine.backward(values)
        with pytest.raises(dprc.PrivacyError, match=r"Call engine.step"):
            engine.optimizer.step()

    def test_a_weight_used_outside_its_module_in_an_unseen_way(self):
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 6)

            def forward(self, x):
                return self.a(x) @ self.a.weight

        model = Functional()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match=r"a\.weight: is also used outside"):
            engine.backward(model(torch.randn(3, 6)).sum(1))

    def test_a_module_that_flattens_the_batch(self):
        class Flat(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(6, 2)

            def forward(self, x):
                return self.a(x[:, 1:].flatten(0, 1)).view(x.shape[0], -1, 2)

        model = Flat()
        engine = make_engine(model)
        with pytest.raises(dprc.PrivacyError, match="a: its output has leading dimension 12"):
            engine.backward(model(torch.randn(3, 5, 6)).sum((1, 2)))

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "1 .BatchNorm1d.: batch norm"),
            (nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)), "0: max_norm=1.0 rewrites"),
            (nn.Linear(3, 3).requires_grad_(False), "no trained parameter"),
        ],
    )
    def test_a_module_that_cannot_be_protected(self, module, message):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer.param_groups[0]["params"] = [p for p in module.parameters() if p.requires_grad]
        with pytest.raises(dprc.PrivacyError, match=message):
            dprc.PrivacyEngine(
                module, optimizer, max_grad_norm=1.0, noise_multiplier=1.0, sample_rate=0.1,
                expected_batch_size=1, privacy_seed=0,
            )  # fmt: skip
        assert all("forward" not in m.__dict__ for m in module.modules()), "left as it was"

    def test_an_optimizer_of_other_parameters(self):
        model, other = nn.Linear(4, 2), nn.Linear(4, 2)
        options = {
            "max_grad_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.1,
            "expected_batch_size": 1, "privacy_seed": 0,
        }  # fmt: skip
        with pytest.raises(dprc.PrivacyError, match="does not hold the trained parameter 'weight'"):
            dprc.PrivacyEngine(model, torch.optim.SGD(other.parameters(), lr=0.1), **options)
        both = [*model.parameters(), *other.parameters()]
        with pytest.raises(dprc.PrivacyError, match="holds 2 parameters that are not"):
            dprc.PrivacyEngine(model, torch.optim.SGD(both, lr=0.1), **options)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm .* got 0.0"),
            ({"max_grad_norm": math.inf, "noise_multiplier": 1.0}, dprc.PrivacyError, "infinite"),
            ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier .* got -1.0"),
            ({"sample_rate": 1.5}, ValueError, "sample_rate .* got 1.5"),
            ({"expected_batch_size": 0}, ValueError, "expected_batch_size .* got 0"),
            ({"schedule": "one_pass"}, ValueError, "schedule .* got 'one_pass'"),
            ({"estimator": "hutch"}, ValueError, "estimator.* auto, got 'hutch'"),
            ({"estimator": 3}, TypeError, "estimator.* got 3"),
            ({"analysis": "loose"}, ValueError, "analysis .* got 'loose'"),
            (
                {"estimator": "hutchinson", "analysis": "envelope", "num_probes": 5},
                ValueError,
                "envelope",
            ),
            (
                {"estimator": "hutchinson", "num_probes": 3, "noise_multiplier": 1.0},
                dprc.PrivacyError,
                "num_probes=3",
            ),
            ({"privacy_seed": 1.5}, TypeError, "privacy_seed.* got 1.5"),
            ({"privacy_seed": -1}, ValueError, "privacy_seed.* got -1"),
        ],
    )
    def test_a_bad_argument_is_named(self, options, error, message):
        model = zoo.build("llama")
        with pytest.raises(error, match=message):
            make_engine(model, **options)
        zoo.losses(model, zoo.batch()).sum().backward()  # the model is left as it was

    def test_the_bound_of_a_running_engine_cannot_be_moved(self):
        """Noise of a new bound on gradients clipped to the old one would be too small."""
        engine, values = self.engine_with_losses()
        engine.backward(values)
        with pytest.raises(AttributeError, match="max_grad_norm"):
            engine.max_grad_norm = BOUND / 10
        assert engine.max_grad_norm == BOUND

    def test_more_than_one_process(self, monkeypatch):
        engine, values = self.engine_with_losses()
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(dprc.PrivacyError, match="runs 2 processes"):
            engine.backward(values)
        with pytest.raises(dprc.PrivacyError, match="runs 2 processes"):
            engine.step()

    def test_a_module_wrapped_by_others(self):
        model = nn.Linear(4, 2)
        inner = model.forward
        model.forward = lambda x: inner(x)
        with pytest.raises(dprc.PrivacyError, match="already replaced"):
            make_engine(model)


class TestPlan:
    def test_auto_takes_the_cheapest_for_the_declared_length(self):
        def chosen(max_tokens):
            model = zoo.build("llama")
            engine = make_engine(model, estimator="auto", num_probes=5, max_tokens=max_tokens)
            rows = {row["name"]: row["estimator"] for row in engine.plan()}
            assert engine.law.num_probes in (None, 5)
            return rows["model.layers.0.mlp.up_proj.weight"]  # 44 x 24

        assert chosen(2) == "ghost"  # 2T²(d+p) < 2Tk(d+p) < 2Tdp
        assert chosen(4096) == "hutchinson"
        wide = make_engine(zoo.build("llama"), estimator="auto", num_probes=20, max_tokens=4096)
        rows = {row["name"]: row["estimator"] for row in wide.plan()}
        assert rows["model.layers.0.mlp.up_proj.weight"] == "exact"  # 20(24+44) > 24·44

    def test_auto_needs_a_declared_length(self):
        with pytest.raises(ValueError, match="max_tokens: estimator='auto'"):
            make_engine(zoo.build("llama"), estimator="auto")
        with pytest.raises(ValueError, match=r"max_tokens must be .* got 0"):
            make_engine(zoo.build("llama"), estimator="auto", max_tokens=0)

    def test_auto_clips_by_the_norms_it_reports(self):
        model, inputs = zoo.build("llama"), zoo.batch()
        truth = per_sample_gradients(model, zoo.losses(model, inputs))
        engine = make_engine(model, estimator="auto", num_probes=5, max_tokens=100)
        got = released_sum(engine, lambda e: e.backward(zoo.losses(model, inputs)))
        assert_same(got, clipped_sum(truth, engine.squared_norms.sqrt(), BOUND))

    def test_a_plan_names_every_parameter_once(self):
        for name in zoo.MODELS | zoo.MORE_MODELS:
            model = zoo.build(name)
            engine = make_engine(model, estimator="hutchinson", num_probes=5)
            rows = engine.plan()
            assert [r["name"] for r in rows] == [
                n for n, p in model.named_parameters() if p.requires_grad
            ]
            assert all(row["captured_as"] for row in rows)
            engine.detach()
        kinds = {row["name"]: row["captured_as"] for row in rows}  # vit
        assert kinds["vit.embeddings.cls_token"] == "loop"


class TestLawOfTheScale:
    """A gradient of rank one: the estimate over the truth must be χ²_k/k, on the engine itself."""

    K = 6

    def ratios(self, sketch, micro_batches, steps=60):
        """Return (steps, 32) ratios of estimated and true squared norms of one linear layer."""
        model = nn.Linear(40, 30, bias=False).double()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 40, generator=generator, dtype=torch.float64).repeat(32, 1)
        truth = 30 * x.square().sum(1)  # the gradient of the sum of outputs is ones · xᵀ
        options = {"estimator": "hutchinson", "num_probes": self.K, "sketch": sketch}
        engine = make_engine(model, lr=0.0, **options)
        rows = []
        for _ in range(steps):
            norms = []
            for part in x.chunk(micro_batches):
                engine.backward(model(part).sum(1))
                norms.append(engine.squared_norms)
            engine.step()
            rows.append(torch.cat(norms) / truth)
        return torch.stack(rows)

    def test_per_sample_ratios_follow_chi_squared(self):
        sample = self.K * self.ratios("per_sample", 1).flatten().numpy()
        assert stats.kstest(sample, stats.chi2(self.K).cdf).pvalue > 1e-3
        assert stats.kstest(sample, stats.chi2(self.K - 2).cdf).pvalue < 1e-6

    def test_shared_ratios_follow_chi_squared_over_steps(self):
        sample = self.K * self.ratios("shared", 1, steps=800)[:, 0].numpy()
        assert stats.kstest(sample, stats.chi2(self.K).cdf).pvalue > 1e-3
        assert stats.kstest(sample, stats.chi2(self.K - 2).cdf).pvalue < 1e-6

    @pytest.mark.slow
    def test_per_sample_ratios_are_uncorrelated_across_samples_and_micro_batches(self):
        ratios = self.ratios("per_sample", 4, steps=800)
        correlation = torch.corrcoef(ratios.T) - torch.eye(32).double()
        assert correlation.abs().max() < 5.5 / math.sqrt(800)  # of 496 pairs
        shared = torch.corrcoef(self.ratios("shared", 4, steps=30).T)
        assert shared.min() > 0.99, "these samples are equal, so a shared sketch treats them alike"

    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    def test_ratios_do_not_depend_on_the_cut(self, sketch):
        whole, ones = self.ratios(sketch, 1, steps=3), self.ratios(sketch, 32, steps=3)
        torch.testing.assert_close(whole, ones, rtol=1e-12, atol=0)
