"""Poisson sampling: independent inclusion, physical batches, empty batches."""

import warnings

import numpy as np
import pytest
import torch
from scipy import stats

import dprc
from dprc.noise import Stream
from dprc.sampling import PlainSampler, PoissonLoader, poisson_indices

STREAM = Stream((1, 2))


def loader(size=50, sample_rate=0.2, **options):
    chosen = {"steps": 10, "max_physical_batch": 4, "collate_fn": list}
    return PoissonLoader(list(range(size)), PlainSampler(STREAM, sample_rate), **(chosen | options))


def test_batch_sizes_are_binomial():
    sizes = [
        len(poisson_indices(STREAM, size=40, sample_rate=0.3, step=step)) for step in range(3000)
    ]
    observed = np.bincount(sizes, minlength=41)[5:20]
    expected = 3000 * stats.binom(40, 0.3).pmf(np.arange(41))[5:20]
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert stats.chi2(15).sf(statistic) > 1e-3
    shuffled = np.bincount([12] * 3000, minlength=41)[5:20]  # fixed batches are not Poisson
    assert stats.chi2(15).sf(((shuffled - expected) ** 2 / expected).sum()) < 1e-6


def test_items_are_included_independently():
    chosen = np.zeros((3000, 2))
    for step in range(3000):
        indices = poisson_indices(STREAM, size=2, sample_rate=0.3, step=step)
        chosen[step, indices] = 1
    assert abs(np.corrcoef(chosen.T)[0, 1]) < 5 / np.sqrt(3000)


def test_rate_one_takes_everything():
    assert len(poisson_indices(STREAM, size=100, sample_rate=1.0, step=0)) == 100


def test_physical_batches_partition_the_logical_one():
    for logical in loader():
        physical = list(logical)
        assert all(1 <= len(batch) <= 4 for batch in physical)
        assert [i for batch in physical for i in batch] == logical.indices
        assert len(logical) == len(logical.indices)


def test_an_empty_logical_batch_gives_no_physical_batch_but_is_there():
    batches = list(loader(size=3, sample_rate=0.01, steps=20))
    assert [batch.step for batch in batches] == list(range(20))
    assert any(len(batch) == 0 and not list(batch) for batch in batches)


def test_iterating_again_goes_on_and_repeats_no_step():
    twice = loader(steps=5)
    indices = [batch.indices for _ in range(2) for batch in twice]
    assert indices == [batch.indices for batch in loader(steps=10)]
    assert indices[:5] != indices[5:]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps: .* got 0"),
        ({"steps": 2.0}, TypeError, "steps: .* got 2.0"),
        ({"max_physical_batch": 0}, ValueError, "max_physical_batch: .* got 0"),
    ],
)
def test_bad_counts_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        loader(**options)


def test_an_iterable_dataset_is_refused():
    sampler = PlainSampler(STREAM, 0.1)
    with pytest.raises(TypeError, match="cannot be sampled"):
        PoissonLoader(iter([1]), sampler, steps=1, max_physical_batch=1, collate_fn=list)


@pytest.mark.filterwarnings("ignore:privacy_seed")
class TestTheEnginesLoader:
    @pytest.fixture
    def engine(self):
        model = torch.nn.Linear(4, 2)
        return dprc.PrivacyEngine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
            noise_multiplier=1.0, sample_rate=0.25, expected_batch_size=100, privacy_seed=0,
        )  # fmt: skip

    @pytest.fixture
    def data(self):
        return list(torch.randn(400, 4))

    def test_uses_the_accounted_rate_and_continues_with_the_engines_steps(self, engine, data):
        sizes, indices = [], []
        loader = engine.poisson_loader(data, steps=15, max_physical_batch=64)
        for _ in range(2):  # two "epochs" are 30 steps, all of them drawn anew
            for logical in loader:
                for batch in logical:
                    engine.backward(engine.model(batch).sum(1))
                sizes.append(len(logical))
                indices.append(tuple(logical.indices))
                engine.step()
        assert abs(np.mean(sizes) - 100) < 5 * np.sqrt(400 * 0.25 * 0.75 / 30)
        assert len(set(indices)) == 30
        assert engine.accountant.steps == 30
        assert engine.sampled_by_loader

    def test_a_logical_batch_without_a_step_is_refused(self, engine, data):
        loader = iter(engine.poisson_loader(data, steps=3, max_physical_batch=64))
        next(loader)
        with pytest.raises(dprc.PrivacyError, match=r"Call engine\.step\(\) once after each"):
            next(loader)

    def test_a_step_without_a_logical_batch_is_refused(self, engine, data):
        for _ in engine.poisson_loader(data, steps=1, max_physical_batch=64):
            engine.step()
        with pytest.raises(dprc.PrivacyError, match="no new logical batch"):
            engine.step()

    def test_a_sample_given_twice_is_refused(self, engine, data):
        for logical in engine.poisson_loader(data, steps=1, max_physical_batch=400):
            for batch in logical:
                engine.backward(engine.model(batch).sum(1))
                with pytest.raises(dprc.PrivacyError, match="Give each sample to backward"):
                    engine.backward(engine.model(batch).sum(1))

    def test_another_loader_is_told_apart(self, engine, data):
        engine.backward(engine.model(torch.stack(data[:8])).sum(1))
        engine.step()
        assert not engine.sampled_by_loader
        with pytest.warns(UserWarning, match=r"a DataLoader's, are not. Use engine.poisson_loader"):
            engine.epsilon(1e-5)

    def test_epsilon_says_nothing_of_its_own_samples(self, engine, data):
        for logical_batch in engine.poisson_loader(data, steps=2, max_physical_batch=4):
            for batch in logical_batch:
                engine.backward(engine.model(batch).sum(1))
            engine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.epsilon(1e-5)
