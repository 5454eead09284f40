"""Estimate the GPU time of a configuration's training runs, before anybody pays for it.

``python -m workflows.gpu_hours workflows/config/paper.yaml``
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import yaml

from dprc import tasks
from workflows.configuration import check_configuration, chosen_epsilons


class Shape(NamedTuple):
    """What a model's operations depend on."""

    parameters: int
    layers: int
    width: int


class Device(NamedTuple):
    """What a GPU does in a second."""

    name: str
    operations: float  # in float32 without TF32, as the runs are
    bytes_read: float
    used: float  # the part of either that a run gets


class Estimate(NamedTuple):
    """Runs of one task, mode and method."""

    task: str
    mode: str
    method: str
    runs: int
    hours_each: float


SHAPES = {"llama-3.2-1b": Shape(1_235_814_400, 16, 2048)}
A100 = Device("A100 80GB", operations=19.5e12, bytes_read=2.0e12, used=0.6)
EXPLANATION = """\
An upper estimate: every document is taken to be as long as max_tokens allows, and is often shorter.
Products with weights and attention of a forward pass are one unit; a step without privacy takes 3,
with two passes 4 and the norms; LoRA saves the gradients of weights; checkpointing repeats a
forward pass in each backward pass. Written answers read the weights once for each token and batch.
Assumed: {device} at {used:.0%} of {teraflops:g} TFLOP/s in float32 and of {bandwidth:g} TB/s.
Products in TF32, which torch leaves off unless asked, would be up to 8 times as fast.
Nothing of it was measured on a GPU. Layers, norm errors and data preparation are not in it."""


def estimate_runs(config: Mapping[str, Any], device: Device = A100) -> list[Estimate]:
    """Estimate the time of each kind of training run.

    Args:
        config: A configuration that was checked.
        device: What the runs are on.

    Returns:
        One estimate for each task, mode and method, in the configuration's order.

    Raises:
        ValueError: The shape of a model is not known here.
    """
    found = []
    for name, task in config["tasks"].items():
        preset = config["models"][task["model"]]["preset"]
        if preset not in SHAPES:
            raise ValueError(
                f"models.{task['model']}: the size of {preset!r} is not known here"
                f" (known: {', '.join(SHAPES)})"
            )
        for mode, changes in task["modes"].items():
            for method in changes.get("methods", task["methods"]):
                budgets = chosen_epsilons(task, mode, method)
                private = config["methods"][method] is not None
                seeds = changes.get("seeds", config["seeds"])
                runs = len(list(product(budgets if private else [None], seeds)))
                seconds = _training_seconds(
                    name, task, mode, config["methods"][method], SHAPES[preset], device
                ) + _evaluation_seconds(name, task, SHAPES[preset], device)
                found.append(Estimate(name, mode, method, runs, seconds / 3600))
    return found


def _forward_operations(shape: Shape, tokens: int) -> float:
    """Count products with weights, and causal attention, of one document's forward pass."""
    return tokens * (2 * shape.parameters + 2 * tokens * shape.width * shape.layers)


def step_units(method: Mapping[str, Any] | None, mode: str, *, checkpointing: bool) -> float:
    """Count a step in forward passes.

    >>> step_units(None, "full", checkpointing=False)
    3.0
    >>> step_units({"estimator": "exact", "schedule": "two_pass"}, "full", checkpointing=False)
    5.0
    """
    passes = 2 if method is not None and method.get("schedule") == "two_pass" else 1
    # Forward, and in each backward pass the gradients of inputs.
    units = 1.0 + passes
    if checkpointing:
        units += passes
    if mode == "full":
        units += 1.0  # the gradients of weights, once
        if method is not None:
            # Exact norms form them too; estimates cost a few per cent of that.
            units += 1.0 if method["estimator"] in ("exact", "tiled") else 0.1
    return units


def _training_seconds(
    name: str,
    task: Mapping[str, Any],
    mode: str,
    method: Mapping[str, Any] | None,
    shape: Shape,
    device: Device,
) -> float:
    training = task["training"]
    documents = training["sample_rate"] * tasks.get(name).train_documents * training["steps"]
    checkpointing = task.get("loading", {}).get("gradient_checkpointing", False)
    units = step_units(method, mode, checkpointing=checkpointing)
    work = documents * units * _forward_operations(shape, task["max_tokens"])
    return work / (device.operations * device.used)


def _evaluation_seconds(name: str, task: Mapping[str, Any], shape: Shape, device: Device) -> float:
    evaluation = task.get("evaluation", {})
    documents = evaluation.get("documents", tasks.get(name).test_documents)
    work = documents * _forward_operations(shape, task["max_tokens"])
    written = evaluation.get("max_new_tokens", tasks.get(name).max_new_tokens)
    reads = documents / evaluation.get("batch", 1) * written * 4 * shape.parameters
    return work / (device.operations * device.used) + reads / (device.bytes_read * device.used)


def write_estimate(estimates: Sequence[Estimate], device: Device = A100) -> str:
    """Write estimates as a table, their sum, and how they were made."""
    lines = [f"{'task':<12}{'mode':<6}{'method':<20}{'runs':>5}{'hours each':>12}{'hours':>9}"]
    for e in estimates:
        hours = e.runs * e.hours_each
        lines.append(
            f"{e.task:<12}{e.mode:<6}{e.method:<20}{e.runs:>5}{e.hours_each:>12.1f}{hours:>9,.0f}"
        )
    runs = sum(e.runs for e in estimates)
    hours = sum(e.runs * e.hours_each for e in estimates)
    lines.append(f"{runs} training runs, at most about {hours:,.0f} GPU hours")
    explanation = EXPLANATION.format(
        device=device.name,
        used=device.used,
        teraflops=device.operations / 1e12,
        bandwidth=device.bytes_read / 1e12,
    )
    return "\n".join([*lines, explanation])


def main(words: Sequence[str] | None = None) -> int:
    """Print the estimate of a configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m workflows.gpu_hours", description="Estimate a configuration's GPU hours."
    )
    parser.add_argument("config", help="a file of workflows/config")
    arguments = parser.parse_args(words)
    with open(arguments.config, encoding="utf-8") as handle:
        config = yaml.safe_load(handle)
    try:
        check_configuration(config)
        print(write_estimate(estimate_runs(config)))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
