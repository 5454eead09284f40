"""``dprc count-flops``, ``profile-layer``, ``measure-norm-error`` and ``compare-peers``."""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dprc.commands.options import counts, refuse_unused, stay_offline

if TYPE_CHECKING:
    from dprc.estimators import Estimator


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
    add(
        "--estimator",
        default="hutchinson",
        metavar="NAME[,NAME…]",
        help="hutchpp_r2_k26 is hutchpp with a head of rank 2 and 26 probes (default: hutchinson)",
    )
    add("--num-probes", type=int, default=32, metavar="K", help="(default: 32)")
    add("--head-rank", type=int, metavar="R", help="hutchpp only")
    add("--sketch", default="per_sample", help="per_sample or shared (default: per_sample)")
    add("--dtype", default="float32", help="float32, bfloat16 or float64 (default: float32)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--repeats", type=int, default=5, metavar="N", help="timed rounds (default: 5)")
    add("--threads", type=int, default=1, metavar="N", help="of the CPU (default: 1)")
    add("--seed", type=int, default=0, help="of inputs and sketches (default: 0)")
    _add_output(layer)
    layer.set_defaults(run=partial(_profile_layer, layer))


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
        help="training steps side by side: ours, Opacus', and without privacy",
        description=(
            "Take training steps in every mode on the same model and batch. Norms and clipped sums "
            "are checked against brute force; then time, in turns, and peak memory are given as "
            "ratios to the step without privacy. What is wrong or refused is said and not timed."
        ),
        epilog="example: dprc compare-peers --tokens 2048 --modes all --out peers.json",
    )
    add = peers.add_argument
    add("--tokens", help="sequence lengths (default: 1024; of the grid 512,1024,2048,4096)")
    add("--modes", help="names separated by commas, or all (default: a chosen few)")
    add("--settings", help="models and ways to train, or all (default: full; of the grid all)")
    add("--grid", action="store_true", help="all modes, settings and lengths: many hours")
    add("--rounds", type=int, default=5, help="timed in turns (default: 5); 0 checks only")
    add("--no-memory", action="store_true", help="leave memory out")
    add("--no-noise", action="store_true", help="leave noise out, in all libraries")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--threads", type=int, default=1, metavar="N", help="of the CPU (default: 1)")
    add("--hidden-size", type=int, default=512, metavar="D", help="(default: 512)")
    add("--layers", type=int, default=4, metavar="N", help="of the model (default: 4)")
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


def _profile_layer(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    from dprc.profiling.device import device_name, resolve_device
    from dprc.profiling.flops import LayerShape
    from dprc.profiling.latency import DTYPES, profile_layer
    from dprc.results import write_result

    if arguments.dtype not in DTYPES:
        raise ValueError(f"--dtype: must be one of {', '.join(DTYPES)}, got {arguments.dtype!r}")
    names = arguments.estimator.split(",")
    taken = {"head_rank": {"hutchpp"}, "num_probes": {"hutchpp", "hutchinson"}}
    for option, takers in taken.items():
        if not takers & set(names):
            why = f"is for {' and '.join(sorted(takers))}, which --estimator does not name"
            refuse_unused(parser, arguments, [option], why=why)
    chosen = [_named_estimator(name, arguments) for name in names]
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
            f"{_row_name(row):<15} {1000 * row['latency_seconds']:>10.2f} ms  "
            f"{row['workspace_bytes'] / 2**20:>10.2f} MiB beyond inputs of "
            f"{row['input_bytes'] / 2**20:.2f}  {row['flops'] / 1e9:>10.3f} GFLOP"
        )


def _row_name(row: dict[str, Any]) -> str:
    head = "" if row["head_rank"] is None else f"_r{row['head_rank']}_k{row['num_probes']}"
    return f"{row['estimator']}{head}"


