"""Checks of arguments: every message names the argument, its value and what is allowed."""

import math
from numbers import Integral, Real

from dprc.accounting.scale import ScaleLaw

SKETCHES = ("shared", "per_sample")
ANALYSES = ("tight", "envelope")


def real(name: str, value: object) -> float:
    """A finite number that is not a bool."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number


def positive_int(name: str, value: object) -> int:
    """An int of at least 1, numpy's too; floats and bools are refused, even when whole."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def noise_multiplier(value: object, *, allow_zero: bool = False) -> float:
    """A noise multiplier above 0, or of at least 0."""
    number = real("noise_multiplier", value)
    if number < 0 or (number == 0 and not allow_zero):
        raise ValueError(
            f"noise_multiplier must be {'at least' if allow_zero else 'above'} 0, got {value!r}"
        )
    return number


def sample_rate(value: object) -> float:
    """A Poisson inclusion probability in (0, 1]."""
    number = real("sample_rate", value)
    if not 0 < number <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {value!r}")
    return number


def epsilon(value: object) -> float:
    """An epsilon above 0."""
    number = real("epsilon", value)
    if number <= 0:
        raise ValueError(f"epsilon must be above 0, got {value!r}")
    return number


def delta(value: object) -> float:
    """A delta in (0, 1)."""
    number = real("delta", value)
    if not 0 < number < 1:
        raise ValueError(f"delta must be in (0, 1), got {value!r}")
    return number


def tolerance(value: object) -> float:
    """A relative excess in (0, 1)."""
    number = real("tolerance", value)
    if not 0 < number < 1:
        raise ValueError(f"tolerance must be in (0, 1), got {value!r}")
    return number


def sketch_and_analysis(sketch: str, analysis: str, law: ScaleLaw) -> None:
    """Known names that fit together."""
    if analysis not in ANALYSES:
        raise ValueError(f"analysis must be one of {', '.join(ANALYSES)}, got {analysis!r}")
    if law.is_exact:
        return
    if sketch not in SKETCHES:
        raise ValueError(f"sketch must be one of {', '.join(SKETCHES)}, got {sketch!r}")
    if analysis == "envelope" and sketch == "per_sample":
        raise ValueError(
            "analysis='envelope' needs sketch='shared': the envelope bounds the sensitivity "
            "given the sketch; use analysis='tight' with sketch='per_sample'"
        )
