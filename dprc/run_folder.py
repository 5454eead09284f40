"""The folder of a run: what lies in it, and whether a run may start or go on in it."""

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from dprc import fingerprints
from dprc.checkpoints import CheckpointFolder, reason
from dprc.results import write_text_atomic
from dprc.run_log import RunLog
from dprc.settings import RunSettings


class RunFolder:
    """Files of one run.

    Args:
        folder: Made if it is not there.
        resume: Go on with the run that was begun in it, if it is this one.
        overwrite: Where that cannot be, remove what was begun or finished and start anew.
        note_fn: Told in a line what was found.

    Raises:
        FileExistsError: There is a run, and neither is given; or the path is a file.
        PermissionError: Nothing can be written there.
    """

    def __init__(
        self, folder: Path, *, resume: bool, overwrite: bool, note_fn: Callable[[str], None]
    ) -> None:
        self.folder, self._resume, self._overwrite = folder, resume, overwrite
        self._note = note_fn
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"--out: {folder} cannot be written to")
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self.metrics, self.model = folder / "metrics.json", folder / "model"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other runs out while this one works; the lock goes with the process.

        Raises:
            BlockingIOError: Another process trains in this folder.
        """
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BlockingIOError(
                f"--out: another process trains in {self.folder}; wait for it, or stop it"
            ) from None
        except OSError as error:
            warnings.warn(
                f"--out: {self.folder} cannot be locked ({error}); start no second run in it",
                stacklevel=2,
            )
        try:
            yield
        finally:
            os.close(descriptor)

    def finished_metrics(self, settings: RunSettings) -> dict[str, Any] | None:
        """Return the metrics of this very run if it is finished here.

        Raises:
            FileExistsError: A run is here, and neither to be resumed nor to be overwritten.
            ValueError: Another run is finished here, and is not to be overwritten.
        """
        begun = bool(self.checkpoints.steps())
        if not begun and not self.metrics.exists():
            return None
        if not (self._resume or self._overwrite):
            found = "finished run" if self.metrics.exists() else "run; go on with --resume"
            raise FileExistsError(
                f"--out: {self.folder} holds a {found}; replace it with --overwrite, or name "
                "another folder"
            )
        if not self._resume or not self.metrics.exists():
            return None
        try:
            result = json.loads(self.metrics.read_text(encoding="utf-8"))
            config = RunSettings.model_validate(result["config"])
        except (ValueError, KeyError, TypeError) as error:
            self._refuse_or_note(f"{self.metrics} is of another version ({type(error).__name__})")
            return None
        refused, _ = fingerprints.differences(
            fingerprints.of_settings(config), fingerprints.of_settings(settings)
        )
        if refused:
            self._refuse_or_note(f"{self.folder} holds a finished run where {_first_of(refused)}")
            return None
        if not settings.output.keep_checkpoints:
            self.checkpoints.remove()
        self._note(f"{self.metrics} is there: this run is finished, nothing is done")
        metrics: dict[str, Any] = result["metrics"]
        return metrics

    def resumable_step(self) -> int | None:
        """Return the step of the checkpoint to go on from; None to start anew.

        Raises:
            ValueError: All checkpoints are damaged, and are not to be overwritten.
        """
        if not self._resume or self.metrics.exists():
            return None
        step, damaged = self.checkpoints.newest_usable()
        if step is None and damaged:
            self._refuse_or_note(f"no checkpoint is usable: {'; '.join(damaged)}")
        elif step is None:
            self._note(f"no checkpoint in {self.folder}: starting anew")
        elif damaged:
            self._note(
                f"WARNING: damaged checkpoints are skipped and removed ({'; '.join(damaged)}); "
                f"going on from step {step}"
            )
            self.checkpoints.remove_after(step)
        return step

    def is_continued_by(self, step: int, about: Mapping[str, Any]) -> bool:
        """Tell whether a checkpoint is of a run that depends on the same things.

        Args:
            step: Of the checkpoint.
            about: Some of what this run depends on.

        Returns:
            False where it is not, but may be overwritten.

        Raises:
            ValueError: It is not, and must not be overwritten.
        """
        saved = self.checkpoints.about(step)
        refused, allowed = fingerprints.differences(
            {name: saved[name] for name in saved if name in about or name not in _CONTENTS}, about
        )
        if refused:
            self._refuse_or_note(
                f"the checkpoint of step {step} is of another run: {_first_of(refused)}"
            )
            return False
        for line in allowed:
            if not line.startswith("output."):
                self._note(f"{line}, which a run may do on its way")
        return True

    def start_anew(self) -> None:
        """Remove what an earlier run left."""
        self.metrics.unlink(missing_ok=True)  # first: without it nothing here counts as finished
        self.checkpoints.remove()
        for name in ("settings.yaml", "steps.csv", "evaluations.csv"):
            (self.folder / name).unlink(missing_ok=True)
        for name in ("model", "tensorboard"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Say what could not be written, and that what was saved is still there.

        Raises:
            OSError: In place of what the libraries raise on a full disk, for one.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            steps = self.checkpoints.steps()
            saved = f"step {steps[-1]} is saved: go on with --resume" if steps else "none is saved"
            raise OSError(
                f"{what}: could not be written to {self.folder} "
                f"({reason(error)}); of the training, {saved}"
            ) from error

    def write_settings(self, settings: RunSettings) -> None:
        """Write settings.yaml."""
        write_text_atomic(self.folder / "settings.yaml", yaml.safe_dump(settings.model_dump()))

    def write_log(self, log: RunLog) -> None:
        """Write steps.csv and evaluations.csv."""
        with self.writing("steps.csv and evaluations.csv"):
            write_text_atomic(self.folder / "steps.csv", log.steps_csv())
            write_text_atomic(self.folder / "evaluations.csv", log.evaluations_csv())

    def _refuse_or_note(self, problem: str) -> None:
        if not self._overwrite:
            raise ValueError(
                f"--resume: {problem}. Undo the change, or start anew with --overwrite"
            )
        self._note(f"{problem}: starting anew")


def _first_of(lines: Sequence[str]) -> str:
    """Return the first lines as one, and say whether there are more."""
    return "; ".join(lines[:3]) + ("; and more" if len(lines) > 3 else "")


# Known only once data and model are loaded.
_CONTENTS = ("content of the documents", "content of the model")


def contents(documents: str, model: str) -> dict[str, str]:
    """Return what a run depends on that is known only once it is loaded."""
    return dict(zip(_CONTENTS, (documents[:16], model[:16]), strict=True))
