"""The questions one asks of a training run: how much noise, which ε, which δ."""

import math
import warnings
from typing import Any

from dprc.accounting import validate
from dprc.accounting.accountant import Accountant
from dprc.accounting.compose import DEFAULT_TOLERANCE
from dprc.accounting.scale import ScaleLaw, scale_law
from dprc.errors import PrivacyError

# Outside this range a calibration answers a question that nobody means.
_MIN_NOISE, _MAX_NOISE = 1e-3, 1e7
_ROUGH = 1e-3


def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    sample_rate: float,
    steps: int,
    estimator: str = "hutchinson",
    num_probes: int = 32,
    sketch: str = "per_sample",
    analysis: str = "tight",
    head_rank: int | None = None,
    require_certified: bool = False,
) -> float:
    """The ε that so many equal steps cost, an upper bound.

    Args:
        noise_multiplier: Noise standard deviation on the sum of clipped gradients, in units of the
            clipping threshold; at least 0.
        delta: In (0, 1).
        sample_rate: Poisson inclusion probability of a sample in a step, in (0, 1].
        steps: Number of optimizer steps, an int.
        estimator: ``"exact"``, ``"ghost"``, ``"tiled"``, ``"hutchinson"`` or ``"hutchpp"``.
        num_probes: Gaussian probes (of the tail for hutchpp); at least 4.
        sketch: ``"per_sample"`` (each sample its own sketch) or ``"shared"``.
        analysis: ``"tight"``, or ``"envelope"`` (the paper's; shared sketches only).
        head_rank: Rank of the head, hutchpp only. With a certified pair (head_rank, num_probes) it
            saves noise (docs/small_head.md); otherwise the tail is charged like Hutchinson's.
        require_certified: Whether a head_rank without a certified pair is an error.

    Returns:
        ε ≥ 0; inf without noise.

    Raises:
        ValueError: An argument is out of range or does not fit another.
        PrivacyError: Fewer than 4 probes; delta below what floating-point error allows; a pair that
            had to be certified and is not.

    Guarantee:
        The steps together are (ε, delta)-differentially private under adding or removing one
        sample, for every gradient, in floating-point arithmetic too (docs/theory.md, Theorem 9).

    Example:
        >>> round(epsilon(noise_multiplier=1.0, delta=1e-5, sample_rate=0.01, steps=1000), 1)
        2.0
    """
    accountant = _accountant(
        noise_multiplier,
        sample_rate,
        steps,
        _law(estimator, num_probes, head_rank, analysis, require_certified),
        sketch,
        analysis,
    )
    return accountant.epsilon(delta)


def epsilon_bounds(
    *,
    noise_multiplier: float,
    delta: float,
    sample_rate: float,
    steps: int,
    estimator: str = "hutchinson",
    num_probes: int = 32,
    sketch: str = "per_sample",
    analysis: str = "tight",
    head_rank: int | None = None,
    require_certified: bool = False,
) -> tuple[float, float]:
    """Lower and upper bound on the ε of so many equal steps.

    The lower bound belongs to a gradient that exists: the true ε of the mechanism is between the
    two. Its rank is one; for hutchpp, twice that of the head. Arguments and errors as for
    ``epsilon``.

    Example:
        >>> lower, upper = epsilon_bounds(
        ...     noise_multiplier=1.0, delta=1e-5, sample_rate=0.01, steps=1000
        ... )
        >>> lower <= upper
        True
    """
    accountant = _accountant(
        noise_multiplier,
        sample_rate,
        steps,
        _law(estimator, num_probes, head_rank, analysis, require_certified),
        sketch,
        analysis,
    )
    head = (num_probes if head_rank is None else head_rank) if estimator == "hutchpp" else None
    return accountant.epsilon_bounds(delta, head_rank=head)


