"""One training run: from typed settings to a result file."""

import csv
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from dprc import accounting, losses, tasks
from dprc.engine import PrivacyEngine
from dprc.errors import PrivacyError
from dprc.models import load_classifier
from dprc.noise import Stream
from dprc.results import write_result, write_text_atomic
from dprc.sampling import LogicalBatch, PlainSampler, PoissonLoader
from dprc.settings import PrivacySettings, RunSettings, TrainingSettings
from dprc.tasks import Example

_EVALUATION_BATCH = 128


class TokenisedExamples:
    """Examples as ids, cut to a number of tokens; each is tokenised alone.

    Args:
        examples: Documents.
        tokenizer: A Hugging Face tokenizer.
        max_tokens: Tokens kept from the start of each document.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Any, max_tokens: int) -> None:
        encoded = tokenizer(
            [example.text for example in examples], truncation=True, max_length=max_tokens
        )
        self._ids: list[list[int]] = encoded["input_ids"]
        self._labels = [example.label for example in examples]
        self._pad = tokenizer.pad_token_id

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        """Return the ids and the label of one document."""
        return self._ids[index], self._labels[index]

    def collate(self, items: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        """Pad to the longest; masked positions change no sample's loss."""
        longest = max(len(ids) for ids, _ in items)
        ids = torch.full((len(items), longest), self._pad)
        mask = torch.zeros(len(items), longest, dtype=torch.long)
        for row, (tokens, _) in enumerate(items):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        labels = torch.tensor([label for _, label in items])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def accuracy(model: nn.Module, examples: TokenisedExamples) -> float:
    """Return the fraction of documents whose label is predicted."""
    model.eval()
    right = 0
    for start in range(0, len(examples), _EVALUATION_BATCH):
        stop = min(start + _EVALUATION_BATCH, len(examples))
        batch = examples.collate([examples[i] for i in range(start, stop)])
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(-1) == labels).sum())
    model.train()
    return right / len(examples)


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
    dataset = tasks.load_dataset(Path(settings.task.data), tasks.get(settings.task.name).name)
    model, tokenizer = load_classifier(
        Path(settings.model.path), len(dataset.label_names), settings.seed
    )
    length = settings.task.max_tokens
    limit = model.backbone.config.max_position_embeddings
    if length > limit:
        raise ValueError(f"task.max_tokens: the model has {limit} positions, got {length}")
    train_examples = TokenisedExamples(dataset.train, tokenizer, length)
    test_examples = TokenisedExamples(dataset.test, tokenizer, length)

    started, log = time.perf_counter(), StepLog()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # dropout, if the model has any
        engine = _fit(model, train_examples, settings, log, show_progress)
    train_seconds = time.perf_counter() - started

    metrics = {
        "test_accuracy": accuracy(model, test_examples),
        "nonprivate_train_accuracy": accuracy(model, train_examples),
        "majority_accuracy": _majority(dataset),
        "train_documents": len(train_examples),
        "test_documents": len(test_examples),
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


def _majority(dataset: tasks.Dataset) -> float:
    labels = [example.label for example in dataset.test]
    return max(labels.count(label) for label in set(labels)) / len(labels)


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
    model: nn.Module,
    examples: TokenisedExamples,
    settings: RunSettings,
    log: StepLog,
    show_progress: bool,
) -> PrivacyEngine | None:
    """Train in place; return the engine of a private run."""
    training = settings.training
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

        _loop(model, loader, backward, step, scheduler, log, show_progress)
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
    _loop(model, loader, engine.backward, engine.step, scheduler, log, show_progress)
    return engine


def _loop(
    model: nn.Module,
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
            values = losses.classification_loss(model, batch)
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
