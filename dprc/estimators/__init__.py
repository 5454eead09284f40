"""Estimators of the squared norm of one parameter's per-sample gradient.

The gradient of a weight W of shape (rows, columns) for one sample is a sum over its uses of
``leftᵀ right``, with factors left (T, rows) and right (T, columns). For a linear layer left is
the output gradient G and right the activation A; for an embedding left is a one-hot matrix, given
by its ids, and right the output gradient. The randomized estimators never form the product.

============  ===================================  ==================================
name          what                                 floating-point operations (FMA = 2)
============  ===================================  ==================================
exact         form the gradient, take its norm     2BTdp
ghost         inner product of two Gram matrices   2BT²(d+p)
tiled         exact, block of rows by block        2BTdp
hutchinson    project one side on k probes         2BTk(d+p)
hutchpp       exact head, projected tail           2BT(3r+k)(d+p) + 2Brk(d+p)
============  ===================================  ==================================

All arithmetic is float32 (float64 for float64 inputs), with autocast and TF32 off: a norm rounded
to bfloat16 would clip too little.
"""

from collections.abc import Callable

from dprc.estimators.base import Accumulation, Estimator, Use
from dprc.estimators.deterministic import Exact, Ghost, Tiled
from dprc.estimators.hutchinson import Hutchinson
from dprc.estimators.hutchpp import HutchPlusPlus
from dprc.sketch import SKETCHES

__all__ = [
    "Accumulation",
    "Estimator",
    "Exact",
    "Ghost",
    "HutchPlusPlus",
    "Hutchinson",
    "Tiled",
    "Use",
    "get",
    "names",
]

_REGISTRY: dict[str, Callable[[int, str, int | None], Estimator]] = {
    "exact": lambda num_probes, sketch, head_rank: Exact(),
    "ghost": lambda num_probes, sketch, head_rank: Ghost(),
    "tiled": lambda num_probes, sketch, head_rank: Tiled(),
    "hutchinson": lambda num_probes, sketch, head_rank: Hutchinson(num_probes, sketch),
    "hutchpp": HutchPlusPlus,
}


def names() -> tuple[str, ...]:
    """Return the names that ``get`` knows."""
    return tuple(_REGISTRY)


def get(
    name: str, *, num_probes: int = 32, sketch: str = "per_sample", head_rank: int | None = None
) -> Estimator:
    """Make an estimator by name.

    Args:
        name: One of ``names()``.
        num_probes: Random probes k of a randomized estimator; of the tail for ``hutchpp``.
        sketch: ``"per_sample"`` or ``"shared"``, for a randomized estimator.
        head_rank: Rank of the exact head of ``hutchpp``; ``num_probes`` when None.

    Raises:
        ValueError: An unknown name or sketch, num_probes < 1, or head_rank for another estimator.
        TypeError: A count that is not an int.

    Example:
        >>> get("hutchinson", num_probes=16).scale_law().num_probes
        16
    """
    if name not in _REGISTRY:
        raise ValueError(f"estimator: must be one of {', '.join(names())}, got {name!r}")
    if sketch not in SKETCHES:
        raise ValueError(f"sketch: must be one of {', '.join(SKETCHES)}, got {sketch!r}")
    if head_rank is not None and name != "hutchpp":
        raise ValueError(f"head_rank: only hutchpp has a head, got {head_rank!r} for {name!r}")
    for label, count in (("num_probes", num_probes), ("head_rank", head_rank)):
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{label}: must be an int, got {count!r}")
        if count < 1:
            raise ValueError(f"{label}: must be at least 1, got {count}")
    return _REGISTRY[name](num_probes, sketch, head_rank)
