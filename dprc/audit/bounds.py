"""From counts of an attack's successes to lower bounds on ε that hold with a stated confidence."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special, stats

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Kind = Literal["remove", "add", "both"]

# Share of the trials that chooses an event, where one is chosen by the trials themselves.
HELD_OUT = 0.25
# Tail probabilities among which thresholds are looked for.
_TAILS = np.geomspace(0.002, 0.6, 40)


@dataclass(frozen=True)
class Event:
    """When an attack guesses.

    Attributes:
        kind: ``"remove"`` (guess "present" from ``high`` on), ``"add"`` (guess "absent" up to
            ``low``), or ``"both"``.
        low: Threshold; -inf where nobody is guessed absent.
        high: Threshold; inf where nobody is guessed present.
    """

    kind: Kind
    low: float
    high: float


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on ε, and the attack that shows it.

    Attributes:
        epsilon: The bound, at least 0.
        event: When the attack guesses.
        trials: Trials that it was counted on.
    """

    epsilon: float
    event: Event
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
    scores: Array, present: Flags, event: Event, *, delta: float, confidence: float
) -> float:
    """Bound ε from below by a membership attack on independent trials.

    Args:
        scores: (trials,), of any meaning.
        present: (trials,), whether the differing sample was there: an independent fair coin each.
        event: When the attack guesses; chosen without these trials.
        delta: The δ at which ε is bounded, in [0, 1).
        confidence: Probability with which the bound must hold, in (0, 1).

    Returns:
        The bound, at least 0.

    Raises:
        ValueError: Shapes differ, a number out of range, or a world that was never drawn.

    Guarantee:
        If each trial is the output of a mechanism that is (ε, delta)-private under adding or
        removing the sample, the bound exceeds ε with probability at most 1 - confidence, whatever
        the scores and the event are.

    Source:
        (ε, δ)-privacy gives P(E | present) ≤ e^ε P(E | absent) + δ and the same the other way
        round; for "both" these are added: P(right guess) ≤ e^ε P(wrong guess) + δ, where worlds are
        fair coins. Each of the two probabilities is bounded by Clopper and Pearson at half the
        error.
    """
    if scores.shape != present.shape or scores.ndim != 1:
        raise ValueError(f"scores and present: shapes {scores.shape}, {present.shape} differ")
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be in [0, 1), got {delta!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence!r}")
    there = int(present.sum())
    absent = len(present) - there
    if there == 0 or absent == 0:
        raise ValueError(f"trials: {len(scores)} are too few to see both worlds")
    said_present, said_absent = scores >= event.high, scores <= event.low
    right = (said_present & present).sum() + (said_absent & ~present).sum()
    wrong = (said_present & ~present).sum() + (said_absent & present).sum()
    of_right, of_wrong = {
        "remove": (there, absent),
        "add": (absent, there),
        "both": (len(present), len(present)),
    }[event.kind]
    return float(_epsilon(right, of_right, wrong, of_wrong, delta, 1.0 - confidence))


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


