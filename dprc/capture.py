"""Capture: every use of a trained parameter hands its factors on during the backward pass.

A captured module computes with a *detached* weight and passes its output through a tap, an
autograd function that saves the module's input as autograd saves any tensor (so both kinds of
gradient checkpointing and saved-tensor hooks work) and receives the output's gradient. Autograd
itself therefore forms no weight gradient, in any pass, and a parameter that is used in a way the
capture does not see would get an ordinary gradient: a hook on each parameter refuses that.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dprc.coupling import refuse_coupling, refuse_parts
from dprc.errors import PrivacyError
from dprc.graph import make_anchor
from dprc.sites import (
    EmbeddingSite,
    FactorSite,
    LinearSite,
    LoopSite,
    Receiver,
    Site,
    make_site,
    retyped,
    weight_of,
)


class _Tap(torch.autograd.Function):
    """Identity whose backward pass delivers (saved input, output gradient) to the site."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, saved: torch.Tensor | None, anchor: Any, site: FactorSite
    ) -> torch.Tensor:
        ctx.site = site
        ctx.save_for_backward(*([] if saved is None else [saved]))
        return output.detach()  # not a view, so that code after it may work in place

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor) -> Any:
        # Contiguous once, for whoever reads it here and for the layer's own backward.
        grads = output_grads[0].contiguous()
        saved = ctx.saved_tensors  # once: checkpointing recomputes at each access
        ctx.site.deliver(saved[0] if saved else None, grads)
        return grads, None, None, None


