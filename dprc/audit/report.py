"""An audit: experiments, detectors, bounds, and the report of them."""

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dprc import accounting
from dprc.audit import detectors
from dprc.audit.bounds import (
    EpsilonBound,
    Flags,
    best_lower_bound,
    choose_event,
    gaussian_mu_lower_bound,
)
from dprc.audit.detectors import Answer, Finding
from dprc.audit.experiments import (
    PairTrials,
    Record,
    Run,
    Structure,
    run_pairs,
    run_structure,
    run_training,
)
from dprc.audit.one_run import count_right, one_run_epsilon
from dprc.audit.rig import ProgressFn, canary_rank
from dprc.audit.settings import AuditSettings

Array = npt.NDArray[np.float64]

# Of all canaries, about which a guess is made. Fixed before anything is seen.
GUESSED_SHARE = 1 / 8
# Trials of the claimed mechanism on which the attack is chosen.
SIMULATED = 400_000

QUESTIONS = {
    "epsilon": "can an attack on one step show more than the claimed epsilon",
    "one_run": "can an attack on one training run show more than the claimed epsilon",
    "sensitivity": "is a canary in each parameter clipped to the bound",
    "noise_scale": "is noise as large as accounted, for any number of micro-batches",
    "noise_shape": "is noise Gaussian",
    "noise_freshness": "is noise new in each step",
    "scale_law": "do estimated norms follow the law that was accounted for",
    "sketch_sharing": "do all samples and micro-batches of a step share the sketch",
    "sketch_independence": "has each sample of a step a sketch of its own",
    "sketch_freshness": "is the sketch new in each step",
    "sampling": "are samples drawn independently, as often as accounted",
    "optimizer_guard": "is an optimizer step outside the engine refused",
    "accounting": "was each step accounted for",
}


@dataclass(frozen=True)
class RunBound:
    """The bound of one training run with many canaries."""

    epsilon_lower_bound: float
    epsilon_claimed: float
    delta: float
    steps: int
    canaries: int
    guesses: int
    right: int

    @property
    def tightness(self) -> float:
        """Lower bound over claim."""
        return self.epsilon_lower_bound / self.epsilon_claimed


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes:
        settings: Of the audit.
        noise_multiplier: σ of the step, calibrated for the settings' target.
        epsilon_claimed: What the engine's accountant claims for one step at ``settings.delta``.
        bound: What the attack on one step shows.
        gaussian_mu: Lower bound on μ; None outside the family of Gaussian steps (exact norms,
            every sample taken).
        gaussian_epsilon: ε that this μ gives at ``settings.run_delta``, in that family alone.
        run: The audit of a whole run; None where it was left out.
        findings: One for each detector.
        cpu_seconds: Processor time of the audit.

    Guarantee: where the engine does what was accounted, some finding is refuted with probability at
        most 1 - confidence; and with probability at least confidence all lower bounds hold.
    """

    settings: AuditSettings
    noise_multiplier: float
    epsilon_claimed: float
    bound: EpsilonBound
    gaussian_mu: float | None
    gaussian_epsilon: float | None
    run: RunBound | None
    findings: tuple[Finding, ...]
    cpu_seconds: float

    @property
    def refuted(self) -> tuple[str, ...]:
        """Names of the detectors that refute the claim."""
        return tuple(finding.name for finding in self.findings if finding.refuted)

    @property
    def tightness(self) -> float:
        """Lower bound over claim."""
        return self.epsilon_lower_bound / self.epsilon_claimed

    @property
    def epsilon_lower_bound(self) -> float:
        """Lower bound on ε of one step at ``settings.delta``."""
        return self.bound.epsilon

    def as_dict(self) -> dict[str, Any]:
        """The report, as values that JSON can hold."""
        event = self.bound.event
        run = None if self.run is None else asdict(self.run) | {"tightness": self.run.tightness}
        return {
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "confidence": self.settings.confidence,
            "epsilon_claimed": self.epsilon_claimed,
            "delta": self.settings.delta,
            "tightness": self.tightness,
            "noise_multiplier": self.noise_multiplier,
            "attack": {
                "event": event.kind,
                "guess_present_from": event.high if math.isfinite(event.high) else None,
                "guess_absent_to": event.low if math.isfinite(event.low) else None,
                "trials": self.bound.trials,
            },
            "gaussian_mu_lower_bound": self.gaussian_mu,
            "gaussian_epsilon_lower_bound": self.gaussian_epsilon,
            "one_run": run,
            "cpu_seconds": self.cpu_seconds,
            "detectors": [finding.as_dict() for finding in self.findings],
            "refuted": list(self.refuted),
        }


def membership_scores(outputs: Array, ratios: Array, record: Record) -> Array:
    """Score trials by a monotone function of the likelihood ratio of the two worlds.

    Known to the adversary: the canary, everything about the other samples, and a shared sketch. Its
    ratio R is then known, so μ = 1/(σ√R), and μx - μ²/2 is the log-likelihood ratio given that
    the canary was drawn. A sketch of each sample stays hidden: the ratio integrated over R
    increases in x (docs/theory.md, Theorem 4), so x itself is the score. Subsampling mixes both
    with the world without the canary, which changes no order.

    Args:
        outputs: (trials,), along the canary's direction, in units of the noise.
        ratios: (trials,), R; NaN where it is not known, which counts as 1.
        record: What was accounted.
    """
    if record.sketch != "shared":
        return outputs
    mu = 1.0 / (record.noise_multiplier * np.sqrt(np.where(np.isnan(ratios), 1.0, ratios)))
    scores: Array = mu * outputs - 0.5 * mu * mu
    return scores


def simulated_scores(record: Record, rank: int, seed: int | None) -> tuple[Array, Flags]:
    """Scores and worlds of the mechanism as claimed, on which the attack's event is chosen."""
    rng = np.random.default_rng(None if seed is None else [seed, 2])
    present = rng.random(SIMULATED) < 0.5
    k = record.num_probes
    ratios = np.ones(SIMULATED)
    if k is not None:
        ratios = (rank - 1 + rng.chisquare(k, SIMULATED) / k) / rank
    drawn = present & (rng.random(SIMULATED) < record.sample_rate)
    outputs = rng.standard_normal(SIMULATED)
    outputs += drawn / (record.noise_multiplier * np.sqrt(ratios))
    return membership_scores(outputs, ratios, record), present