def choose_event(
    scores: Array, present: Flags, *, delta: float, confidence: float, trials: int
) -> Event:
    """Choose the event whose bound promises most on so many trials.

    Args:
        scores: (n,), of trials other than those that will be counted: simulated ones of the
            mechanism as claimed, or a part that was held out.
        present: (n,), the worlds they come from.
        delta: As for ``epsilon_lower_bound``.
        confidence: As for ``epsilon_lower_bound``.
        trials: How many will be counted.
    """
    alpha, half = 1.0 - confidence, trials / 2
    highs, lows = np.quantile(scores, 1.0 - _TAILS), np.quantile(scores, _TAILS)
    above: dict[bool, Array] = {}
    below: dict[bool, Array] = {}
    for world in (True, False):
        ordered = np.sort(scores[present == world])
        # One more than was seen: without it, an empty tail would look perfect.
        size = len(ordered) + 1
        above[world] = (len(ordered) - np.searchsorted(ordered, highs, "left") + 1) / size
        below[world] = (np.searchsorted(ordered, lows, "right") + 1) / size
    remove = _epsilon(above[True] * half, half, above[False] * half, half, delta, alpha)
    add = _epsilon(below[False] * half, half, below[True] * half, half, delta, alpha)
    both = _epsilon(
        (above[True][:, None] + below[False][None, :]) * half,
        trials,
        (above[False][:, None] + below[True][None, :]) * half,
        trials,
        delta,
        alpha,
    )
    both[highs[:, None] <= lows[None, :]] = -1.0
    high, low = np.unravel_index(int(both.argmax()), both.shape)
    candidates: list[tuple[float, Event]] = [
        (float(remove.max()), Event("remove", -math.inf, float(highs[remove.argmax()]))),
        (float(add.max()), Event("add", float(lows[add.argmax()]), math.inf)),
        (float(both.max()), Event("both", float(lows[low]), float(highs[high]))),
    ]
    return max(candidates, key=lambda candidate: candidate[0])[1]


def best_lower_bound(
    scores: Array, present: Flags, planned: Event, *, delta: float, confidence: float
) -> EpsilonBound:
    """Bound ε by the better of two events: a planned one, and one that the trials suggest.

    The planned event is the best where the mechanism is as claimed. Where it is not, another may
    show far more: it is chosen on the first quarter of the trials and counted on the rest.

    Args:
        scores: As for ``epsilon_lower_bound``.
        present: As for ``epsilon_lower_bound``.
        planned: Chosen without these trials.
        delta: As for ``epsilon_lower_bound``.
        confidence: Probability with which the better bound must hold; each holds at half the error.

    Raises:
        ValueError: As ``epsilon_lower_bound``.
    """
    each = 1.0 - (1.0 - confidence) / 2
    cut = int(HELD_OUT * len(scores))
    rest = len(scores) - cut
    if not 0 < present[:cut].sum() < cut:
        raise ValueError(f"trials: {len(scores)} are too few to see both worlds")
    # By what they alone would show, which keeps away from tails that they saw too little of.
    suggested = choose_event(scores[:cut], present[:cut], delta=delta, confidence=each, trials=cut)
    bounds = [
        EpsilonBound(
            epsilon_lower_bound(scores, present, planned, delta=delta, confidence=each),
            planned,
            len(scores),
        ),
        EpsilonBound(
            epsilon_lower_bound(
                scores[cut:], present[cut:], suggested, delta=delta, confidence=each
            ),
            suggested,
            rest,
        ),
    ]
    return max(bounds, key=lambda bound: bound.epsilon)


def gaussian_mu_lower_bound(
    scores: Array, present: Flags, threshold: float, *, confidence: float
) -> float:
    """Bound μ from below, where the mechanism is known to be a Gaussian one.

    Args:
        scores: As for ``epsilon_lower_bound``.
        present: As for ``epsilon_lower_bound``.
        threshold: From which on the sample is taken to be present; chosen without these trials.
        confidence: Probability with which the bound must hold.

    Returns:
        μ ≥ 0, the distance of the two unit normals that the outputs are.

    Guarantee:
        Holds with the confidence for every μ-Gaussian-private mechanism. What μ says about ε at a
        small δ holds only in the family where the outputs *are* N(0,1) and N(μ,1): exact norms,
        sample_rate 1. Mixtures (randomized norms, subsampling) are not in it.
    """
    alpha = 1.0 - confidence
    there, absent = scores[present], scores[~present]
    power = proportion_lower(float((there >= threshold).sum()), len(there), alpha / 2)
    error = proportion_upper(float((absent >= threshold).sum()), len(absent), alpha / 2)
    if power <= 0 or error >= 1:
        return 0.0
    return max(0.0, float(stats.norm.ppf(power) - stats.norm.ppf(error)))
