"""What one run trains and how it is scored: a task's text, a model, a loss and a metric."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dprc import losses, tasks
from dprc.models import load_classifier
from dprc.settings import RunSettings
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


def _majority(dataset: tasks.Dataset) -> float:
    labels = [example.label for example in dataset.test]
    return max(labels.count(label) for label in set(labels)) / len(labels)


@dataclass(frozen=True)
class Workload:
    """Everything of a run that is not training itself.

    Attributes:
        model: To be trained in place; what is not trained does not require gradients.
        tokenizer: Of the model.
        train: Training examples; each item is one privacy unit.
        test: Held-out examples.
        losses: Gives (B,) losses of a collated batch, one per sample.
        evaluate: Gives the metrics of the model as it is now, by their names in metrics.json.
        main_metric: The metric that a run is judged by.
    """

    model: nn.Module
    tokenizer: Any
    train: TokenisedExamples
    test: TokenisedExamples
    losses: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
    evaluate: Callable[[], dict[str, float]]
    main_metric: str


def prepare_workload(settings: RunSettings) -> Workload:
    """Load text and model of a run.

    Raises:
        FileNotFoundError: Data or model are not prepared.
        ValueError: A setting out of range.
    """
    dataset = tasks.load_dataset(Path(settings.task.data), tasks.get(settings.task.name).name)
    model, tokenizer = load_classifier(
        Path(settings.model.path), len(dataset.label_names), settings.seed
    )
    length = settings.task.max_tokens
    limit = model.backbone.config.max_position_embeddings
    if length > limit:
        raise ValueError(f"task.max_tokens: the model has {limit} positions, got {length}")
    train = TokenisedExamples(dataset.train, tokenizer, length)
    test = TokenisedExamples(dataset.test, tokenizer, length)

    def evaluate() -> dict[str, float]:
        return {
            "test_accuracy": accuracy(model, test),
            "nonprivate_train_accuracy": accuracy(model, train),
            "majority_accuracy": _majority(dataset),
        }

    return Workload(
        model=model,
        tokenizer=tokenizer,
        train=train,
        test=test,
        losses=lambda batch: losses.classification_loss(model, batch),
        evaluate=evaluate,
        main_metric="test_accuracy",
    )