def delta(
    *,
    epsilon: float,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    estimator: str = "hutchinson",
    num_probes: int = 32,
    sketch: str = "per_sample",
    analysis: str = "tight",
    head_rank: int | None = None,
    require_certified: bool = False,
) -> float:
    """The δ of so many equal steps at this ε ≥ 0, an upper bound.

    Arguments, guarantee and errors as for ``epsilon``.

    Example:
        >>> delta(epsilon=2.0, noise_multiplier=1.0, sample_rate=0.01, steps=1000) < 1.1e-5
        True
    """
    accountant = _accountant(
        noise_multiplier,
        sample_rate,
        steps,
        _law(estimator, num_probes, head_rank, analysis, require_certified),
        sketch,
        analysis,
    )
    return accountant.delta(epsilon)


def privacy_loss_distribution(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    estimator: str = "hutchinson",
    num_probes: int = 32,
    sketch: str = "per_sample",
    analysis: str = "tight",
    head_rank: int | None = None,
    require_certified: bool = False,
) -> Any:
    """The composed loss of so many equal steps, as dp_accounting's object.

    Use it to compose the training with other mechanisms. Arguments and errors as for ``epsilon``;
    see ``Accountant.privacy_loss_distribution`` for what is guaranteed.

    Example:
        >>> pld = privacy_loss_distribution(noise_multiplier=2.0, sample_rate=0.01, steps=10)
        >>> pld.get_epsilon_for_delta(1e-5) < 1.0
        True
    """
    accountant = _accountant(
        noise_multiplier,
        sample_rate,
        steps,
        _law(estimator, num_probes, head_rank, analysis, require_certified),
        sketch,
        analysis,
    )
    return accountant.privacy_loss_distribution()


def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    estimator: str = "hutchinson",
    num_probes: int = 32,
    sketch: str = "per_sample",
    analysis: str = "tight",
    head_rank: int | None = None,
    require_certified: bool = False,
) -> float:
    """The noise multiplier that reaches (ε, δ) in so many equal steps.

    Args:
        epsilon: The target, above 0.
        delta: In (0, 1).
        sample_rate: As for ``epsilon``, like the remaining arguments.
        steps: Number of optimizer steps.
        estimator: Norm estimator.
        num_probes: Gaussian probes.
        sketch: ``"per_sample"`` or ``"shared"``.
        analysis: ``"tight"`` or ``"envelope"``.
        head_rank: Rank of the head, hutchpp only.
        require_certified: As for ``epsilon``.

    Returns:
        A noise multiplier σ for which the function ``epsilon`` returns at most the target, within
        0.2 % of the smallest such σ.

    Raises:
        ValueError: An argument is out of range; or the target is met without noise, because a
            sample takes part with a probability below delta.
        PrivacyError: The target cannot be reached.

    Example:
        >>> round(noise_multiplier(epsilon=2.0, delta=1e-5, sample_rate=0.01, steps=1000), 2)
        1.0
    """
    target, delta = validate.epsilon(epsilon), validate.delta(delta)
    law = _law(estimator, num_probes, head_rank, analysis, require_certified)
    # Refuse bad settings, and warn of costly ones, once.
    _accountant(1.0, sample_rate, steps, law, sketch, analysis)
    refusals: dict[float, PrivacyError] = {}

    def spent(sigma: float, tolerance: float = DEFAULT_TOLERANCE) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            accountant = _accountant(sigma, sample_rate, steps, law, sketch, analysis)
        try:
            return accountant.epsilon(delta, tolerance=tolerance)
        except PrivacyError as refusal:
            # No ε can be promised at this noise: it is not enough, as far as one can tell.
            refusals[sigma] = refusal
            return math.inf

    sigma, slope = _rough_root(spent, target, _first_guess(target, delta, sample_rate, steps))
    # The rough answer is corrected with the exact function, from the side that needs more noise.
    lowest_safe = math.inf
    highest_unsafe = 0.0
    previous = (0.0, math.inf)
    for attempt in range(18):
        reached = spent(sigma)
        if 0.0 < reached < math.inf and 0.0 < previous[1] < math.inf and sigma != previous[0]:
            secant = math.log(reached / previous[1]) / math.log(previous[0] / sigma)
            slope = min(max(secant, 0.2), 1e4)
        previous = (sigma, reached)
        if reached <= target:
            lowest_safe = min(lowest_safe, sigma)
        else:
            highest_unsafe = max(highest_unsafe, sigma)
        if lowest_safe <= highest_unsafe * 1.001 or target * (1 - 5e-4) <= reached <= target:
            if highest_unsafe in refusals and lowest_safe <= highest_unsafe * 1.01:
                raise refusals[highest_unsafe]
            return lowest_safe if reached > target else sigma
        limit = 1.1 ** (attempt + 1)
        growth = limit if reached > target else 1.0 / limit
        if 0.0 < reached < math.inf:
            growth = (reached / target * (1 + 2e-4)) ** (1.0 / slope)
        proposal = sigma * min(max(growth, 1.0 / limit), limit)
        enclosed = highest_unsafe > 0.0 and lowest_safe < math.inf
        if enclosed and (attempt >= 5 or not highest_unsafe < proposal < lowest_safe):
            proposal = math.sqrt(highest_unsafe * lowest_safe)
        sigma = proposal
    raise PrivacyError(f"no noise_multiplier found for epsilon={epsilon!r}, delta={delta!r}")


