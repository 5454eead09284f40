"""What one run trains and how it is scored: a task's text, a model, a loss and a metric."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dprc import losses, metrics, tasks
from dprc.examples import Examples, PromptedExamples, TokenisedExamples
from dprc.generation import evaluating, generate
from dprc.models import load_model, name_labels
from dprc.settings import RunSettings, TaskSettings
from dprc.tasks import Example, Task

Batch = Mapping[str, torch.Tensor]
LossFn = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """Everything of a run that is not training itself.

    Attributes:
        model: To be trained in place; what is not trained does not require gradients.
        tokenizer: Of the model.
        train: Training examples; each item is one privacy unit.
        test: Held-out examples that ``evaluate`` looks at.
        losses: Gives (B,) losses of a collated batch, one per sample, on the model's device.
        evaluate: Gives the metrics of the model as it is now, by their names in metrics.json.
        main_metric: The metric that a run is judged by.
    """

    model: nn.Module
    tokenizer: Any
    train: Examples
    test: Examples
    losses: LossFn
    evaluate: Callable[[], dict[str, float]]
    main_metric: str


def prepare_workload(settings: RunSettings) -> Workload:
    """Load text and model of a run.

    Raises:
        FileNotFoundError: Data or model are not prepared.
        ValueError: A setting out of range, or one that does not fit the task.
    """
    task, options = tasks.get(settings.task.name), settings.task
    dataset = tasks.load_dataset(Path(options.data), task.name)
    model, tokenizer = load_model(
        settings.model,
        num_labels=len(dataset.label_names) if task.kind == "classification" else None,
        max_tokens=options.max_tokens,
        seed=settings.seed,
    )
    if dataset.label_names:
        name_labels(model, dataset.label_names)
    test = dataset.test[: options.evaluation_documents]
    make = _classification if task.kind == "classification" else _generation
    return make(task, options, model, tokenizer, dataset.train, test)


def _classification(
    task: Task,
    options: TaskSettings,
    model: nn.Module,
    tokenizer: Any,
    train: Sequence[Example],
    test: Sequence[Example],
) -> Workload:
    if options.max_new_tokens is not None:
        raise ValueError(f"task.max_new_tokens: task {task.name} predicts labels; leave it out")
    learned = TokenisedExamples(train, tokenizer, options.max_tokens)
    held_out = TokenisedExamples(test, tokenizer, options.max_tokens)

    def evaluate() -> dict[str, float]:
        some = min(options.evaluation_documents or len(learned), len(learned))
        return {
            "test_accuracy": _accuracy(model, held_out, len(held_out), options.evaluation_batch),
            "nonprivate_train_accuracy": _accuracy(model, learned, some, options.evaluation_batch),
            "majority_accuracy": _majority(test),
        }

    return Workload(
        model=model,
        tokenizer=tokenizer,
        train=learned,
        test=held_out,
        losses=_on_device(model, lambda batch: losses.classification_loss(model, batch)),
        evaluate=evaluate,
        main_metric=f"test_{task.main_metric}",
    )


def _generation(
    task: Task,
    options: TaskSettings,
    model: nn.Module,
    tokenizer: Any,
    train: Sequence[Example],
    test: Sequence[Example],
) -> Workload:
    if task.prompt is None:
        raise ValueError(f"task {task.name}: has no prompt to write an answer to")
    learned = PromptedExamples(train, tokenizer, task.prompt, options.max_tokens)
    held_out = PromptedExamples(test, tokenizer, task.prompt, options.max_tokens)
    new_tokens = options.max_new_tokens or task.max_new_tokens
    # Refused before training rather than after it.
    prompts = [held_out.prompt_ids(index, new_tokens) for index in range(len(held_out))]
    loss_fn = _on_device(
        model, lambda batch: losses.causal_lm_loss(model, batch, options.chunk_tokens)
    )
    score_fn = metrics.rouge if task.kind == "summarization" else metrics.question_answering

    def evaluate() -> dict[str, float]:
        written = generate(
            model,
            prompts,
            max_new_tokens=new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            batch_size=options.evaluation_batch,
        )
        texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in written]
        scores = score_fn(texts, [example.answers for example in test])
        return {
            **{f"test_{name}": score for name, score in scores.items()},
            "test_loss": _mean_loss(model, loss_fn, held_out, options.evaluation_batch),
        }

    return Workload(
        model=model,
        tokenizer=tokenizer,
        train=learned,
        test=held_out,
        losses=loss_fn,
        evaluate=evaluate,
        main_metric=f"test_{task.main_metric}",
    )


def _on_device(model: nn.Module, loss_fn: LossFn) -> LossFn:
    """Bring each batch to where the model is when the loss is computed."""

    def on_device(batch: Batch) -> torch.Tensor:
        device = next(model.parameters()).device
        return loss_fn({name: tensor.to(device) for name, tensor in batch.items()})

    return on_device


def _mean_loss(model: nn.Module, loss_fn: LossFn, examples: Examples, batch_size: int) -> float:
    """Return the mean over documents of each one's mean loss over its answer's tokens."""
    total = 0.0
    with evaluating(model):
        for start in range(0, len(examples), batch_size):
            stop = min(start + batch_size, len(examples))
            batch = examples.collate([examples[i] for i in range(start, stop)])
            total += float(loss_fn(batch).sum())
    return total / len(examples)


def _accuracy(model: nn.Module, examples: Examples, count: int, batch_size: int) -> float:
    """Return the fraction of the first ``count`` documents whose label is predicted."""
    predicted: list[int] = []
    labels: list[int] = []
    device = next(model.parameters()).device
    with evaluating(model):
        for start in range(0, count, batch_size):
            stop = min(start + batch_size, count)
            batch = examples.collate([examples[i] for i in range(start, stop)])
            labels += batch.pop("labels").tolist()
            logits = model(**{name: tensor.to(device) for name, tensor in batch.items()}).logits
            predicted += logits.argmax(-1).tolist()
    return metrics.accuracy(predicted, labels)["accuracy"]


def _majority(test: Sequence[Example]) -> float:
    labels = [example.label for example in test]
    return max(labels.count(label) for label in set(labels)) / len(labels)
