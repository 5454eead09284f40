"""``dprc count-flops``."""

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
