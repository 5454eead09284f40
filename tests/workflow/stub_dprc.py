"""A stand-in for the `dprc` command: tiny result files of the same shape, without torch.

The fixtures of the workflow's tests put it on PATH. Each call is written to calls.log, so that a
test can read what was run. Files beside it change what it does: noise_scale.txt the noise that it
calibrates, train_seconds.txt how long a training run takes.
"""

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path

# The rules put the copy of the workflow on the path.
from dprc.provenance import code_record

HERE = Path(__file__).parent
MECHANISM = ("sample_rate", "steps", "estimator", "num_probes", "sketch", "analysis")
PRIVACY = ("epsilon", "delta", *MECHANISM)


def option(name, default):
    path = HERE / f"{name}.txt"
    return float(path.read_text()) if path.exists() else default


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_result(path, config, metrics, privacy, made_by):
    sections = {"config": config, "metrics": metrics, "privacy": privacy}
    environment = {"device": "a stand-in", "code": code_record(made_by)}
    write(path, json.dumps({**sections, "environment": environment, "valid": True}))


def prepare_data(arguments):
    for name in ("train.jsonl", "test.jsonl", "dataset.json"):
        write(Path(arguments.out) / name, "{}\n")


def prepare_model(arguments):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "model.json"):
        write(Path(arguments.out) / name, "{}\n")


def calibrate(arguments):
    noise = option("noise_scale", 1.0) * 10.0 / arguments.epsilon
    privacy = {name: getattr(arguments, name) for name in PRIVACY} | {"noise_multiplier": noise}
    write_result(arguments.out, {}, {}, privacy, "calibration")


def train(arguments):
    settings = json.load(sys.stdin)
    noise = (settings["privacy"] or {}).get("noise_multiplier", 0.0)
    accuracy = 0.9 - 0.01 * (noise + settings["seed"])
    steps = settings["training"]["steps"]
    metrics = {"train_seconds": 1.0, "steps": steps}
    metrics |= {f"test_{name}": accuracy for name in ("accuracy", "rouge1", "f1", "exact_match")}
    privacy = settings["privacy"] and {**settings["privacy"], **settings["method"]}
    out = Path(arguments.out)
    write(out / "steps.csv", "step\n")
    time.sleep(option("train_seconds", 0.0))
    write(out / "settings.yaml", json.dumps(settings))
    write_result(out / "metrics.json", settings, metrics, privacy, "training")


def counts(text):
    return [int(part) for part in text.split(",")]


def count_flops(arguments):
    rows = []
    layers = [counts(layer.replace("x", ",")) for layer in arguments.layers.split(",")]
    sizes = product(layers, counts(arguments.tokens), counts(arguments.num_probes))
    for (d, p), t, k in sizes:
        costs = {
            "exact": 2 * t * d * p,
            "ghost": 2 * t * t * (d + p),
            "tiled": 2 * t * d * p,
            "hutchinson": 2 * t * k * (d + p),
            "hutchpp": 8 * t * k * (d + p) + 2 * k * k * (d + p),
        }
        rows += [
            {
                "in_features": d,
                "out_features": p,
                "tokens": t,
                "num_probes": k,
                "estimator": name,
                "flops_counted": cost,
                "flops_formula": cost,
                "saving_vs_exact": 1 - cost / costs["exact"],
            }
            for name, cost in costs.items()
        ]
    write_result(arguments.out, {}, {"rows": rows}, None, "flops")


def sweep_noise(arguments):
    rows = []
    for epsilon, k in product(arguments.epsilons.split(","), (None, *counts(arguments.num_probes))):
        kinds = [(None, "tight")]
        if k is not None:
            kinds = [("per_sample", "tight"), ("shared", "tight"), ("shared", "envelope")]
        for place, (sketch, analysis) in enumerate(kinds, start=1):
            overhead = 0.0 if k is None else place / k
            noise = option("noise_scale", 1.0) * 10.0 / float(epsilon)
            rows.append(
                {
                    "epsilon": float(epsilon),
                    "estimator": "exact" if k is None else "hutchinson",
                    "num_probes": k,
                    "sketch": sketch,
                    "analysis": analysis,
                    "noise_multiplier": noise * (1 + overhead),
                    "noise_overhead": overhead,
                }
            )
    kinds = {"sample_rate": float, "steps": int, "delta": float}
    config = {name: kind(getattr(arguments, name)) for name, kind in kinds.items()}
    write_result(arguments.out, config, {"rows": rows}, None, "calibration")


