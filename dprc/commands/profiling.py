"""``dprc count-flops``, ``profile-layer``, ``measure-norm-error`` and ``compare-peers``."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dprc.commands.options import counts, stay_offline


def add_parsers(subparsers: Any) -> None:
    """Add the parsers of this group."""
    _add_count_flops(subparsers)
    _add_profile_layer(subparsers)
    _add_measure_norm_error(subparsers)
    _add_compare_peers(subparsers)


def _add_output(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--out", help="result file to write")


def _add_count_flops(subparsers: Any) -> None:
    flops = subparsers.add_parser(
        "count-flops",
        help="operations of each estimator on each layer",
        description="Count the floating-point operations of norm estimation; needs no memory.",
        epilog="example: dprc count-flops --layers 8192x2048,2048x512 --tokens 4096 --json",
    )
    flops.add_argument("--layers", required=True, help="in x out features, e.g. 8192x2048,2048x512")
    flops.add_argument("--tokens", required=True, help="sequence lengths, e.g. 512,4096")
    flops.add_argument("--num-probes", default="32", help="probe counts, e.g. 8,32 (default: 32)")
    _add_output(flops)
    flops.set_defaults(run=_count_flops)


def _add_profile_layer(subparsers: Any) -> None:
    layer = subparsers.add_parser(
        "profile-layer",
        help="time and peak memory of one layer's norm",
        description=(
            "Time the per-sample norms of one linear layer and weigh what they take. On a GPU by "
            "CUDA events and the peaks of torch's allocator and of the device; on a CPU by the CPU "
            "time of the process and the peak of live tensors."
        ),
        epilog=(
            "example: dprc profile-layer --in-features 8192 --out-features 2048 --tokens 4096"
            " --estimator exact,tiled,hutchinson"
        ),
    )
    add = layer.add_argument
    add("--in-features", type=int, required=True, metavar="D")
    add("--out-features", type=int, required=True, metavar="P")
    add("--tokens", type=int, required=True, metavar="T", help="of each sample")
    add("--batch", type=int, default=1, metavar="B", help="samples (default: 1)")
    add("--estimator", default="hutchinson", metavar="NAME[,NAME…]", help="(default: hutchinson)")
    add("--num-probes", type=int, default=32, metavar="K", help="(default: 32)")
    add("--head-rank", type=int, metavar="R", help="hutchpp only")
    add("--sketch", default="per_sample", help="per_sample or shared (default: per_sample)")
    add("--dtype", default="float32", help="float32, bfloat16 or float64 (default: float32)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--repeats", type=int, default=5, metavar="N", help="timed rounds (default: 5)")
    add("--threads", type=int, default=1, metavar="N", help="of the CPU (default: 1)")
    add("--seed", type=int, default=0, help="of inputs and sketches (default: 0)")
    _add_output(layer)
    layer.set_defaults(run=_profile_layer)


def _add_measure_norm_error(subparsers: Any) -> None:
    error = subparsers.add_parser(
        "measure-norm-error",
        help="error of estimated norms on real gradients",
        description=(
            "Compare hutchinson's and hutchpp's norms with exact ones, on gradients of a language "
            "model's linear layers on real text, and with what theory allows."
        ),
        epilog=(
            "example: dprc measure-norm-error --model smollm2-135m --data results/data/bbc_offline"
        ),
    )
    add = error.add_argument
    add("--model", required=True, help="smollm2-135m, or a folder with model and tokenizer")
    add("--data", type=Path, required=True, help="folder written by prepare-data")
    add("--task", default="bbc_offline", help="task of the data (default: bbc_offline)")
    add("--layers", metavar="PATTERN", help="linear layers by name (default: the middle block's)")
    add("--documents", type=int, default=1, metavar="N", help="of the text (default: 1)")
    add("--tokens", type=int, default=512, metavar="T", help="of each document (default: 512)")
    add("--num-probes", default="4,8,16,32,64,128,256", help="(default: 4,8,…,256)")
    add("--repeats", type=int, default=64, metavar="N", help="estimates of a norm (default: 64)")
    add("--seed", type=int, default=0, help="of the sketches (default: 0)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    _add_output(error)
    error.set_defaults(run=_measure_norm_error)


def _add_compare_peers(subparsers: Any) -> None:
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
    _add_output(peers)
    peers.set_defaults(run=_compare_peers)


def _count_flops(arguments: argparse.Namespace) -> None:
    layers = [counts("--layers", layer, "x") for layer in arguments.layers.split(",")]
    for layer in layers:
        if len(layer) != 2:
            raise ValueError(f"--layers: each must be INxOUT, got {arguments.layers!r}")
    tokens = counts("--tokens", arguments.tokens)
    num_probes = counts("--num-probes", arguments.num_probes)

    from dprc.profiling.flops import flops_table
    from dprc.results import write_result

    rows = flops_table([(layer[0], layer[1]) for layer in layers], tokens, num_probes)
    if arguments.out:
        config = {"layers": layers, "tokens": tokens, "num_probes": num_probes}
        write_result(
            arguments.out, config=config, metrics={"rows": rows}, privacy=None, made_by="flops"
        )
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
    if not (arguments.json or arguments.out):
        for row in rows:
            print(
                f"{row['in_features']:>6} x {row['out_features']:<6} T={row['tokens']:<7} "
                f"k={row['num_probes']:<5} {row['estimator']:<11} {row['flops_counted']:>16,} "
                f"{100 * row['saving_vs_exact']:>9.2f} % saved"
            )


def _profile_layer(arguments: argparse.Namespace) -> None:
    from dprc import estimators
    from dprc.profiling.device import device_name, resolve_device
    from dprc.profiling.flops import LayerShape
    from dprc.profiling.latency import DTYPES, profile_layer
    from dprc.results import write_result

    if arguments.dtype not in DTYPES:
        raise ValueError(f"--dtype: must be one of {', '.join(DTYPES)}, got {arguments.dtype!r}")
    names = arguments.estimator.split(",")
    if arguments.head_rank is not None and "hutchpp" not in names:
        raise ValueError("--head-rank: only hutchpp has a head, and it is not in --estimator")
    chosen = [
        estimators.get(
            name,
            num_probes=arguments.num_probes,
            sketch=arguments.sketch,
            head_rank=arguments.head_rank if name == "hutchpp" else None,
        )
        for name in names
    ]
    shape = LayerShape(
        arguments.in_features, arguments.out_features, arguments.tokens, arguments.batch
    )
    device = resolve_device(arguments.device)
    profile = profile_layer(
        shape,
        chosen,
        device=device,
        dtype=DTYPES[arguments.dtype],
        repeats=arguments.repeats,
        threads=arguments.threads,
        seed=arguments.seed,
    )
    metrics = {
        "rows": profile.rows,
        "exclusive": profile.occupancy.exclusive,
        "not_exclusive_because": profile.occupancy.reason,
    }
    if not profile.occupancy.exclusive:
        print(f"not valid: {profile.occupancy.reason}", file=sys.stderr)
    if arguments.out:
        write_result(
            arguments.out,
            config=_settings(arguments),
            metrics=metrics,
            privacy=None,
            valid=profile.occupancy.exclusive,
            device=device_name(device),
            made_by="layer_profile",
        )
    if arguments.json:
        # With one estimator its numbers stand at the top as well.
        alone = profile.rows[0] if len(profile.rows) == 1 else {}
        valid = {"valid": profile.occupancy.exclusive}
        print(json.dumps({**alone, **metrics, **valid}, indent=2))
        return
    print(f"{device_name(device)}; {profile.rows[0]['clock']}; {profile.rows[0]['memory_source']}")
    for row in profile.rows:
        print(
            f"{row['estimator']:<11} {1000 * row['latency_seconds']:>10.2f} ms  "
            f"{row['workspace_bytes'] / 2**20:>10.2f} MiB beyond inputs of "
            f"{row['input_bytes'] / 2**20:.2f}  {row['flops'] / 1e9:>10.3f} GFLOP"
        )


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what determines a result: every option but those about where it goes."""
    left_out = ("command", "run", "json", "out")
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in left_out
    }


