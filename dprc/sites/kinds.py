"""Which kind of site a module gets: told by what the module does, not by its name."""

from collections.abc import Mapping

import torch
from torch import nn

from dprc.sites.base import Receiver, Site, shadowed
from dprc.sites.matrices import (
    ConvolutionSite,
    EmbeddingSite,
    LinearSite,
    TransposedLinearSite,
)
from dprc.sites.vectors import ElementwiseSite, ScaleSite, layer_norm, rms_norm, with_factor


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
        return ElementwiseSite(path, receiver, own) if _is_elementwise(module, own) else None
    common = (path, receiver, own.get("weight"), own.get("bias"))
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
        return ScaleSite(*common, layer_norm) if len(module.normalized_shape) == 1 else None
    if forward is nn.RMSNorm.forward and isinstance(module, nn.RMSNorm):
        return ScaleSite(*common, rms_norm) if len(module.normalized_shape) == 1 else None
    if _is_transposed_linear(module):
        return TransposedLinearSite(*common)
    if set(own) == {"weight"} and _is_scaling(module):
        return ScaleSite(*common)
    if _is_elementwise(module, own):
        return ElementwiseSite(path, receiver, own)
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
    # Not the module's own values: ones would hide a product, and a simulated model has none.
    stand_in = _probe((5, weight.shape[0]), weight)[4]
    products: list[torch.Tensor] = []

    def multiply(factor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        products.append(factor * other)
        return products[-1]

    try:
        with torch.no_grad():
            output = with_factor(module, multiply, (x,), {}, stand_in)
            with shadowed(module, {"weight": stand_in}):
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
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    of_this_process: torch.Tensor = like.to_local() if hasattr(like, "to_local") else like
    return values.to(of_this_process)
