"""Hutch++ with a head of small rank: its estimates, its law, and the faults that would break it."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

import dprc
from dprc import estimators, losses
from dprc.accounting.small_head import load_table
from dprc.estimators import Use
from dprc.estimators.hutchpp import HutchPlusPlus, _HeadAndTail
from dprc.noise import Stream
from dprc.sketch import SketchSource
from tests import tiny

KEY = Stream((3, 5))


class TestEstimate:
    @staticmethod
    def truth(gradient, sketch, rank, probes):  # (rows, columns), (side, rank + probes)
        """The definition, with dense matrices and a basis by singular vectors."""
        m = gradient if sketch.shape[0] == gradient.shape[1] else gradient.T
        power = m.T @ m @ sketch[:, :rank]
        basis = torch.linalg.svd(power, full_matrices=False).U
        left = torch.eye(m.shape[1], dtype=m.dtype) - basis @ basis.T
        tail = m @ left @ sketch[:, rank:] * math.sqrt((rank + probes) / probes)
        return (m @ basis).square().sum() + tail.square().sum()

    @pytest.mark.parametrize("sketch", ["shared", "per_sample"])
    @pytest.mark.parametrize(("rows", "columns"), [(9, 40), (40, 9), (2500, 12)])
    @pytest.mark.parametrize(("rank", "probes"), [(1, 4), (2, 26), (3, 5), (4, 3), (8, 8)])
    def test_is_its_definition(self, sketch, rows, columns, rank, probes):
        generator = torch.Generator().manual_seed(rank)
        left = torch.randn(2, 30, rows, generator=generator, dtype=torch.float64)
        right = torch.randn(2, 30, columns, generator=generator, dtype=torch.float64)
        source = SketchSource(KEY, sketch, step=3)
        norms = HutchPlusPlus(probes, sketch, rank).begin(rows, columns, batch=2, source=source)
        norms.add_use(Use(left, right))
        side = max(rows, columns) if sketch == "shared" else min(rows, columns)
        blocks = source.blocks(
            side, rank + probes, batch=2, device=left.device, dtype=torch.float64
        )
        drawn = torch.cat([block for _, block in blocks], dim=1).expand(2, -1, -1)
        expected = [self.truth(left[i].T @ right[i], drawn[i], rank, probes) for i in range(2)]
        torch.testing.assert_close(norms.finish(), torch.stack(expected), rtol=1e-9, atol=0)

    def test_a_sample_that_is_not_finite_leaves_the_others_alone(self):
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(3, 5, n, generator=generator) for n in (40, 30))
        found = []
        for value in (1.0, math.inf, math.nan):
            right[1, 2, 3] = value
            norms = HutchPlusPlus(26, "per_sample", 2).begin(
                40, 30, batch=3, source=SketchSource(KEY, "per_sample")
            )
            norms.add_use(Use(left, right))
            found.append(norms.finish())
        for broken in found[1:]:
            assert not broken[1].isfinite()
            assert torch.equal(broken[[0, 2]], found[0][[0, 2]])


class FastSource(SketchSource):
    """All samples' numbers from one generator: the streams draw one sample at a time."""

    def blocks(self, rows, num_probes, *, batch, device, dtype, role=0):
        generator = torch.Generator().manual_seed(self.step)
        numbers = torch.randn(batch, rows, num_probes, generator=generator, dtype=dtype)
        yield slice(0, rows), numbers.div_(math.sqrt(num_probes))


