"""Privacy accounting of DP-SGD with exact and with randomized clipping."""

from dprc.accounting.accountant import Accountant
from dprc.accounting.queries import (
    delta,
    epsilon,
    epsilon_bounds,
    noise_multiplier,
    privacy_loss_distribution,
)
from dprc.accounting.scale import ScaleLaw, combine_laws, scale_law
from dprc.accounting.small_head import certified_pairs, matched_probes

__all__ = [
    "Accountant",
    "ScaleLaw",
    "certified_pairs",
    "combine_laws",
    "delta",
    "epsilon",
    "epsilon_bounds",
    "matched_probes",
    "noise_multiplier",
    "privacy_loss_distribution",
    "scale_law",
]