def audit(
    settings: AuditSettings | None = None, *, progress_fn: ProgressFn = lambda _: None
) -> AuditReport:
    """Attack the engine and report how much of its claim the attack can show.

    Args:
        settings: What is audited; the defaults where None.
        progress_fn: Told what is being done.

    Returns:
        The report.

    Raises:
        ValueError: A setting is out of range, or does not fit another.
        PrivacyError: Too few probes for private training.

    Example:
        >>> report = audit(AuditSettings(trials=400, structure_steps=20, canaries=0, seed=0))
        >>> report.epsilon_lower_bound <= report.epsilon_claimed
        True
    """
    settings, start = settings or AuditSettings(), time.process_time()
    mechanism: dict[str, Any] = {
        "sample_rate": settings.sample_rate,
        "estimator": settings.estimator,
        "num_probes": settings.num_probes,
        "sketch": settings.sketch,
        "analysis": settings.analysis,
        "head_rank": settings.head_rank,
    }
    noise = accounting.noise_multiplier(
        epsilon=settings.epsilon, delta=settings.delta, steps=1, **mechanism
    )
    observed: dict[str, PairTrials | Structure | Run] = {}
    structure = run_structure(settings, noise, progress_fn)
    pairs = run_pairs(settings, noise, progress_fn)
    observed |= {"structure": structure, "pair": pairs}
    run = None
    if settings.canaries:
        run_noise = accounting.noise_multiplier(
            epsilon=settings.epsilon,
            delta=settings.run_delta,
            steps=settings.run_steps,
            **mechanism,
        )
        run = run_training(settings, run_noise, progress_fn)
        observed["run"] = run
    known = pairs.ratios[~np.isnan(pairs.ratios)]
    answers = structural_answers(structure, known, canary_rank(settings))
    answers["sampling"] = detectors.sampling(pairs)
    answers["accounting"] = detectors.accounting(observed)

    # Half of what may go wrong belongs to the attack on one step, the rest to all others alike.
    error = 1.0 - settings.confidence
    others = len(answers) + (run is not None) + 1  # and the bound on μ
    level = error / 2 / others
    simulated, worlds = simulated_scores(pairs.record, canary_rank(settings), settings.seed)
    target = {"delta": settings.delta, "confidence": 1.0 - error / 2}
    planned = choose_event(simulated, worlds, trials=settings.trials, **target)
    scores = membership_scores(pairs.outputs, pairs.ratios, pairs.record)
    bound = best_lower_bound(scores, pairs.present, planned, **target)
    claimed = pairs.record.epsilon(settings.delta)
    findings = [
        _bound_finding("epsilon", bound.epsilon, claimed, error / 2),
        *(Finding(n, QUESTIONS[n], a.p_value, level, a.detail) for n, a in answers.items()),
    ]
    run_bound = None
    if run is not None:
        run_bound = bound_run(settings, run, confidence=1.0 - level)
        findings.append(
            _bound_finding(
                "one_run", run_bound.epsilon_lower_bound, run_bound.epsilon_claimed, level
            )
        )
    mu = epsilon_of_mu = None
    if pairs.record.num_probes is None and settings.sample_rate == 1:
        # Halfway: where the errors of the two worlds are equal, nearly the best for any μ.
        middle = 0.5 / pairs.record.noise_multiplier
        mu = gaussian_mu_lower_bound(pairs.outputs, pairs.present, middle, confidence=1.0 - level)
        epsilon_of_mu = _gaussian_epsilon(mu, settings.run_delta)
    return AuditReport(
        settings=settings,
        noise_multiplier=noise,
        epsilon_claimed=claimed,
        bound=bound,
        gaussian_mu=mu,
        gaussian_epsilon=epsilon_of_mu,
        run=run_bound,
        findings=tuple(findings),
        cpu_seconds=time.process_time() - start,
    )


