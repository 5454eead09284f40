"""Detectors: each asks one question of what was observed, and answers with a p-value.

A p-value is at most the probability of seeing as much where the engine does what was accounted.
Detectors that look at several things at once are corrected for it (Bonferroni) within themselves.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from dprc.audit.experiments import PairTrials, Record, Run, Structure
from dprc.audit.rig import MAX_GRAD_NORM

Array = npt.NDArray[np.float64]

# Rounding of a squared norm in float32, with a margin; far below any fault of a sketch.
_ROUNDING = 1e-3
_LAGS = (1, 2, 3)
_SHAPE_SAMPLE = 20_000
# Steps whose noise is compared with that of the step before.
_COMPARED_STEPS = 200


@dataclass(frozen=True)
class Finding:
    """What one detector found.

    Attributes:
        name: Of the detector.
        question: What it asks, in words.
        p_value: At most the chance of this where all is as accounted.
        level: Below which it refutes the claim.
        detail: What was seen, in words.
    """

    name: str
    question: str
    p_value: float
    level: float
    detail: str

    @property
    def refuted(self) -> bool:
        """Whether the claim is refuted."""
        return self.p_value < self.level

    def as_dict(self) -> dict[str, Any]:
        """The fields, as values that JSON can hold."""
        return {**asdict(self), "refuted": self.refuted}


@dataclass(frozen=True)
class Answer:
    """A detector's p-value and what it saw."""

    p_value: float
    detail: str


def mean_scale(record: Record) -> float:
    """Return E S of the law accounted for: what a clipped canary contributes on average, over C.

    E X^(-1/2) for X = χ²_k/k is √(k/2)·Γ((k-1)/2)/Γ(k/2). Where the law is below χ²_k in convex
    order, E S is smaller.
    """
    k = record.num_probes
    if k is None:
        return 1.0
    return math.sqrt(k / 2) * math.exp(special.gammaln((k - 1) / 2) - special.gammaln(k / 2))


def sensitivity(contributions: Mapping[str, Array], record: Record) -> Answer:
    """Ask whether a canary in each parameter contributes at most C·E S on average."""
    bound = MAX_GRAD_NORM * mean_scale(record)
    smallest, worst = 1.0, ""
    largest, largest_name = -math.inf, ""
    for name, values in contributions.items():
        p = _p_of_a_mean_above(bound, values)
        if values.mean() > largest:
            largest, largest_name = float(values.mean()), name
        if p < smallest:
            smallest, worst = p, name
    detail = f"largest mean {largest:.3g} in {largest_name}, at most {bound:.3g} allowed"
    if worst:
        detail += f"; least likely in {worst}"
    return Answer(min(1.0, smallest * len(contributions)), detail)


def _p_of_a_mean_above(bound: float, values: Array) -> float:
    """Student's one-sided test; without noise there is nothing to test."""
    if np.ptp(values) == 0:
        return float(values[0] <= bound)
    return float(stats.ttest_1samp(values, bound, alternative="greater").pvalue)


def noise_scale(
    noise: Mapping[int, Array], by_parameter: Mapping[str, Array], record: Record
) -> Answer:
    """Ask whether noise is as large as accounted, however the batch was cut, everywhere."""
    deviation = record.noise_multiplier * MAX_GRAD_NORM
    groups = {f"{count} micro-batches": values for count, values in noise.items()}
    groups |= {f"{name} of empty batches": values for name, values in by_parameter.items()}
    smallest, worst = 1.0, ""
    least, least_name = math.inf, ""
    for name, values in groups.items():
        total = float(np.square(values / deviation).sum())
        p = float(stats.chi2.cdf(total, values.size))
        relative = math.sqrt(total / values.size)
        if relative < least:
            least, least_name = relative, name
        if p < smallest:
            smallest, worst = p, name
    detail = f"least deviation {least:.3f} of the accounted one ({least_name})"
    if worst != least_name:
        detail += f"; least likely with {worst}"
    return Answer(min(1.0, smallest * len(groups)), detail)


