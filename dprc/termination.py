"""SIGTERM asks a run to stop: it finishes its step and saves, and the next call goes on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


# A BaseException, as KeyboardInterrupt is: `except Exception` in a library must not swallow it.
class Terminated(BaseException):
    """A run was asked to stop, and did; ``step`` is that of the checkpoint it saved."""

    step = 0


class Termination:
    """Takes note of SIGTERM while it is entered.

    Signals reach the main thread only; in another one nothing is noted.
    """

    def __init__(self) -> None:
        self.requested = False
        self._at_once = False
        self._before: Any = None

    def __enter__(self) -> Self:
        """Start to take note."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave SIGTERM to whoever had it before."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Stop in the middle of what runs here, which can be repeated and may take long."""
        self._at_once = True
        try:
            if self.requested:
                raise Terminated
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._at_once:
            self._at_once = False  # a second signal must not disturb the saving
            raise Terminated
