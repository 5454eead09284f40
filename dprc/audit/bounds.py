"""From counts of an attack's successes to lower bounds on ε that hold with a stated confidence."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special, stats

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Event = Literal["remove", "add", "both"]

# Share of the trials that chooses the event; the others bound its probabilities.
CHOOSING_SHARE = 0.25
# Tail probabilities among which thresholds are looked for.
_TAILS = np.geomspace(0.003, 0.6, 40)


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on ε, and the attack that shows it.

    Attributes:
        epsilon: The bound, at least 0.
        event: ``"remove"`` (guess "present" from ``high`` on), ``"add"`` (guess "absent" up to
            ``low``), or ``"both"``.
        low: Threshold; -inf where nobody is guessed absent.
        high: Threshold; inf where nobody is guessed present.
        trials: Trials that the bound was computed from, not those that chose the event.
    """

    epsilon: float
    event: Event
    low: float
    high: float
    trials: int


def proportion_upper(successes: Array | float, trials: Array | float, alpha: float) -> Array:
    """Clopper and Pearson's upper bound on a binomial probability, wrong with chance alpha."""
    successes, trials = np.broadcast_arrays(np.asarray(successes, float), trials)
    inside = successes < trials
    safe = np.where(inside, successes, 0.0)
    failures = np.where(inside, trials - safe, 1.0)
    bound: Array = np.where(inside, special.betainccinv(safe + 1.0, failures, alpha), 1.0)
    return bound


def proportion_lower(successes: Array | float, trials: Array | float, alpha: float) -> Array:
    """Clopper and Pearson's lower bound on a binomial probability, wrong with chance alpha."""
    bound: Array = 1.0 - proportion_upper(np.asarray(trials) - successes, trials, alpha)
    return bound


def epsilon_lower_bound(
    scores: Array, present: Flags, *, delta: float, confidence: float
) -> EpsilonBound:
    """Bound ε from below by a membership attack on independent trials.

    Args:
        scores: (trials,), larger where the differing sample is more likely present.
        present: (trials,), whether it was: an independent fair coin for each trial.
        delta: The δ at which ε is bounded, in [0, 1).
        confidence: Probability with which the bound must hold, in (0, 1).

    Returns:
        The bound, from an event chosen on the first quarter of the trials and counted on the rest.

    Raises:
        ValueError: Shapes differ, a number out of range, or too few trials of either kind.

    Guarantee:
        If each trial is the output of a mechanism that is (ε, delta)-private under adding or
        removing the sample, the bound exceeds ε with probability at most 1 - confidence, whatever
        the scores are.

    Source:
        (ε, δ)-privacy gives P(E | present) ≤ e^ε P(E | absent) + δ and the same the other way
        round; for "both" these are added: P(right guess) ≤ e^ε P(wrong guess) + δ, where worlds are
        fair coins. Each of the two probabilities is bounded by Clopper and Pearson at half the
        error. The bound holds given the first quarter, which is independent of the rest.
    """
    if scores.shape != present.shape or scores.ndim != 1:
        raise ValueError(f"scores and present: shapes {scores.shape}, {present.shape} differ")
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence!r}")
    cut = int(CHOOSING_SHARE * len(scores))
    chosen, counted = (slice(0, cut), slice(cut, None))
    for part in (present[chosen], present[counted]):
        if not 0 < part.sum() < len(part):
            raise ValueError(f"trials: {len(scores)} are too few to see both worlds")
    alpha = 1.0 - confidence
    event, low, high = _choose(
        scores[chosen], present[chosen], delta, alpha, counted_share=(len(scores) - cut) / cut
    )
    value = _bound(scores[counted], present[counted], event, low, high, delta, alpha)
    return EpsilonBound(value, event, low, high, len(scores) - cut)


def _bound(
    scores: Array,
    present: Flags,
    event: Event,
    low: float,
    high: float,
    delta: float,
    alpha: float,
) -> float:
    said_present, said_absent = scores >= high, scores <= low
    right = (said_present & present).sum() + (said_absent & ~present).sum()
    wrong = (said_present & ~present).sum() + (said_absent & present).sum()
    there = int(present.sum())
    absent = len(present) - there
    of_right, of_wrong = {
        "remove": (there, absent),
        "add": (absent, there),
        "both": (len(present), len(present)),
    }[event]
    return float(_epsilon(right, of_right, wrong, of_wrong, delta, alpha))