def _named_estimator(name: str, arguments: argparse.Namespace) -> "Estimator":
    """Make an estimator by its name, which may hold its head and probes."""
    from dprc import estimators

    num_probes, head_rank = arguments.num_probes, None
    if name == "hutchpp":
        head_rank = arguments.head_rank
    elif found := re.fullmatch(r"hutchpp_r([0-9]+)_k([0-9]+)", name):
        name, head_rank, num_probes = "hutchpp", int(found[1]), int(found[2])
    return estimators.get(name, num_probes=num_probes, sketch=arguments.sketch, head_rank=head_rank)


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
    tokens = counts(
        "--tokens", arguments.tokens or ("512,1024,2048,4096" if arguments.grid else "1024")
    )
    for name, least in (("rounds", 0), ("threads", 1), ("layers", 1), ("hidden_size", 16)):
        if getattr(arguments, name) < least:
            option = name.replace("_", "-")
            raise ValueError(
                f"--{option}: must be at least {least}, got {getattr(arguments, name)}"
            )
    if min(tokens) < 2:
        raise ValueError("--tokens: must be at least 2, for the next token is learned")
    if arguments.hidden_size % 16:
        raise ValueError(f"--hidden-size: must be a multiple of 16, got {arguments.hidden_size}")
    stay_offline()
    from dprc.profiling import peers
    from dprc.profiling.device import device_name, resolve_device
    from dprc.profiling.peer_modes import DEFAULT_MODES, MODES, OPACUS_MISSING, is_missing
    from dprc.profiling.peer_settings import SETTINGS
    from dprc.results import write_result

    everything = "all" if arguments.grid else None
    modes = _names(arguments.modes or everything, DEFAULT_MODES, MODES)
    settings = _names(arguments.settings or everything, ("full",), SETTINGS)
    chosen = peers.choose_modes(modes)
    if arguments.modes and arguments.modes != "all" and any(map(is_missing, chosen)):
        raise ImportError(f"--modes: {OPACUS_MISSING}")
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown:
        raise ValueError(f"--settings: must be of {', '.join(SETTINGS)}, got {unknown[0]!r}")
    sizes = {"hidden_size": arguments.hidden_size, "layers": arguments.layers}
    device = resolve_device(arguments.device)
    options = {"device": arguments.device, "threads": arguments.threads}
    measurement = peers.describe_measurement(**options, noise=not arguments.no_noise)
    config = _settings(arguments) | {"modes": modes, "tokens": tokens, "settings": settings}
    rows: list[dict[str, Any]] = []

    def save(*, valid: bool) -> None:
        if arguments.out:
            metrics = {"rows": rows, "measurement": measurement}
            named = device_name(device)
            write_result(
                arguments.out,
                config=config,
                metrics=metrics,
                privacy=None,
                valid=valid,
                device=named,
                made_by="peers",
            )

    warnings.filterwarnings("ignore", message="Full backward hook")  # Opacus' way of working
    for some in peers.compare(
        modes,
        tokens,
        [replace(SETTINGS[name], **sizes) for name in settings],
        rounds=arguments.rounds,
        memory=not arguments.no_memory,
        noise=not arguments.no_noise,
        **options,
        progress_fn=lambda text: print(f"{text} …", file=sys.stderr),
    ):
        rows += some
        save(valid=False)  # what is there after a crash of a long run, and enters no figure
        if not arguments.json:
            for row in some:
                print(_peer_line(row), flush=True)
    save(valid=True)
    if arguments.json:
        print(json.dumps({"rows": rows, "measurement": measurement}, indent=2))


def _names(text: str | None, default: Iterable[str], known: Iterable[str]) -> list[str]:
    """Read names separated by commas; ``all`` are all known ones."""
    if text is None:
        return list(default)
    return list(known) if text == "all" else text.split(",")


def _peer_line(row: dict[str, Any]) -> str:
    def ratio(value: float | None) -> str:
        return "    -  " if value is None else f"{value:5.2f} x"

    start = f"{row['setting']:<27} T={row['tokens']:<6} {row['mode']:<28}"
    if row["status"] != "ok":
        return f"{start} {row['status']}: {row['message']}"
    error = row["max_norm_error"]
    norms = "" if error is None else f"  norms within {error:.1e}"
    return (
        f"{start} time {ratio(row['time_ratio'])}  memory {ratio(row['peak_memory_ratio'])}{norms}"
    )