def structural_answers(structure: Structure, more_ratios: Array, rank: int) -> dict[str, Answer]:
    """Ask every detector of a step's structure that applies to what was accounted for.

    Args:
        structure: What was observed.
        more_ratios: (n,), of other steps, one a step, for the law of the ratio.
        rank: Of the canaries.
    """
    record, ratios = structure.record, structure.ratios
    answers = {
        "sensitivity": detectors.sensitivity(structure.contributions, record),
        "noise_scale": detectors.noise_scale(structure.noise, structure.noise_by_parameter, record),
        "noise_shape": detectors.noise_shape(structure.noise, record),
        "noise_freshness": detectors.noise_freshness(structure.noise),
    }
    # One shared sketch makes one ratio a step; those of one sample each are all independent.
    independent = ratios[:, 0] if record.sketch == "shared" else ratios.ravel()
    of_all = np.concatenate([independent, more_ratios])
    answers["scale_law"] = detectors.scale_law(of_all, record, rank)
    if record.sketch == "shared":
        answers["sketch_sharing"] = detectors.sketch_sharing(ratios)
        answers["sketch_freshness"] = detectors.sketch_freshness(ratios[:, :1])
    elif record.sketch == "per_sample":
        answers["sketch_independence"] = detectors.sketch_independence(ratios, structure.cuts)
        answers["sketch_freshness"] = detectors.sketch_freshness(ratios)
    answers["optimizer_guard"] = detectors.optimizer_guard(structure)
    return answers


def bound_run(settings: AuditSettings, run: Run, *, confidence: float) -> RunBound:
    """Bound the ε of a whole run by the guesses about its canaries."""
    guesses = 2 * max(1, round(settings.canaries * GUESSED_SHARE / 2))
    right = count_right(run.scores, run.included, guesses)
    lower = one_run_epsilon(
        canaries=settings.canaries,
        guesses=guesses,
        right=right,
        delta=settings.run_delta,
        confidence=confidence,
    )
    return RunBound(
        epsilon_lower_bound=lower,
        epsilon_claimed=run.record.epsilon(settings.run_delta, run.record.steps),
        delta=settings.run_delta,
        steps=run.record.steps,
        canaries=settings.canaries,
        guesses=guesses,
        right=right,
    )


def _bound_finding(name: str, lower: float, claimed: float, level: float) -> Finding:
    """A lower bound at error ``level`` refutes a smaller claim."""
    return Finding(
        name,
        QUESTIONS[name],
        p_value=0.0 if lower > claimed else 1.0,
        level=level,
        detail=f"at least {lower:.3f} shown, {claimed:.3f} claimed",
    )


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """ε at δ of the pair N(0,1), N(μ,1): a lower bound, where μ is one."""
    if mu <= 0:
        return 0.0
    lower, _ = accounting.epsilon_bounds(
        noise_multiplier=1.0 / mu, delta=delta, sample_rate=1.0, steps=1, estimator="exact"
    )
    return lower