def ratios(energies, runs, *, seed=0, head_rank=2, num_probes=26, norms=_HeadAndTail):
    """Estimates over truth of a gradient with these squared singular values, float64."""
    size = len(energies)
    values = torch.tensor(energies, dtype=torch.float32)
    left, right = torch.diag(values.sqrt()), torch.eye(size)
    found = []
    for start in range(0, runs, 25_000):
        batch = min(25_000, runs - start)
        source = FastSource(KEY, "per_sample", step=seed * 10_000 + start // 25_000)
        estimator = HutchPlusPlus(num_probes, "per_sample", head_rank)
        accumulation = norms(size, size, batch, estimator, source)
        uses = Use(*(factor.expand(batch, -1, -1) for factor in (left, right)))
        accumulation.add_use(uses)
        found.append(accumulation.finish().double().numpy() / float(values.double().sum()))
    return np.concatenate(found)


def excess(sample, strikes, pair=(2, 26)):
    """Mean (x − R)₊ above the certified put at each strike, in standard errors."""
    payoff = np.maximum(np.asarray(strikes)[:, None] - sample, 0.0)
    # Strikes that hardly any run reached show nothing.
    seen = (payoff > 0).sum(axis=1) >= 20
    error = payoff.std(axis=1, ddof=1) / math.sqrt(sample.size)
    over = payoff.mean(axis=1) - load_table(*pair).puts.at(np.asarray(strikes))
    return np.where(seen, over / np.where(seen, error, 1.0), -np.inf)


STRIKES = np.arange(0.4, 1.3, 0.05)
SPECTRA = {
    "flat, rank 2r": [1, 1, 1, 1, 0, 0],
    "flat, rank 2r+1": [1, 1, 1, 1, 1, 0],
    "two spikes": [0.4, 0.4, 0.2, 0, 0, 0],
    "a spike and bulk": [0.5] + [0.1] * 5,
}


class ReusedProbes(_HeadAndTail):
    """Takes S for the first probes as well."""

    def _sketch(self, use):
        sketch = super()._sketch(use)
        sketch[..., self._rank : 2 * self._rank] = sketch[..., : self._rank]
        return sketch


class OneSided(_HeadAndTail):
    """Takes a basis of MᵀΩ, without the power step."""

    def _basis(self, use, start):
        return torch.linalg.qr(self._apply(use, start, transposed=True).mT).Q


class TestLaw:
    """Puts of the estimator itself against the certified ones, for gradients chosen to hurt."""

    @pytest.mark.parametrize("name", SPECTRA)
    def test_no_put_is_above_the_certified_one(self, name):
        assert excess(ratios(SPECTRA[name], 50_000), STRIKES).max() < 5

    def test_the_bound_is_not_far_above_the_flat_gradient(self):
        # Else nothing would be learned from staying below it.
        sample = ratios(SPECTRA["flat, rank 2r"], 50_000)
        put = np.maximum(1 - sample, 0).mean()
        assert 0.75 < put / load_table(2, 26).puts.at(np.array([1.0]))[0] < 0.9

    def test_probes_that_are_not_independent_of_the_head_are_caught(self):
        sample = ratios(SPECTRA["flat, rank 2r"], 50_000, norms=ReusedProbes)
        assert excess(sample, STRIKES).max() > 20

    def test_the_tail_has_exactly_the_probes_that_are_charged(self):
        # One direction more than the head has: the rest is of rank one, its law that of its probes.
        energies, runs = [1.0, 1.0, 1.0], 150_000
        sample = ratios(energies, runs)
        values = torch.tensor(energies).sqrt()
        found = []
        for start in range(0, runs, 25_000):
            ((_, drawn),) = FastSource(KEY, "per_sample", step=start // 25_000).blocks(
                3, 28, batch=25_000, device=values.device, dtype=torch.float32
            )
            power = values.square().view(1, -1, 1) * drawn[..., :2]
            basis = torch.linalg.qr(power).Q.double()
            caught = (values.view(1, -1, 1) * basis).square().sum((1, 2)) / 3
            found.append(1 - caught.numpy())
        rest = np.concatenate(found)
        assert np.allclose(rest, 1 / 3, atol=1e-5), "a flat gradient leaves a third, whatever Q is"
        probes = 26 * (1 + (sample - 1) / rest)
        assert stats.kstest(probes, stats.chi2(26).cdf).pvalue > 1e-3
        for wrong in (24, 28):
            assert stats.kstest(probes * wrong / 26, stats.chi2(wrong).cdf).pvalue < 1e-6

    @pytest.mark.slow
    def test_a_head_without_its_power_step_is_caught(self):
        # One spike: the bulk tilts a basis that is not powered, and the rest of the spike is left
        # to one eigenvalue.
        energies = [0.85] + [0.15 / 39] * 39
        right, wrong = (
            ratios(energies, 300_000, norms=norms) for norms in (_HeadAndTail, OneSided)
        )
        assert excess(right, STRIKES).max() < 5
        assert excess(wrong, STRIKES).max() > 5

    @pytest.mark.slow
    @pytest.mark.parametrize("pair", [(1, 29), (2, 26), (2, 34), (2, 42)])
    def test_a_search_over_spectra_finds_none_above(self, pair):
        rank, probes = pair
        table = load_table(rank, probes)
        for strike in (0.85, 0.95, 1.05):
            bound = float(table.puts.at(np.array([strike]))[0])

            def put(logits, runs=10_000, seed=0, strike=strike):
                energies = np.exp(logits - logits.max())
                sample = ratios(
                    energies.tolist(), runs, seed=seed, head_rank=rank, num_probes=probes
                )
                return np.maximum(strike - sample, 0).mean(), sample

            best = optimize.minimize(
                lambda logits, put=put: -put(logits)[0],
                np.array([0.0] * (2 * rank) + [-4.0] * (6 - 2 * rank)),
                method="Nelder-Mead",
                options={"maxfev": 60},
            )
            # New numbers: what the search found by luck does not count.
            fresh, sample = put(best.x, runs=100_000, seed=1)
            assert excess(sample, [*STRIKES, strike], pair).max() < 5
            assert strike < 1 or fresh > 0.8 * bound, "the search must have come near"


SMALL_HEAD = {"estimator": "hutchpp", "num_probes": 26, "head_rank": 2}


@pytest.mark.filterwarnings("ignore:privacy_seed")
class TestModel:
    """A whole model under the law of a head, also where a parameter cannot have one."""

    @staticmethod
    def engine(model, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = {
            "max_grad_norm": 1.0,
            "noise_multiplier": 0.0,
            "sample_rate": 0.1,
            "expected_batch_size": 1,
            "privacy_seed": 0,
        }
        return dprc.PrivacyEngine(model, optimizer, **(chosen | SMALL_HEAD | options))

    @staticmethod
    def batch():
        ids = torch.arange(12).view(2, 6)
        return {"input_ids": ids, "attention_mask": ids.ge(0), "labels": ids}

    @staticmethod
    def wide_model():
        """Tied embeddings of 168 columns, keys and values of 84 rows."""
        return tiny.causal_lm(hidden_size=168, intermediate_size=200, num_hidden_layers=1)

    def test_parameters_without_a_head_take_matched_probes_under_one_law(self):
        model = self.wide_model()
        engine = self.engine(model, noise_multiplier=1.0)
        assert engine.law == dprc.accounting.ScaleLaw.small_head(2, 26)
        engine.backward(losses.causal_lm_loss(model, self.batch(), chunk_tokens=4))
        rows = {row["name"]: row for row in engine.plan()}
        chosen = {
            name: (row["estimator"], row["num_probes"], row["head_rank"])
            for name, row in rows.items()
        }
        assert chosen["model.embed_tokens.weight"] == ("hutchinson", 160, None)
        assert chosen["model.layers.0.mlp.up_proj.weight"] == ("hutchpp", 26, 2)
        assert rows["model.norm.weight"]["num_probes"] is None
        engine.step()
        one_step = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 1, "delta": 1e-5}
        assert engine.epsilon(1e-5) == dprc.accounting.epsilon(**one_step, **SMALL_HEAD)
        assert engine.epsilon(1e-5) < dprc.accounting.epsilon(**one_step, num_probes=26)
        # With the tail's number of probes alone the whole model would be charged like them.
        laws = [engine.law, dprc.accounting.ScaleLaw.chi2(26)]
        assert dprc.accounting.combine_laws(laws) != engine.law

    def test_a_used_matrix_narrower_than_the_matched_probes_is_exact(self):
        model = tiny.causal_lm(hidden_size=40, intermediate_size=60, num_hidden_layers=1)
        engine = self.engine(model)
        losses.causal_lm_loss(model, self.batch())
        rows = {row["name"]: row["estimator"] for row in engine.plan()}
        assert rows["model.embed_tokens.weight"] == "exact"  # 40 columns
        assert rows["model.layers.0.mlp.up_proj.weight"] == "hutchpp"

    def test_auto_with_a_head_charges_the_heads_law(self):
        options = {**SMALL_HEAD, "estimator": "auto"}
        chosen = {}
        for tokens in (8, 4096):
            engine = self.engine(self.wide_model(), estimator="auto", max_tokens=tokens)
            chosen[tokens] = {row["name"]: row["estimator"] for row in engine.plan()}
            engine.detach()
        up, keys = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
        assert chosen[8][up] == "ghost"
        assert chosen[4096][up] == "hutchpp"  # 32·(168+200) < 168·200
        assert chosen[4096][keys] == "hutchpp"  # 32·(168+84) < 168·84
        target = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.1, "steps": 20}
        model = self.wide_model()
        calibrated = dprc.PrivacyEngine.with_epsilon(
            model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
            expected_batch_size=3, privacy_seed=0, max_tokens=4096, **target, **options,
        )  # fmt: skip
        assert calibrated.noise_multiplier == dprc.accounting.noise_multiplier(
            **target, **SMALL_HEAD
        )


