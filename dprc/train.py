"""One training run: from typed settings to a result file."""

import csv
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from dprc import accounting
from dprc.engine import PrivacyEngine
from dprc.errors import PrivacyError
from dprc.noise import Stream
from dprc.results import write_result, write_text_atomic
from dprc.sampling import LogicalBatch, PlainSampler, PoissonLoader
from dprc.settings import PrivacySettings, RunSettings, TrainingSettings
from dprc.workload import Workload, prepare_workload


@dataclass
class StepLog:
    """What is written for each step. Everything but the step is computed from private data."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def text(self) -> str:
        """Return CSV; the names say what is not private."""
        handle = io.StringIO()
        columns = ["step", "nonprivate_batch_size", "nonprivate_mean_loss", "seconds"]
        writer = csv.DictWriter(handle, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return handle.getvalue()


def make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            trained, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
    return torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)


def make_scheduler(
    optimizer: torch.optim.Optimizer, settings: TrainingSettings
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return linear warm-up, then a constant rate or a linear decay to zero."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        if settings.schedule == "constant":
            return 1.0
        return (settings.steps - step) / max(settings.steps - settings.warmup_steps, 1)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def calibrated_noise(
    privacy: PrivacySettings, training: TrainingSettings, clipping: dict[str, Any]
) -> float:
    """Return the noise multiplier of a run: calibrated, or the given one after a check.

    Raises:
        PrivacyError: The given one does not reach the target.
    """
    run = {"sample_rate": training.sample_rate, "steps": training.steps, **clipping}
    if privacy.noise_multiplier is None:
        return accounting.noise_multiplier(epsilon=privacy.epsilon, delta=privacy.delta, **run)
    reached = accounting.epsilon(
        noise_multiplier=privacy.noise_multiplier, delta=privacy.delta, **run
    )
    if reached > privacy.epsilon:
        raise PrivacyError(
            f"privacy.noise_multiplier: {privacy.noise_multiplier} gives epsilon {reached:.4f}, "
            f"above the target {privacy.epsilon}. Leave it out to have it calibrated."
        )
    return privacy.noise_multiplier


def train(settings: RunSettings, folder: Path, *, show_progress: bool = False) -> dict[str, Any]:
    """Train, evaluate on the test split and write the result.

    Args:
        settings: Of the run.
        folder: Gets settings.yaml, steps.csv and, last, metrics.json.
        show_progress: Whether to draw a progress bar on standard error.

    Returns:
        The metrics that metrics.json holds.

    Raises:
        PrivacyError: The run would break its guarantee.
        ValueError: A setting out of range.
        FileNotFoundError: Data or model are not prepared.
    """
    # Before anything is trained: a folder that cannot be written would lose the run.
    folder.mkdir(parents=True, exist_ok=True)
    workload = prepare_workload(settings)
    model = workload.model

    started, log = time.perf_counter(), StepLog()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # dropout, if the model has any
        engine = _fit(workload, settings, log, show_progress)
    train_seconds = time.perf_counter() - started

    metrics = {
        **workload.evaluate(),
        "train_documents": len(workload.train),
        "test_documents": len(workload.test),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "steps": settings.training.steps,
        "train_seconds": train_seconds,
    }
    if not math.isfinite(log.rows[-1]["nonprivate_mean_loss"]):
        raise ValueError("training diverged: the last loss is not finite; lower learning_rate")
    privacy = None
    if engine is not None and settings.privacy is not None:
        metrics["nonprivate_clipped_fraction"] = engine.clipped_samples / max(
            sum(row["nonprivate_batch_size"] for row in log.rows), 1
        )
        privacy = _privacy_section(engine, settings.privacy, settings.training)
        engine.detach()
    write_text_atomic(folder / "settings.yaml", yaml.safe_dump(settings.model_dump()))
    write_text_atomic(folder / "steps.csv", log.text())
    write_result(
        folder / "metrics.json", config=settings.model_dump(), metrics=metrics, privacy=privacy
    )
    return metrics


def _privacy_section(
    engine: PrivacyEngine, privacy: PrivacySettings, training: TrainingSettings
) -> dict[str, Any]:
    return {
        "epsilon": engine.epsilon(privacy.delta),
        "epsilon_target": privacy.epsilon,
        "delta": privacy.delta,
        "noise_multiplier": engine.noise_multiplier,
        "max_grad_norm": engine.max_grad_norm,
        "sample_rate": training.sample_rate,
        "steps": engine.accountant.steps,
        "estimator": engine.estimator.name,
        "num_probes": engine.law.num_probes,
        "sketch": None if engine.law.is_exact else engine.sketch,
        "analysis": engine.analysis,
        "adjacency": "add/remove one document",
        "sampled_by_loader": engine.sampled_by_loader,
        "releasable": engine.releasable,
    }


def _fit(
    workload: Workload, settings: RunSettings, log: StepLog, show_progress: bool
) -> PrivacyEngine | None:
    """Train in place; return the engine of a private run."""
    training, model, examples = settings.training, workload.model, workload.train
    optimizer = make_optimizer(model, training)
    scheduler = make_scheduler(optimizer, training)
    model.train()
    batch_size = training.sample_rate * len(examples)
    if settings.method is None or settings.privacy is None:
        loader = PoissonLoader(
            examples,
            PlainSampler(Stream((settings.seed, 0)), training.sample_rate),
            steps=training.steps,
            max_physical_batch=training.max_physical_batch,
            collate_fn=examples.collate,
        )

        def backward(values: torch.Tensor) -> None:
            torch.autograd.backward(values.sum() / batch_size)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        _loop(workload, loader, backward, step, scheduler, log, show_progress)
        return None

    clipping = settings.method.accounting()
    engine = PrivacyEngine(
        model,
        optimizer,
        max_grad_norm=settings.privacy.max_grad_norm,
        noise_multiplier=calibrated_noise(settings.privacy, training, clipping),
        sample_rate=training.sample_rate,
        expected_batch_size=batch_size,
        schedule=settings.method.schedule,
        privacy_seed=settings.privacy_seed,
        **clipping,
    )
    loader = engine.poisson_loader(
        examples,
        steps=training.steps,
        max_physical_batch=training.max_physical_batch,
        collate_fn=examples.collate,
    )
    _loop(workload, loader, engine.backward, engine.step, scheduler, log, show_progress)
    return engine


def _loop(
    workload: Workload,
    loader: PoissonLoader,
    backward: Callable[[torch.Tensor], None],
    step: Callable[[], None],
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    log: StepLog,
    show_progress: bool,
) -> None:
    for logical_batch in _with_progress(loader, show_progress):
        started, total = time.perf_counter(), 0.0
        for batch in logical_batch:
            values = workload.losses(batch)
            backward(values)
            total += float(values.detach().nan_to_num(posinf=0.0).sum())
        step()
        scheduler.step()
        log.rows.append(
            {
                "step": logical_batch.step,
                "nonprivate_batch_size": len(logical_batch),
                "nonprivate_mean_loss": total / max(len(logical_batch), 1),
                "seconds": round(time.perf_counter() - started, 4),
            }
        )


def _with_progress(loader: PoissonLoader, show: bool) -> Iterator[LogicalBatch]:
    if not show:
        yield from loader
        return
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("training"), *columns) as progress:
        yield from progress.track(loader, total=len(loader))
