"""What was done to the data, step by step, and what it costs in privacy."""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from dprc.accounting import validate
from dprc.accounting.scale import ScaleLaw


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step as the adversary may know it: the public settings of the mechanism.

    Attributes:
        noise_multiplier: Noise standard deviation on the sum, in units of the clipping threshold.
        sample_rate: Poisson inclusion probability.
        law: The law of the ratio of squared norms.
        sketch: ``"shared"`` or ``"per_sample"``; ``"none"`` for the exact law.
        analysis: ``"tight"`` or ``"envelope"``; always ``"tight"`` for the exact law.
    """

    noise_multiplier: float
    sample_rate: float
    law: ScaleLaw
    sketch: str
    analysis: str

    @classmethod
    def create(
        cls,
        *,
        noise_multiplier: float,
        sample_rate: float,
        law: ScaleLaw,
        sketch: str,
        analysis: str,
    ) -> "StepEvent":
        """Check the settings and drop those that an exact law ignores.

        Raises:
            ValueError: A setting is out of range, or envelope is asked for per-sample sketches.
            PrivacyError: The law has fewer than 4 probes.
        """
        noise = validate.noise_multiplier(noise_multiplier, allow_zero=True)
        rate = validate.sample_rate(sample_rate)
        validate.sketch_and_analysis(sketch, analysis, law)
        law.require_private()
        if law.is_exact:
            sketch, analysis = "none", "tight"
        return cls(noise, rate, law, sketch, analysis)


class Accountant:
    """Counts optimizer steps, and turns the counts into (ε, δ) when asked.

    Recording only counts; everything is computed when it is asked for, and kept until the next
    step. The settings may change between steps.

    Example:
        >>> accountant = Accountant()
        >>> accountant.step(
        ...     noise_multiplier=1.0, sample_rate=0.01, law=ScaleLaw.chi2(32),
        ...     sketch="per_sample", analysis="tight", count=100,
        ... )
        >>> accountant.steps
        100
    """

    def __init__(self) -> None:
        self._counts: Counter[StepEvent] = Counter()

    @property
    def steps(self) -> int:
        """The number of steps recorded."""
        return self._counts.total()

    def step(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        law: ScaleLaw,
        sketch: str,
        analysis: str,
        count: int = 1,
    ) -> None:
        """Record ``count`` optimizer steps with these settings."""
        event = StepEvent.create(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            law=law,
            sketch=sketch,
            analysis=analysis,
        )
        self._counts[event] += validate.positive_int("count", count)

    def epsilon(self, delta: float) -> float:
        """The upper bound on ε at this δ for all steps recorded; inf after a step without noise."""
        raise NotImplementedError

    def delta(self, epsilon: float) -> float:
        """The upper bound on δ at this ε."""
        raise NotImplementedError

    def epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """Lower and upper bound on ε at this δ."""
        raise NotImplementedError

    def privacy_loss_distribution(self) -> Any:
        """The composed privacy loss distribution, as an object of dp_accounting."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What was recorded, as plain values that JSON can hold."""
        return {
            "version": 1,
            "steps": [{**asdict(event), "count": count} for event, count in self._counts.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace what was recorded by a saved state.

        Raises:
            ValueError: The state is not one that state_dict made.
        """
        if state.get("version") != 1:
            raise ValueError(f"state version must be 1, got {state.get('version')!r}")
        counts: Counter[StepEvent] = Counter()
        for entry in state["steps"]:
            settings = {**entry, "law": ScaleLaw(**entry["law"])}
            count = validate.positive_int("count", settings.pop("count"))
            counts[StepEvent(**settings)] += count
        self._counts = counts
