"""Capture: every use of a trained parameter hands its factors on during the backward pass.

A captured module computes with a *detached* weight and passes its output through a tap, an
autograd function that saves the module's input as autograd saves any tensor (so both kinds of
gradient checkpointing and saved-tensor hooks work) and receives the output's gradient. Autograd
itself therefore forms no weight gradient, in any pass, and a parameter that is used in a way the
capture does not see would get an ordinary gradient: a hook on each parameter refuses that.

Modules are taken by behaviour. A module whose parameters cannot be captured is refused at
construction, by its path.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from dprc.errors import PrivacyError
from dprc.estimators import Use, full_precision, work_dtype


class Contribution(Protocol):
    """What one use of a parameter in one micro-batch knows of its gradient."""

    @property
    def batch(self) -> int:
        """Number of samples, as the use saw it."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Floating types of the factors."""

    def masked(self, excluded: torch.Tensor) -> "Contribution":  # excluded (B,) bool
        """Return the contribution with the excluded samples exactly zero, even if not finite."""

    def weighted(self, factors: torch.Tensor) -> "Contribution":  # factors (B,)
        """Return the contribution with each sample's gradient multiplied by its factor."""

    def add_total_(self, total: torch.Tensor) -> None:
        """Add the gradient summed over samples to ``total``, which has the parameter's shape."""


