"""Faults that break the privacy guarantee, to be planted with pytest's monkeypatch.

Each plants itself in the engine's parts; none exists in the product.
"""

import torch

import dprc.engine
import dprc.sampling
from dprc import estimators
from dprc.clipping import ClippedSum
from dprc.engine import PrivacyEngine
from dprc.schedules import NormPass
from dprc.sketch import SketchSource

ADD_NOISE = dprc.engine.add_gaussian_noise_


def no_clipping(monkeypatch):
    clip = ClippedSum._clip

    def ones(self, losses, norms):
        factors, excluded = clip(self, losses, norms)
        return torch.ones_like(factors), excluded

    monkeypatch.setattr(ClippedSum, "_clip", ones)


def less_noise(monkeypatch, factor=0.7):
    def smaller(total, *, standard_deviation, **where):
        return ADD_NOISE(total, standard_deviation=factor * standard_deviation, **where)

    monkeypatch.setattr(dprc.engine, "add_gaussian_noise_", smaller)


def no_noise_on(monkeypatch, parameter):
    def all_but_one(total, **options):
        return total if options["parameter"] == parameter else ADD_NOISE(total, **options)

    monkeypatch.setattr(dprc.engine, "add_gaussian_noise_", all_but_one)


def same_noise_each_step(monkeypatch):
    def repeated(total, **options):
        return ADD_NOISE(total, **options | {"step": 0})

    monkeypatch.setattr(dprc.engine, "add_gaussian_noise_", repeated)


def uniform_noise(monkeypatch):
    def uniform(total, *, standard_deviation, **where):
        width = 12**0.5 * standard_deviation
        return total.add_(width * (torch.rand(total.shape) - 0.5))

    monkeypatch.setattr(dprc.engine, "add_gaussian_noise_", uniform)


def noise_with_each_micro_batch(monkeypatch, micro_batches=4):
    """Right in sum only where a batch is cut into as many micro-batches as the scale assumes."""
    add, backward = ClippedSum.add, PrivacyEngine.backward
    scale = []

    def noisy_add(self, losses, source, **options):
        add(self, losses, source, **options)
        for _, total in self.totals.items():
            total.add_(torch.randn(total.shape) * scale[-1])

    def remembering(self, losses):
        scale.append(self.noise_multiplier * self.max_grad_norm / micro_batches**0.5)
        return backward(self, losses)

    monkeypatch.setattr(dprc.engine, "add_gaussian_noise_", lambda total, **_: total)
    monkeypatch.setattr(ClippedSum, "add", noisy_add)
    monkeypatch.setattr(PrivacyEngine, "backward", remembering)


def parameter_left_out_of_the_norm(monkeypatch, parameter):
    per_parameter = NormPass.per_parameter

    def rest(self):
        norms = per_parameter(self)
        return {
            index: torch.zeros_like(value) if index == parameter else value
            for index, value in norms.items()
        }

    monkeypatch.setattr(NormPass, "per_parameter", rest)


def other_sketches(monkeypatch, **changed):
    """Make the sketches from another kind, step or first sample than the engine says."""

    def source(stream, kind, *, step, first_sample, stride):
        where = {"kind": kind, "step": step, "first_sample": first_sample}
        for name, change_fn in changed.items():
            where[name] = change_fn(step, first_sample)
        return SketchSource(stream, **where)

    monkeypatch.setattr(dprc.engine, "SketchSource", source)


def shared_sketch_accounted_as_per_sample(monkeypatch):
    other_sketches(monkeypatch, kind=lambda step, first: "shared")


def fresh_shared_sketch_for_each_micro_batch(monkeypatch):
    other_sketches(monkeypatch, step=lambda step, first: 100 * step + first)


def sketch_kept_over_steps(monkeypatch, steps=10**9):
    other_sketches(monkeypatch, step=lambda step, first: step // steps)


def sketch_by_place_in_the_micro_batch(monkeypatch):
    other_sketches(monkeypatch, first_sample=lambda step, first: 0)


def fewer_probes_than_accounted(monkeypatch):
    """The norm is taken with half the probes that the law was made from."""
    begin = estimators.Hutchinson.begin

    def halved(self, rows, columns, **options):
        return begin(estimators.Hutchinson(self.num_probes // 2, self.sketch), rows, columns,
                     **options)  # fmt: skip

    monkeypatch.setattr(estimators.Hutchinson, "begin", halved)


def optimizer_steps_outside_the_engine(monkeypatch):
    """Nothing refuses it, and before each step one goes out without noise or accounting."""
    step = PrivacyEngine.step

    def twice(self):
        for index, total in self._sum.totals.items():
            self._capture.parameters[index].grad = total
        self.optimizer.step()
        step(self)

    monkeypatch.setattr(PrivacyEngine, "_refuse_foreign_step", lambda self, *_: None)
    monkeypatch.setattr(PrivacyEngine, "step", twice)


def no_guard(monkeypatch):
    monkeypatch.setattr(PrivacyEngine, "_refuse_foreign_step", lambda self, *_: None)


def one_batch_size(monkeypatch):
    """As many samples in each batch as are expected, accounted as Poisson sampling."""

    def chosen(stream, *, size, sample_rate, step):
        generator = torch.Generator().manual_seed(step)
        return torch.randperm(size, generator=generator)[: round(size * sample_rate)].sort()[0]

    monkeypatch.setattr(dprc.sampling, "poisson_indices", chosen)


def samples_drawn_too_often(monkeypatch):
    indices = dprc.sampling.poisson_indices

    def more(stream, *, sample_rate, **options):
        return indices(stream, sample_rate=1.1 * sample_rate, **options)

    monkeypatch.setattr(dprc.sampling, "poisson_indices", more)


# Their places among the parameters of the audited model.
MATRIX, HEAD, BIAS = range(3)
