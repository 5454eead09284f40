"""``dprc count-flops`` and ``compare-peers``."""

import argparse
import json
from typing import Any


def add_parsers(subparsers: Any) -> None:
    """Add the parsers of this group."""
    flops = subparsers.add_parser(
        "count-flops",
        help="operations of each estimator on each layer",
        description="Count the floating-point operations of norm estimation; needs no memory.",
        epilog="example: dprc count-flops --layers 8192x2048,2048x512 --tokens 4096 --json",
    )
    flops.add_argument("--layers", required=True, help="in x out features, e.g. 8192x2048,2048x512")
    flops.add_argument("--tokens", required=True, help="sequence lengths, e.g. 512,4096")
    flops.add_argument("--num-probes", default="32", help="probe counts, e.g. 8,32 (default: 32)")
    flops.add_argument("--json", action="store_true", help="print the rows as JSON")
    flops.add_argument("--out", help="result file to write")
    flops.set_defaults(run=_count_flops)

    peers = subparsers.add_parser(
        "compare-peers",
        help="time and memory of a training step, mode by mode",
        description=(
            "Take training steps of a small Llama in every mode, interleaved in one run, and print "
            "time and memory as ratios to the step without privacy."
        ),
        epilog="example: dprc compare-peers --tokens 1024,2048 --json",
    )
    peers.add_argument("--tokens", default="1024", help="sequence lengths (default: 1024)")
    peers.add_argument("--modes", help="names separated by commas (default: a chosen few)")
    peers.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    peers.add_argument("--no-memory", action="store_true", help="leave memory out")
    peers.add_argument("--json", action="store_true", help="print the rows as JSON")
    peers.add_argument("--out", help="result file to write")
    peers.set_defaults(run=_compare_peers)


def _counts(name: str, text: str, separator: str = ",") -> list[int]:
    parts = text.split(separator)
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}: must be whole numbers above 0, got {text!r}")
    return [int(part) for part in parts]


def _count_flops(arguments: argparse.Namespace) -> None:
    layers = [_counts("--layers", layer, "x") for layer in arguments.layers.split(",")]
    for layer in layers:
        if len(layer) != 2:
            raise ValueError(f"--layers: each must be INxOUT, got {arguments.layers!r}")
    tokens = _counts("--tokens", arguments.tokens)
    num_probes = _counts("--num-probes", arguments.num_probes)

    from dprc.profiling.flops import flops_table
    from dprc.results import write_result

    rows = flops_table([(layer[0], layer[1]) for layer in layers], tokens, num_probes)
    if arguments.out:
        config = {"layers": layers, "tokens": tokens, "num_probes": num_probes}
        write_result(arguments.out, config=config, metrics={"rows": rows}, privacy=None)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
    if not (arguments.json or arguments.out):
        for row in rows:
            print(
                f"{row['in_features']:>6} x {row['out_features']:<6} T={row['tokens']:<7} "
                f"k={row['num_probes']:<5} {row['estimator']:<11} {row['flops_counted']:>16,} "
                f"{100 * row['saving_vs_exact']:>9.2f} % saved"
            )


def _compare_peers(arguments: argparse.Namespace) -> None:
    tokens = _counts("--tokens", arguments.tokens)
    if arguments.rounds < 1:
        raise ValueError(f"--rounds: must be at least 1, got {arguments.rounds}")

    from dprc.profiling.peers import DEFAULT_MODES, compare
    from dprc.results import write_result

    modes = arguments.modes.split(",") if arguments.modes else list(DEFAULT_MODES)
    rows = compare(modes, tokens, rounds=arguments.rounds, memory=not arguments.no_memory)
    if arguments.out:
        config = {"modes": modes, "tokens": tokens, "rounds": arguments.rounds}
        write_result(arguments.out, config=config, metrics={"rows": rows}, privacy=None)
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    for row in rows:
        memory = row["peak_memory_ratio"]
        print(
            f"{row['mode']:<26} T={row['tokens']:<7} time {row['time_ratio']:5.2f} x  "
            f"memory {'-' if memory is None else f'{memory:5.2f} x'}"
        )
