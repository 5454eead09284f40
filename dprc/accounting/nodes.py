"""Integration over the law of R: nodes that overestimate the mean of a convex function."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import special

from dprc.accounting.arrays import Array
from dprc.accounting.puts import GAMMA_ERROR, PutBound, chi2_puts, largest
from dprc.accounting.scale import ScaleLaw
from dprc.accounting.small_head import load_table

# chi^2_k/k shrinks in convex order as k grows, so a smaller k is a safe stand-in for a larger one.
_MAX_RESOLVED_PROBES = 100_000

# Nodes are placed at normal quantiles, dense where the mass that decides ε lies: the mass below the
# first is 6e-39, above the last 6e-16.
_NODE_QUANTILES = np.concatenate(
    [
        np.arange(-65, -45) * 0.2,
        np.arange(-180, 0) * 0.05,
        np.arange(0, 50) * 0.1,
        np.arange(5.0, 8.01, 0.5),
    ]
)


@dataclass(frozen=True)
class RatioNodes:
    """A measure on ratios that overestimates E φ(R) for convex φ ≥ 0.

    Attributes:
        ratios: Increasing, positive; shape (nodes,).
        masses: Rounded up; shape (nodes,).
        masses_low: Rounded down; shape (nodes,).
        mass_at_zero: Mass whose φ is to be taken as φ(0), rounded up.
    """

    ratios: Array
    masses: Array
    masses_low: Array
    mass_at_zero: float


@cache
def ratio_nodes(law: ScaleLaw) -> RatioNodes:
    """Nodes of the tight analysis: each bin's mass goes to its two ends, keeping its mean.

    Guarantee:
        For convex non-increasing φ ≥ 0, Σ masses·φ(ratios) + mass_at_zero·φ(0) ≥ E φ(R),
        floating-point error included (docs/theory.md, Lemma 7; for certified laws
        docs/small_head.md, section 4).
    """
    if law.num_probes is None:
        one = np.ones(1)
        return RatioNodes(one, one, one, 0.0)
    if law.kind != "chi2":
        ratios, masses, rounding, at_zero = _put_bound(law).atoms()
        return RatioNodes(ratios, masses + rounding, np.maximum(masses - rounding, 0.0), at_zero)
    k = min(law.num_probes, _MAX_RESOLVED_PROBES)
    nodes = _chi2_quantiles(k)
    low, high, slack = split_chi2_bins(nodes, k)
    masses = np.zeros_like(nodes)
    masses[:-1] += low
    masses[1:] += high
    # Mass above the last node goes down to it: φ is non-increasing.
    masses[-1] += special.gammaincc(k / 2, nodes[-1] * k / 2)
    return RatioNodes(
        nodes,
        masses * (1.0 + slack),
        masses * (1.0 - slack),
        float(special.gammainc(k / 2, nodes[0] * k / 2)) * (1.0 + slack),
    )


def _put_bound(law: ScaleLaw) -> PutBound:
    """An upper bound on the law's put function."""
    if law.kind == "largest":
        return largest([_put_bound(part) for part in law.parts])
    k = law.num_probes or 0
    if law.head_rank is not None:
        return load_table(law.head_rank, k).puts
    strikes = _chi2_quantiles(min(k, _MAX_RESOLVED_PROBES))
    return PutBound(strikes, chi2_puts(strikes, min(k, _MAX_RESOLVED_PROBES)))


def _chi2_quantiles(k: int) -> Array:
    """Quantiles of χ²_k/k, each from the side on which its probability is small."""
    below = _NODE_QUANTILES[_NODE_QUANTILES < 0]
    above = _NODE_QUANTILES[_NODE_QUANTILES >= 0]
    lower = special.gammaincinv(k / 2, special.ndtr(below))
    upper = special.gammainccinv(k / 2, special.ndtr(-above))
    ratios: Array = np.concatenate([lower, upper]) * 2.0 / k
    return ratios


def _chi2_bins(nodes: Array, k: int, shift: int | None = None) -> Array:
    """P(node_i < χ²_k/scale ≤ node_{i+1}); with scale = shift, k = shift+2: E[R; bin] of χ²_shift.

    Source: E[X; X ≤ r] = F_{k+2}(r k) for X = χ²_k/k.
    """
    scaled = nodes * (shift or k) / 2
    below = special.gammainc(k / 2, scaled)
    above = special.gammaincc(k / 2, scaled)
    mass: Array = np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))
    return mass


def split_chi2_bins(nodes: Array, k: int) -> tuple[Array, Array, float]:
    """Mass of χ²_k/k for each bin's lower and upper end, with the bin's mass and mean.

    Returns:
        low and high, shape (nodes-1,), and a bound on their relative error.
    """
    mass = _chi2_bins(nodes, k)
    moment = _chi2_bins(nodes, k + 2, shift=k)
    high = np.clip((moment - nodes[:-1] * mass) / np.diff(nodes), 0.0, mass)
    # The division by a bin's relative width amplifies the error of the CDF.
    slack = GAMMA_ERROR * float(1.0 + 2.0 * np.max(nodes[1:] / np.diff(nodes)))
    return mass - high, high, slack