def envelope(arguments):
    rows = [
        {"num_probes": 32, "rank": rank, "ratio": ratio, "cdf": ratio / 2}
        for rank, ratio in product(counts(arguments.ranks), (0.5, 1.0, 1.5))
    ]
    write_result(arguments.out, {}, {"rows": rows}, None, "envelope")


def profile_layer(arguments):
    rows = [
        {
            "estimator": name.split("_")[0],
            "num_probes": int(arguments.num_probes) if name.startswith("hutch") else None,
            "head_rank": 2 if "_r2_" in name else None,
            "sketch": arguments.sketch if name.startswith("hutch") else None,
            "in_features": arguments.in_features,
            "out_features": arguments.out_features,
            "tokens": int(arguments.tokens),
            "batch": 1,
            "dtype": "float32",
            "latency_seconds": 0.1 * place,
            "latency_quartiles_seconds": [0.09 * place, 0.12 * place],
            "repeats": 3,
            "threads": 1,
            "clock": "a stand-in",
            "flops": 1,
            "input_bytes": 4096,
            "workspace_bytes": 1024 * place,
            "peak_memory_bytes": 4096 + 1024 * place,
            "memory_source": "a stand-in",
            "device_peak_bytes": None,
        }
        for place, name in enumerate(arguments.estimator.split(","), start=1)
    ]
    write_result(arguments.out, {}, {"rows": rows}, None, "layer_profile")


def simulate_memory(arguments):
    rows = simulated_steps(arguments) if arguments.model else simulated_layers(arguments)
    made_by = "step_memory" if arguments.model else "layer_memory"
    write_result(arguments.out, {}, {"rows": rows}, None, made_by)


def simulated_layers(arguments):
    layers = []
    sizes = [counts(layer.replace("x", ",")) for layer in arguments.layers.split(",")]
    lengths, probes = counts(arguments.tokens), counts(arguments.num_probes)

    def add(t, d, p, estimator, workspace, k=None, sketch=None, projection=None):
        layers.append(
            {
                "in_features": d,
                "out_features": p,
                "tokens": t,
                "batch": 1,
                "dtype": "fp32",
                "estimator": estimator,
                "convention": "in_place",
                "num_probes": k,
                "sketch": sketch,
                "projection": projection,
                "input_bytes": 4 * t * (d + p),
                "workspace_bytes": 4 * workspace,
                "token_workspace_bytes": 4 * t * (k or 0),
                "peak_bytes": 4 * (workspace + t * (d + p)),
                "saving_excluding_inputs": 1 - workspace / (d * p),
                "saving_including_inputs": 0.5,
                "saving_including_inputs_copied": 0.6,
                "saving_token_workspace": None if k is None else 1 - t * k / (d * p),
            }
        )

    for (d, p), t in product(sizes, lengths):
        for estimator, workspace in (("exact", d * p), ("tiled", 128 * d), ("ghost", 2 * t * t)):
            add(t, d, p, estimator, workspace)
        for k, projection in product(probes, ("by_block", "whole")):
            add(t, d, p, "hutchinson", k * (t + d), k, "shared", projection)
            add(t, d, p, "hutchpp", 3 * k * (t + d), k, "shared", projection)
    return layers


def simulated_steps(arguments):
    return [
        {
            "model": arguments.model,
            "mode": mode,
            "estimator": None if mode == "nonprivate" else mode.split("_")[0],
            "schedule": "two_pass",
            "tokens": t,
            "batch": 1,
            "dtype": "bf16",
            "checkpointing": True,
            "peak_bytes": 1000 * t,
        }
        for t, mode in product(counts(arguments.tokens), arguments.modes.split(","))
    ]