class _ParameterTap(torch.autograd.Function):
    """A parameter's value as a leaf whose gradient goes to ``deliver``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: Any, deliver: Any) -> torch.Tensor:
        ctx.deliver = deliver
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor) -> Any:
        ctx.deliver(output_grads[0])
        return None, None, None


@dataclass(frozen=True)
class _CapturedForward:
    """What stands in for ``module.forward``. A copy of it would still serve the original module."""

    module: nn.Module
    site: Site
    capture: "Capture"

    # Compiled, the detached weight would become a graph input with a gradient of zeros.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.site.forward(self.module, self.capture, args, kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        raise PrivacyError(
            "a model held by a PrivacyEngine cannot be copied or pickled: the copy would compute "
            "with the original's weights. Copy it before, or use engine.detach() or state_dict()."
        )

    __reduce__ = __deepcopy__  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__(None)


class _SharedWeight(torch.Tensor):
    """What ``module.weight`` gives to code outside the module.

    ``F.linear`` and ``F.embedding`` on it are captured as further uses of the parameter. Any other
    operation sees the parameter itself, so that its gradient is refused rather than lost.
    """

    _module: nn.Module
    _linear: LinearSite
    _look_up: EmbeddingSite
    _capture: "Capture"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = args[1] if len(args) > 1 and isinstance(args[1], cls) else None
        if weight is not None and func is F.linear and not kwargs:
            with torch._C.DisableTorchFunctionSubclass():
                output = F.linear(args[0], weight_of(weight._module), *args[2:])
                return weight._capture.tap(output, args[0], weight._linear)
        if weight is not None and func is F.embedding:
            with torch._C.DisableTorchFunctionSubclass():
                value = weight_of(weight._module)
                return weight._look_up.look_up(args[0], value, weight._capture)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_unwrapped(args), **_unwrapped(kwargs))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _SharedWeight):
        # Looked up each time: a sharded module has another tensor while it is gathered.
        return value.__dict__["_module"]._parameters["weight"]
    if isinstance(value, (tuple, list)):
        return type(value)(_unwrapped(item) for item in value)
    if isinstance(value, dict):
        return {name: _unwrapped(item) for name, item in value.items()}
    return value


@dataclass
class Capture:
    """The captured modules of one model.

    Args:
        model: The model whose trained parameters are captured.
        receiver: Who takes the contributions.

    Attributes:
        parameters: The trained parameters; a parameter's index is its place here.
        names: Their names in the model.
        sites: One for each captured module.
        uses: How often each parameter was used since the engine last looked.
        replay: While a chunk that can be run again is in its backward pass: runs it with the
            gradient of each sample's loss multiplied by a factor, (B,).
        batch: Number of samples of the model's last call.
        batches: Those of all its calls since the engine last looked.
        tokens: Length of its second axis; None if it has none.

    Raises:
        PrivacyError: A trained parameter or a module that cannot be captured.
    """

    model: nn.Module
    receiver: Receiver
    parameters: list[nn.Parameter] = field(init=False)
    names: list[str] = field(init=False)
    sites: list[Site] = field(init=False, default_factory=list)
    uses: Counter[int] = field(init=False, default_factory=Counter)
    replay: Callable[[torch.Tensor], Any] | None = field(init=False, default=None)
    batch: int | None = field(init=False, default=None)
    tokens: int | None = field(init=False, default=None)
    batches: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not named:
            raise PrivacyError("model: has no trained parameter (every requires_grad is False)")
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self._index = {id(parameter): i for i, parameter in enumerate(self.parameters)}
        self._anchor = make_anchor()
        self._declared: set[int] = set()
        self._lasting = set(self.model.state_dict())
        self._buffers = {
            name: (buffer, buffer._version)
            for name, buffer in self.model.named_buffers()
            if buffer.is_floating_point()
        }
        self._calls, self._trains, self._recomputing = 0, False, False
        self._patched: list[tuple[nn.Module, str]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        try:
            self._patch_all()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Give the model back as it was."""
        for module, name in self._patched:
            module.__dict__.pop(name, None)
        for handle in self._handles:
            handle.remove()
        self._patched.clear()
        self._handles.clear()

    # --- called by the engine ---------------------------------------------------------------------

    def end_of_batch(self) -> None:
        """Forget what the forward passes of one micro-batch noted."""
        self.uses.clear()
        self.batches.clear()
        self._calls = 0  # an interrupted forward pass never left

    def check_buffers(self) -> None:
        """Refuse buffers that a forward pass wrote: they would release what they saw.

        One that is not part of the model's state, such as the frequencies of rotary positions, may
        be replaced by another; so may any by the same values, on another device or in another type.
        """
        for name, buffer in self.model.named_buffers():
            if name not in self._buffers:
                continue
            known, version = self._buffers[name]
            if buffer is not known:
                written = name in self._lasting and not _same_values(known, buffer)
                self._buffers[name] = (buffer, buffer._version)
            else:
                written = version != buffer._version
            if written:
                raise PrivacyError(
                    f"{name}: is a buffer that the model writes in its forward pass, so it leaves "
                    "the training without noise. Switch the statistics off."
                )

    def indices(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """Return the indices of those parameters that are trained."""
        known = (self._index.get(id(parameter)) for parameter in parameters)
        return [index for index in known if index is not None]

    def refuse_gradients(self) -> None:
        """Refuse gradients that a sharded model formed itself, past the hooks of its parameters."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None:
                _refuse_gradient(name)(parameter)

    # --- called by captured forwards --------------------------------------------------------------

    def tap(
        self, output: torch.Tensor, saved: torch.Tensor | None, site: FactorSite
    ) -> torch.Tensor:
        """Pass an output through the tap of a site."""
        if self._counts and site.weight is not None:
            self.uses[site.weight] += 1
        if not torch.is_grad_enabled():
            return output
        saved = saved.detach() if saved is not None and site.saves_input else None
        tapped: torch.Tensor = _Tap.apply(output, saved, self._anchor, site)  # type: ignore[no-untyped-call]
        return tapped

    def tap_parameter(
        self, value: torch.Tensor, deliver: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Make a parameter's value differentiable; its gradient goes to ``deliver``."""
        if not torch.is_grad_enabled():
            return value
        tapped: torch.Tensor = _ParameterTap.apply(value, self._anchor, deliver)  # type: ignore[no-untyped-call]
        return tapped

    def has_several_uses(self, parameter: int) -> bool:
        """Whether the parameter was used more than once, or is by declaration."""
        return parameter in self._declared or self.uses[parameter] > 1

    @property
    def _counts(self) -> bool:
        if self._recomputing:
            return False
        # Within a model's call its caller's mode decides: a checkpoint runs without gradients.
        return self._trains if self._calls else torch.is_grad_enabled()

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Count no uses: the backward pass runs, and forwards within it are recomputations."""
        before, self._recomputing = self._recomputing, True
        try:
            yield
        finally:
            self._recomputing = before

    # --- called by losses -------------------------------------------------------------------------

    def declare_several_uses(self, module: nn.Module) -> None:
        """Treat the module's weight as used several times, however often it is."""
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in self._index:
            self._declared.add(self._index[id(weight)])

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count uses although the mode says that no gradient will follow."""
        calls, trains = self._calls, self._trains
        self._calls, self._trains = calls + 1, True
        try:
            yield
        finally:
            self._calls, self._trains = calls, trains

    @contextmanager
    def replayable(self, run_fn: Callable[[torch.Tensor], Any]) -> Iterator[None]:
        """Say how what is delivered within can be delivered again, weighted."""
        before, self.replay = self.replay, run_fn
        try:
            yield
        finally:
            self.replay = before

    # --- construction -----------------------------------------------------------------------------

    def _patch_all(self) -> None:
        modules = dict(self.model.named_modules())
        for path, module in modules.items():
            refuse_coupling(path, module)
        sites: dict[str, Site] = {}
        loops: set[str] = set()
        for path, module in modules.items():
            own = self._own(module)
            if not own:
                continue
            if capture_of(module) is not None:
                raise PrivacyError(
                    f"{path or 'model'}: another PrivacyEngine holds this model. Call detach() of "
                    "that engine first."
                )
            if "forward" in module.__dict__:
                raise PrivacyError(
                    f"{path or 'model'}: its forward is already replaced by other code, which the "
                    "capture would bypass. Wrap the model with dprc first, or remove that wrapper."
                )
            site = make_site(path, module, own, self.receiver)
            if site is None:
                loops.add(_loop_path(path, module, own))
            else:
                sites[path] = site
        looped: set[int] = set()
        for path in sorted(loops):
            if not any(_inside(path, other) for other in loops):
                loop = self._loop_site(path, modules[path])
                looped.update(loop.parameters)
                self._patch(modules[path], loop)
        for path, site in sites.items():
            if any(path == other or _inside(path, other) for other in loops):
                continue
            if isinstance(site, FactorSite) and site.weight in looped:
                raise PrivacyError(
                    f"{path}.weight: is shared with a module whose samples run one by one; untie "
                    "it, or freeze it with requires_grad_(False)."
                )
            self._patch(modules[path], site)
            if isinstance(site, FactorSite):
                self._share_weight(modules[path], site)
        reached = {index for site in self.sites for index in site.parameters}
        for index, name in enumerate(self.names):
            if index not in reached:
                raise PrivacyError(
                    f"{name}: belongs to a module that is captured without it, so its gradient "
                    "would not be seen. Freeze it with requires_grad_(False)."
                )
        for name, parameter in zip(self.names, self.parameters, strict=True):
            hook = parameter.register_post_accumulate_grad_hook
            self._handles.append(hook(_refuse_gradient(name)))  # type: ignore[no-untyped-call]
        for module in modules.values():
            # A loss may call the backbone inside a model; whoever is called first knows the batch.
            if module is self.model or hasattr(module, "base_model_prefix"):
                enter = module.register_forward_pre_hook(self._enter_model, with_kwargs=True)
                leave = module.register_forward_hook(self._leave_model, always_call=True)
                self._handles += [enter, leave]

    def _own(self, module: nn.Module) -> dict[str, int]:
        return {
            name: self._index[id(parameter)]
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.requires_grad
        }

    def _loop_site(self, path: str, module: nn.Module) -> LoopSite:
        refuse_parts(path, module)
        owners = tuple(
            (inner, name, index)
            for inner in module.modules()
            for name, index in self._own(inner).items()
        )
        return LoopSite(path or "model", self.receiver, owners)

    def _patch(self, module: nn.Module, site: Site) -> None:
        self.sites.append(site)
        module.__dict__["forward"] = _CapturedForward(module, site, self)
        self._patched.append((module, "forward"))

    def _share_weight(self, module: nn.Module, site: FactorSite) -> None:
        weight = module._parameters.get("weight")
        if site.weight is None or weight is None or weight.dim() != 2:
            return
        shared = retyped(weight.detach(), _SharedWeight)
        common = (f"{site.path}.weight used elsewhere", self.receiver, site.weight, None)
        shared.__dict__.update(
            _module=module,
            _linear=LinearSite(*common),
            _look_up=EmbeddingSite(*common),
            _capture=self,
        )
        module.__dict__["weight"] = shared
        self._patched.append((module, "weight"))

    def _enter_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._calls += 1
        if self._calls > 1:
            return
        self._trains = torch.is_grad_enabled()
        main = [kwargs[name] for name in _MAIN_INPUTS if kwargs.get(name) is not None]
        for value in (*main, *args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                self.batch = value.shape[0]
                if self._trains:
                    self.batches.add(self.batch)
                self.tokens = value.shape[1] if value.dim() > 1 else None
                return

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls -= 1


# What says how many samples there are, before masks and positions that may serve all of them.
_MAIN_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")


def capture_of(module: nn.Module) -> Capture | None:
    """Return the capture that holds a module; None if it is not captured."""
    forward = module.__dict__.get("forward")
    return forward.capture if isinstance(forward, _CapturedForward) else None


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.to(second), second)


def _inside(path: str, other: str) -> bool:
    return path != other and (other == "" or path.startswith(f"{other}."))


def _loop_path(path: str, module: nn.Module, own: dict[str, int]) -> str:
    """Return the module whose samples are run one by one: this one, or the one around it."""
    shapes = [module.get_parameter(name).shape for name in own]
    stacked = not isinstance(module, nn.modules.conv._ConvNd) and any(
        len(shape) > 2 and shape[0] > 1 for shape in shapes
    )
    holder = isinstance(module, (nn.ParameterDict, nn.ParameterList))
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return path.rpartition(".parametrizations.")[0]
    # Stacked experts see the tokens of all samples in one row; a holder is never called at all.
    return path.rpartition(".")[0] if stacked or holder else path


def _refuse_gradient(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(parameter: torch.Tensor) -> None:
        parameter.grad = None
        raise PrivacyError(
            f"{name}: is also used outside its own module in a way whose per-sample gradient is "
            "not seen. Call the module instead (or F.linear on its weight), or freeze the "
            "parameter."
        )

    return refuse
