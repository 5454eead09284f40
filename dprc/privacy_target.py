"""From a privacy target and a method to the noise and the engine of a run."""

from typing import Any

import torch
from torch import nn

from dprc import accounting, estimators
from dprc.arguments import randomized_name
from dprc.engine import PrivacyEngine
from dprc.errors import PrivacyError
from dprc.processes import Processes
from dprc.settings import MethodSettings, PrivacySettings, RunSettings, TrainingSettings


def clipping_options(method: MethodSettings) -> dict[str, Any]:
    """Return the arguments that calibration and engine share.

    Raises:
        ValueError: An unknown estimator, or an option that it does not have.
    """
    options = method.accounting()
    made = {"num_probes", "sketch", "head_rank"} & set(options)
    try:
        name = randomized_name(method.estimator, method.head_rank)
        estimator = estimators.get(name, **{key: options[key] for key in made})
    except ValueError as error:
        raise ValueError(f"method.{error}") from None
    for key in ("num_probes", "sketch"):
        if key in options and not estimator.randomized:
            raise ValueError(
                f"method.{key}: the norms of {name!r} are not estimated; leave it out, got "
                f"{options[key]!r}"
            )
    return options


def calibrated_noise(
    privacy: PrivacySettings, training: TrainingSettings, clipping: dict[str, Any]
) -> float:
    """Return the noise multiplier of a run: calibrated, or the given one after a check.

    Args:
        privacy: The target.
        training: Sampling rate and steps.
        clipping: What ``clipping_options`` gives; ``"auto"`` is charged like the randomized
            estimator among its choices, for nothing that it may choose has a worse law.

    Raises:
        PrivacyError: The given one does not reach the target.
        ValueError: Options that do not fit together, or a target that no noise reaches.
    """
    run = _charged(privacy, training, clipping)
    if privacy.noise_multiplier is None:
        return accounting.noise_multiplier(epsilon=privacy.epsilon, **run)
    reached = accounting.epsilon(noise_multiplier=privacy.noise_multiplier, **run)
    if reached > privacy.epsilon:
        raise PrivacyError(
            f"privacy.noise_multiplier: {privacy.noise_multiplier} gives epsilon {reached:.4f}, "
            f"above the target {privacy.epsilon}. Leave it out to have it calibrated."
        )
    return privacy.noise_multiplier


def check_target(settings: RunSettings) -> None:
    """Refuse, before anything slow, a method or a target that no run can have.

    Raises:
        PrivacyError: The given noise does not reach the target, or the estimator has no law.
        ValueError: An unknown estimator or analysis, or options that do not fit together.
    """
    method, privacy, training = settings.method, settings.privacy, settings.training
    if method is None or privacy is None:
        return
    clipping = clipping_options(method)
    if privacy.noise_multiplier is not None:
        calibrated_noise(privacy, training, clipping)
    else:
        # Any noise will do to find out whether the options fit; calibration takes much longer.
        accounting.epsilon(noise_multiplier=1.0, **_charged(privacy, training, clipping))


def _charged(
    privacy: PrivacySettings, training: TrainingSettings, clipping: dict[str, Any]
) -> dict[str, Any]:
    """Return what accounting is asked about; of "auto", its worst choice."""
    estimator = clipping["estimator"]
    return {
        "delta": privacy.delta,
        "sample_rate": training.sample_rate,
        "steps": training.steps,
        **clipping,
        "estimator": randomized_name(estimator, clipping.get("head_rank")),
    }


def make_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: RunSettings,
    *,
    expected_batch_size: float,
    processes: Processes | None = None,
) -> PrivacyEngine:
    """Return the engine of a private run.

    Args:
        model: Its trained parameters are those of ``optimizer``.
        optimizer: Of the run.
        settings: With a method and a privacy target.
        expected_batch_size: The sampling rate times the public number of training examples.
        processes: Those that train the model together; None for this one alone.

    Raises:
        PrivacyError: Parameters or modules that cannot be protected, or too little noise.
        ValueError: The run is not private, or an option is out of range.
    """
    method, privacy, training = settings.method, settings.privacy, settings.training
    if method is None or privacy is None:
        raise ValueError("settings: a run without method and privacy has no engine")
    clipping = clipping_options(method)
    options: dict[str, Any] = {
        "max_grad_norm": privacy.max_grad_norm,
        "sample_rate": training.sample_rate,
        "expected_batch_size": expected_batch_size,
        "schedule": method.schedule,
        "max_tokens": settings.task.max_tokens,
        "privacy_seed": settings.privacy_seed,
        "processes": processes,
        **clipping,
    }
    if privacy.noise_multiplier is not None:
        noise = calibrated_noise(privacy, training, clipping)
        return PrivacyEngine(model, optimizer, noise_multiplier=noise, **options)
    return PrivacyEngine.with_epsilon(
        model,
        optimizer,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        steps=training.steps,
        **options,
    )
