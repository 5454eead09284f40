"""Documents as token ids: cut to a context length, padded into batches."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from dprc.losses import IGNORED
from dprc.tasks import Example, Prompt

Item = TypeVar("Item")
_Ids = npt.NDArray[np.int32]


class Examples(Protocol):
    """What a training loop asks of examples: each item is one privacy unit."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...
    def collate(self, items: list[Any]) -> dict[str, torch.Tensor]:
        """Make a batch."""


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right to the longest: ids and mask, both (B, T)."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, : len(row)] = 1
    return ids, mask


class TokenisedExamples:
    """Labelled documents as ids, cut at the end; each is tokenised alone.

    Args:
        examples: Documents with labels.
        tokenizer: A Hugging Face tokenizer with a padding token.
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

    def __getitem__(self, index: int) -> tuple[list[int], int | None]:
        """Return the ids and the label of one document."""
        return self._ids[index], self._labels[index]

    def collate(self, items: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        """Pad to the longest; masked positions change no sample's loss."""
        ids, mask = _padded([ids for ids, _ in items], self._pad)
        labels = torch.tensor([label for _, label in items])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class PromptedExamples:
    """Documents in a prompt, with the answer to be written after it.

    An example is: start token (if the tokenizer has one), words before, document, words after,
    answer, end token. The parts are tokenised apart. Only the document is cut, at its end, until
    all fits ``max_tokens``; instruction, question and answer are kept whole. What becomes of an
    example depends on that example alone.

    Args:
        examples: Documents with answers; the first answer is learned.
        tokenizer: A Hugging Face tokenizer with padding and end tokens.
        prompt: The words around each document.
        max_tokens: Context length T.

    Raises:
        ValueError: An example whose instruction, question and answer alone exceed ``max_tokens``.
    """

    def __init__(
        self, examples: Sequence[Example], tokenizer: Any, prompt: Prompt, max_tokens: int
    ) -> None:
        def encode(texts: list[str]) -> list[_Ids]:
            # Cut here already, for a document may be much longer than what is ever used of it.
            rows = tokenizer(
                texts, add_special_tokens=False, truncation=True, max_length=max_tokens + 1
            )["input_ids"]
            return [np.asarray(row, dtype=np.int32) for row in rows]

        around = [prompt.around(example) for example in examples]
        start = tokenizer("")["input_ids"][:1]
        self._start = start if start == [tokenizer.bos_token_id] else []
        self._end: int = tokenizer.eos_token_id
        self._pad: int = tokenizer.pad_token_id
        self._max_tokens = max_tokens
        self._before = encode([before for before, _ in around])
        self._documents = encode([example.text for example in examples])
        self._after = encode([after for _, after in around])
        self._answers = encode([f" {example.answers[0]}" for example in examples])
        for index, example in enumerate(examples):
            needed = self._fixed(index) + len(self._answers[index]) + 1
            if needed > max_tokens:
                raise ValueError(
                    f"task.max_tokens: instruction, question and answer of document "
                    f"{example.id!r} need {needed} tokens or more, got {max_tokens}"
                )

    def _fixed(self, index: int) -> int:
        return len(self._start) + len(self._before[index]) + len(self._after[index])

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._documents)

    def prompt_ids(self, index: int, new_tokens: int) -> list[int]:
        """Return a prompt that leaves room for an answer of ``new_tokens``.

        Raises:
            ValueError: Instruction and question leave no such room.
        """
        room = self._max_tokens - self._fixed(index) - new_tokens
        if room < 0:
            raise ValueError(
                f"task.max_new_tokens: {new_tokens} tokens do not fit beside the instruction in "
                f"task.max_tokens {self._max_tokens}; at most {room + new_tokens} do"
            )
        return [
            *self._start,
            *self._before[index].tolist(),
            *self._documents[index][:room].tolist(),
            *self._after[index].tolist(),
        ]

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        """Return the ids of prompt and answer, and how many belong to the prompt."""
        answer = [*self._answers[index].tolist(), self._end]
        prompt = self.prompt_ids(index, len(answer))
        return prompt + answer, len(prompt)

    def collate(self, items: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
        """Pad to the longest; prompt and padding are no labels."""
        ids, mask = _padded([ids for ids, _ in items], self._pad)
        labels = ids.masked_fill(mask == 0, IGNORED)
        for row, (_, prompt) in enumerate(items):
            labels[row, :prompt] = IGNORED
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}
