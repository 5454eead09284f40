"""Arithmetic that norms and sums are computed in, and what rounding elsewhere costs the bound."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from dprc.errors import PrivacyError


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch autocast and rounded float32 products (TF32, bfloat16) off for the block."""
    castable = torch.amp.is_autocast_available(device.type)
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    with torch.autocast(device.type, enabled=False) if castable else nullcontext():
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# The norm is taken of the gradients of the first pass; those of the sum are rounded again. The
# factor (1 - slack) keeps the clipped norm below C·S all the same. It goes by the coarsest dtype of
# anything on the way: parameters (frozen ones too), activations, gradients, losses, TF32 products.
SLACK = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
TF32_SLACK = 1e-2


def slack_of(dtype: torch.dtype) -> float:
    """Return the slack of a floating type; integers (quantized frozen weights) round no gradient.

    Raises:
        PrivacyError: A type whose rounding no slack covers, such as float16.
    """
    if not dtype.is_floating_point:
        return 0.0
    if dtype not in SLACK:
        raise PrivacyError(
            f"{dtype}: scaled gradients underflow in it, so that no bound on the clipped norm "
            "holds. Use bfloat16 or float32."
        )
    return SLACK[dtype]


def model_slack(model: nn.Module) -> float:
    """Return the slack of everything a gradient meets on its way, frozen layers included."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    rounded = torch.get_float32_matmul_precision() != "highest"
    return max(TF32_SLACK if rounded else 0.0, *map(slack_of, dtypes))