def _zero_rows(tensor: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    shape = (-1,) + (1,) * (tensor.dim() - 1)
    return tensor.masked_fill(excluded.view(shape), 0)


def _scale_rows(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    shape = (-1,) + (1,) * (tensor.dim() - 1)
    return tensor.to(factors.dtype) * factors.view(shape)


@dataclass(frozen=True)
class MatrixUse:
    """A use of a matrix: the gradient is leftᵀ right, transposed or not as the weight is stored."""

    use: Use

    @property
    def batch(self) -> int:
        """Number of samples, as the use saw it."""
        return self.use.right.shape[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Floating types of the factors."""
        return tuple(factor.dtype for factor in self.use if factor.is_floating_point())

    def masked(self, excluded: torch.Tensor) -> "MatrixUse":
        """Return the use with the excluded samples exactly zero."""
        left = self.use.left if self.use.by_ids else _zero_rows(self.use.left, excluded)
        return MatrixUse(Use(left, _zero_rows(self.use.right, excluded)))

    def weighted(self, factors: torch.Tensor) -> "MatrixUse":
        """Return the use with each sample's gradient multiplied by its factor."""
        left, right = self.use
        if self.use.by_ids or right.shape[-1] <= left.shape[-1]:
            return MatrixUse(Use(left, _scale_rows(right, factors)))
        return MatrixUse(Use(_scale_rows(left, factors), right))

    def add_total_(self, total: torch.Tensor) -> None:
        """Add leftᵀ right, summed over samples and tokens."""
        right = self.use.right.flatten(0, 1).to(total.dtype)
        if self.use.by_ids:
            total.index_add_(0, self.use.left.flatten().long(), right)
        else:
            total.addmm_(self.use.left.flatten(0, 1).to(total.dtype).t(), right)


@dataclass(frozen=True)
class VectorUse:
    """A use of a bias or a scale: the gradient is the sum of ``grads`` over tokens."""

    grads: torch.Tensor  # (B, T, *parameter.shape)

    @property
    def batch(self) -> int:
        """Number of samples, as the use saw it."""
        return self.grads.shape[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Floating types of the factors."""
        return (self.grads.dtype,)

    def masked(self, excluded: torch.Tensor) -> "VectorUse":
        """Return the use with the excluded samples exactly zero."""
        return VectorUse(_zero_rows(self.grads, excluded))

    def weighted(self, factors: torch.Tensor) -> "VectorUse":
        """Return the use with each sample's gradient multiplied by its factor."""
        # Summed over tokens first, so that a kept bias costs (B, p) and not (B, T, p).
        return VectorUse(_scale_rows(self.per_sample().unsqueeze(1), factors))

    def per_sample(self) -> torch.Tensor:  # (B, *parameter.shape)
        """Return each sample's gradient, in the working dtype."""
        return self.grads.to(work_dtype(self.grads.dtype)).sum(1)

    def add_total_(self, total: torch.Tensor) -> None:
        """Add the sum over samples and tokens."""
        total.add_(self.grads.to(total.dtype).sum((0, 1)).view_as(total))


class Receiver(Protocol):
    """Who takes the contributions during a backward pass: the engine."""

    def receive(self, path: str, parameter: int, contribution: Contribution) -> None:
        """Take one use of one parameter."""

    def check_active(self, path: str) -> None:
        """Raise PrivacyError unless a backward pass of the engine is running."""


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

    def deliver(self, saved: torch.Tensor | None, grads: torch.Tensor) -> None:
        """Hand the factors of one use to the receiver."""
        self.receiver.check_active(self.path)
        with torch.no_grad(), full_precision(grads.device):
            if self.weight is not None and saved is not None:
                self.receiver.receive(self.path, self.weight, self.weight_use(saved, grads))
            if self.bias is not None:
                rows = grads.reshape(grads.shape[0], -1, grads.shape[-1])
                self.receiver.receive(self.path, self.bias, VectorUse(rows))

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Make the contribution of the weight from the saved input and the output's gradient."""
        raise NotImplementedError


def _by_token(tensor: torch.Tensor) -> torch.Tensor:  # (B, …, n) -> (B, T, n)
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])


class LinearSite(Site):
    """``nn.Linear``: the weight is (out, in)."""

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return GᵀA."""
        return MatrixUse(Use(_by_token(grads), _by_token(saved)))


class TransposedLinearSite(Site):
    """``Conv1D`` of transformers: a linear layer whose weight is (in, out)."""

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return AᵀG."""
        return MatrixUse(Use(_by_token(saved), _by_token(grads)))


@dataclass(frozen=True)
class EmbeddingSite(Site):
    """``nn.Embedding``; rows at ``padding_idx`` have no gradient."""

    padding_idx: int | None = None

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return one-hot(ids)ᵀG."""
        if self.padding_idx is not None:
            grads = grads.masked_fill((saved == self.padding_idx).unsqueeze(-1), 0)
        return MatrixUse(Use(saved.reshape(saved.shape[0], -1), _by_token(grads)))


class ScaleSite(Site):
    """A norm layer: output = scale ⊙ normalised (+ bias), with the scale on the last axis."""

    def weight_use(self, saved: torch.Tensor, grads: torch.Tensor) -> Contribution:
        """Return the sum over tokens of G ⊙ normalised."""
        return VectorUse(_by_token(grads * saved))


class _Tap(torch.autograd.Function):
    """Identity whose backward pass delivers (saved input, output gradient) to the site."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, saved: torch.Tensor | None, anchor: Any, site: Site
    ) -> torch.Tensor:
        ctx.site = site
        ctx.save_for_backward(*([] if saved is None else [saved]))
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor) -> Any:
        (grads,) = output_grads
        saved = ctx.saved_tensors  # once: checkpointing recomputes at each access
        ctx.site.deliver(saved[0] if saved else None, grads)
        return grads, None, None, None


