"""What a run depends on, in hashes: a checkpoint is continued only by the run that it is of."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dprc.results import environment
from dprc.sampling import MapDataset
from dprc.settings import RunSettings

# Settings that may change between the parts of a run. The contents of the two paths have
# fingerprints of their own; how samples are cut into physical batches and dealt to processes only
# rounds sums in another order.
_MAY_CHANGE = ("training.max_physical_batch", "parallel.strategy", "task.data", "model.path")


class CollatedDataset(MapDataset, Protocol):
    """A dataset that makes batches of its items."""

    def collate(self, items: list[Any], /) -> Mapping[str, torch.Tensor]:
        """Make a batch."""


def of_settings(settings: RunSettings) -> dict[str, Any]:
    """Return the settings as flat keys, ``training.steps`` for one."""
    return dict(_flat(settings.model_dump(mode="json")))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def of_code() -> dict[str, Any]:
    """Return a hash of this package's source, and the versions that a step is computed with."""
    digest, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    about = environment()
    versions = {name: version for name, version in about["versions"].items() if name != "dprc"}
    return {"code": digest.hexdigest()[:16], "python": about["python"], **versions}


def of_examples(*splits: CollatedDataset) -> str:
    """Return a hash of what the model sees of each example, in their order."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(f"split of {len(split)}".encode())
        for index in range(len(split)):
            for name, tensor in sorted(split.collate([split[index]]).items()):
                _add(digest, name, tensor)
    return digest.hexdigest()


def of_model(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers: before training, of what training starts at."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _add(digest, name, tensor)
    return digest.hexdigest()


def _add(digest: Any, name: str, tensor: torch.Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy())


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare two mappings of flat keys.

    Args:
        saved: Of the run that was begun.
        mine: Of the run that is to continue it.

    Returns:
        Lines for the keys that must not differ, and for those that may.
    """
    refused: list[str] = []
    allowed: list[str] = []
    # Settings, whose names have dots, come before what they bring with them.
    for name in sorted({*saved, *mine}, key=lambda name: ("." not in name, name)):
        before, now = saved.get(name), mine.get(name)
        if before != now:
            line = f"{name} was {before!r} and is {now!r} now"
            harmless = name in _MAY_CHANGE or name.startswith("output.")
            (allowed if harmless else refused).append(line)
    return refused, allowed
