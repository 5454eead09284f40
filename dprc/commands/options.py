"""What several commands read and report in the same way."""

import argparse
import json
import os
from collections.abc import Iterable
from typing import Any


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


def numbers(name: str, text: str) -> list[float]:
    """Read numbers above 0, separated by commas.

    Args:
        name: Of the option, for the message.
        text: What it was given.

    Raises:
        ValueError: Something else.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: must be numbers separated by commas, got {text!r}") from None
    if not all(number > 0 for number in found):
        raise ValueError(f"{name}: must be above 0, got {text!r}")
    return found


def refuse_unused(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    names: Iterable[str],
    *,
    why: str,
) -> None:
    """Refuse options that would change nothing.

    Args:
        parser: Knows the defaults.
        arguments: What was given.
        names: Of the options that have no meaning here, as attributes.
        why: Says so, after the option's name.

    Raises:
        ValueError: One of them is not at its default.
    """
    for name in names:
        value = getattr(arguments, name)
        if value != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')}: {why}; leave it out, got {value!r}")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what a run's noise depends on beside ε: delta, sampling rate, steps."""
    add = parser.add_argument
    add("--delta", type=float, required=True, metavar="D", help="in (0, 1)")
    add("--sample-rate", type=float, required=True, metavar="Q", help="Poisson, in (0, 1]")
    add("--steps", type=int, required=True, metavar="N", help="optimizer steps")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add where rows go: see ``report_rows``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE", help="write a result file")


def report_rows(
    arguments: argparse.Namespace,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    lines: list[str],
    *,
    made_by: str,
) -> None:
    """Write rows as a result file, as JSON, or, where neither is asked for, as lines.

    Args:
        arguments: With ``out`` and ``json`` of ``add_output``.
        config: What was asked for.
        rows: The answer.
        lines: The same for readers.
        made_by: A kind of ``dprc.provenance.SOURCES``.
    """
    if arguments.out:
        from dprc.results import write_result

        write_result(
            arguments.out, config=config, metrics={"rows": rows}, privacy=None, made_by=made_by
        )
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
    if not (arguments.json or arguments.out):
        print("\n".join(lines))


def stay_offline() -> None:
    """Take everything from files: a forgotten look-up fails at once and waits for no hub."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
