"""Training steps side by side: every mode on the same model and batch, interleaved in one run.

Times are CPU time of the whole process, which other work on the machine changes little; memory is
the peak resident size over that of the model, each mode in a process of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dprc.engine import PrivacyEngine

BATCH = 2
VOCABULARY = 4096


@dataclass(frozen=True)
class Mode:
    """One way to take a training step.

    Args:
        estimator: None for a step without privacy.
        schedule: Of the engine.
    """

    name: str
    estimator: str | None = None
    schedule: str | None = None


MODES = {
    mode.name: mode
    for mode in (
        Mode("nonprivate"),
        *(
            Mode(f"{estimator}_{schedule}", estimator, schedule)
            for schedule in ("two_pass", "book_keeping")
            for estimator in ("exact", "tiled", "ghost", "hutchinson", "hutchpp")
        ),
    )
}
DEFAULT_MODES = (
    "nonprivate",
    "exact_two_pass",
    "hutchinson_two_pass",
    "exact_book_keeping",
    "hutchinson_book_keeping",
)


def build_model(*, hidden_size: int = 512, layers: int = 4) -> Any:
    """Make the Llama that all modes train: hidden 512, 4 layers, vocabulary 4096, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1 << 17,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batch(tokens: int) -> torch.Tensor:
    """Make (2, tokens) random ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (BATCH, tokens), generator=generator)


def whole_losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return (B,) mean losses from the whole logits."""
    logits = model(input_ids=ids).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return each.mean(1)


def make_step(mode: Mode, model: nn.Module, ids: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return a function that takes one whole step, noise included; it returns squared norms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if mode.estimator is None:

        def plain() -> None:
            torch.autograd.backward(whole_losses(model, ids).mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine = PrivacyEngine(
            model,
            optimizer,
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            sample_rate=0.01,
            expected_batch_size=BATCH,
            estimator=mode.estimator,
            schedule=str(mode.schedule),
            privacy_seed=0,
        )

    def private() -> torch.Tensor:
        engine.backward(whole_losses(model, ids))
        engine.step()
        return engine.squared_norms

    return private


def compare(
    modes: Sequence[str], tokens: Sequence[int], *, rounds: int = 5, memory: bool = True
) -> list[dict[str, Any]]:
    """Time and weigh the modes.

    Args:
        modes: Names of ``MODES``; ``nonprivate`` is added, for the ratios are to it.
        tokens: Sequence lengths.
        rounds: Interleaved rounds; the median of each mode is reported.
        memory: Whether to measure memory, which starts a process for each mode and length.

    Returns:
        A row for each mode and length: ``mode``, ``library``, ``estimator``, ``schedule``,
        ``tokens``, ``time_ratio``, ``time_seconds`` (CPU time), ``peak_memory_ratio`` (None if not
        measured), ``max_norm_error`` (relative; of a randomized estimator its error in this batch).

    Raises:
        ValueError: An unknown mode.
    """
    unknown = [name for name in modes if name not in MODES]
    if unknown:
        raise ValueError(f"--modes: must be of {', '.join(MODES)}, got {unknown[0]!r}")
    names = list(dict.fromkeys(["nonprivate", *modes]))
    rows = []
    for length in tokens:
        ids = make_batch(length)
        truth = _brute_force_norms(ids)
        steps = {name: make_step(MODES[name], build_model(), ids) for name in names}
        errors = {name: _norm_error(step(), truth) for name, step in steps.items()}  # warms up
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name, step in steps.items():
                started = time.process_time()
                step()
                seconds[name].append(time.process_time() - started)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        peak = {name: _peak_bytes(name, length) if memory else None for name in names}
        for name in names:
            mine, reference = peak[name], peak["nonprivate"]
            rows.append(
                {
                    "mode": name,
                    "library": "torch" if name == "nonprivate" else "dprc",
                    "estimator": MODES[name].estimator,
                    "schedule": MODES[name].schedule,
                    "tokens": length,
                    "time_ratio": median[name] / median["nonprivate"],
                    "time_seconds": median[name],
                    "peak_memory_ratio": mine / reference if mine and reference else None,
                    "max_norm_error": errors[name],
                }
            )
    return rows


def _brute_force_norms(ids: torch.Tensor) -> torch.Tensor:  # (B,) squared
    model = build_model()
    losses = whole_losses(model, ids)
    norms = []
    for loss in losses:
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        norms.append(torch.stack([grad.double().square().sum() for grad in grads]).sum())
    return torch.stack(norms)


def _norm_error(squared: torch.Tensor | None, truth: torch.Tensor) -> float | None:
    if squared is None:
        return None
    return float((squared.double().sqrt() / truth.sqrt() - 1).abs().max())


def _peak_bytes(mode: str, tokens: int) -> int:
    """Measure a mode in a process of its own, whose allocator gives freed memory back at once."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "dprc.profiling.peers", mode, str(tokens)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"measuring {mode} at {tokens} tokens failed:\n{done.stderr}")
    return int(json.loads(done.stdout)["peak_bytes"])


def _status_bytes(field: str) -> int:
    """Read a size of this process from Linux, VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _measure_own_peak(mode: str, tokens: int) -> int:
    ids = make_batch(tokens)
    step = make_step(MODES[mode], build_model(), ids)
    step()  # what is loaded at first use is no memory of a step
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    step()
    return _status_bytes("VmHWM") - before


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"peak_bytes": _measure_own_peak(sys.argv[1], int(sys.argv[2]))}))