def noise_shape(noise: Mapping[int, Array], record: Record) -> Answer:
    """Ask whether noise is Gaussian (Kolmogorov and Smirnov)."""
    deviation = record.noise_multiplier * MAX_GRAD_NORM
    each = _SHAPE_SAMPLE // len(noise)
    sample = np.concatenate([values.ravel()[:each] for values in noise.values()])
    test = stats.kstest(sample / deviation, "norm")
    return Answer(float(test.pvalue), f"distance {test.statistic:.4f} of {len(sample)} numbers")


def noise_freshness(noise: Mapping[int, Array]) -> Answer:
    """Ask whether the noise of a step tells anything of the next step's, or of its own halves."""
    worst = 0.0
    tests = 0
    for values in noise.values():
        rows = values[:_COMPARED_STEPS]
        half = rows.shape[1] // 2
        pairs = [(rows[:-1], rows[1:]), (rows[:, :half], rows[:, half : 2 * half])]
        for first, second in pairs:
            size = math.sqrt(float(np.square(first).sum() * np.square(second).sum()))
            # No noise at all is as good as known.
            correlation = float((first * second).sum()) / size if size > 0 else 1.0
            # Under the claim nearly N(0, 1) for this many products.
            worst = max(worst, abs(correlation) * math.sqrt(first.size))
            tests += 1
    return Answer(min(1.0, tests * 2 * float(stats.norm.sf(worst))), f"{worst:.1f} deviations")


def tail_ratios(ratios: Array, rank: int) -> Array:
    """Turn ratios of a canary of equal singular values into those of its part outside the head.

    A head of rank r catches r of m equal singular values whatever its sketch, so R = r/m + (1/m)·X
    where m = r + 1. Without a head m is 1.
    """
    return rank * ratios - (rank - 1)


def scale_law(ratios: Array, record: Record, rank: int) -> Answer:
    """Ask whether ratios of estimated and true norms follow the law accounted for.

    By the distance of distribution functions (Kolmogorov and Smirnov), which sees any difference of
    some size, and by mean and variance, which see a wrong k sooner.

    Args:
        ratios: (n,), independent of each other under the claim.
        record: What was accounted.
        rank: Of the canary.
    """
    k = record.num_probes
    if k is None:
        error = float(np.abs(ratios - 1.0).max())
        return Answer(float(error <= _ROUNDING), f"largest error of a norm {error:.1e}")
    values = tail_ratios(ratios, rank)
    test = stats.kstest(k * values, stats.chi2(k).cdf)
    # Moments of χ²_k/k: variance 2/k, fourth central moment 12(k+4)/k³.
    variance, fourth = 2.0 / k, 12.0 * (k + 4) / k**3
    squares = np.square(values - 1.0)
    scores = np.array(
        [
            (values.mean() - 1.0) / math.sqrt(variance),
            (squares.mean() - variance) / math.sqrt(fourth - variance**2),
        ]
    ) * math.sqrt(len(values))
    p_values = [float(test.pvalue), *(2 * stats.norm.sf(np.abs(scores))).tolist()]
    detail = (
        f"distance {test.statistic:.4f} from chi-squared with {k} degrees in {len(values)} "
        f"ratios; their variance {squares.mean():.4f}, by the law {variance:.4f}"
    )
    return Answer(min(1.0, len(p_values) * min(p_values)), detail)


def sketch_sharing(ratios: Array) -> Answer:
    """Ask whether equal samples have equal ratios in all micro-batches of a step (shared)."""
    spread = float((ratios.max(1) - ratios.min(1)).max())
    return Answer(float(spread <= _ROUNDING), f"ratios of one step differ by up to {spread:.1e}")


