"""The site of any module with a batch axis: its samples are run one by one."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dprc.contributions import SampleUse
from dprc.errors import PrivacyError
from dprc.sites.base import Site, Tapper


@dataclass(frozen=True)
class LoopSite(Site):
    """Any module with a batch axis: runs on one sample at a time, with its own parameters.

    Exact, and slow for large batches; it serves small modules with parameters of an unusual kind.
    """

    owners: tuple[tuple[nn.Module, str, int], ...] = ()  # (module, parameter name, index)
    verified: list[bool] = field(default_factory=list)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of all parameters inside."""
        return tuple(index for _, _, index in self.owners)

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> Any:
        """Run the module's own forward once for each sample."""
        run = type(module).forward
        if not torch.is_grad_enabled():
            return run(module, *args, **kwargs)
        batch = capture.batch
        if batch is None:
            raise PrivacyError(f"{self.path}: call the whole model, so that the batch is known")
        if not self.verified and batch > 1:
            self._verify(module, batch, args, kwargs)
            self.verified.append(True)
        outputs = []
        for sample in range(batch):
            mine = _map(partial(self._slice, sample=sample, batch=batch), (args, kwargs))
            with self._own_parameters(capture, sample, batch):
                outputs.append(run(module, *mine[0], **mine[1]))
        return self._join(outputs) if outputs else run(module, *args, **kwargs)

    def _verify(self, module: Any, batch: int, args: Any, kwargs: Any) -> None:
        """Check once that the samples one by one give what the whole batch gives."""
        run, modes = type(module).forward, {inner: inner.training for inner in module.modules()}
        module.eval()  # without dropout
        try:
            with torch.no_grad():
                whole = run(module, *args, **kwargs)
                parts = [
                    _map(partial(self._slice, sample=i, batch=batch), (args, kwargs))
                    for i in range(batch)
                ]
                joined = self._join([run(module, *mine[0], **mine[1]) for mine in parts])
        finally:
            for inner, mode in modes.items():
                inner.training = mode
        if not _same(whole, joined):
            raise PrivacyError(
                f"{self.path} ({type(module).__name__}): gives something else for its samples one "
                "by one than for the batch, so its per-sample gradient is not known. Freeze its "
                "parameters, or train LoRA adapters instead."
            )

    @contextmanager
    def _own_parameters(self, capture: Tapper, sample: int, batch: int) -> Iterator[None]:
        changed: list[tuple[nn.Module, str, Any]] = []
        try:
            for owner, name, index in self.owners:
                changed.append((owner, name, owner.__dict__.get(name)))
                owner.__dict__[name] = capture.tap_parameter(
                    owner._parameters[name].detach(),  # type: ignore[union-attr]
                    self._to(index, sample, batch),
                )
            yield
        finally:
            for owner, name, before in reversed(changed):
                owner.__dict__.pop(name)
                if before is not None:
                    owner.__dict__[name] = before

    def _to(self, index: int, sample: int, batch: int) -> Callable[[torch.Tensor], None]:
        def deliver(grad: torch.Tensor) -> None:
            rows = grad.new_zeros(batch, 1)
            rows[sample] = grad.abs().max()
            self.by_sample(rows)
            self.receiver.receive(index, SampleUse(grad, sample, batch))

        return deliver

    def _slice(self, value: Any, sample: int, batch: int) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 or value.shape[0] == 1:
                return value
            if value.shape[0] == batch:
                return value[sample : sample + 1]
            raise PrivacyError(
                f"{self.path}: got an input with leading dimension {value.shape[0]} where {batch} "
                "samples are expected, so its samples cannot be told apart. Freeze its parameters, "
                "or train LoRA adapters instead."
            )
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            return value
        raise PrivacyError(
            f"{self.path}: got an argument of type {type(value).__name__}, which cannot be cut "
            "into samples. Freeze its parameters, or switch the feature off (a cache, for one)."
        )

    def _join(self, outputs: list[Any]) -> Any:
        first = outputs[0]
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            return torch.cat(outputs)
        if isinstance(first, (tuple, list)):
            return type(first)(self._join(list(parts)) for parts in zip(*outputs, strict=True))
        if isinstance(first, Mapping):
            joined = {name: self._join([output[name] for output in outputs]) for name in first}
            return type(first)(**joined)
        if first is None:
            return None
        raise PrivacyError(
            f"{self.path}: returns a {type(first).__name__}, which has no batch axis to join"
        )


def _same(first: Any, second: Any) -> bool:
    """Compare two outputs up to rounding."""
    if isinstance(first, torch.Tensor):
        if first.shape != second.shape or not first.is_floating_point():
            return first.shape == second.shape and torch.equal(first, second)
        tolerance = 100 * torch.finfo(first.dtype).eps
        scale = float(first.abs().max()) if first.numel() else 0.0
        return torch.allclose(first, second, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if isinstance(first, (tuple, list)):
        return all(_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, Mapping):
        return all(_same(first[name], second[name]) for name in first)
    return bool(first == second)


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_map(fn, item) for item in value)
    if isinstance(value, dict):
        return {name: _map(fn, item) for name, item in value.items()}
    return fn(value)