def measure_norm_error(arguments):
    def row(layer, name, k):
        spread = 0.0 if k is None else (2 / k) ** 0.5
        quantiles = {str(q): spread * (q - 0.5) for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
        found = {"layer": layer, "document": 0, "estimator": name, "num_probes": k}
        for kind in ("norm", "squared"):
            found |= {f"{kind}_error_mean": 0.0, f"{kind}_error_std": spread}
        return found | {"norm_error_quantiles": quantiles}

    rows = [row("a layer", "tiled", None)]
    for name, k in product(("hutchinson", "hutchpp"), counts(arguments.num_probes)):
        rows += [row(layer, name, k) for layer in ("a layer", "all layers together")]
    write_result(arguments.out, {}, {"rows": rows}, None, "norm_error")


def compare_peers(arguments):
    rows = [
        {
            "mode": mode,
            "library": library,
            "estimator": estimator,
            "schedule": "two_pass" if estimator else None,
            "num_probes": None,
            "head_rank": None,
            "setting": "full",
            "architecture": "llama",
            "training": "full",
            "tied": False,
            "checkpointing": None,
            "micro_batches": 1,
            "tokens": 64,
            "batch": 2,
            "status": "ok",
            "message": None,
            "max_norm_error": 1e-6 if estimator else None,
            "clipped_sum_error": 1e-6 if estimator else None,
            **dict.fromkeys(
                ("time_ratio", "time_seconds", "time_seconds_low", "time_seconds_high"),
                1.0 if arguments.rounds != "0" else None,
            ),
            "peak_memory_ratio": 1.0 if arguments.rounds != "0" else None,
        }
        for mode, library, estimator in (
            ("nonprivate", "torch", None),
            ("opacus_fast", "opacus", "exact"),
            ("exact_two_pass", "dprc", "exact"),
        )
    ]
    rows.append({**rows[1], "status": "refused", "message": "a stand-in", "time_ratio": None})
    measurement = dict.fromkeys(("machine", "date", "dtype", "clock", "memory_source"), "none")
    measurement |= {"threads": 1, "noise": True}
    write_result(arguments.out, {}, {"rows": rows, "measurement": measurement}, None, "peers")


def audit(arguments):
    names = ("estimator", "num_probes", "sketch", "sample_rate")
    config = {name: getattr(arguments, name) for name in names}
    config |= {"head_rank": None, "trials": 200, "num_probes": int(arguments.num_probes or 32)}
    bounds = {"epsilon_claimed": 2.0, "epsilon_lower_bound": 1.5, "tightness": 0.75}
    metrics = {
        **bounds,
        "delta": arguments.delta,
        "confidence": 0.95,
        "one_run": {**bounds, "delta": 1e-5},
        "detectors": [{}, {}],
    }
    write_result(arguments.out, config | {"sample_rate": 1.0}, metrics, None, "audit")


def noise_by_work(arguments):
    def row(epsilon, work, estimator, probes, rank, sketch, analysis):
        noise = {"noise_multiplier": 1 + 1 / probes, "noise_overhead": 1 / probes}
        mechanism = {"estimator": estimator, "num_probes": probes, "head_rank": rank}
        kind = {"sketch": sketch, "analysis": analysis}
        return {"epsilon": epsilon, "work": work, **mechanism, **kind, **noise}

    rows = []
    for epsilon in map(float, arguments.epsilons.split(",")):
        for k in counts(arguments.work):
            for kind in (("shared", "envelope"), ("shared", "tight"), ("per_sample", "tight")):
                rows.append(row(epsilon, k, "hutchinson", k, None, *kind))
        rows.append(row(epsilon, 32, "hutchpp", 26, 2, "per_sample", "tight"))
    run = {name: getattr(arguments, name) for name in ("delta", "sample_rate", "steps")}
    write_result(arguments.out, run, {"rows": rows}, None, "calibration")


def main():
    with (HERE / "calls.log").open("a") as log:
        log.write(" ".join(sys.argv[1:]) + "\n")
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    parser.add_argument("--out", required=True)
    parser.add_argument("--config")
    parser.add_argument("--layers")
    parser.add_argument("--model")
    parser.add_argument("--modes")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--epsilons")
    parser.add_argument("--work")
    parser.add_argument("--ranks")
    parser.add_argument("--delta", type=float)
    parser.add_argument("--sample-rate", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--estimator")
    parser.add_argument("--num-probes")
    parser.add_argument("--in-features", type=int)
    parser.add_argument("--out-features", type=int)
    parser.add_argument("--sketch")
    parser.add_argument("--analysis")
    parser.add_argument("--tokens")
    parser.add_argument("--rounds")
    arguments, _ = parser.parse_known_args()
    globals()[arguments.command.replace("-", "_")](arguments)


if __name__ == "__main__":
    main()
