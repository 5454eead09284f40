"""Estimators against dense per-sample gradients, and their randomness against theory."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dprc import estimators
from dprc.accounting import ScaleLaw
from dprc.estimators import Use, products
from dprc.estimators.products import NARROW_COLUMNS
from dprc.noise import Stream
from dprc.profiling.flops import LayerShape
from dprc.profiling.layer_memory import layer_memory
from dprc.sketch import SketchSource

DETERMINISTIC = ("exact", "ghost", "tiled")
RANDOMIZED = ("hutchinson", "hutchpp", "small head")
EVERY = (*estimators.names(), "small head")
KEY = Stream((3, 5))


def build(name, *, num_probes=8, sketch="per_sample", rank=None):
    """Make an estimator by name; "small head" is hutchpp with fewer columns in the head."""
    if name == "small head":
        name, rank = "hutchpp", rank or 2
    return estimators.get(name, num_probes=num_probes, sketch=sketch, head_rank=rank)


def factors(batch, tokens, d, p, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(batch, tokens, d, generator=generator, dtype=torch.float64)
    g = torch.randn(batch, tokens, p, generator=generator, dtype=torch.float64)
    return a.to(dtype), g.to(dtype)


def dense(a, g):
    return (g.double().transpose(1, 2) @ a.double()).flatten(1).square().sum(1)


def source(kind="per_sample", step=0, first_sample=0):
    return SketchSource(KEY, kind, step=step, first_sample=first_sample)


def estimate(name, uses, rows, columns, *, num_probes=8, sketch="per_sample", step=0, rank=None):
    estimator = build(name, num_probes=num_probes, sketch=sketch, rank=rank)
    accumulation = estimator.begin(
        rows, columns, batch=uses[0].right.shape[0], source=source(sketch, step)
    )
    for use in uses:
        accumulation.add_use(use)
    return accumulation.finish()


class TestEveryEstimator:
    """The contract that each member of the registry keeps."""

    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    def test_samples_do_not_mix(self, name, sketch):
        a, g = factors(3, 5, 11, 13)
        full = estimate(name, [Use(g, a)], 13, 11, sketch=sketch)
        a[1:], g[1:] = 100 * a[1:], -g[1:]
        changed = estimate(name, [Use(g, a)], 13, 11, sketch=sketch)
        assert full[0] == changed[0]
        assert (full[1:] != changed[1:]).all()

    @pytest.mark.parametrize("name", EVERY)
    def test_an_empty_batch_and_no_use_give_no_norm(self, name):
        a, g = factors(0, 5, 11, 13)
        assert estimate(name, [Use(g, a)], 13, 11).shape == (0,)
        accumulation = build(name).begin(13, 11, batch=2, source=source())
        assert torch.equal(accumulation.finish(), torch.zeros(2))

    @pytest.mark.parametrize("name", EVERY)
    def test_a_zero_gradient_has_norm_zero(self, name):
        a, g = factors(2, 5, 11, 13)
        assert torch.equal(
            estimate(name, [Use(torch.zeros_like(g), a)], 13, 11), torch.zeros(2).double()
        )

    @pytest.mark.parametrize("name", EVERY)
    def test_low_precision_inputs_are_computed_in_float32(self, name):
        a, g = factors(2, 2500, 11, 13, torch.bfloat16)
        low = estimate(name, [Use(g, a)], 13, 11)
        high = estimate(name, [Use(g.float(), a.float())], 13, 11)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, high, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("name", EVERY)
    def test_autocast_around_it_changes_nothing(self, name):
        a, g = factors(2, 9, 11, 13, torch.float32)
        plain = estimate(name, [Use(g, a)], 13, 11)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(estimate(name, [Use(g, a)], 13, 11), plain)

    @pytest.mark.parametrize("name", EVERY)
    def test_factors_that_do_not_fit_are_refused(self, name):
        a, g = factors(2, 5, 11, 13)
        for use in (Use(a, g), Use(g, a[:1]), Use(g[:, :4], a), Use(g, a[0])):
            with pytest.raises(ValueError, match="do not fit"):
                estimate(name, [use], 13, 11)


class TestDeterministic:
    @pytest.mark.parametrize("name", DETERMINISTIC)
    @given(
        batch=st.integers(1, 3),
        tokens=st.integers(1, 9),
        d=st.integers(1, 9),
        p=st.sampled_from([1, 7, 150]),
    )
    def test_equals_the_dense_norm(self, name, batch, tokens, d, p):
        a, g = factors(batch, tokens, d, p)
        torch.testing.assert_close(
            estimators.get(name).squared_norm(a, g), dense(a, g), rtol=1e-10, atol=1e-12
        )

    @pytest.mark.parametrize("name", DETERMINISTIC)
    def test_several_uses_are_summed_before_the_norm(self, name):
        a, g = factors(2, 5, 11, 300)
        b, h = factors(2, 4, 11, 300, seed=1)  # together still smaller than the gradient
        ids = torch.tensor([[3, 3, 250, 0, 299], [1, 2, 3, 2, 1]])
        e, _ = factors(2, 5, 11, 1, seed=2)
        one_hot = torch.nn.functional.one_hot(ids, 300).double()
        got = estimate(name, [Use(g, a), Use(h, b), Use(ids, e)], 300, 11)
        whole = dense(torch.cat([a, b, e], 1), torch.cat([g, h, one_hot], 1))
        torch.testing.assert_close(got, whole, rtol=1e-10, atol=0)
        apart = dense(a, g) + dense(b, h) + dense(e, one_hot)
        assert not torch.allclose(apart, whole, rtol=1e-3), "the cross terms must matter here"

    @pytest.mark.parametrize(("dense_uses", "kept"), [(3, 4), (4, 0), (6, 0)])
    def test_tiled_keeps_uses_only_while_the_gradient_is_larger(self, dense_uses, kept):
        # A use has 2 * 5 * (20 + 300) = 3200 numbers, the gradient 2 * 20 * 300 = 12000.
        pieces = [factors(2, 5, 20, 300, seed=seed) for seed in range(dense_uses)]
        ids = torch.tensor([[3, 3, 250, 0, 299], [1, 2, 3, 2, 1]])
        e, _ = factors(2, 5, 20, 1, seed=9)
        accumulation = estimators.get("tiled").begin(300, 20, batch=2)
        for a, g in pieces:
            accumulation.add(a, g)
        accumulation.add(ids, e)
        assert len(accumulation._uses) == kept
        pieces.append((e, torch.nn.functional.one_hot(ids, 300).double()))
        whole = dense(*(torch.cat(side, 1) for side in zip(*pieces, strict=True)))
        torch.testing.assert_close(accumulation.finish(), whole, rtol=1e-10, atol=0)

    def test_tiled_forms_no_gradient_of_uses_by_ids_alone(self):
        accumulation = estimators.get("tiled").begin(4, 3, batch=2)
        ids = torch.tensor([[3, 3, 0, 1, 2], [1, 2, 3, 2, 1]])
        e, _ = factors(2, 5, 3, 1)
        for _ in range(3):
            accumulation.add(ids, e)
        assert len(accumulation._uses) == 3
        one_hot = torch.nn.functional.one_hot(ids, 4).double()
        torch.testing.assert_close(accumulation.finish(), 9 * dense(e, one_hot))

    @pytest.mark.parametrize("name", DETERMINISTIC)
    def test_an_embedding_sums_equal_ids_first(self, name):
        ids = torch.tensor([[3, 3, 9, 3], [0, 1, 2, 9]])
        e, _ = factors(2, 4, 6, 1)
        got = estimate(name, [Use(ids, e)], 10, 6)
        one_hot = torch.nn.functional.one_hot(ids, 10).double()
        torch.testing.assert_close(got, dense(e, one_hot), rtol=1e-12, atol=0)
        assert not torch.isclose(got[0], e[0].square().sum()), "row 3 occurs three times"

    def test_a_large_norm_is_exact_to_a_millionth_in_float32(self):
        a, g = factors(1, 64, 900, 1100, torch.float32)
        got = estimators.get("exact").squared_norm(a, g)
        torch.testing.assert_close(got.double(), dense(a, g), rtol=1e-6, atol=0)


class TestRandomized:
    RUNS = 4000

    def ratios(self, name, a, g, runs=RUNS, **options):
        """Estimates over truth, one for each step of the sketch stream."""
        rows, columns = g.shape[-1], a.shape[-1]
        many = [
            estimate(name, [Use(g, a)], rows, columns, step=step, **options) for step in range(runs)
        ]
        return (torch.stack(many) / dense(a, g)).double().numpy()

    @pytest.mark.parametrize("name", RANDOMIZED)
    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    @pytest.mark.parametrize(("d", "p"), [(11, 17), (17, 11)])
    def test_is_unbiased(self, name, sketch, d, p):
        a, g = factors(2, 5, d, p)
        ratios = self.ratios(name, a, g, runs=1500, sketch=sketch, num_probes=3)
        error = ratios.std(axis=0, ddof=1) / np.sqrt(len(ratios))
        assert (np.abs(ratios.mean(axis=0) - 1) < 5 * error).all()
        biased = ratios * 3 / 4  # probes of variance 1/(k+1) instead of 1/k
        assert not (np.abs(biased.mean(axis=0) - 1) < 5 * error).any()

    def test_hutchinson_has_the_variance_of_theory(self):
        a, g = factors(1, 3, 9, 7)
        values = torch.linalg.svdvals(g[0].T @ a[0]).square()
        weights = (values / values.sum()).numpy()
        expected = 2 / 4 * (weights**2).sum()
        sample = self.ratios("hutchinson", a, g, num_probes=4)[:, 0]
        # The variance of a sample variance is about (kurtosis - 1)/n · variance².
        error = sample.var() * np.sqrt((stats.kurtosis(sample) + 2) / len(sample))
        assert abs(sample.var() - expected) < 5 * error
        assert abs(sample.var() - 2 / 4) > 5 * error, "this gradient is not rank one"

    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    def test_a_rank_one_gradient_follows_chi_squared(self, sketch):
        a, g = factors(1, 1, 9, 7)
        sample = self.ratios("hutchinson", a, g, num_probes=6, sketch=sketch)[:, 0]
        assert stats.kstest(6 * sample, stats.chi2(6).cdf).pvalue > 1e-3
        assert stats.kstest(6 * sample, stats.chi2(4).cdf).pvalue < 1e-6

    def test_several_uses_share_one_sketch(self):
        # Equal and opposite uses cancel exactly only if both met the same probes.
        a, g = factors(2, 5, 11, 13)
        assert estimate("hutchinson", [Use(g, a), Use(-g, a)], 13, 11).max() < 1e-25
        ids = torch.tensor([[3, 3, 12, 0, 7], [1, 2, 3, 2, 1]])
        one_hot = torch.nn.functional.one_hot(ids, 13).double()
        for sketch in ("shared", "per_sample"):
            uses = [Use(one_hot, a), Use(ids, -a)]
            assert estimate("hutchinson", uses, 13, 11, sketch=sketch).max() < 1e-25

    @pytest.mark.parametrize(
        ("sketch", "rows"), [("shared", 8193), ("shared", 20000), ("per_sample", 8193)]
    )
    def test_sketches_made_by_block_see_every_row(self, rows, sketch):
        ids = torch.tensor([[0, 8191, 8192, rows - 1]])
        e, _ = factors(1, 4, rows + 1 if sketch == "per_sample" else 3, 1)
        one_hot = torch.nn.functional.one_hot(ids, rows).double()
        uses = [Use(one_hot, e), Use(ids, -e)]
        assert estimate("hutchinson", uses, rows, e.shape[-1], sketch=sketch).max() < 1e-20
        whole = estimate("hutchinson", uses[:1], rows, e.shape[-1], sketch=sketch, num_probes=512)
        assert abs(whole[0] / dense(e, one_hot)[0] - 1) < 5 * (2 / 512) ** 0.5

    def test_a_shared_sketch_is_one_and_per_sample_sketches_are_many(self):
        a, g = factors(1, 5, 11, 13)
        twice = [Use(g.repeat(2, 1, 1), a.repeat(2, 1, 1))]
        first, second = estimate("hutchinson", twice, 13, 11, sketch="shared")
        assert first == second
        first, second = estimate("hutchinson", twice, 13, 11, sketch="per_sample")
        assert first != second

    def test_sketches_of_samples_are_uncorrelated(self):
        a, g = factors(1, 5, 11, 13)
        twice = (a.repeat(2, 1, 1), g.repeat(2, 1, 1))
        ratios = self.ratios("hutchinson", *twice, num_probes=4)
        assert abs(np.corrcoef(ratios.T)[0, 1]) < 5 / np.sqrt(self.RUNS)
        shared = self.ratios("hutchinson", *twice, num_probes=4, sketch="shared", runs=100)
        assert np.corrcoef(shared.T)[0, 1] > 0.99

    def test_a_sample_keeps_its_sketch_however_the_batch_is_cut(self):
        a, g = factors(5, 4, 11, 13)
        whole = estimators.get("hutchinson").begin(13, 11, batch=5, source=source())
        whole.add(a, g)
        parts = []
        for start, stop in ((0, 2), (2, 5)):
            part = estimators.get("hutchinson").begin(
                13, 11, batch=stop - start, source=source(first_sample=start)
            )
            part.add(a[start:stop], g[start:stop])
            parts.append(part.finish())
        torch.testing.assert_close(torch.cat(parts), whole.finish(), rtol=1e-12, atol=0)

    def test_hutchpp_is_exact_when_the_head_spans_the_gradient(self):
        a, g = factors(2, 3, 11, 13)  # rank 3
        for rank, exact in ((3, True), (2, False)):
            got = estimate("hutchpp", [Use(g, a)], 13, 11, rank=rank)
            assert torch.allclose(got, dense(a, g), rtol=1e-9) == exact

    @pytest.mark.parametrize("name", ["hutchpp", "small head"])
    def test_a_head_refuses_a_second_use(self, name):
        a, g = factors(2, 3, 11, 13)
        with pytest.raises(ValueError, match="several uses"):
            estimate(name, [Use(g, a), Use(g, a)], 13, 11)

    @pytest.mark.parametrize(
        ("options", "probes"),
        [
            ({"num_probes": 26, "head_rank": 2}, 160),  # below the certified law in convex order
            ({"num_probes": 26}, 26),
            ({"num_probes": 9, "head_rank": 2}, 9),  # no certified law: the tail's
        ],
    )
    def test_several_uses_take_probes_with_the_same_law(self, options, probes):
        several = estimators.get("hutchpp", sketch="shared", **options).of_several_uses()
        assert several == estimators.Hutchinson(probes, "shared")
        assert several.of_several_uses() is several


class TestCosts:
    @pytest.mark.parametrize(
        ("name", "d", "p", "saving"),
        [
            ("hutchinson", 2048, 8192, 98.05),
            ("hutchinson", 2048, 512, 92.19),
            ("hutchpp", 2048, 8192, 92.17),
            ("hutchpp", 2048, 512, 68.69),
        ],
    )
    def test_savings_are_those_the_paper_publishes(self, name, d, p, saving):
        cost = estimators.get(name).flops(1, 4096, d, p) / estimators.get("exact").flops(
            1, 4096, d, p
        )
        assert round(100 * (1 - cost), 2) == saving

    # Ghost takes its second Gram matrix and the converted factor at different moments.
    @pytest.mark.parametrize("name", EVERY)
    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize(
        "shape",
        [LayerShape(96, 640, 300, 2), LayerShape(640, 96, 40, 3), LayerShape(4500, 64, 5000)],
    )
    def test_workspace_is_no_less_than_simulated_and_not_much_more(
        self, name, sketch, dtype, shape
    ):
        estimator = build(name, sketch=sketch)
        simulated = layer_memory(estimator, shape, dtype=dtype).workspace_bytes
        sizes = (shape.batch, shape.tokens, shape.in_features, shape.out_features)
        low = torch.bfloat16 if dtype == "bf16" else torch.float32
        claimed = estimator.workspace_bytes(*sizes, low)
        # One sample's numbers are drawn outside of the formula, before they are put in place.
        drawn = 4 * 10 * min(shape.in_features, shape.out_features) * estimator.randomized
        assert simulated <= claimed + drawn + 64
        if dtype == "fp32":
            assert claimed <= 1.3 * simulated + 64

    def test_workspace_of_low_precision_inputs_counts_the_converted_block(self):
        exact = estimators.get("exact")
        assert exact.workspace_bytes(2, 100, 3, 5) == 4 * 2 * 3 * 5
        assert exact.workspace_bytes(2, 100, 3, 5, torch.bfloat16) == 4 * (30 + 2 * 100 * 8)


class TestRegistry:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"name": "hutch"}, ValueError, "estimator: must be one of .* got 'hutch'"),
            ({"name": "exact", "sketch": "both"}, ValueError, "sketch: .* got 'both'"),
            ({"name": "hutchinson", "num_probes": 0}, ValueError, "num_probes: .* got 0"),
            ({"name": "hutchinson", "num_probes": 2.0}, TypeError, "num_probes: .* got 2.0"),
            ({"name": "hutchinson", "head_rank": 2}, ValueError, "head_rank: only hutchpp"),
            ({"name": "hutchpp", "head_rank": 0}, ValueError, "head_rank: .* got 0"),
        ],
    )
    def test_bad_options_are_refused_by_name(self, options, error, message):
        with pytest.raises(error, match=message):
            estimators.get(**options)

    def test_the_law_is_that_of_the_probes(self):
        assert estimators.get("ghost").scale_law().is_exact
        assert estimators.get("hutchinson", num_probes=20).scale_law().num_probes == 20
        assert estimators.get("hutchpp", num_probes=20).scale_law().num_probes == 20

    def test_the_law_of_a_small_head_is_the_certified_one(self):
        law = estimators.get("hutchpp", num_probes=26, head_rank=2).scale_law()
        assert law == ScaleLaw.small_head(2, 26)
        with pytest.warns(UserWarning, match="no certified law"):
            law = estimators.get("hutchpp", num_probes=20, head_rank=2).scale_law()
        assert law == ScaleLaw.chi2(20)

    def test_a_randomized_estimator_needs_randomness(self):
        a, g = factors(1, 2, 3, 4)
        with pytest.raises(ValueError, match="generator"):
            estimators.get("hutchinson").squared_norm(a, g)
        generator = torch.Generator().manual_seed(0)
        first = estimators.get("hutchinson").squared_norm(a, g, generator)
        assert first != estimators.get("hutchinson").squared_norm(a, g, generator)


class TestThinProducts:
    """Products of a tall factor with a few columns: any order gives the same."""

    @pytest.mark.parametrize("columns", [1, 2, NARROW_COLUMNS, NARROW_COLUMNS + 1, 9])
    @pytest.mark.parametrize("batch_of_columns", [1, 3])
    def test_are_the_plain_products(self, columns, batch_of_columns):
        factor, _ = factors(3, 7, 5, 1)
        narrow, _ = factors(batch_of_columns, 5, columns, 1, seed=1)
        thin = products.project(factor, narrow)
        torch.testing.assert_close(thin, (factor @ narrow).mT)
        total = torch.ones(3, columns, 5, dtype=torch.float64)
        products.collect_(total, thin, factor)
        torch.testing.assert_close(total, 1 + thin @ factor)

    def test_the_script_times_the_same_products_in_all_orders(self, capsys):
        path = Path(__file__).resolve().parents[1] / "scripts" / "thin_products.py"
        spec = importlib.util.spec_from_file_location("thin_products", path)
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        project, turned, collect, turned_collect = (
            product() for product in script.orders(2, 7, 5, 3, torch.device("cpu")).values()
        )
        torch.testing.assert_close(project, turned.mT)
        torch.testing.assert_close(collect, turned_collect.mT)
        threads = torch.get_num_threads()
        try:
            script.main(["--widths", "5", "--columns", "2,3", "--tokens", "7", "--repeats", "1"])
        finally:
            torch.set_num_threads(threads)
        assert len(capsys.readouterr().out.splitlines()) == 4
