"""Run every code path that needs a GPU, once, on one GPU, in under eight minutes.

``python scripts/gpu_checks.py --out results/gpu_checks.json`` profiles the paper's two layers with
every estimator, takes training steps of a small Llama in bfloat16 with both schedules, and runs the
tests that are marked ``gpu``. Each part says what failed and the next one runs all the same.

Exit code 0: all is well. 1: a part failed. 2: there is no GPU.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dprc import estimators
from dprc.engine import PrivacyEngine
from dprc.losses import causal_lm_loss
from dprc.profiling.device import device_name, measure_peak, resolve_device
from dprc.profiling.flops import LayerShape
from dprc.profiling.latency import profile_layer
from dprc.profiling.peer_settings import Setting, build_model
from dprc.profiling.timing import time_interleaved
from dprc.results import write_result

ROOT = Path(__file__).resolve().parent.parent
BUDGET_SECONDS = 460.0
PAPER_LAYERS = ((8192, 2048), (2048, 512))
SCHEDULES = ("two_pass", "book_keeping")


def profile_layers(
    device: torch.device,
    *,
    layers: tuple[tuple[int, int], ...] = PAPER_LAYERS,
    tokens: tuple[int, ...] = (4096, 16384),
    repeats: int = 10,
) -> dict[str, Any]:
    """Time and weigh every estimator on the paper's layers, in float32 and bfloat16."""
    chosen = [estimators.get(name, sketch="shared") for name in estimators.names()]
    rows, reasons = [], set()
    for dtype in (torch.float32, torch.bfloat16):
        for in_features, out_features in layers:
            for length in tokens:
                profile = profile_layer(
                    LayerShape(in_features, out_features, length),
                    chosen,
                    device=device,
                    dtype=dtype,
                    repeats=repeats,
                )
                rows += profile.rows
                reasons |= {profile.occupancy.reason} - {None}
    return {"rows": rows, "not_exclusive_because": sorted(reasons)}


def take_steps(
    device: torch.device,
    *,
    tokens: int = 2048,
    repeats: int = 5,
    hidden_size: int = 512,
    chosen: tuple[str, ...] = ("exact", "tiled", "hutchinson", "hutchpp"),
) -> dict[str, Any]:
    """Train a small bfloat16 Llama, without privacy and with each estimator and schedule.

    Returns:
        ``rows`` with ``step_seconds``, ``peak_memory_bytes`` over the model and
        ``max_norm_error`` against the exact norms of the same batch.

    Raises:
        ValueError: A norm, a loss or a parameter that is not finite; an exact norm that is off.
    """
    ids = torch.randint(4096, (2, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    batch = {"input_ids": ids, "labels": ids}
    modes: dict[str, Callable[[], torch.Tensor | None]] = {}
    engines: dict[str, PrivacyEngine] = {}
    for name in ("nonprivate", *(f"{e}/{s}" for e in chosen for s in SCHEDULES)):
        model = build_model(Setting(hidden_size=hidden_size)).to(device, torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        if name == "nonprivate":
            modes[name] = _plain_step(model, optimizer, batch)
            continue
        estimator, schedule = name.split("/")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the fixed privacy_seed
            engines[name] = PrivacyEngine(
                model,
                optimizer,
                max_grad_norm=1.0,
                noise_multiplier=1.0,
                sample_rate=0.01,
                expected_batch_size=2,
                estimator=estimator,
                schedule=schedule,
                privacy_seed=0,
            )
        modes[name] = _private_step(engines[name], batch)
    # All models are equal before their first step, so their norms can be compared.
    norms = {name: step() for name, step in modes.items()}
    peaks = {name: measure_peak(step, device, [ids]) for name, step in modes.items()}
    timings = time_interleaved(modes, device, repeats=repeats, warm_up=1)
    truth = norms[f"exact/{SCHEDULES[0]}"]
    rows = []
    for name in modes:
        estimator, _, schedule = name.partition("/")
        found = norms[name]
        error = None
        if found is not None and truth is not None:
            error = float((found.sqrt() / truth.sqrt() - 1).abs().max())
            if not error < (1e-2 if estimator in ("exact", "tiled") else 1.0):
                raise ValueError(f"{name}: norms are off by {error:.3g} (relative)")
        if name in engines and not _all_finite(engines[name].model):
            raise ValueError(f"{name}: a parameter is not finite after training")
        rows.append(
            {
                "mode": name,
                "estimator": None if name == "nonprivate" else estimator,
                "schedule": schedule or None,
                "tokens": tokens,
                "step_seconds": timings[name].median_seconds,
                "step_quartiles_seconds": list(timings[name].quartiles_seconds),
                "peak_memory_bytes": peaks[name].allocated_bytes,
                "device_peak_bytes": peaks[name].device_bytes,
                "max_norm_error": error,
            }
        )
    return {"rows": rows}


def _all_finite(model: torch.nn.Module) -> bool:
    return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _plain_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> Callable[[], None]:
    def step() -> None:
        torch.autograd.backward(causal_lm_loss(model, batch).mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _private_step(
    engine: PrivacyEngine, batch: dict[str, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        engine.backward(causal_lm_loss(engine.model, batch))
        norms = engine.squared_norms.clone()
        engine.step()
        return norms

    return step


def run_tests(timeout_seconds: float) -> dict[str, Any]:
    """Run the tests that are marked ``gpu``.

    Raises:
        ValueError: One failed, or none ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", f"--junitxml={report}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {} if suite is None else {k: int(suite.get(k, 0)) for k in ("tests", "skipped")}
    if done.returncode != 0 or counts.get("tests", 0) == counts.get("skipped", 0):
        raise ValueError(f"pytest -m gpu: exit code {done.returncode}\n{done.stdout[-4000:]}")
    return counts


def run_parts(parts: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Run each part; a failure is recorded and stops no other."""
    found: dict[str, dict[str, Any]] = {}
    for name, part in parts.items():
        started = time.perf_counter()
        sys.stderr.write(f"{name} …\n")
        try:
            result = {"ok": True, **part()}
        except Exception as error:  # whatever it is, the next part can still tell something
            result = {"ok": False, "error": "".join(traceback.format_exception(error))[-4000:]}
        seconds = time.perf_counter() - started
        found[name] = {**result, "wall_seconds": seconds}
        sys.stderr.write(f"{name}: {'ok' if result['ok'] else 'FAILED'}, {seconds:.0f} s\n")
        if not result["ok"]:
            sys.stderr.write(result["error"])
    return found


def main() -> int:
    """Run all parts and write one result file."""
    parser = argparse.ArgumentParser(description="Run every code path that needs a GPU.")
    parser.add_argument("--out", required=True, help="result file to write")
    arguments = parser.parse_args()
    try:
        device = resolve_device("cuda")
    except ValueError as error:
        sys.stderr.write(f"gpu_checks: error: {error}\n")
        return 2
    started = time.perf_counter()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "layers": lambda: profile_layers(device),
        "training": lambda: take_steps(device),
        "tests": lambda: run_tests(BUDGET_SECONDS - (time.perf_counter() - started)),
    }
    found = run_parts(parts)
    passed = all(part["ok"] for part in found.values())
    alone = not found["layers"].get("not_exclusive_because")
    write_result(
        arguments.out,
        config={"layers": PAPER_LAYERS, "schedules": SCHEDULES},
        metrics=found,
        privacy=None,
        valid=passed and alone,
        device=device_name(device),
    )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
