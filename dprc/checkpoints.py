"""Checkpoints of a run: whole or not there, checked before use, and as sensitive as the data.

A checkpoint is a folder ``step_<n>`` with the trained parameters, the state of optimizer, schedule
and random generators, the log, and a manifest of checksums. It is written under another name,
synced and renamed, so that a crash leaves the ones before as they were. It holds the keys of the
noise: whoever reads it can undo the privacy of the model, so only its owner can.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dprc.run_log import RunLog

KEPT = 2
_FORMAT = 1
_PREFIX, _TEMPORARY = "step_", ".unfinished_"
_ABOUT, _LOG, _PARAMETERS, _STATE = "about.json", "log.json", "model.safetensors", "state.pt"
_MANIFEST = "manifest.json"


class DamagedError(ValueError):
    """A checkpoint is not what was written."""


@dataclass(frozen=True)
class Snapshot:
    """A run between two steps.

    Attributes:
        step: Steps taken.
        about: What the run depends on: settings and fingerprints. Holds no secret.
        log: Rows so far.
        parameters: Trained parameters and buffers by name.
        state: Of optimizer, schedule, engine (with its keys) and torch's generators; tensors and
            plain values only.
    """

    step: int
    about: dict[str, Any]
    log: RunLog
    parameters: dict[str, torch.Tensor]
    state: dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one run; the last two are kept.

    Args:
        folder: Where they lie; made when the first is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, whole or damaged, in order."""
        names = (path.name.removeprefix(_PREFIX) for path in self.folder.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        """Return the folder of one checkpoint."""
        return self.folder / f"{_PREFIX}{step:08d}"

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint, and remove those before the last two.

        Raises:
            OSError: It could not be written (a full disk, for one); those before are untouched.
        """
        temporary = self.folder / f"{_TEMPORARY}{snapshot.step}"
        final = self.path(snapshot.step)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_unfinished()
            _write(temporary, snapshot)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            _sync(self.folder)
        # The libraries tell of a full disk in their own ways.
        except (OSError, SafetensorError, RuntimeError) as error:
            there = [step for step in self.steps() if step != snapshot.step]
            kept = f"the last one is of step {there[-1]}" if there else "there is none before it"
            raise OSError(
                f"checkpoint of step {snapshot.step}: could not be written to {self.folder} "
                f"({reason(error)}); {kept}"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for step in self.steps()[:-KEPT]:
            shutil.rmtree(self.path(step))

    def newest_usable(self) -> tuple[int | None, list[str]]:
        """Find the last checkpoint that is what was written.

        Returns:
            Its step, None if there is none; and a line for each later one that is damaged.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                _verify(self.path(step))
            except DamagedError as error:
                damaged.append(str(error))
            else:
                return step, damaged
        return None, damaged

    def about(self, step: int) -> dict[str, Any]:
        """Read what the run of a checkpoint depends on."""
        about: dict[str, Any] = json.loads((self.path(step) / _ABOUT).read_text(encoding="utf-8"))
        return about

    def load(self, step: int) -> Snapshot:
        """Read a checkpoint that ``newest_usable`` found.

        Only tensors and plain values are read: nothing in a checkpoint is executed.
        """
        path = self.path(step)
        return Snapshot(
            step=step,
            about=self.about(step),
            log=RunLog.from_json((path / _LOG).read_text(encoding="utf-8")),
            parameters=load_file(path / _PARAMETERS),
            state=torch.load(path / _STATE, weights_only=True, map_location="cpu"),
        )

    def remove_after(self, step: int) -> None:
        """Remove later checkpoints, which are damaged, so that they do not count as the last."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later))

    def remove(self) -> None:
        """Remove all checkpoints, and the folder unless it holds something else."""
        if not self.folder.exists():
            return
        self._remove_unfinished()
        for step in self.steps():
            shutil.rmtree(self.path(step))
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _remove_unfinished(self) -> None:
        for path in self.folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path)


def reason(error: BaseException) -> str:
    """Return in a line why something could not be written; torch hides the system's own words."""
    hidden = error.__context__
    told = hidden if isinstance(hidden, OSError) and not isinstance(error, OSError) else error
    return " ".join(str(told).split())


def _write(folder: Path, snapshot: Snapshot) -> None:
    """Write and sync all files of a checkpoint, the manifest last."""
    folder.mkdir(mode=0o700)
    about = json.dumps(snapshot.about, indent=2)
    with _private_file(folder / _ABOUT) as handle:
        handle.write(about.encode())
    with _private_file(folder / _LOG) as handle:
        handle.write(snapshot.log.to_json().encode())
    parameters = {name: value.detach().contiguous() for name, value in snapshot.parameters.items()}
    save_file(parameters, folder / _PARAMETERS)
    with (folder / _PARAMETERS).open("rb+") as handle:
        os.fchmod(handle.fileno(), 0o600)
        os.fsync(handle.fileno())
    with _private_file(folder / _STATE) as handle:
        torch.save(snapshot.state, handle)
    files = {
        name: {"sha256": _sha256(folder / name), "bytes": (folder / name).stat().st_size}
        for name in (_ABOUT, _LOG, _STATE, _PARAMETERS)
    }
    manifest = {"format": _FORMAT, "step": snapshot.step, "files": files}
    with _private_file(folder / _MANIFEST) as handle:
        handle.write(json.dumps(manifest, indent=2).encode())
    _sync(folder)


@contextmanager
def _private_file(path: Path) -> Iterator[Any]:
    """Open a new file that only its owner can read; sync it at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        yield handle
        handle.flush()
        os.fsync(handle.fileno())


def _sync(folder: Path) -> None:
    """Make names in a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _verify(path: Path) -> None:
    """Compare the files of a checkpoint with its manifest.

    Raises:
        DamagedError: One differs, or is missing.
        ValueError: The format is that of another version.
    """
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        format_number, files = manifest["format"], dict(manifest["files"])
        recorded = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except FileNotFoundError:
        raise DamagedError(f"{path.name}: {_MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{path.name}: {_MANIFEST} is not readable") from None
    if format_number != _FORMAT:
        raise ValueError(
            f"{path}: has format {format_number!r}, and this version reads {_FORMAT}; continue it "
            "with the version that wrote it"
        )
    for name in (_ABOUT, _LOG, _STATE, _PARAMETERS):
        if name not in recorded or not (path / name).is_file():
            raise DamagedError(f"{path.name}: {name} is missing")
        size, checksum = recorded[name]
        if (path / name).stat().st_size != size:
            raise DamagedError(f"{path.name}: {name} has another size than was written")
        if _sha256(path / name) != checksum:
            raise DamagedError(f"{path.name}: {name} differs from its checksum")