def _measure_norm_error(arguments: argparse.Namespace) -> None:
    num_probes = counts("--num-probes", arguments.num_probes)
    for name, least in (("documents", 1), ("tokens", 2), ("repeats", 2)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name}: must be at least {least}, got {getattr(arguments, name)}")
    stay_offline()
    from dprc import tasks
    from dprc.models import load_causal_lm, load_tokenizer
    from dprc.profiling import norm_error
    from dprc.profiling.device import device_name, resolve_device
    from dprc.results import write_result

    device = resolve_device(arguments.device)
    dataset = tasks.load_dataset(arguments.data, tasks.get(arguments.task).name)
    documents = norm_error.first_long_documents(
        [example.text for example in dataset.train],
        load_tokenizer(arguments.model),
        tokens=arguments.tokens,
        count=arguments.documents,
    )
    model = load_causal_lm(arguments.model).to(device)
    layers = norm_error.choose_layers(model, arguments.layers or norm_error.middle_block(model))
    rows = norm_error.measure_norm_error(
        list(norm_error.layer_gradients(model, [ids.to(device) for ids in documents], layers)),
        num_probes,
        repeats=arguments.repeats,
        seed=arguments.seed,
        progress_fn=lambda text: print(f"{text} …", file=sys.stderr),
    )
    if arguments.out:
        config = _settings(arguments) | {"layers": layers, "num_probes": num_probes}
        write_result(
            arguments.out,
            config=config,
            metrics={"rows": rows},
            privacy=None,
            device=device_name(device),
            made_by="norm_error",
        )
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    for row in (row for row in rows if row["layer"] == norm_error.ALL_LAYERS):
        print(
            f"document {row['document']}  {row['estimator']:<11} k={row['num_probes']:<5} "
            f"squared norm: deviation {row['squared_error_std']:.4f} "
            f"(at most {row['squared_error_std_bound']:.4f})  norm: {row['norm_error_mean']:+.4f} "
            f"± {row['norm_error_std']:.4f}"
        )


def _compare_peers(arguments: argparse.Namespace) -> None:
    tokens = counts("--tokens", arguments.tokens)
    if arguments.rounds < 1:
        raise ValueError(f"--rounds: must be at least 1, got {arguments.rounds}")

    from dprc.profiling.peers import DEFAULT_MODES, compare
    from dprc.results import write_result

    modes = arguments.modes.split(",") if arguments.modes else list(DEFAULT_MODES)
    rows = compare(modes, tokens, rounds=arguments.rounds, memory=not arguments.no_memory)
    if arguments.out:
        config = {"modes": modes, "tokens": tokens, "rounds": arguments.rounds}
        write_result(
            arguments.out, config=config, metrics={"rows": rows}, privacy=None, made_by="peers"
        )
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    for row in rows:
        memory = row["peak_memory_ratio"]
        print(
            f"{row['mode']:<26} T={row['tokens']:<7} time {row['time_ratio']:5.2f} x  "
            f"memory {'-' if memory is None else f'{memory:5.2f} x'}"
        )
