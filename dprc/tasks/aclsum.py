"""Scientific papers with summaries of three aspects, from the package ``aclsum``, offline."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dprc.packages import package_folder
from dprc.tasks.base import Dataset, Example, Kind, Prompt, fixed_split, unique
from dprc.tasks.duplicates import fingerprint

_QUESTIONS = {
    "challenge": "What problem does the paper address?",
    "approach": "What do the authors do about it?",
    "outcome": "What do the authors find?",
}
# The package's own split: its train and validation papers are for training, its test papers for
# testing. The names of its files.
_TRAIN, _TEST = ("train", "val"), ("test",)


@dataclass(frozen=True)
class AclsumSummary:
    """Papers of computational linguistics and a summary in three sentences; the metric is ROUGE.

    The document is the paper's body, without title, authors and abstract (which would be a
    summary); the summary is its sentences on challenge, approach and outcome, in that order.
    Split: 150 papers (the package's train and validation) and 100 (its test).
    """

    train_documents: int = 150
    test_documents: int = 100

    name: ClassVar[str] = "aclsum_summary"
    kind: ClassVar[Kind] = "summarization"
    prompt: ClassVar[Prompt] = Prompt(
        before="Summarize the following paper: its problem, its approach and its result, one "
        "sentence each.\n\nPaper:\n",
        after="\n\nSummary:",
    )
    main_metric: ClassVar[str] = "rouge1"
    max_new_tokens: ClassVar[int] = 128

    def read(self, source: Path | None = None) -> Dataset:
        """Read the papers.

        Raises:
            ImportError: The package is not installed.
            FileNotFoundError: A file is missing.
            ValueError: Too few papers for the split.
        """
        return _read(self, source, _summary)


@dataclass(frozen=True)
class AclsumQa:
    """The same papers with a question on one aspect of each; the metrics are F1 and exact match.

    One row for each paper, since a paper with three rows would be three privacy units: which of
    the three questions is asked follows from the hash of its text.
    """

    train_documents: int = 150
    test_documents: int = 100

    name: ClassVar[str] = "aclsum_qa"
    kind: ClassVar[Kind] = "question_answering"
    prompt: ClassVar[Prompt] = Prompt(
        before="Answer the question about the following paper in one sentence.\n\nPaper:\n",
        after="\n\nQuestion: {question}\nAnswer:",
    )
    # Answers are whole sentences, which hardly ever match exactly.
    main_metric: ClassVar[str] = "f1"
    max_new_tokens: ClassVar[int] = 64

    def read(self, source: Path | None = None) -> Dataset:
        """Read the papers; raises as ``AclsumSummary.read``."""
        return _read(self, source, _question)


def _summary(paper: str, body: str, aspects: Mapping[str, str]) -> Example:
    summary = " ".join(aspects[aspect].strip() for aspect in _QUESTIONS)
    return Example(paper, body, answers=(summary,))


def _question(paper: str, body: str, aspects: Mapping[str, str]) -> Example:
    aspect = tuple(_QUESTIONS)[int(fingerprint(body), 16) % len(_QUESTIONS)]
    answers = (aspects[aspect].strip(),)
    return Example(paper, body, question=_QUESTIONS[aspect], answers=answers)


_Make = Callable[[str, str, Mapping[str, str]], Example]


def _read(task: AclsumSummary | AclsumQa, source: Path | None, make: _Make) -> Dataset:
    folder = source or package_folder("aclsum", needed_by=f"task {task.name}") / "dataset"
    pools = [[*_papers(task.name, folder, names, make)] for names in (_TRAIN, _TEST)]
    train, test = fixed_split(task, *unique(*pools))
    return Dataset(train, test, (), documents_read=sum(map(len, pools)))


def _papers(task: str, folder: Path, names: tuple[str, ...], make: _Make) -> Iterator[Example]:
    for name in names:
        file = folder / f"{name}.jsonl"
        if not file.is_file():
            raise FileNotFoundError(f"task {task}: no {file.name} in {folder}")
        for row in map(json.loads, file.read_text(encoding="utf-8").strip().split("\n")):
            paper = json.loads(
                (folder / "paper_jsons" / f"{row['id']}.json").read_text(encoding="utf-8")
            )
            yield make(row["id"], _body(paper["pdf_parse"]["body_text"]), row["summary"])


def _body(paragraphs: list[dict[str, Any]]) -> str:
    """Join paragraphs, each section under its heading."""
    parts, section = [], None
    for paragraph in paragraphs:
        if paragraph["section"] != section:
            section = paragraph["section"]
            parts.append(section)
        parts.append(paragraph["text"])
    return "\n\n".join(part for part in parts if part)
