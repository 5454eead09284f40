"""The site of any module with a batch axis: each sample meets its own copy of the parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dprc.contributions import SampleUse, VectorUse
from dprc.errors import PrivacyError
from dprc.sites.base import Site, Tapper


@dataclass(frozen=True)
class LoopSite(Site):
    """Any module with a batch axis: runs on each sample alone, with the sample's own parameters.

    All samples at once under ``torch.vmap``, or in a loop where vmap refuses the module: experts
    that sort tokens, for one. Exact; it serves small modules with parameters of an unusual kind,
    since the gradient of each sample is formed.

    Args:
        path: As for every site.
        receiver: As for every site.
        owners: (module, parameter name, index) of all parameters inside.
        vmaps: Whether vmap gives what the loop gives: empty until the first batch has shown it.
    """

    owners: tuple[tuple[nn.Module, str, int], ...] = ()
    vmaps: list[bool] = field(default_factory=list)

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
        if not self.vmaps and batch > 1:
            self.vmaps.append(self._verify(module, batch, args, kwargs))
        if batch > 1 and self.vmaps[0]:
            copies = self._copies(
                batch, lambda value, index: capture.tap_parameter(value, self._to_all(index))
            )
            try:
                with self._unwritten(module):
                    return self._at_once(module, copies, batch, args, kwargs)
            except RuntimeError:  # a way through the module that the first batch did not take
                self.vmaps[0] = False
        outputs = []
        for sample in range(batch):
            mine = _map(partial(self._slice, sample=sample, batch=batch), (args, kwargs))
            own = [
                capture.tap_parameter(_value(owner, name), self._to(index, sample, batch))
                for owner, name, index in self.owners
            ]
            with self._standing_in(own):
                outputs.append(run(module, *mine[0], **mine[1]))
        return self._join(outputs) if outputs else run(module, *args, **kwargs)

    def _verify(self, module: Any, batch: int, args: Any, kwargs: Any) -> bool:
        """Check once that the samples one by one give what the batch gives; whether vmap does.

        Raises:
            PrivacyError: They do not.
        """
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
            if not _same(whole, joined):
                raise PrivacyError(
                    f"{self.path} ({type(module).__name__}): gives something else for its samples "
                    "one by one than for the batch, so its per-sample gradient is not known. "
                    "Freeze its parameters, or train LoRA adapters instead."
                )
            return self._vmap_agrees(module, joined, batch, args, kwargs)
        finally:
            for inner, mode in modes.items():
                inner.training = mode

    def _vmap_agrees(self, module: Any, joined: Any, batch: int, args: Any, kwargs: Any) -> bool:
        copies = self._copies(batch, lambda value, index: value.clone().requires_grad_())
        try:
            # Nobody's business what the trial saves: checkpointing around it counts saved tensors.
            with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
                output = self._at_once(module, copies, batch, args, kwargs)
                if not _same(joined, output):
                    return False
                reached = [leaf for leaf in tree_leaves(output) if _is_differentiable(leaf)]
                # Some functions have a rule for the forward pass alone.
                torch.autograd.grad(sum(leaf.sum() for leaf in reached), copies, allow_unused=True)
        except Exception:  # vmap refuses in many ways, all of which the loop can do
            return False
        return True

    def _copies(
        self, batch: int, make_fn: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> list[torch.Tensor]:  # each (B, *parameter.shape)
        return [
            make_fn(_value(owner, name).expand(batch, *_value(owner, name).shape), index)
            for owner, name, index in self.owners
        ]

    def _at_once(
        self, module: Any, copies: list[torch.Tensor], batch: int, args: Any, kwargs: Any
    ) -> Any:
        """Run all samples under vmap, each with its own parameters and a batch axis of 1."""
        leaves, structure = tree_flatten((args, kwargs))
        for leaf in leaves:
            self._slice(leaf, 0, batch)  # refuses what has no samples to tell apart
        places = [i for i, leaf in enumerate(leaves) if _has_samples(leaf, batch)]

        def run_one(own: list[torch.Tensor], mine: list[torch.Tensor]) -> Any:
            given = list(leaves)
            for place, value in zip(places, mine, strict=True):
                given[place] = value.unsqueeze(0)
            its_args, its_kwargs = tree_unflatten(given, structure)
            with self._standing_in(own):
                output = type(module).forward(module, *its_args, **its_kwargs)
            return tree_map(lambda leaf: leaf.squeeze(0), output)

        mapped = [leaves[place] for place in places]
        return torch.vmap(run_one, randomness="different")(copies, mapped)

    @contextmanager
    def _standing_in(self, values: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let other tensors stand in for the parameters."""
        changed: list[tuple[nn.Module, str, Any]] = []
        try:
            for (owner, name, _), value in zip(self.owners, values, strict=True):
                changed.append((owner, name, owner.__dict__.get(name)))
                owner.__dict__[name] = value
            yield
        finally:
            for owner, name, before in reversed(changed):
                owner.__dict__.pop(name)
                if before is not None:
                    owner.__dict__[name] = before

    @contextmanager
    def _unwritten(self, module: nn.Module) -> Iterator[None]:
        """Refuse a module that replaces a buffer: it would keep a tensor of vmap's inside."""
        owners = [
            (owner, name, b) for owner in module.modules() for name, b in owner._buffers.items()
        ]
        yield
        for owner, name, buffer in owners:
            if owner._buffers[name] is not buffer:
                owner._buffers[name] = buffer
                raise PrivacyError(
                    f"{self.path}: writes the buffer {name} in its forward pass, so it leaves the "
                    "training without noise. Switch the statistics off."
                )

    def _to_all(self, index: int) -> Callable[[torch.Tensor], None]:
        def deliver(grads: torch.Tensor) -> None:  # (B, *parameter.shape)
            grads = self.by_sample(grads)
            self.receiver.receive(index, VectorUse(grads.unsqueeze(1)))

        return deliver

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


def _value(owner: nn.Module, name: str) -> torch.Tensor:
    parameter = owner._parameters[name]
    if parameter is None:
        raise TypeError(f"{type(owner).__name__} lost its {name} after it was captured")
    return parameter.detach()


def _has_samples(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _same(first: Any, second: Any) -> bool:
    """Compare two outputs up to rounding."""
    if isinstance(first, torch.Tensor):
        if first.shape != second.shape or not first.is_floating_point():
            return first.shape == second.shape and torch.equal(first, second)
        tolerance = 100 * torch.finfo(first.dtype).eps
        scale = float(first[first.isfinite()].abs().max()) if first.isfinite().any() else 0.0
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
