"""``dprc prepare-data``, ``prepare-model`` and ``train``."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from dprc.commands.options import stay_offline

PRESETS = ("tiny-llama", "smollm2-135m", "llama-3.2-1b")
TINY_LLAMA_OPTIONS = ("hidden_size", "layers", "heads", "intermediate_size", "seed")


def add_parsers(subparsers: Any) -> None:
    """Add the parsers of this group."""
    data = subparsers.add_parser(
        "prepare-data",
        help="read, deduplicate and split a task's text",
        description="Read a task's source, drop duplicate documents and write the fixed split.",
        epilog="example: dprc prepare-data --task bbc_offline --out results/data/bbc_offline",
    )
    data.add_argument(
        "--task",
        required=True,
        help="e.g. bbc_offline; of your own files: own_classification, own_summary, own_qa",
    )
    data.add_argument("--source", type=Path, help="folder of local files, yours or the source's")
    data.add_argument("--labels", help="own_classification: the classes, separated by commas")
    for split in ("train", "test"):
        data.add_argument(
            f"--{split}-documents", type=_count, help=f"public size of the {split} split"
        )
    data.add_argument("--out", required=True, type=Path, help="folder to write")
    data.set_defaults(run=_prepare_data)

    model = subparsers.add_parser(
        "prepare-model",
        help="write a preset's model and tokenizer as a Hugging Face folder",
        description=(
            "Write a model as a folder that runs load: tiny-llama, a small Llama on principal "
            "components of SmolLM2's token embedding; smollm2-135m, from its package; "
            "llama-3.2-1b, from the hub or, as any causal language model, from --source."
        ),
        epilog="example: dprc prepare-model --preset tiny-llama --out results/models/tiny-llama",
    )
    model.add_argument("--preset", required=True, choices=PRESETS)
    model.add_argument("--source", help="llama-3.2-1b: folder of a local copy")
    for name in TINY_LLAMA_OPTIONS:
        model.add_argument(f"--{name.replace('_', '-')}", type=int, help="tiny-llama only")
    model.add_argument("--out", required=True, type=Path, help="folder to write")
    model.set_defaults(run=_prepare_model)

    train = subparsers.add_parser(
        "train",
        help="one training run, from a settings file to metrics.json",
        description=(
            "Train one model, privately or not, and evaluate it on the test split. A run saves "
            "checkpoints on its way and when it gets SIGTERM (then it exits with 143). With both "
            "flags, it goes on where it can and starts anew where it cannot. On several GPUs: "
            "torchrun --standalone --nproc-per-node N -m dprc train ..."
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


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return count


def _prepare_data(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    from dprc import tasks

    source, out = arguments.source, arguments.out
    if source is not None and out.resolve() in (source.resolve(), (source / "data").resolve()):
        raise ValueError(
            f"--out: {out} is where --source has its files, which would be replaced; name another "
            "folder"
        )
    sizes = {
        name: getattr(arguments, name)
        for name in ("train_documents", "test_documents")
        if getattr(arguments, name) is not None
    }
    task: Any = replace(tasks.get(arguments.task), **sizes)  # type: ignore[type-var]
    if arguments.labels is not None:
        if not hasattr(task, "labels"):
            raise ValueError(f"--labels: task {task.name} brings its own or has none")
        task = replace(task, labels=tuple(name.strip() for name in arguments.labels.split(",")))
    tasks.save_dataset(task, out, source)


def _prepare_model(arguments: argparse.Namespace) -> None:
    sizes = {
        name: getattr(arguments, name)
        for name in TINY_LLAMA_OPTIONS
        if getattr(arguments, name) is not None
    }
    if sizes and arguments.preset != "tiny-llama":
        raise ValueError(
            f"--{next(iter(sizes)).replace('_', '-')}: only preset tiny-llama can be sized, got "
            f"--preset {arguments.preset}"
        )
    if arguments.source is not None and arguments.preset != "llama-3.2-1b":
        raise ValueError(f"--source: preset {arguments.preset} comes from its package")
    if arguments.preset != "llama-3.2-1b" or arguments.source is not None:
        stay_offline()
    from dprc import models

    if arguments.preset == "tiny-llama":
        models.save_tiny_llama(models.TinyLlama(**sizes), arguments.out)
    elif arguments.preset == "smollm2-135m":
        models.save_smollm2(arguments.out)
    else:
        models.save_llama(arguments.out, arguments.source)


def _train(arguments: argparse.Namespace) -> int:
    from dprc.settings import read_settings
    from dprc.termination import Terminated

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun says so
    # Refused before anything slow; read by one process of several, whose standard input is shared.
    settings = None if several else read_settings(arguments.config, sys.stdin)
    stay_offline()
    from dprc.parallel import joined_job, this_job
    from dprc.progress import Bar, Lines
    from dprc.train import train

    resume = f"dprc train --config {arguments.config} --out {arguments.out} --resume"
    if several:
        resume = f"torchrun --nproc-per-node N -m {resume}"
    reporter, reports = Bar() if sys.stderr.isatty() else Lines(), True
    try:
        with joined_job() as reports:
            if settings is None:
                settings = this_job().led(lambda: read_settings(arguments.config, sys.stdin))
            train(
                settings,
                arguments.out,
                resume=arguments.resume,
                overwrite=arguments.overwrite,
                reporter=reporter if reports else None,
            )
    except Terminated as stop:
        if reports:
            print(
                f"dprc train: terminated after step {stop.step}, which is saved. Go on with: "
                f"{resume}",
                file=sys.stderr,
            )
        return 143
    except KeyboardInterrupt:
        if reports:
            print(
                f"dprc train: interrupted; no result was written. Go on from the last checkpoint, "
                f"or from the start without one, with: {resume}",
                file=sys.stderr,
            )
        return 130
    except MemoryError as error:
        print(f"dprc train: error: {error}", file=sys.stderr)
        return 2
    if reports:
        print(
            f"{reporter.last_evaluation or 'finished before'} -> {arguments.out / 'metrics.json'}"
        )
    return 0
