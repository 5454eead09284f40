"""What was done to the data, step by step, and what it costs in privacy."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dprc.accounting import prv, validate
from dprc.accounting.compose import DEFAULT_TOLERANCE, Composition, Part
from dprc.accounting.events import StepEvent
from dprc.accounting.scale import ScaleLaw
from dprc.accounting.step import step_curves
from dprc.errors import PrivacyError

_STATE_KEYS = {"noise_multiplier", "sample_rate", "law", "sketch", "analysis", "count"}


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
        self._answers: dict[Hashable, Any] = {}

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
        """Record ``count`` optimizer steps with these settings.

        Args:
            noise_multiplier: At least 0; a step with 0 is recorded, and makes ε infinite.
            sample_rate: Poisson inclusion probability in (0, 1].
            law: The law of the model's norm estimate.
            sketch: ``"shared"`` or ``"per_sample"``; ignored for the exact law.
            analysis: ``"tight"`` or ``"envelope"``; ignored for the exact law.
            count: Number of steps.

        Raises:
            ValueError: A setting is out of range or does not fit another.
            PrivacyError: The law has fewer than 4 probes.
        """
        event = StepEvent.create(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            law=law,
            sketch=sketch,
            analysis=analysis,
        )
        self._counts[event] += validate.positive_int("count", count)
        self._answers.clear()

    def epsilon(self, delta: float, *, tolerance: float = DEFAULT_TOLERANCE) -> float:
        """The upper bound on ε at this δ for all steps recorded.

        Args:
            delta: In (0, 1).
            tolerance: Relative excess that the lattice may cause, in (0, 1).

        Returns:
            ε ≥ 0; 0 before the first step, inf after a step without noise.

        Raises:
            ValueError: delta or tolerance is out of range.
            PrivacyError: delta is so small that floating-point error could decide it.

        Guarantee:
            All steps together are (ε, delta)-differentially private under adding or removing one
            sample, in floating-point arithmetic too (docs/theory.md, Theorem 9).
        """
        delta, tolerance = validate.delta(delta), validate.tolerance(tolerance)
        answer: float = self._answer(
            ("epsilon", delta, tolerance),
            lambda: _larger_epsilon(self._compositions(tolerance), delta),
            nothing=0.0,
            everything=math.inf,
        )
        return answer

    def delta(self, epsilon: float) -> float:
        """The upper bound on δ at this ε ≥ 0 for all steps recorded.

        Raises:
            ValueError: epsilon is negative or not finite.

        Guarantee:
            As for ``epsilon``.
        """
        epsilon = validate.real("epsilon", epsilon)
        if epsilon < 0:
            raise ValueError(f"epsilon must be at least 0, got {epsilon!r}")
        answer: float = self._answer(
            ("delta", epsilon),
            lambda: max(float(c.delta(epsilon)) for c in self._compositions(DEFAULT_TOLERANCE)),
            nothing=0.0,
            everything=1.0,
        )
        return answer

    def epsilon_bounds(self, delta: float, *, head_rank: int | None = None) -> tuple[float, float]:
        """Lower and upper bound on ε at this δ.

        The lower one belongs to a gradient that exists; no analysis of this mechanism can claim
        less. Its rank is one where a law has no head, and 2r for a head of rank r.

        Args:
            delta: In (0, 1).
            head_rank: Of hutchpp in every parameter and step, if the laws recorded do not know of
                it: without it the lower bound would be one of Hutchinson's estimator.

        Raises:
            RuntimeError: The two contradict each other, which would prove a defect.

            Else as for ``epsilon``.
        """
        upper = self.epsilon(delta)
        lower = self._answer(
            ("lower", delta, head_rank),
            lambda: self._lower_epsilon(delta, head_rank),
            nothing=0.0,
            everything=math.inf,
        )
        if lower > upper:
            raise RuntimeError(
                f"the lower bound {lower!r} on epsilon is above the upper one {upper!r}: a defect "
                "of the accounting; do not use its answers, and report these steps"
            )
        return lower, upper

    def privacy_loss_distribution(self) -> Any:
        """The composed privacy loss distribution as dp_accounting's object, to compose further.

        Returns:
            ``dp_accounting.pld.privacy_loss_distribution.PrivacyLossDistribution``, pessimistic.

        Raises:
            PrivacyError: Nothing was recorded, or a step had no noise.

        Guarantee:
            Its δ(ε) is an upper bound. Composing it further in dp_accounting adds that library's
            own floating-point error, which it does not bound.
        """
        if not self._counts or self._noiseless:
            raise PrivacyError(
                "a privacy loss distribution needs at least one step, each with a noise_multiplier "
                f"above 0; recorded: {self.steps} steps"
            )
        return self._answer(("pld",), self._export)

    @property
    def _noiseless(self) -> bool:
        return any(event.noise_multiplier == 0 for event in self._counts)

    def _answer(
        self,
        question: Hashable,
        compute_fn: Callable[[], Any],
        *,
        nothing: Any = None,
        everything: Any = None,
    ) -> Any:
        """Compute once per recorded history."""
        if not self._counts:
            return nothing
        if self._noiseless:
            return everything
        if question not in self._answers:
            self._answers[question] = compute_fn()
        return self._answers[question]

    def _compositions(self, tolerance: float) -> tuple[Composition, Composition]:
        """Both directions of the neighbouring relation: remove and add."""
        coarseness = max(1.0, min(4.0, tolerance / DEFAULT_TOLERANCE))
        curves = [(step_curves(event, coarseness), n) for event, n in self._counts.items()]
        return (
            Composition([Part(c.remove, c.add, n) for c, n in curves], tolerance),
            Composition([Part(c.add, c.remove, n) for c, n in curves], tolerance),
        )

    def _lower_epsilon(self, delta: float, head_rank: int | None) -> float:
        if head_rank is None:
            return float(prv.epsilon_interval(self._counts, delta).lower)
        rank = validate.positive_int("head_rank", head_rank)

        def witness_fn(law: ScaleLaw) -> prv.Witness:
            if law.kind != "chi2" or law.num_probes is None:
                return prv.witness_of(law)
            return prv.Witness.flat(rank, law.num_probes)

        return float(prv.epsilon_interval(self._counts, delta, witness_fn).lower)

    def _export(self) -> Any:
        from dp_accounting.pld import pld_pmf, privacy_loss_distribution

        remove, add = self._compositions(DEFAULT_TOLERANCE)
        # One interval for both: the finer that suits, if neither gets too long.
        suiting, least = zip(remove.export_interval(), add.export_interval(), strict=True)
        interval = max(*least, min(suiting))
        pmfs = []
        for composition in (remove, add):
            start, masses, infinite = composition.masses(interval)
            pmfs.append(pld_pmf.DensePLDPmf(interval, start, masses, infinite, True))
        return privacy_loss_distribution.PrivacyLossDistribution(*pmfs)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded, as plain values that JSON can hold."""
        return {
            "version": 1,
            "steps": [
                {**vars(event), "law": event.law.as_dict(), "count": count}
                for event, count in self._counts.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace what was recorded by a saved state.

        Raises:
            ValueError: The state is not one that state_dict made, or a setting in it is one that
                ``step`` refuses.
            PrivacyError: A law in it has fewer than 4 probes, or no certificate in this version.
        """
        if state.get("version") != 1 or not isinstance(state.get("steps"), list):
            raise ValueError(f"state must be one that state_dict made, got {state!r}")
        counts: Counter[StepEvent] = Counter()
        for entry in state["steps"]:
            if not isinstance(entry, dict) or set(entry) != _STATE_KEYS:
                raise ValueError(f"state has a step {entry!r}; its keys must be {_STATE_KEYS}")
            settings = dict(entry)
            count, law = settings.pop("count"), settings.pop("law")
            # Nothing that could not have been recorded may be loaded.
            event = StepEvent.create(law=ScaleLaw.from_dict(law), **settings)
            counts[event] += validate.positive_int("count", count)
        self._counts = counts
        self._answers.clear()


def _larger_epsilon(directions: Sequence[Composition], delta: float) -> float:
    """The larger ε of the directions; one that floating-point error decides may be known smaller.

    Raises:
        PrivacyError: A direction is refused that may have the larger ε.
    """
    largest = 0.0
    refused: list[tuple[Composition, PrivacyError]] = []
    for direction in directions:
        try:
            largest = max(largest, float(direction.epsilon(delta)))
        except PrivacyError as refusal:
            refused.append((direction, refusal))
    for direction, reason in refused:
        if direction.ceiling(delta) > largest:
            raise reason
    return largest
