"""What is audited, and how long."""

from dataclasses import dataclass

from dprc import estimators
from dprc.accounting import validate


@dataclass(frozen=True)
class AuditSettings:
    """Settings of an audit.

    Attributes:
        estimator: A name of ``dprc.estimators.names()``.
        num_probes: As for ``PrivacyEngine``.
        head_rank: As for ``PrivacyEngine``.
        sketch: ``"per_sample"`` or ``"shared"``.
        analysis: ``"tight"`` or ``"envelope"``.
        schedule: ``"two_pass"`` or ``"book_keeping"``.
        epsilon: Target of one step at ``delta``; the noise is calibrated for it.
        delta: At which one step is bounded. At 1e-5 no attack shows much in thousands of trials.
        sample_rate: Poisson inclusion probability of the step.
        trials: Noisy steps on the pair.
        structure_steps: Noisy steps of each kind from which sketches, noise and sensitivity are
            looked at.
        canaries: Of the run that is audited as a whole; 0 leaves it out.
        run_steps: Steps of that run.
        run_delta: δ at which that run is bounded.
        confidence: Probability with which all statements of the report hold together.
        seed: None takes randomness from the operating system; an int repeats an audit.

    Raises:
        ValueError: A number out of range or an unknown name.
    """

    estimator: str = "hutchinson"
    num_probes: int = 32
    head_rank: int | None = None
    sketch: str = "per_sample"
    analysis: str = "tight"
    schedule: str = "two_pass"
    epsilon: float = 2.0
    delta: float = 1e-2
    sample_rate: float = 1.0
    trials: int = 30_000
    structure_steps: int = 150
    canaries: int = 1000
    run_steps: int = 8
    run_delta: float = 1e-5
    confidence: float = 0.95
    seed: int | None = None

    def __post_init__(self) -> None:
        known = estimators.names()
        if self.estimator not in known:
            raise ValueError(
                f"estimator: must be one of {', '.join(known)}, got {self.estimator!r}"
            )
        validate.epsilon(self.epsilon)
        for name in ("delta", "run_delta"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}: must be in (0, 1), got {getattr(self, name)!r}")
        validate.sample_rate(self.sample_rate)
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence: must be in [0.5, 1), got {self.confidence!r}")
        for name, least in (("trials", 200), ("structure_steps", 20), ("run_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: must be at least {least}, got {getattr(self, name)}")
        if self.canaries != 0 and self.canaries < 16:
            raise ValueError(f"canaries: must be 0 or at least 16, got {self.canaries}")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed: must not be negative, got {self.seed}")
