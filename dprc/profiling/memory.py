"""Peak memory of norm estimation and of training steps, simulated on tensors without memory.

The engine, the losses and the optimizer are the real ones; only the tensors are fake. So nothing
here has to be kept in step with the engine, and a step of any size can be weighed anywhere.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional as F

from dprc import estimators
from dprc.engine import SCHEDULES, PrivacyEngine
from dprc.losses import IGNORED, causal_lm_loss
from dprc.profiling.meter import MemoryMeter, ShapesOnlyStream
from dprc.profiling.presets import ModelShape
from dprc.recompute import recompute_blocks
from dprc.schedules import NormPass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSSES = ("chunked", "full")
OPTIMIZERS = ("adamw", "sgd")
EXCLUDED = (
    "the CUDA context and library handles",
    "what a caching allocator rounds up and fragments",
    "scratch that a kernel takes within one operator",
    "random numbers that numpy draws on a CPU (on a GPU they are counted)",
)


@dataclass(frozen=True)
class Step:
    """What is simulated.

    Args:
        tokens: Of each sample, T.
        batch: Samples of the physical batch, B.
        estimator: Of the registry; None for a step without privacy.
        schedule: ``"two_pass"`` or ``"book_keeping"``.
        num_probes: k.
        sketch: ``"per_sample"`` or ``"shared"``.
        head_rank: Of ``hutchpp``; None for ``num_probes``.
        dtype: Of parameters and activations: ``"fp32"`` or ``"bf16"``.
        checkpointing: Recompute each block's activations in the backward pass.
        loss: ``"chunked"`` is ``dprc.losses.causal_lm_loss``; ``"full"`` makes all logits at once.
        chunk_tokens: Of the chunked loss.
        optimizer: ``"adamw"`` (two states for each trained parameter) or ``"sgd"`` (none).
        lora_rank: Train LoRA adapters of this rank on all linear layers instead of everything.
        forward_only: Stop after the losses, without gradients.
    """

    tokens: int
    batch: int = 1
    estimator: str | None = None
    schedule: str = "two_pass"
    num_probes: int = 32
    sketch: str = "per_sample"
    head_rank: int | None = None
    dtype: str = "fp32"
    checkpointing: bool = False
    loss: str = "chunked"
    chunk_tokens: int = 1024
    optimizer: str = "adamw"
    lora_rank: int | None = None
    forward_only: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "num_probes", "chunk_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: must be a whole number above 0, got {value!r}")
        if self.tokens < 2:
            raise ValueError(f"tokens: a next token needs at least 2, got {self.tokens}")
        for name, allowed in (
            ("dtype", tuple(DTYPES)),
            ("loss", LOSSES),
            ("optimizer", OPTIMIZERS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}: must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )

    @property
    def name(self) -> str:
        """``nonprivate``, ``forward``, or estimator and schedule."""
        if self.forward_only:
            return "forward"
        return "nonprivate" if self.estimator is None else f"{self.estimator}_{self.schedule}"


@dataclass(frozen=True)
class StepMemory:
    """Peak memory of one step.

    Attributes:
        step: What was simulated.
        peak_bytes: Most bytes of tensors alive at once, parameters and optimizer state included.
        phase: Where: ``forward``, ``norms``, ``gradients`` (``backward`` without privacy) or
            ``step``.
        operator: What allocated last.
        composition: Bytes at the peak: ``parameters``, ``optimizer_state``, ``gradients``,
            ``inputs``, ``activations`` (made by the forward pass) and ``workspace`` (the rest).
        largest: The largest tensors at the peak that are neither parameters nor state.
        peak_by_phase: Most bytes at once within each phase.
    """

    step: Step
    peak_bytes: int
    phase: str
    operator: str
    composition: dict[str, int]
    largest: list[dict[str, Any]]
    peak_by_phase: dict[str, int]

    def as_row(self) -> dict[str, Any]:
        """Return one flat row, as the result files hold it."""
        parts = {f"{name}_bytes": size for name, size in self.composition.items()}
        return {
            "mode": self.step.name,
            **asdict(self.step),
            "peak_bytes": self.peak_bytes,
            "phase": self.phase,
            "operator": self.operator,
            "peak_by_phase": self.peak_by_phase,
            **parts,
            "largest": self.largest,
        }


class Workbench:
    """A model, its optimizer and its engine, ready to take the step that is asked for.

    Args:
        config: Of transformers.
        step: What will be taken.
        mode: None trains real tensors, for checks against a real allocator.
    """

    def __init__(self, config: Any, step: Step, mode: FakeTensorMode | None) -> None:
        self._step, self._mode = step, mode
        self.phase = ""
        self.model = _build(config, step, mode)
        with self._tensors():
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer: torch.optim.Optimizer = (
                torch.optim.SGD(trained, lr=1e-6)
                if step.optimizer == "sgd"
                # One tensor after the other, as the fused one: the default's lists of temporaries
                # are as large as the model.
                else torch.optim.AdamW(trained, lr=1e-6, foreach=False)
            )
            _make_state(self.optimizer, trained)
        self.engine: PrivacyEngine | None = None
        if step.estimator is not None and not step.forward_only:
            # Without the mode: what kind a module is, it finds out on real numbers.
            self.engine = _engine(self.model, self.optimizer, step)
            # Whether samples are independent is a check of the first batch alone.
            self.engine._sum.independence_checked = self.engine._sum.cuts_trusted = True

    def draw_from(self, stream_fn: Callable[[Any], Any]) -> None:
        """Replace the engine's random streams."""
        if self.engine is not None:
            streams = self.engine._streams
            self.engine._streams = replace(
                streams, noise=stream_fn(streams.noise), sketch=stream_fn(streams.sketch)
            )

    def current_phase(self) -> str:
        """Name where the step is."""
        running = None if self.engine is None else self.engine._sum.phase
        if running is None:
            return self.phase
        return "norms" if isinstance(running, NormPass) else "gradients"

    def ids(self, batch: int, tokens: int) -> torch.Tensor:
        """Make token ids (batch, tokens)."""
        vocabulary = int(self.model.config.vocab_size)
        generator = None if self._mode else torch.Generator().manual_seed(0)
        with self._tensors():
            return torch.randint(vocabulary, (batch, tokens), generator=generator)

    def take(self, ids: torch.Tensor, meter: MemoryMeter | None = None) -> None:
        """Take the step on a physical batch that is the whole logical batch.

        Args:
            ids: (B, T).
            meter: What watches; on fake tensors one must.
        """
        with self._tensors(), nullcontext() if meter is None else meter:
            self._take(ids, meter)

    def _take(self, ids: torch.Tensor, meter: MemoryMeter | None) -> None:
        self.phase = "forward"
        if self._step.forward_only:
            with torch.no_grad():
                self._losses(ids)
            return
        if self.engine is not None:
            self.engine.backward(self._losses(ids))
            self._label(meter, [total for _, total in self.engine._sum.totals.items()])
            self.phase = "step"
            self.engine.step()
            return
        loss = self._losses(ids).mean()
        self.phase = "backward"
        torch.autograd.backward(loss)
        del loss
        self._label(meter)
        self.phase = "step"
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def held(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Yield (label, tensors) of what is there between two steps."""
        yield "parameters", [*self.model.parameters(), *self.model.buffers()]
        states = self.optimizer.state.values()
        yield (
            "optimizer_state",
            [value for state in states for value in state.values() if torch.is_tensor(value)],
        )

    def _label(self, meter: MemoryMeter | None, totals: list[torch.Tensor] | None = None) -> None:
        if meter is not None:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            meter.hold(grads if totals is None else totals, "gradients")

    def _losses(self, ids: torch.Tensor) -> torch.Tensor:
        if self._step.loss == "chunked":
            batch = {"input_ids": ids, "labels": ids}
            return causal_lm_loss(self.model, batch, chunk_tokens=self._step.chunk_tokens)
        return _whole_losses(self.model, ids)

    @contextmanager
    def _tensors(self) -> Iterator[None]:
        if self._mode is None:
            yield
            return
        with self._mode:
            yield


def simulate_step(config: Any, step: Step, *, numpy_draws: bool = False) -> StepMemory:
    """Weigh one training step of a causal language model on fake tensors.

    The step is one in the middle of a run: the optimizer has its state, and the checks of the first
    batch are done. No batch holds padding, so attention takes no mask.

    Args:
        config: A transformers configuration; see ``presets.ModelShape.config``.
        step: What to simulate.
        numpy_draws: Random numbers are made by numpy, as on a CPU, and not counted.

    Returns:
        The peak. It excludes what ``EXCLUDED`` names. What depends on the data is taken at its
        worst: all token ids of a batch differ.

    Raises:
        ValueError: The model cannot be simulated, or an unknown name in ``step``.
        PrivacyError: The engine refuses the model.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    bench = Workbench(config, step, mode)
    meter = MemoryMeter(bench.current_phase)
    bench.draw_from(lambda stream: ShapesOnlyStream(stream.key, meter, not numpy_draws))
    for label, tensors in bench.held():
        meter.hold(tensors, label)
    ids = bench.ids(step.batch, step.tokens)
    meter.hold([ids], "inputs")
    with _garbage_kept():
        try:
            bench.take(ids, meter)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"--model: a step of {config.model_type} depends on values in {error.func}, so its "
                "memory cannot be simulated"
            ) from error
    return _weighed(step, meter)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Switch Python's cycle collector off: a run must not count on when it runs, and it is slow."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _weighed(step: Step, meter: MemoryMeter) -> StepMemory:
    peak = meter.peak()
    composition = dict.fromkeys(
        ("parameters", "optimizer_state", "gradients", "inputs", "activations", "workspace"), 0
    )
    for storage in peak.alive:
        made = "activations" if storage.phase == "forward" else "workspace"
        composition[storage.label or made] += storage.num_bytes
    moving = [s for s in peak.alive if s.label not in ("parameters", "optimizer_state")]
    largest = [
        {"bytes": s.num_bytes, "shape": list(s.shape), "operator": s.operator, "phase": s.phase}
        for s in sorted(moving, key=lambda s: -s.num_bytes)[:5]
    ]
    return StepMemory(
        step,
        peak.num_bytes,
        peak.phase,
        peak.operator,
        composition,
        largest,
        {phase: size for phase, size in meter.peak_by_phase.items() if phase},
    )


