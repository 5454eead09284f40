"""Products of a tall factor with a few columns, in the order that is fast for their number.

A factor F (B, T, n) has many tokens; what it meets has c columns, c small. Both products return
the c first, (B, c, ·), so that a second one follows without a copy.

The order is a function of c alone, never of the data and never measured at run time: a run that is
repeated rounds alike. ``scripts/thin_products.py`` shows the times behind it for any machine.
"""

import torch

# Up to so many columns the product is bound by reading F, and the row-major order F·P would leave
# most of each vector register empty.
NARROW_COLUMNS = 3


def project(
    factor: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:  # (B, T, n), (B or 1, n, c) -> (B, c, T)
    """Return (F·columns)ᵀ, the tokens' coordinates along the columns."""
    each = columns.expand(factor.shape[0], -1, -1)
    if each.shape[2] > NARROW_COLUMNS:
        return torch.bmm(factor, each).transpose(1, 2)
    return torch.bmm(columns.mT.contiguous().expand_as(each.mT), factor.mT)


def collect_(
    total: torch.Tensor, weights: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:  # (B, c, n), (B, c, T), (B, T, n)
    """Add weights·F, summed over tokens, in place; the other order, Fᵀ·weightsᵀ, is slower."""
    return total.baddbmm_(weights, factor)
