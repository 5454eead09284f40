"""Sites: how each kind of module is captured, told by what the module does, not by its name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dprc.contributions import Contribution, MatrixUse, SampleUse, VectorUse
from dprc.errors import PrivacyError
from dprc.estimators import Use, full_precision


class Receiver(Protocol):
    """Who takes the contributions during a backward pass: the engine."""

    def receive(self, parameter: int, contribution: Contribution) -> None:
        """Take one use of one parameter."""

    def by_sample(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a use with the samples on its first axis.

        Raises:
            PrivacyError: They cannot be told apart, or no backward pass of the engine is running.
        """

    def observe(self, path: str, grads: torch.Tensor) -> None:
        """See the output gradients of a use, samples first, before it is received."""


class Tapper(Protocol):
    """What a captured forward needs of the capture."""

    batch: int | None

    def tap(self, output: torch.Tensor, saved: torch.Tensor | None, site: "Site") -> torch.Tensor:
        """Pass an output through the tap of a site."""

    def tap_parameter(
        self, value: torch.Tensor, deliver: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Make a parameter's value differentiable; its gradient goes to ``deliver``."""


@dataclass(frozen=True)
class Site:
    """One captured module.

    Args:
        path: Its name in the model.
        weight: Index of its weight among the trained parameters; None if frozen or absent.
        bias: Likewise of its bias.
        receiver: Who takes the contributions.
    """

    path: str
    weight: int | None
    bias: int | None
    receiver: Receiver

    @property
    def saves_input(self) -> bool:
        """Whether the backward pass needs the module's input."""
        return self.weight is not None

    @property
    def owners(self) -> tuple[tuple[nn.Module, str, int], ...]:
        """(module, parameter name, index) of parameters whose samples run one by one."""
        return ()

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of the parameters captured here."""
        return tuple(index for index in (self.weight, self.bias) if index is not None)

    def deliver(self, saved: torch.Tensor | None, grads: torch.Tensor) -> None:
        """Hand the factors of one use to the receiver."""
        grads = self.receiver.by_sample(self.path, grads)
        self.receiver.observe(self.path, grads)
        with torch.no_grad(), full_precision(grads.device):
            if self.weight is not None and saved is not None:
                saved = self.receiver.by_sample(self.path, saved)
                self.receiver.receive(self.weight, self.weight_use(saved, grads))
            if self.bias is not None:
                self.receiver.receive(self.bias, VectorUse(self.by_token(grads)))

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:  # (B, …, n) -> (B, T, n)
        """Merge the axes between batch and features."""
        return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Make the contribution of the weight from the saved input and the output's gradient."""
        raise NotImplementedError

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Compute the module's output, tapped."""
        raise NotImplementedError


def _sole_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    values = (*args, *kwargs.values())
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        raise TypeError("a captured layer takes one tensor")
    return values[0]


def _detached(module: nn.Module, name: str) -> torch.Tensor | None:
    parameter = module._parameters.get(name)
    return None if parameter is None else parameter.detach()


def _weight(module: nn.Module) -> torch.Tensor:
    weight = _detached(module, "weight")
    if weight is None:
        raise TypeError(f"{type(module).__name__} lost its weight after it was captured")
    return weight


@contextmanager
def shadowed(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Let ``module.name`` give another tensor for a while; the parameters stay registered."""
    before = {name: module.__dict__[name] for name in values if name in module.__dict__}
    module.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            del module.__dict__[name]
        module.__dict__.update(before)


class LinearSite(Site):
    """``nn.Linear``: the weight is (out, in)."""

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return GᵀA."""
        return MatrixUse(Use(self.by_token(grads), self.by_token(saved)))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Compute x·weightᵀ + bias."""
        x = _sole_argument(args, kwargs)
        return capture.tap(F.linear(x, _weight(module), _detached(module, "bias")), x, self)


class TransposedLinearSite(Site):
    """``Conv1D`` of transformers: a linear layer whose weight is (in, out)."""

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return AᵀG."""
        return MatrixUse(Use(self.by_token(saved), self.by_token(grads)))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Compute bias + x·weight."""
        x = _sole_argument(args, kwargs)
        bias, weight = module._parameters["bias"].detach(), _weight(module)
        flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
        return capture.tap(flat.view(*x.shape[:-1], flat.shape[-1]), x, self)


@dataclass(frozen=True)
class EmbeddingSite(Site):
    """``nn.Embedding`` and its subclasses; rows at ``padding_idx`` have no gradient."""

    padding_idx: int | None = None

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return one-hot(ids)ᵀG."""
        if self.padding_idx is not None:
            grads = grads.masked_fill((saved == self.padding_idx).unsqueeze(-1), 0)
        return MatrixUse(Use(saved.reshape(saved.shape[0], -1), self.by_token(grads)))

    def look_up(self, ids: torch.Tensor, weight: torch.Tensor, capture: Tapper) -> torch.Tensor:
        """Pick the rows, tapped; ids made once for the whole batch get a row for each sample."""
        if capture.batch is not None and capture.batch > 1 and ids.dim() > 1 and len(ids) == 1:
            ids = ids.expand(capture.batch, *ids.shape[1:])
        return capture.tap(F.embedding(ids, weight.detach(), self.padding_idx), ids, self)

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Run the module's own forward (a subclass may scale or shift) and tap the look-up."""
        with _LookUpMode(module.weight, self, capture):
            output: torch.Tensor = type(module).forward(module, *args, **kwargs)
        return output


class _LookUpMode(TorchFunctionMode):
    """Within one embedding's forward, taps the call of ``F.embedding`` on its weight."""

    def __init__(self, weight: torch.Tensor, site: EmbeddingSite, capture: Tapper) -> None:
        super().__init__()
        self._weight, self._site, self._capture = weight, site, capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and len(args) > 1 and args[1] is self._weight:
            return self._site.look_up(args[0], self._weight, self._capture)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ConvolutionSite(Site):
    """``nn.Conv1d`` and ``nn.Conv2d``: a linear layer over patches."""

    convolution: Any = None

    def by_token(self, tensor: torch.Tensor) -> torch.Tensor:  # (B, n, …) -> (B, T, n)
        """Put the channels last and merge the places."""
        return tensor.flatten(2).transpose(1, 2)

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return Gᵀ·patches."""
        layer = self.convolution
        line = saved.dim() == 3  # Conv1d is a Conv2d of height 1
        options = {
            name: (1, *getattr(layer, name)) if line else getattr(layer, name)
            for name in ("kernel_size", "dilation", "stride")
        }
        padding = layer.padding if not line else (0, *layer.padding)
        image = saved.unsqueeze(2) if line else saved
        patches = F.unfold(image, padding=padding, **options).transpose(1, 2)
        return MatrixUse(Use(self.by_token(grads), patches))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Convolve."""
        x = _sole_argument(args, kwargs)
        if x.dim() != module._parameters["weight"].dim():
            raise PrivacyError(f"{self.path}: needs a batch axis, got an input of {x.dim()} axes")
        output = module._conv_forward(x, _weight(module), _detached(module, "bias"))
        return capture.tap(output, x, self)


@dataclass(frozen=True)
class ScaleSite(Site):
    """A norm layer: output = scale ⊙ normalised (+ bias), with the scale on the last axis.

    Args:
        normalise_fn: (module, args, kwargs) -> normalised input, without scale and bias. None runs
            the module's own forward and taps its product with the weight.
    """

    normalise_fn: Callable[[Any, Any, Any], torch.Tensor] | None = None

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return G ⊙ normalised."""
        return VectorUse(self.by_token(grads * saved))

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Normalise, scale and shift."""
        if self.normalise_fn is None:

            def multiply(weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
                return capture.tap(weight * other, other, self)

            return _with_factor(module, multiply, args, kwargs)
        normalised = self.normalise_fn(module, args, kwargs)
        weight, bias = _detached(module, "weight"), _detached(module, "bias")
        output = normalised if weight is None else weight * normalised
        return capture.tap(output if bias is None else output + bias, normalised, self)


def _layer_norm(module: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x = _sole_argument(args, kwargs)
    return F.layer_norm(x, module.normalized_shape, None, None, module.eps)


def _rms_norm(module: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return F.rms_norm(_sole_argument(args, kwargs), module.normalized_shape, None, module.eps)


class _Factor(torch.Tensor):
    """A weight that may only be multiplied with: the product goes through ``multiply_fn``."""

    multiply_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            factor, other = args if isinstance(args[0], cls) else reversed(args)
            if isinstance(factor, cls) and not isinstance(other, cls):
                with torch._C.DisableTorchFunctionSubclass():
                    return factor.__dict__["multiply_fn"](factor.as_subclass(torch.Tensor), other)
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, device
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise TypeError(f"the weight of a norm layer met {func}, not a product")


_PRODUCTS = (torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)


def _with_factor(
    module: Any,
    multiply_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    args: Any,
    kwargs: Any,
) -> torch.Tensor:
    """Run the module's own forward, its product with the weight replaced."""
    factor = _weight(module).as_subclass(_Factor)
    factor.__dict__["multiply_fn"] = multiply_fn
    with shadowed(module, {"weight": factor}):
        output: torch.Tensor = type(module).forward(module, *args, **kwargs)
    return output


@dataclass(frozen=True)
class ElementwiseSite(Site):
    """Any layer that uses its vectors element by element: each sample gets a copy of them."""

    names: Mapping[str, int] | None = None  # parameter name -> index

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of the vectors."""
        return tuple((self.names or {}).values())

    def forward(self, module: Any, capture: Tapper, args: Any, kwargs: Any) -> torch.Tensor:
        """Run the module's own forward on one copy of each vector for each sample."""
        x = _sole_argument(args, kwargs)
        copies = {
            name: capture.tap_parameter(_spread(module._parameters[name], x), self._to(index))
            for name, index in (self.names or {}).items()
        }
        with shadowed(module, copies):
            output: torch.Tensor = type(module).forward(module, *args, **kwargs)
        return output

    def _to(self, index: int) -> Callable[[torch.Tensor], None]:
        def deliver(grads: torch.Tensor) -> None:  # (B, 1, …, n)
            grads = self.receiver.by_sample(self.path, grads)
            self.receiver.observe(self.path, grads)
            self.receiver.receive(index, VectorUse(self.by_token(grads)))

        return deliver


def _spread(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # (n,) -> (B, 1, …, n)
    shape = (x.shape[0], *[1] * (x.dim() - 2), vector.shape[0])
    return vector.detach().expand(shape)


@dataclass(frozen=True)
class LoopSite(Site):
    """Any module with a batch axis: runs on one sample at a time, with its own parameters.

    Exact, and slow for large batches; it serves small modules with parameters of an unusual kind.
    """

    looped: tuple[tuple[nn.Module, str, int], ...] = ()
    verified: list[bool] = field(default_factory=list)

    @property
    def owners(self) -> tuple[tuple[nn.Module, str, int], ...]:
        """(module, parameter name, index) of all parameters inside."""
        return self.looped

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of all parameters inside."""
        return tuple(index for _, _, index in self.looped)

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
            self.receiver.observe(self.path, self.receiver.by_sample(self.path, rows))
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


# --- which kind a module is -----------------------------------------------------------------------


def make_site(
    path: str, module: nn.Module, own: Mapping[str, int], receiver: Receiver
) -> Site | None:
    """Make the site of a module with these trained parameters; None if it needs a LoopSite.

    Args:
        path: Name of the module in the model.
        module: The module.
        own: Name -> index of its own trained parameters.
        receiver: Who takes the contributions.
    """
    if module._parameters.get("weight") is None and "weight" in dir(module):
        return None  # computed from other parameters
    if not set(own) <= {"weight", "bias"}:
        return (
            ElementwiseSite(path, None, None, receiver, own)
            if _is_elementwise(module, own)
            else None
        )
    common = (path, own.get("weight"), own.get("bias"), receiver)
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return LinearSite(*common)
    if isinstance(module, nn.Embedding):
        if module.scale_grad_by_freq:  # counted within each sample, by running it alone
            return None
        return EmbeddingSite(*common, module.padding_idx)
    if forward in (nn.Conv1d.forward, nn.Conv2d.forward) and isinstance(
        module, (nn.Conv1d, nn.Conv2d)
    ):
        plain = module.groups == 1 and module.padding_mode == "zeros"
        plain = plain and not isinstance(module.padding, str)
        return ConvolutionSite(*common, module) if plain else None
    if forward is nn.LayerNorm.forward and isinstance(module, nn.LayerNorm):
        return ScaleSite(*common, _layer_norm) if len(module.normalized_shape) == 1 else None
    if forward is nn.RMSNorm.forward and isinstance(module, nn.RMSNorm):
        return ScaleSite(*common, _rms_norm) if len(module.normalized_shape) == 1 else None
    if _is_transposed_linear(module):
        return TransposedLinearSite(*common)
    if set(own) == {"weight"} and _is_scaling(module):
        return ScaleSite(*common)
    if _is_elementwise(module, own):
        return ElementwiseSite(*common, own)
    return None


# What a module raises when it is asked in a way that it was not made for.
_NOT_THIS_KIND = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)


def _is_transposed_linear(module: nn.Module) -> bool:
    """Ask the module whether it is x ↦ bias + x·weight, as transformers' Conv1D is."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or bias is None or weight.dim() != 2 or bias.shape != weight.shape[1:]:
        return False
    if len(module._parameters) > 2 or len(list(module.children())) > 0:
        return False
    # Not the module's own values: zero or symmetric ones would look like much else.
    values = _probe((weight.shape[0] + 3, weight.shape[1]), weight)
    x = _probe((2, weight.shape[0]), weight)
    probe = {"weight": values[3:], "bias": values[0]}
    try:
        with torch.no_grad(), shadowed(module, probe):
            output = type(module).forward(module, x)
            return torch.equal(output, torch.addmm(probe["bias"], x, probe["weight"]))
    except _NOT_THIS_KIND:
        return False


def _is_scaling(module: nn.Module) -> bool:
    """Ask the module whether its output is the product of its weight with something.

    True for the RMSNorm classes of transformers' Llama, Mistral, Qwen and their kin, whatever
    their names; the comparison is bitwise.
    """
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1:
        return False
    x = _probe((2, 3, weight.shape[0]), weight)
    products: list[torch.Tensor] = []

    def multiply(factor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        products.append(factor * other)
        return products[-1]

    try:
        with torch.no_grad():
            output = _with_factor(module, multiply, (x,), {})
            plain = type(module).forward(module, x)
    except _NOT_THIS_KIND:
        return False
    return len(products) == 1 and output is products[0] and torch.equal(output, plain)


def _is_elementwise(module: nn.Module, own: Mapping[str, int]) -> bool:
    """Ask the module whether giving each sample its own vectors does just that.

    True for Gemma's RMSNorm, whose scale is 1 + weight.
    """
    vectors = {name: module._parameters[name] for name in own}
    if any(v is None or v.dim() != 1 for v in vectors.values()) or len(list(module.children())):
        return False
    sample = next(iter(vectors.values()))
    if sample is None:
        return False
    x = _probe((2, 3, sample.shape[0]), sample)
    copies = {
        name: _probe((2, 1, vector.shape[0]), vector)
        for name, vector in vectors.items()
        if vector is not None
    }
    try:
        with torch.no_grad():
            with shadowed(module, copies):
                together = type(module).forward(module, x)
            for row in range(2):
                with shadowed(module, {name: copy[row, 0] for name, copy in copies.items()}):
                    alone = type(module).forward(module, x[row : row + 1])
                if not torch.equal(together[row : row + 1], alone):
                    return False
    except _NOT_THIS_KIND:
        return False
    return True


def _probe(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
