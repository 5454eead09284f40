"""Privacy accounting of DP-SGD with exact and with randomized clipping."""

from dprc.accounting.accountant import Accountant
from dprc.accounting.scale import ScaleLaw, combine_laws, scale_law

__all__ = ["Accountant", "ScaleLaw", "combine_laws", "scale_law"]
