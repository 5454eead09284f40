"""``dprc plan`` and ``dprc simulate-memory``."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dprc.commands.options import counts, refuse_unused, stay_offline

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def add_parsers(subparsers: Any) -> None:
    """Add the parsers of this group."""
    plan = subparsers.add_parser(
        "plan",
        help="costs by layer, peak memory, and what to use, for a model",
        description=(
            "Plan private training of a causal language model from its configuration alone: "
            "operations and workspace of each estimator by layer, simulated peak memory of a step, "
            "and what to use. Needs neither weights nor a GPU."
        ),
        epilog="example: dprc plan --model llama-3.2-1b --tokens 4096 --batch 4 --memory 80GiB",
    )
    _add_model(plan)
    plan.add_argument("--tokens", type=int, required=True, help="of each sample")
    plan.add_argument("--batch", type=int, required=True, help="samples of a physical batch")
    plan.add_argument("--checkpointing", action="store_true", help="peaks with checkpointing")
    plan.add_argument("--memory", help="what there is, e.g. 80GiB; fits the physical batch")
    plan.add_argument("--epsilon", type=float, help="chooses probes by noise; with the next three")
    plan.add_argument("--delta", type=float, help="in (0, 1)")
    plan.add_argument("--sample-rate", type=float, help="Poisson inclusion probability")
    plan.add_argument("--steps", type=int, help="optimizer steps")
    plan.add_argument("--head-rank", type=int, metavar="R", help="of hutchpp, e.g. 2; plan for it")
    plan.add_argument("--num-probes", type=int, metavar="K", help="of its tail, e.g. 26")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(run=_plan)

    simulate = subparsers.add_parser(
        "simulate-memory",
        help="peak memory of norms (--layers) or of steps (--model)",
        description=(
            "Simulate peak memory on tensors without memory: of one layer's norm by every "
            "estimator (--layers), or of whole training steps (--model)."
        ),
        epilog="example: dprc simulate-memory --layers 8192x2048 --tokens 4096 --json",
    )
    simulate.add_argument("--layers", help="in x out features, e.g. 8192x2048,2048x512")
    _add_model(simulate, required=False)
    simulate.add_argument("--tokens", required=True, help="sequence lengths, e.g. 1024,4096")
    simulate.add_argument("--num-probes", default="32", help="probe counts (default: 32)")
    simulate.add_argument("--head-rank", type=int, help="--model: of hutchpp (default: probes)")
    simulate.add_argument("--batch", type=int, default=1, help="samples (default: 1)")
    simulate.add_argument("--modes", help="--model: forward, nonprivate, hutchinson_two_pass, …")
    simulate.add_argument("--sketch", help="shared or per_sample (layers: both)")
    simulate.add_argument("--checkpointing", action="store_true", help="--model: recompute blocks")
    simulate.add_argument("--loss", default="chunked", help="--model: chunked (default) or full")
    simulate.add_argument("--optimizer", default="adamw", help="--model: adamw (default) or sgd")
    simulate.add_argument("--lora-rank", type=int, help="--model: train LoRA adapters alone")
    simulate.add_argument("--json", action="store_true", help="print the rows as JSON")
    simulate.add_argument("--out", help="result file to write")
    simulate.set_defaults(run=partial(_simulate, simulate))


def _add_model(parser: Any, *, required: bool = True) -> None:
    parser.add_argument("--model", required=required, help="preset, config.json, or its folder")
    parser.add_argument("--dtype", default="fp32", help="fp32 (default) or bf16")


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``80GiB``, ``24GB`` or ``1000000B``.

    Raises:
        ValueError: Not such a size; a number alone is none, for it could be meant in gigabytes.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]?I?B)", text.strip().upper())
    unit = None if match is None else match[2]
    if match is None or unit not in _UNITS or float(match[1]) <= 0:
        raise ValueError(
            f"--memory: must be a size with its unit such as 80GiB or 24GB, got {text!r}"
        )
    return int(float(match[1]) * _UNITS[unit])


@contextmanager
def _simulating(model: str) -> Iterator[None]:
    """Say in one line that a model does not run on tensors without memory."""
    try:
        yield
    except (RuntimeError, ArithmeticError, NotImplementedError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"--model: {model} cannot be simulated: {first}") from error


def _plan(arguments: argparse.Namespace) -> None:
    for name in ("tokens", "batch"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: must be at least 1, got {getattr(arguments, name)}")
    memory = None if arguments.memory is None else parse_bytes(arguments.memory)
    target = (arguments.epsilon, arguments.delta, arguments.sample_rate, arguments.steps)
    if any(value is not None for value in target) and None in target:
        raise ValueError("--epsilon, --delta, --sample-rate and --steps: give all four, or none")
    head = (arguments.head_rank, arguments.num_probes)
    if (head[0] is None) != (head[1] is None):
        raise ValueError("--head-rank and --num-probes: give both, or none")
    stay_offline()

    from dprc.profiling.presets import load_shape
    from dprc.profiling.recommend import Target, make_plan

    with _simulating(arguments.model):
        answer = make_plan(
            load_shape(arguments.model),
            tokens=arguments.tokens,
            batch=arguments.batch,
            dtype=arguments.dtype,
            checkpointing=arguments.checkpointing,
            memory_bytes=memory,
            target=None if arguments.epsilon is None else Target(*target),
            head=None if head[0] is None else head,
        )
    for note in answer["notes"]:
        if note.startswith("warning"):
            print(f"dprc plan: {note}", file=sys.stderr)
    print(json.dumps(answer, indent=2, allow_nan=False) if arguments.json else _in_words(answer))


def _in_words(plan: dict[str, Any]) -> str:
    from dprc import estimators

    names = estimators.names()
    lines = [
        f"{plan['model']}: {plan['parameters'] / 1e6:,.0f} M parameters, {plan['tokens']} tokens x "
        f"{plan['batch']} samples, {plan['dtype']}, {plan['optimizer']}; k = {plan['num_probes']}, "
        f"{plan['sketch']} sketch"
        + ("" if plan["head_rank"] is None else f", head of rank {plan['head_rank']}"),
        "",
        "Norm of one layer: GFLOP | MiB of workspace beyond activations and gradients",
        f"{'layer':<16}{'count':>6}" + "".join(f"{name:>19}" for name in names),
    ]
    for row in plan["layers"]:
        costs = "".join(
            f"{row['estimators'][name]['flops'] / 1e9:>9,.1f} |"
            f"{row['estimators'][name]['workspace_bytes'] / 2**20:>8,.1f}"
            for name in names
        )
        layer = f"{row['in_features']} x {row['out_features']}"
        lines.append(f"{layer:<16}{row['count']:>6}{costs}")
    lines += ["", "Peak memory of a step" + (", checkpointing" if plan["checkpointing"] else "")]
    for name, row in plan["peaks"].items():
        note = "" if row["extrapolated_from"] is None else "  (extrapolated)"
        lines.append(
            f"  {name:<13}{row['peak_bytes'] / 2**30:>8.2f} GiB "
            f"{row['ratio_to_nonprivate']:>6.2f} x  in {row['phase']}{note}"
        )
    lines += [
        "  without " + "; ".join(plan["excluded"]),
        *(f"  for {note}" for note in plan["notes"][:1]),
    ]
    lines += [f"  {note}" for note in plan["notes"][1:] if not note.startswith("warning")] + [""]
    return "\n".join([*lines, _advice(plan["recommendation"])])


def _advice(chosen: dict[str, Any]) -> str:
    clipping = chosen["estimator"]
    if chosen["num_probes"] is not None:
        head = "" if chosen["head_rank"] is None else f"head of rank {chosen['head_rank']}, "
        clipping += f", {head}{chosen['num_probes']} probes, {chosen['sketch']} sketch"
    if "noise_multiplier" in chosen:
        clipping += (
            f" (noise multiplier {chosen['noise_multiplier']:.4g}, "
            f"{100 * chosen['noise_overhead']:.1f} % over exact clipping)"
        )
    way = f"{chosen['schedule']}, {'with' if chosen['checkpointing'] else 'without'} checkpointing"
    size = f"{chosen['peak_bytes'] / 2**30:.2f} GiB"
    if chosen["physical_batch"] is None:
        return (
            f"recommended: {clipping}; but not even one sample fits: {way}, chunked loss, takes "
            f"{size}. Use LoRA, bf16, shorter samples, or more memory."
        )
    return (
        f"recommended: {clipping}; {way}; chunked loss; physical batch "
        f"{chosen['physical_batch']} ({size})"
    )


# Options of `simulate-memory` about a whole model.
_OF_MODELS = ("head_rank", "modes", "checkpointing", "loss", "optimizer", "lora_rank")


def _simulate(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if (arguments.layers is None) == (arguments.model is None):
        raise ValueError("--layers or --model: give one of the two")
    if arguments.layers is not None:
        refuse_unused(parser, arguments, _OF_MODELS, why="is of --model, not of --layers")
    tokens = counts("--tokens", arguments.tokens)
    probes = counts("--num-probes", arguments.num_probes)
    if arguments.batch < 1:
        raise ValueError(f"--batch: must be at least 1, got {arguments.batch}")
    stay_offline()
    rows = (
        _layer_rows(arguments, tokens, probes)
        if arguments.layers is not None
        else _model_rows(arguments, tokens, probes)
    )
    if arguments.out:
        from datetime import UTC, datetime

        from dprc.results import write_result

        metrics = {"rows": rows, "date": datetime.now(UTC).date().isoformat()}
        config = {k: v for k, v in vars(arguments).items() if k not in ("run", "out", "json")}
        made_by = "step_memory" if arguments.layers is None else "layer_memory"
        write_result(arguments.out, config=config, metrics=metrics, privacy=None, made_by=made_by)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
    if not (arguments.json or arguments.out):
        for row in rows:
            print(_row_in_words(row))


def _layer_rows(
    arguments: argparse.Namespace, tokens: list[int], probes: list[int]
) -> list[dict[str, Any]]:
    layers = [counts("--layers", layer, "x") for layer in arguments.layers.split(",")]
    for layer in layers:
        if len(layer) != 2:
            raise ValueError(f"--layers: each must be INxOUT, got {arguments.layers!r}")

    from dprc.profiling.layer_memory import layer_rows
    from dprc.sketch import SKETCHES

    return layer_rows(
        [(layer[0], layer[1]) for layer in layers],
        tokens,
        probes,
        sketches=SKETCHES if arguments.sketch is None else (arguments.sketch,),
        batch=arguments.batch,
        dtype=arguments.dtype,
    )


def _model_rows(
    arguments: argparse.Namespace, tokens: list[int], probes: list[int]
) -> list[dict[str, Any]]:
    from dprc.profiling.memory import model_rows
    from dprc.profiling.presets import load_shape

    if len(probes) != 1:
        raise ValueError(f"--num-probes: one with --model, got {arguments.num_probes!r}")
    with _simulating(arguments.model):
        return model_rows(
            load_shape(arguments.model),
            tokens,
            modes=None if arguments.modes is None else arguments.modes.split(","),
            batch=arguments.batch,
            num_probes=probes[0],
            head_rank=arguments.head_rank,
            sketch=arguments.sketch or "per_sample",
            dtype=arguments.dtype,
            checkpointing=arguments.checkpointing,
            loss=arguments.loss,
            optimizer=arguments.optimizer,
            lora_rank=arguments.lora_rank,
        )


def _row_in_words(row: dict[str, Any]) -> str:
    if "mode" in row:
        return (
            f"{row['mode']:<26} T={row['tokens']:<7} {row['peak_bytes'] / 2**30:>9.3f} GiB  "
            f"{row['ratio_to_nonprivate']:>6.3f} x  in {row['phase']}"
        )
    kind = " ".join(str(row[k]) for k in ("num_probes", "sketch", "projection") if row[k])
    return (
        f"{row['in_features']:>6} x {row['out_features']:<6} T={row['tokens']:<7} "
        f"{row['estimator']:<11} {kind or row['convention']:<24} "
        f"{row['workspace_bytes'] / 2**20:>10,.2f} MiB  saves "
        f"{100 * row['saving_excluding_inputs']:>8.2f} % (with inputs "
        f"{100 * row['saving_including_inputs']:.2f} %)"
    )