def _epsilon(
    right: Array | float,
    of_right: float,
    wrong: Array | float,
    of_wrong: float,
    delta: float,
    alpha: float,
) -> Array:
    excess = proportion_lower(right, of_right, alpha / 2) - delta
    error = proportion_upper(wrong, of_wrong, alpha / 2)
    value: Array = np.where(
        excess > 0, np.log(np.maximum(excess, 1e-300) / np.maximum(error, 1e-300)), 0.0
    )
    return np.maximum(value, 0.0)


def _choose(
    scores: Array, present: Flags, delta: float, alpha: float, counted_share: float
) -> tuple[Event, float, float]:
    """Choose the event whose bound promises most on trials as many as will be counted."""
    highs = np.quantile(scores, 1.0 - _TAILS)
    lows = np.quantile(scores, _TAILS)
    there, absent = int(present.sum()), int((~present).sum())
    # One count more for what was not seen yet: without it, an empty tail would look perfect.
    there_high, absent_high = (
        (scores[world][None, :] >= highs[:, None]).sum(1) for world in (present, ~present)
    )
    there_low, absent_low = (
        (scores[world][None, :] <= lows[:, None]).sum(1) for world in (present, ~present)
    )

    def promised(right: Array, of_right: int, wrong: Array, of_wrong: int) -> Array:
        return _epsilon(
            right * counted_share,
            of_right * counted_share,
            np.minimum(wrong + 1, of_wrong) * counted_share,
            of_wrong * counted_share,
            delta,
            alpha,
        )

    remove = promised(there_high, there, absent_high, absent)
    add = promised(absent_low, absent, there_low, there)
    both = promised(
        there_high[:, None] + absent_low[None, :],
        there + absent,
        absent_high[:, None] + there_low[None, :],
        there + absent,
    )
    both[highs[:, None] <= lows[None, :]] = -1.0
    best: tuple[float, Event, float, float] = (-1.0, "remove", -math.inf, math.inf)
    for values, event in ((remove, "remove"), (add, "add"), (both, "both")):
        at = np.unravel_index(int(values.argmax()), values.shape)
        if values[at] > best[0]:
            high = math.inf if event == "add" else float(highs[at[0]])
            low = -math.inf if event == "remove" else float(lows[at[-1]])
            best = (float(values[at]), event, low, high)  # type: ignore[assignment]
    return best[1], best[2], best[3]


def gaussian_mu_lower_bound(scores: Array, present: Flags, *, confidence: float) -> float:
    """Bound μ from below, where the mechanism is known to be a Gaussian one.

    Args:
        scores: As for ``epsilon_lower_bound``.
        present: As for ``epsilon_lower_bound``.
        confidence: Probability with which the bound must hold.

    Returns:
        μ ≥ 0, the distance of the two unit normals that the outputs are.

    Guarantee:
        Holds with the confidence for every μ-Gaussian-private mechanism. What μ says about ε at a
        small δ holds only in the family where the outputs *are* N(0,1) and N(μ,1): exact norms,
        sample_rate 1. Mixtures (randomized norms, subsampling) are not in it.
    """
    cut = int(CHOOSING_SHARE * len(scores))
    alpha = 1.0 - confidence
    # One threshold, where the two worlds' errors are equal: nearly the best for any μ.
    first, rest = scores[:cut], scores[cut:]
    threshold = 0.5 * (first[present[:cut]].mean() + first[~present[:cut]].mean())
    there, absent = rest[present[cut:]], rest[~present[cut:]]
    power = proportion_lower(float((there >= threshold).sum()), len(there), alpha / 2)
    error = proportion_upper(float((absent >= threshold).sum()), len(absent), alpha / 2)
    if power <= 0 or error >= 1:
        return 0.0
    return max(0.0, float(stats.norm.ppf(power) - stats.norm.ppf(error)))
