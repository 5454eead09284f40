"""What a trained model promises: the facts as JSON, and a card that goes with the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dprc.engine import PrivacyEngine
from dprc.results import write_json_atomic, write_text_atomic

COVERED = (
    "The parameters in this folder, and all parameters after every single step, together. "
    "Whatever is computed from them alone is covered too."
)
ASSUMED = (
    "one training document is one privacy unit, and no document is there twice",
    "the number of training documents is public: the expected batch size tells it",
    "Gaussian noise is exact; floating-point noise and its generator are not cryptographic",
    "the random keys of the run are secret: nobody has its checkpoints",
)
NOT_COVERED = (
    "everything that is named nonprivate: columns of steps.csv and evaluations.csv, metrics in "
    "metrics.json, curves in TensorBoard",
    "the choice of hyper-parameters, of the number of steps, or of one run among several, by "
    "looking at results on the training documents",
    "scores on the test documents: nothing protects those documents",
    "checkpoints: they hold the keys of the noise, and are as sensitive as the data",
    "time and memory that a run took, which depend on the documents drawn",
    "documents that a frozen base model was trained on before",
)


def privacy_facts(
    engine: PrivacyEngine, *, delta: float, epsilon_target: float | None
) -> dict[str, Any]:
    """Return what was promised and with which parameters.

    Args:
        engine: After its steps.
        delta: What ε is computed for.
        epsilon_target: What the noise was calibrated for; None where it was given.

    ``dprc epsilon`` gives the same ``epsilon`` for ``noise_multiplier``, ``delta``,
    ``sample_rate``, ``steps``, ``accounted_estimator``, ``num_probes``, ``head_rank``, ``sketch``
    and ``analysis`` (those that are not null).
    """
    exact = engine.law.is_exact
    return {
        "epsilon": engine.epsilon(delta),
        "epsilon_target": epsilon_target,
        "delta": delta,
        "noise_multiplier": engine.noise_multiplier,
        "max_grad_norm": engine.max_grad_norm,
        "sample_rate": engine.sample_rate,
        "expected_batch_size": engine.expected_batch_size,
        "steps": engine.accountant.steps,
        "mechanism": "DP-SGD: Poisson sampling, clipping of each sample's gradient, Gaussian noise",
        "estimator": engine.estimator.name,
        # A model whose norms are all formed exactly pays for no estimate.
        "accounted_estimator": "exact" if exact else engine.estimator.name,
        "num_probes": engine.law.num_probes,
        "head_rank": None if exact else getattr(engine.estimator, "head_rank", None),
        "sketch": None if exact else engine.sketch,
        "analysis": engine.analysis,
        "adjacency": "add/remove one document",
        "sampled_by_loader": engine.sampled_by_loader,
        "releasable": engine.releasable,
    }


def write_card(folder: Path, facts: Mapping[str, Any] | None) -> None:
    """Write PRIVACY.md and, for a private run, privacy.json beside a model.

    Args:
        folder: Of the model.
        facts: Of ``privacy_facts``; None for a run without privacy.
    """
    if facts is None:
        write_text_atomic(
            folder / "PRIVACY.md",
            "# Privacy\n\nThis model was trained WITHOUT privacy. It may reveal any of its "
            "training documents.\n",
        )
        return
    limits = {"covered": COVERED, "assumed": list(ASSUMED), "not_covered": list(NOT_COVERED)}
    write_json_atomic(folder / "privacy.json", {**facts, **limits})
    write_text_atomic(folder / "PRIVACY.md", card_text(facts))


def card_text(facts: Mapping[str, Any]) -> str:
    """Return the card of a private run in words."""
    verdict = (
        "The random keys came from the operating system, so the model may be released under the "
        "guarantee below."
        if facts["releasable"]
        else "NOT RELEASABLE: the run had a fixed privacy_seed. Whoever knows it can compute the "
        "noise and undo the privacy. It is a reproduction, not a private release."
    )
    if not facts["sampled_by_loader"]:
        verdict += " NOT PROVEN: some steps were not sampled by the engine's own loader."
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value is not None)
    assumed = "\n".join(f"- {line}" for line in ASSUMED)
    not_covered = "\n".join(f"- {line}" for line in NOT_COVERED)
    return f"""# Privacy

This model is (ε, δ)-differentially private with ε = {facts["epsilon"]:.6g} and
δ = {facts["delta"]:g}, under adding or removing one training document.

{verdict}

| fact | value |
|---|---|
{rows}

## Covered

{COVERED}

## Assumed

{assumed}

## Not covered

{not_covered}
"""
