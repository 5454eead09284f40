"""The envelope of the paper: the pointwise largest CDF of R over all spectra."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import special

from dprc.accounting.scale import Array, ScaleLaw, split_chi2_bins

_BINS = 200


@dataclass(frozen=True)
class EnvelopeBins:
    """The envelope law at unlimited rank: χ²_k/k below 1, the rest of the mass at 1.

    Attributes:
        edges: Bin edges, increasing, the last is 1; shape (bins+1,).
        low: Mass for each bin's lower end, with the bin's mass and mean; shape (bins,).
        high: Mass for its upper end; shape (bins,).
        at_one: Mass at R = 1.
        mass_at_zero: Mass below the first edge.
    """

    edges: Array
    low: Array
    high: Array
    at_one: float
    mass_at_zero: float


@cache
def envelope_bins(law: ScaleLaw) -> EnvelopeBins:
    """The bins of a law; for the exact law all mass is at 1."""
    if law.num_probes is None:
        return EnvelopeBins(np.ones(1), np.zeros(0), np.zeros(0), 1.0, 0.0)
    k = law.num_probes
    # Quantiles in the normal score, down to a probability of 1e-38.
    top = special.ndtri(special.gammainc(k / 2, k / 2))
    scores = np.linspace(-13.0, top, _BINS + 1)
    edges = special.gammaincinv(k / 2, special.ndtr(scores)) * 2.0 / k
    edges[-1] = 1.0
    low, high, slack = split_chi2_bins(edges, k)
    return EnvelopeBins(
        edges,
        low * (1.0 + slack),
        high * (1.0 + slack),
        float(special.gammaincc(k / 2, k / 2)) * (1.0 + slack),
        float(special.gammainc(k / 2, edges[0] * k / 2)) * (1.0 + slack),
    )