def _first_guess(target: float, delta: float, sample_rate: float, steps: int) -> float:
    """A Gaussian guess at the noise multiplier."""
    scale = math.sqrt(2 * math.log(1.25 / delta))
    guess = sample_rate * math.sqrt(steps) * scale / target
    return min(max(guess, 0.4 if target < 50 else 0.05), 1e5)


def _rough_root(spent: Any, target: float, guess: float) -> tuple[float, float]:
    """A root of the roughly computed ε(σ) = target, and the slope of log ε in log σ there."""
    low = high = math.log(guess)
    value = _log_ratio(spent(guess, _ROUGH), target)
    low_value = high_value = value
    step = 0.3
    while low_value < 0:
        high, high_value = low, low_value
        low -= step
        step *= 1.6
        if low < math.log(_MIN_NOISE):
            raise ValueError(
                f"epsilon={target!r} is met even with noise_multiplier={_MIN_NOISE}: at this delta "
                "and sample_rate no calibration is needed; choose a smaller epsilon or delta"
            )
        low_value = _log_ratio(spent(math.exp(low), _ROUGH), target)
    while high_value > 0:
        low, low_value = high, high_value
        high += step
        step *= 1.6
        if high > math.log(_MAX_NOISE):
            raise PrivacyError(
                f"epsilon={target!r} is not reached below noise_multiplier={_MAX_NOISE:g}"
            )
        high_value = _log_ratio(spent(math.exp(high), _ROUGH), target)
    slope = -1.0
    for _ in range(40):
        if high - low < 2e-3 or high_value == low_value:
            break
        slope = (high_value - low_value) / (high - low)
        # Regula falsi, kept away from the ends so that both of them move.
        share = min(max(-low_value / (high_value - low_value), 0.05), 0.95)
        middle = low + share * (high - low)
        value = _log_ratio(spent(math.exp(middle), _ROUGH), target)
        if value > 0:
            low, low_value = middle, value
        else:
            high, high_value = middle, value
        if abs(value) < 2e-3:
            low = high = middle
    return math.exp(high), max(abs(slope), 0.2)


def _log_ratio(value: float, target: float) -> float:
    """log(value/target), capped so that infinite and zero values do not stop the search."""
    if value <= 0:
        return -5.0
    return min(max(math.log(value / target), -5.0), 5.0) if math.isfinite(value) else 5.0


def _law(
    estimator: str,
    num_probes: int,
    head_rank: int | None,
    analysis: str,
    require_certified: bool,
) -> ScaleLaw:
    """The law to charge; the paper's analysis knows of no heads, so it says nothing of them."""
    with warnings.catch_warnings():
        if analysis == "envelope":
            warnings.simplefilter("ignore", UserWarning)
        return scale_law(estimator, num_probes, head_rank, require_certified=require_certified)


def _accountant(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    law: ScaleLaw,
    sketch: str,
    analysis: str,
) -> Accountant:
    accountant = Accountant()
    accountant.step(
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        law=law,
        sketch=sketch,
        analysis=analysis,
        count=validate.positive_int("steps", steps),
    )
    return accountant