@pytest.mark.filterwarnings("ignore:privacy_seed")
@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, SMALL_HEAD),
        ({"sketch": "shared"}, {**SMALL_HEAD, "sketch": "shared"}),
        ({"num_probes": 64}, {"estimator": "hutchinson", "num_probes": 64}),
        (
            {"sketch": "shared", "analysis": "envelope"},
            {"estimator": "hutchinson", "num_probes": 32, "sketch": "shared"},
        ),
        ({"num_probes": 42, "head_rank": 2}, {**SMALL_HEAD, "num_probes": 42}),
        ({"estimator": "hutchinson"}, {"estimator": "hutchinson", "num_probes": 32}),
        ({"estimator": "hutchpp"}, {"estimator": "hutchpp", "num_probes": 32}),
        ({"estimator": "exact"}, {"estimator": "exact"}),
    ],
)
def test_what_is_left_out_is_a_small_head_unless_probes_or_the_papers_analysis_say_otherwise(
    options, chosen
):
    model = torch.nn.Linear(96, 80)  # wider than any probes here
    run = {"sample_rate": 0.1, "max_grad_norm": 1.0, "expected_batch_size": 1, "privacy_seed": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dprc.PrivacyEngine(model, optimizer, noise_multiplier=1.0, **run, **options)
    name = chosen["estimator"]
    wanted = {key: value for key, value in chosen.items() if key != "estimator"}
    assert repr(engine.estimator) == repr(estimators.get(name, **wanted))
    engine.detach()
    target = {"epsilon": 2.0, "delta": 1e-5, "steps": 5}
    run["analysis"] = options.get("analysis", "tight")
    calibrated = dprc.PrivacyEngine.with_epsilon(model, optimizer, **target, **(run | options))
    assert repr(calibrated.estimator) == repr(engine.estimator)
    assert calibrated.noise_multiplier == dprc.accounting.noise_multiplier(
        **target, sample_rate=0.1, analysis=run["analysis"], **chosen
    )
