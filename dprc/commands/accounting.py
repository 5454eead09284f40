"""``dprc calibrate`` and ``dprc epsilon``: noise for a privacy target, and the way back."""

import argparse
import json
import math
from functools import partial
from typing import Any

from dprc.commands.options import refuse_unused

_CALIBRATE_EXAMPLE = """example:
  dprc calibrate --epsilon 2 --delta 1e-5 --sample-rate 0.01 --steps 1000
"""
_EPSILON_EXAMPLE = """example:
  dprc epsilon --noise-multiplier 1.0 --delta 1e-5 --sample-rate 0.01 --steps 1000
"""


def add_parsers(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add ``calibrate`` and ``epsilon``."""
    calibrate = subparsers.add_parser(
        "calibrate",
        help="noise multiplier that reaches (epsilon, delta)",
        description="Find the noise multiplier that reaches (epsilon, delta).",
        epilog=_CALIBRATE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    calibrate.add_argument("--epsilon", type=float, required=True, metavar="E", help="target")
    _add_shared(calibrate)
    calibrate.add_argument(
        "--compare", action="store_true", help="also compare probes, sketches and analyses"
    )
    calibrate.add_argument(
        "--layers", metavar="INxOUT", help="with --compare, their work: e.g. 2048x8192,8192x2048"
    )
    calibrate.add_argument("--tokens", type=int, metavar="T", help="per sample, with --layers")
    calibrate.set_defaults(run=partial(run_calibrate, calibrate))

    epsilon = subparsers.add_parser(
        "epsilon",
        help="epsilon that a noise multiplier gives, with both bounds",
        description="Bound the epsilon of a training run from below and above.",
        epilog=_EPSILON_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    epsilon.add_argument("--noise-multiplier", type=float, required=True, metavar="S")
    _add_shared(epsilon)
    epsilon.set_defaults(run=run_epsilon)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--delta", type=float, required=True, metavar="D", help="in (0, 1)")
    add("--sample-rate", type=float, metavar="Q", help="Poisson inclusion probability, in (0, 1]")
    add("--steps", type=int, metavar="N", help="optimizer steps")
    add("--dataset-size", type=int, metavar="N", help="with --batch-size and --epochs")
    add(
        "--batch-size",
        type=int,
        metavar="B",
        help="expected; it and the two around it stand for --sample-rate and --steps",
    )
    add("--epochs", type=float, metavar="X", help="expected passes over the data")
    add(
        "--estimator",
        default="hutchinson",
        help="exact, ghost, tiled, hutchinson (default) or hutchpp",
    )
    add(
        "--num-probes",
        type=int,
        default=32,
        metavar="K",
        help="default 32; of the tail for hutchpp",
    )
    add("--head-rank", type=int, metavar="R", help="hutchpp only; certified pairs save noise")
    add(
        "--require-certified",
        action="store_true",
        help="refuse a head-rank and num-probes without a certified law",
    )
    add("--sketch", default="per_sample", help="per_sample (default) or shared")
    add(
        "--analysis",
        default="tight",
        help="tight (default), or envelope (the paper's; shared only)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--out", metavar="FILE", help="write a result file")


def run_calibrate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Print the noise multiplier of a privacy target."""
    from dprc import accounting

    if not args.compare:
        why = "is the work that --compare compares, and it is not given"
        refuse_unused(parser, args, ("layers", "tokens"), why=why)
    settings = _settings(args)
    sigma = accounting.noise_multiplier(epsilon=args.epsilon, **settings)
    spent = accounting.epsilon(noise_multiplier=sigma, **settings)
    answer: dict[str, Any] = {
        "noise_multiplier": sigma,
        "epsilon": args.epsilon,
        "epsilon_spent": spent,
        **settings,
    }
    lines = [
        f"noise_multiplier {sigma:.6g}",
        f"epsilon {spent:.6g} at delta {args.delta:g}",
        f"for {_mechanism(args)}",
    ]
    if args.compare:
        from dprc.accounting import planner

        options = planner.compare(
            epsilon=args.epsilon,
            delta=args.delta,
            sample_rate=settings["sample_rate"],
            steps=settings["steps"],
            layers=_layers(args),
        )
        chosen = planner.recommend(options)
        answer["options"] = [option.as_dict() for option in options]
        answer["recommendation"] = chosen.as_dict()
        lines += ["", planner.format_table(options), "", f"recommended: {_in_words(chosen)}"]
    _report(args, answer, lines, target_epsilon=args.epsilon, sigma=sigma, settings=settings)


def run_epsilon(args: argparse.Namespace) -> None:
    """Print the bounds on epsilon of a noise multiplier."""
    from dprc import accounting

    settings = _settings(args)
    lower, upper = accounting.epsilon_bounds(noise_multiplier=args.noise_multiplier, **settings)
    if math.isinf(upper):
        raise ValueError(
            f"epsilon is infinite at noise_multiplier={args.noise_multiplier!r} and "
            f"delta={args.delta!r}; use more noise or a larger delta"
        )
    answer = {
        "epsilon_lower": lower,
        "epsilon_upper": upper,
        "noise_multiplier": args.noise_multiplier,
        **settings,
    }
    lines = [
        f"epsilon_upper {upper:.6g}",
        f"epsilon_lower {lower:.6g}",
        f"for {_mechanism(args)}",
    ]
    _report(
        args,
        answer,
        lines,
        target_epsilon=upper,
        sigma=args.noise_multiplier,
        settings=settings,
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that the accounting functions share."""
    sample_rate, steps = _schedule(args)
    return {
        "delta": args.delta,
        "sample_rate": sample_rate,
        "steps": steps,
        "estimator": args.estimator,
        "num_probes": args.num_probes,
        "head_rank": args.head_rank,
        "require_certified": args.require_certified,
        "sketch": args.sketch,
        "analysis": args.analysis,
    }


def _layers(args: argparse.Namespace) -> list[Any]:
    """The layer shapes whose work is compared; none if none is given."""
    from dprc.accounting.planner import LayerShape

    if args.layers is None and args.tokens is None:
        return []
    if args.layers is None or args.tokens is None:
        raise ValueError("--layers and --tokens: give both, or neither")
    shapes = []
    for layer in args.layers.split(","):
        parts = layer.split("x")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"--layers: each must be INxOUT, got {layer!r}")
        shapes.append(LayerShape(args.tokens, int(parts[0]), int(parts[1])))
    return shapes


def _mechanism(args: argparse.Namespace) -> str:
    """Say what the numbers are for: with another sketch or probe count they are others."""
    randomized = args.estimator in ("hutchinson", "hutchpp")
    return _in_words(args) if randomized else f"{args.estimator}: norms without error"


def _in_words(option: Any) -> str:
    if option.num_probes is None:
        return "exact"
    head = "" if option.head_rank is None else f"head of rank {option.head_rank}, "
    probes = f"{option.num_probes} probes"
    return f"{option.estimator}, {head}{probes}, {option.sketch}, {option.analysis}"


def _schedule(args: argparse.Namespace) -> tuple[float, int]:
    """Sampling rate and steps, given directly or by data set size, batch size and epochs."""
    direct = (args.sample_rate, args.steps)
    sizes = (args.dataset_size, args.batch_size, args.epochs)
    if all(value is not None for value in direct) and all(value is None for value in sizes):
        return args.sample_rate, args.steps
    if any(value is not None for value in direct) or any(value is None for value in sizes):
        raise ValueError(
            "give either --sample-rate and --steps, or --dataset-size, --batch-size and --epochs"
        )
    if args.dataset_size < 1 or not 1 <= args.batch_size <= args.dataset_size:
        raise ValueError(
            f"batch_size must be in [1, dataset_size={args.dataset_size}], got {args.batch_size}"
        )
    if not (args.epochs > 0 and math.isfinite(args.epochs)):
        raise ValueError(f"epochs must be above 0 and finite, got {args.epochs!r}")
    # Rounded up: a step too many is accounted, never one too few.
    return args.batch_size / args.dataset_size, math.ceil(
        args.epochs * args.dataset_size / args.batch_size
    )


def _report(
    args: argparse.Namespace,
    answer: dict[str, Any],
    lines: list[str],
    *,
    target_epsilon: float,
    sigma: float,
    settings: dict[str, Any],
) -> None:
    print(json.dumps(answer, allow_nan=False) if args.json else "\n".join(lines))
    if args.out is None:
        return
    from dprc.results import write_result

    privacy = {"epsilon": target_epsilon, "noise_multiplier": sigma, **settings}
    config = {key: value for key, value in vars(args).items() if key not in {"run", "out", "json"}}
    metrics = {key: value for key, value in answer.items() if key not in settings}
    write_result(args.out, config=config, metrics=metrics, privacy=privacy, made_by="calibration")