@contextmanager
def _shadowed(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> Iterator[None]:
    """Let ``module.name`` give another tensor for a while; the parameters stay registered."""
    module.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            del module.__dict__[name]


@dataclass
class Capture:
    """The captured modules of one model.

    Args:
        model: The model whose trained parameters are captured.
        receiver: Who takes the contributions.

    Raises:
        PrivacyError: A trained parameter or a module that cannot be captured.
    """

    model: nn.Module
    receiver: Receiver
    parameters: list[nn.Parameter] = field(init=False)
    names: list[str] = field(init=False)
    sites: list[Site] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not named:
            raise PrivacyError("model: has no trained parameter (every requires_grad is False)")
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        # Makes a tapped output differentiable where no input is; never gets a gradient itself.
        self._anchor = torch.zeros((), requires_grad=True)
        self._batch: int | None = None
        self._patched: list[nn.Module] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        try:
            self._patch_all()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Give the model back as it was."""
        for module in self._patched:
            module.__dict__.pop("forward", None)
        for handle in self._handles:
            handle.remove()
        self._patched.clear()
        self._handles.clear()

    def _patch_all(self) -> None:
        seen: set[int] = set()
        for path, module in self.model.named_modules():
            _refuse_coupling(path, module)
            own = {
                name: parameter
                for name, parameter in module.named_parameters(recurse=False)
                if parameter.requires_grad
            }
            if own and id(module) not in seen:
                seen.add(id(module))
                self._patch(path, module, own)
        for name, parameter in zip(self.names, self.parameters, strict=True):
            refuse = _refuse_gradient(name)
            hook = parameter.register_post_accumulate_grad_hook
            self._handles.append(hook(refuse))  # type: ignore[no-untyped-call]
        self._handles.append(
            self.model.register_forward_pre_hook(self._note_batch, with_kwargs=True)
        )

    def _note_batch(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                self._batch = value.shape[0]
                return

    def _patch(self, path: str, module: nn.Module, own: Mapping[str, nn.Parameter]) -> None:
        if "forward" in module.__dict__:
            raise PrivacyError(
                f"{path}: its forward is already replaced by other code, which the capture would "
                "bypass. Wrap the model with dprc first, or remove the other wrapper."
            )
        build = _forward_of(module, own)
        if build is None:
            raise PrivacyError(
                f"{path} ({type(module).__name__}): trained parameter "
                f"{', '.join(f'{path}.{name}' for name in own)} is of a kind whose per-sample "
                "gradient is not supported. Freeze it with requires_grad_(False), or train LoRA "
                "adapters instead."
            )
        site_class, make = build
        indices = {name: self._index[id(parameter)] for name, parameter in own.items()}
        extra = {"padding_idx": module.padding_idx} if isinstance(module, nn.Embedding) else {}
        site = site_class(path, indices.get("weight"), indices.get("bias"), self.receiver, **extra)
        self.sites.append(site)
        module.forward = make(self, module, site)
        self._patched.append(module)

    def tap(self, output: torch.Tensor, saved: torch.Tensor | None, site: Site) -> torch.Tensor:
        """Pass an output through the tap of a site."""
        if not torch.is_grad_enabled():
            return output
        saved = saved.detach() if saved is not None and site.saves_input else None
        tapped: torch.Tensor = _Tap.apply(output, saved, self._anchor, site)  # type: ignore[no-untyped-call]
        return tapped

    def spread(self, ids: torch.Tensor) -> torch.Tensor:
        """Give every sample its own row of ids that were made once for the whole batch."""
        if self._batch is not None and ids.dim() > 1 and ids.shape[0] == 1 and self._batch > 1:
            return ids.expand(self._batch, *ids.shape[1:])
        return ids


def _refuse_gradient(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(parameter: torch.Tensor) -> None:
        parameter.grad = None
        raise PrivacyError(
            f"{name}: is also used outside its own module (for instance by F.linear), where its "
            "per-sample gradient is not seen. Call the module instead, or freeze the parameter."
        )

    return refuse


def _refuse_coupling(path: str, module: nn.Module) -> None:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise PrivacyError(
            f"{path} ({type(module).__name__}): batch normalisation mixes the samples of a batch, "
            "so that no per-sample clipping bounds one sample's influence. Replace it by "
            "GroupNorm or LayerNorm."
        )


# --- forwards of the captured kinds ---------------------------------------------------------------

_Forward = Callable[..., torch.Tensor]
_Build = tuple[type[Site], Callable[[Capture, nn.Module, Any], _Forward]]


def _forward_of(module: nn.Module, own: Mapping[str, nn.Parameter]) -> _Build | None:
    """Find how a module with these trained parameters is captured; None if it is not."""
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return LinearSite, _linear_forward
    if forward is nn.Embedding.forward and isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq:
            return None  # max_norm writes the weight in the forward pass; by_freq couples samples
        return EmbeddingSite, _embedding_forward
    if _is_transposed_linear(module):
        return TransposedLinearSite, _transposed_linear_forward
    if forward is nn.LayerNorm.forward and isinstance(module, nn.LayerNorm):
        return (ScaleSite, _layer_norm_forward) if len(module.normalized_shape) == 1 else None
    if forward is nn.RMSNorm.forward and isinstance(module, nn.RMSNorm):
        return (ScaleSite, _rms_norm_forward) if len(module.normalized_shape) == 1 else None
    if set(own) == {"weight"} and own["weight"].dim() == 1 and _is_scaling(module):
        return ScaleSite, _scaling_forward
    return None


def _sole_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    values = (*args, *kwargs.values())
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        raise TypeError("a captured layer takes one tensor")
    return values[0]


def _detached(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.detach()


def _linear_forward(capture: Capture, module: Any, site: LinearSite) -> _Forward:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = _sole_argument(args, kwargs)
        output = F.linear(x, module.weight.detach(), _detached(module.bias))
        return capture.tap(output, x, site)

    return forward


def _is_transposed_linear(module: Any) -> bool:
    """Ask the module whether it is x ↦ bias + x·weight, as transformers' Conv1D is."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None or bias is None or weight.dim() != 2 or bias.shape != weight.shape[1:]:
        return False
    x = torch.randn(2, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        with torch.no_grad():
            output = type(module).forward(module, x)
            return torch.equal(output, torch.addmm(bias, x, weight))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False  # another signature: not a linear layer


def _transposed_linear_forward(
    capture: Capture, module: Any, site: TransposedLinearSite
) -> _Forward:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = _sole_argument(args, kwargs)
        flat = torch.addmm(module.bias.detach(), x.reshape(-1, x.shape[-1]), module.weight.detach())
        return capture.tap(flat.view(*x.shape[:-1], flat.shape[-1]), x, site)

    return forward


def _embedding_forward(capture: Capture, module: Any, site: EmbeddingSite) -> _Forward:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        ids = capture.spread(_sole_argument(args, kwargs))
        output = F.embedding(ids, module.weight.detach(), module.padding_idx)
        return capture.tap(output, ids, site)

    return forward


def _layer_norm_forward(capture: Capture, module: Any, site: ScaleSite) -> _Forward:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = _sole_argument(args, kwargs)
        normalised = F.layer_norm(x, module.normalized_shape, None, None, module.eps)
        output = normalised
        if module.weight is not None:
            output = output * module.weight.detach()
        if module.bias is not None:
            output = output + module.bias.detach()
        return capture.tap(output, normalised, site)

    return forward


def _rms_norm_forward(capture: Capture, module: Any, site: ScaleSite) -> _Forward:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = _sole_argument(args, kwargs)
        normalised = F.rms_norm(x, module.normalized_shape, None, module.eps)
        return capture.tap(normalised * module.weight.detach(), normalised, site)

    return forward


def _is_scaling(module: Any) -> bool:
    """Ask the module itself whether its output is its weight times what weight 1 gives.

    True for the RMSNorm classes of transformers' Llama, Mistral, Qwen and their kin, whatever
    their names; the comparison is bitwise.
    """
    weight = module.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, weight.shape[0], generator=generator).to(weight)
    scale = (1 + torch.rand(weight.shape[0], generator=generator)).to(weight)
    try:
        with torch.no_grad():
            with _shadowed(module, {"weight": scale}):
                scaled = type(module).forward(module, x)
            with _shadowed(module, {"weight": torch.ones_like(weight)}):
                normalised = type(module).forward(module, x)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False  # another signature: not a norm layer
    return isinstance(scaled, torch.Tensor) and torch.equal(scaled, scale * normalised)


def _scaling_forward(capture: Capture, module: Any, site: ScaleSite) -> _Forward:
    original = type(module).forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        weight = module.weight.detach()
        with _shadowed(module, {"weight": torch.ones_like(weight)}):
            normalised = original(module, *args, **kwargs)
        return capture.tap(weight * normalised, normalised, site)

    return forward
