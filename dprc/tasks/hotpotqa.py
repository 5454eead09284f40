"""HotpotQA: questions that need two of the paragraphs they come with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from dprc.tasks.base import Dataset, Example, Kind, Prompt, fixed_split, unique
from dprc.tasks.hub import Rows, read_splits


@dataclass(frozen=True)
class HotpotQa:
    """Questions on ten paragraphs of Wikipedia, as ``hotpotqa/hotpot_qa``; exact match and F1.

    A privacy unit is a record: one question with all its paragraphs. Records with the same or
    almost the same paragraphs are one document, of which one question is kept. A single paragraph
    may occur in several records, and the guarantee is not about it.

    Split: the source's train and validation (90447 and 7405 records; its test has no answers)
    without duplicates, each side cut to a public constant. Paragraphs are ordered by title, so
    that their order says nothing and equal sets of them are equal texts.

    Args:
        train_documents: Size of the training split.
        test_documents: Size of the test split.
        configuration: ``"distractor"`` (two paragraphs of ten hold the answer) or ``"fullwiki"``.
    """

    train_documents: int = 88000
    test_documents: int = 7000
    configuration: Literal["distractor", "fullwiki"] = "distractor"

    name: ClassVar[str] = "hotpotqa"
    kind: ClassVar[Kind] = "question_answering"
    prompt: ClassVar[Prompt] = Prompt(
        before="Answer the question from the text, in a few words.\n\nText:\n",
        after="\n\nQuestion: {question}\nAnswer:",
    )
    main_metric: ClassVar[str] = "exact_match"
    max_new_tokens: ClassVar[int] = 32

    def read(self, source: Path | None = None) -> Dataset:
        """Read the records: columns id, question, answer, context {title, sentences}.

        Raises:
            OSError: The hub cannot be reached.
            ValueError: Another schema, or too few records.
        """
        pools = read_splits(
            self.name,
            "hotpotqa/hotpot_qa",
            splits=("train", "validation"),
            columns=("id", "question", "answer", "context"),
            configuration=self.configuration,
            source=source,
        )
        train, test = fixed_split(self, *unique(_questions(pools[0]), _questions(pools[1])))
        return Dataset(train, test, (), documents_read=sum(map(len, pools)))


def _questions(rows: Rows) -> list[Example]:
    return [
        Example(
            row["id"],
            _paragraphs(row["id"], row["context"]),
            question=row["question"].strip(),
            answers=(row["answer"].strip(),),
        )
        for row in rows
    ]


def _paragraphs(record: str, context: Mapping[str, Any]) -> str:
    try:
        pairs = sorted(zip(context["title"], context["sentences"], strict=True))
        return "\n\n".join(f"{title}: {''.join(parts).strip()}" for title, parts in pairs)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"task hotpotqa: record {record!r} has a context that is not "
            "{title: [...], sentences: [[...]]} with as many titles as paragraphs"
        ) from None
