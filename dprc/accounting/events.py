"""What one optimizer step reveals of itself."""

from dataclasses import dataclass

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
        if analysis == "envelope":
            # The paper's analysis gives a head no credit.
            law = law.without_heads
        return cls(noise, rate, law, sketch, analysis)