def _build(config: Any, step: Step, mode: FakeTensorMode | None) -> Any:
    """Make the model, of fake tensors where there is a mode."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # The name has no mask function: on fake tensors transformers would else build a (T, T) mask
    # where on real ones, without padding, it leaves causality to the attention kernel.
    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    with nullcontext() if mode is None else torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa_without_mask", dtype=DTYPES[step.dtype]
            ).train()
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"--model: {config.model_type} cannot be built from this configuration: {reason}"
            ) from error
        if step.lora_rank is not None:
            import peft

            lora = peft.LoraConfig(r=step.lora_rank, target_modules="all-linear", lora_dropout=0.0)
            model = peft.get_peft_model(model, lora)
    if mode is not None:
        _make_fake(model, mode)
    if step.checkpointing:
        recompute_blocks(model)
    return model


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace what is on the meta device by fake CPU tensors; what was tied stays tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with mode:
                        fake = torch.empty_like(tensor, device="cpu")
                    made[id(tensor)] = (
                        nn.Parameter(fake, requires_grad=tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else fake
                    )
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _make_state(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Let the optimizer make its state, as its first step does."""
    with MemoryMeter():
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _engine(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> PrivacyEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return PrivacyEngine(
            model,
            optimizer,
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            sample_rate=0.01,
            expected_batch_size=step.batch,
            estimator=str(step.estimator),
            num_probes=step.num_probes,
            sketch=step.sketch,
            head_rank=step.head_rank,
            schedule=step.schedule,
            privacy_seed=0,
        )


def _whole_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return (B,) mean losses from all logits, in float32 as transformers' own loss."""
    logits = model(input_ids=ids).logits.float()
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
    each = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return each.view(ids.shape).sum(1) / (ids.shape[1] - 1)


def mode_names() -> tuple[str, ...]:
    """Return the names of the steps that ``model_rows`` knows."""
    private = (f"{name}_{way}" for way in SCHEDULES for name in estimators.names())
    return ("forward", "nonprivate", *private)


def model_rows(
    shape: ModelShape,
    tokens: Iterable[int],
    *,
    modes: Sequence[str] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Simulate a model's steps, mode by mode.

    Args:
        shape: Of the model.
        tokens: Sequence lengths.
        modes: Of ``mode_names()``; None takes all. ``nonprivate`` is added, for the ratio.
        **settings: Of ``Step``, the same for all; ``head_rank`` for those of ``hutchpp``.

    Returns:
        A row for each mode and length: ``model``, ``StepMemory.as_row``, ``ratio_to_nonprivate``.

    Raises:
        ValueError: An unknown mode, or as ``simulate_step``.
    """
    known = mode_names()
    wanted = known if modes is None else tuple(dict.fromkeys(["nonprivate", *modes]))
    for mode in wanted:
        if mode not in known:
            raise ValueError(f"--modes: must be of {', '.join(known)}, got {mode!r}")
    config = shape.config()
    head_rank = settings.pop("head_rank", None)
    rows = []
    for length in tokens:
        memories = []
        for mode in wanted:
            plain = mode in ("forward", "nonprivate")
            name, _, schedule = ("", "", SCHEDULES[0]) if plain else mode.partition("_")
            step = Step(
                tokens=length,
                estimator=name or None,
                schedule=schedule,
                head_rank=head_rank if name == "hutchpp" else None,
                forward_only=mode == "forward",
                **settings,
            )
            memories.append(simulate_step(config, step))
        reference = next(m for m in memories if m.step.name == "nonprivate").peak_bytes
        rows += [
            {
                "model": shape.name,
                **memory.as_row(),
                "ratio_to_nonprivate": memory.peak_bytes / reference,
            }
            for memory in memories
        ]
    return rows
