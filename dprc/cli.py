"""The ``dprc`` command: one module of ``dprc.commands`` per group of subcommands."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from dprc import __version__
from dprc.errors import PrivacyError

# Each module offers add_parsers(subparsers), which sets `run` on every parser it adds.
# The modules import torch and transformers inside `run`, so that help and accounting stay light.
COMMAND_MODULES = (
    "accounting",
    "certifying",
    "sweeping",
    "work",
    "training",
    "checking",
    "profiling",
    "planning",
    "auditing",
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of every subcommand."""
    parser = argparse.ArgumentParser(
        prog="dprc", description="Differentially private training with randomized clipping."
    )
    parser.add_argument("--version", action="version", version=f"dprc {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMAND_MODULES:
        import_module(f"dprc.commands.{name}").add_parsers(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments: The words after ``dprc``; those of the process when None.

    Returns:
        The exit code: 0; 1 where a check or an audit found a fault; 2 with one clear line on
        standard error for bad input.
    """
    parsed = build_parser().parse_args(arguments)
    try:
        code: int | None = parsed.run(parsed)
    except (ValueError, TypeError, PrivacyError, OSError, ImportError) as error:
        # Bad input is told in one line; a defect of ours keeps its traceback.
        if getattr(error, "told_by_another", False):  # process 0 of a job prints it
            return 2
        line = " ".join(str(error).split())
        print(f"dprc {parsed.command}: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dprc {parsed.command}: interrupted; no result was written", file=sys.stderr)
        return 130
    return code or 0
