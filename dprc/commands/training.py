"""``dprc prepare-data``, ``prepare-model`` and ``train``."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def add_parsers(subparsers: Any) -> None:
    """Add the parsers of this group."""
    data = subparsers.add_parser(
        "prepare-data",
        help="read, deduplicate and split a task's text",
        description="Read a task's source, drop duplicate documents and write the fixed split.",
        epilog="example: dprc prepare-data --task bbc_offline --out results/data/bbc_offline",
    )
    data.add_argument("--task", required=True, help="name of the task, e.g. bbc_offline")
    data.add_argument("--out", required=True, type=Path, help="folder to write")
    data.set_defaults(run=_prepare_data)

    model = subparsers.add_parser(
        "prepare-model",
        help="make a small model on public embeddings",
        description="Make a small Llama on principal components of SmolLM2's token embedding.",
        epilog="example: dprc prepare-model --preset tiny-llama --out results/models/tiny-llama",
    )
    model.add_argument("--preset", required=True, choices=("tiny-llama",))
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--layers", type=int, default=1)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--intermediate-size", type=int, default=256)
    model.add_argument("--seed", type=int, default=0)
    model.add_argument("--out", required=True, type=Path, help="folder to write")
    model.set_defaults(run=_prepare_model)

    train = subparsers.add_parser(
        "train",
        help="one training run, from a settings file to metrics.json",
        description=(
            "Train one model, privately or not, and evaluate it on the test split. A run saves "
            "checkpoints on its way and when it gets SIGTERM (then it exits with 143). With both "
            "flags, it goes on where it can and starts anew where it cannot."
        ),
        epilog="example: dprc train --config run.yaml --out results/my-run --resume",
    )
    train.add_argument("--config", required=True, help="YAML or JSON settings; - reads stdin")
    train.add_argument("--out", required=True, type=Path, help="folder to write")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint; refused if settings, data, model or code changed",
    )
    train.add_argument(
        "--overwrite", action="store_true", help="replace a run that is in the folder already"
    )
    train.set_defaults(run=_train)


def _offline() -> None:
    # Everything comes from files; a forgotten lookup must fail at once, not wait for a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _prepare_data(arguments: argparse.Namespace) -> None:
    from dprc import tasks

    tasks.save_dataset(tasks.get(arguments.task), arguments.out)


def _prepare_model(arguments: argparse.Namespace) -> None:
    _offline()
    from dprc.models import TinyLlama, save_tiny_llama

    preset = TinyLlama(
        hidden_size=arguments.hidden_size,
        layers=arguments.layers,
        heads=arguments.heads,
        intermediate_size=arguments.intermediate_size,
        seed=arguments.seed,
    )
    save_tiny_llama(preset, arguments.out)


def _train(arguments: argparse.Namespace) -> int:
    from dprc.settings import read_settings
    from dprc.termination import Terminated

    settings = read_settings(arguments.config, sys.stdin)  # refused before anything slow
    _offline()
    from dprc.progress import Bar, Lines
    from dprc.train import train

    reporter = Bar() if sys.stderr.isatty() else Lines()
    resume = f"dprc train --config {arguments.config} --out {arguments.out} --resume"
    try:
        train(
            settings,
            arguments.out,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            reporter=reporter,
        )
    except Terminated as stop:
        print(
            f"dprc train: terminated after step {stop.step}, which is saved. Go on with: {resume}",
            file=sys.stderr,
        )
        return 143
    except KeyboardInterrupt:
        print(
            f"dprc train: interrupted; no result was written. Go on from the last checkpoint, or "
            f"from the start without one, with: {resume}",
            file=sys.stderr,
        )
        return 130
    except MemoryError as error:
        print(f"dprc train: error: {error}", file=sys.stderr)
        return 2
    print(f"{reporter.last_evaluation or 'finished before'} -> {arguments.out / 'metrics.json'}")
    return 0
