"""What several commands read in the same way."""

import os


def counts(name: str, text: str, separator: str = ",") -> list[int]:
    """Read whole numbers above 0.

    Args:
        name: Of the option, for the message.
        text: What it was given.
        separator: Between the numbers.

    Raises:
        ValueError: Something else.
    """
    parts = text.split(separator)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}: must be whole numbers above 0, got {text!r}")
    return [int(part) for part in parts]


def stay_offline() -> None:
    """Take everything from files: a forgotten look-up fails at once and waits for no hub."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