def _rank_correlations(first: Array, second: Array) -> Array:
    """Rank correlations of the columns of two arrays (steps, a) and (steps, b), times √(steps-1).

    A constant column, which no sketch gives, counts as wholly correlated.
    """
    ranks = []
    for values in (first, second):
        centred = stats.rankdata(values, axis=0) - (len(values) + 1) / 2
        norms = np.sqrt(np.square(centred).sum(0))
        ranks.append((centred, norms))
    (a, norm_a), (b, norm_b) = ranks
    product = norm_a[:, None] * norm_b[None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        correlations = np.where(product > 0, (a.T @ b) / product, 1.0)
    result: Array = correlations * math.sqrt(len(first) - 1)
    return result


def sketch_independence(ratios: Array, cuts: npt.NDArray[np.int64]) -> Answer:
    """Ask whether samples of a step have ratios that tell nothing of each other (per sample).

    Asked for each cut into micro-batches apart: a sketch may repeat in one of them alone.
    """
    worst, tests = 0.0, 0
    for count in np.unique(cuts):
        rows = ratios[cuts == count]
        scores = _rank_correlations(rows, rows)
        pairs = scores[np.triu_indices_from(scores, 1)]
        worst, tests = max(worst, float(np.abs(pairs).max())), tests + len(pairs)
    return Answer(_two_sided(worst, tests), f"{worst:.1f} deviations, {tests} pairs")


def sketch_freshness(ratios: Array) -> Answer:
    """Ask whether the ratios of a step tell anything of those of the next steps."""
    worst, tests = 0.0, 0
    for lag in _LAGS:
        scores = _rank_correlations(ratios[:-lag], ratios[lag:])
        worst, tests = max(worst, float(np.abs(scores).max())), tests + scores.size
    return Answer(_two_sided(worst, tests), f"{worst:.1f} deviations, {tests} pairs")


def _two_sided(score: float, tests: int) -> float:
    return min(1.0, tests * 2 * float(stats.norm.sf(score)))


def sampling(trials: PairTrials) -> Answer:
    """Ask whether samples are drawn no more often than accounted, and independently."""
    rate = trials.record.sample_rate
    drawn, offered = float(trials.batch_sizes.sum()), float(trials.dataset_sizes.sum())
    frequency = f"frequency {drawn / offered:.4f}, accounted {rate:g}"
    if rate == 1:
        return Answer(1.0, frequency)
    more_often = float(stats.binom.sf(drawn - 1, offered, rate))
    # Batch sizes of Poisson sampling are binomial; shuffled batches of one size are not.
    variances = trials.dataset_sizes * rate * (1 - rate)
    terms = np.square(trials.batch_sizes - trials.dataset_sizes * rate) / variances
    spread = np.sqrt(np.sum(2.0 + (1 - 6 * rate * (1 - rate)) / variances))
    score = abs(float((terms - 1.0).sum())) / float(spread)
    even = 2 * float(stats.norm.sf(score))
    return Answer(
        min(1.0, 2 * min(more_often, even)),
        f"{frequency}; variance of batch sizes {terms.mean():.3f} of the binomial one",
    )


def optimizer_guard(structure: Structure) -> Answer:
    """Ask whether an optimizer step outside the engine is refused."""
    refused = structure.refused and not structure.moved
    return Answer(float(refused), "refused" if refused else "optimizer.step() went through")


def accounting(observed: Mapping[str, PairTrials | Structure | Run]) -> Answer:
    """Ask whether each step the optimizer saw was accounted for, all of one kind."""
    for name, each in observed.items():
        if each.optimizer_steps != each.record.steps:
            return Answer(
                0.0,
                f"{name}: the optimizer saw {each.optimizer_steps} steps, "
                f"{each.record.steps} were accounted for",
            )
        if each.record.kinds != 1:
            return Answer(0.0, f"{name}: {each.record.kinds} kinds of steps were accounted for")
    steps = sum(each.record.steps for each in observed.values())
    return Answer(1.0, f"{steps} steps, each accounted for")
