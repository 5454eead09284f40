"""The law of an estimator's ratio R = n̂²/n², the only thing accounting needs to know of it.

Clipping by an estimated norm n̂ scales the differing sample's gradient to at most C·S, where
S = R^(-1/2). Which inequality turns a law into a guarantee is the business of
``dprc.accounting.step``; here are the laws, how they combine, and how one integrates over them.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from dprc.errors import PrivacyError

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EXACT_ESTIMATORS = ("exact", "ghost", "tiled")
RANDOMIZED_ESTIMATORS = ("hutchinson", "hutchpp")

# E[1/X] = k/(k-2) for X ~ chi^2_k/k: S has no second moment at k = 2, and at k = 3 its tail is so
# heavy that rare steps without effective clipping dominate every guarantee.
MIN_PRIVATE_PROBES = 4
FEW_PROBES = 16
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
# Relative error of scipy's incomplete gamma functions, with a margin of ten.
_GAMMA_ERROR = 1e-13


@dataclass(frozen=True)
class ScaleLaw:
    """The law that R = n̂²/n² is never worse than.

    ``"exact"`` is R = 1. ``"chi2"`` is χ²_k/k, the law of k Gaussian probes on a rank-one gradient,
    which bounds every other gradient in convex order (docs/theory.md, Theorem 1).

    Attributes:
        kind: ``"exact"`` or ``"chi2"``.
        num_probes: k of χ²_k/k; None for ``"exact"``.

    Raises:
        ValueError: The kind is unknown, or num_probes is not a positive int where one is needed.

    Example:
        >>> ScaleLaw.chi2(32)
        ScaleLaw(kind='chi2', num_probes=32)
        >>> ScaleLaw.exact().is_exact
        True
    """

    kind: Literal["exact", "chi2"]
    num_probes: int | None = None

    def __post_init__(self) -> None:
        if self.kind == "exact":
            if self.num_probes is not None:
                raise ValueError(
                    f"num_probes must be None for the exact law, got {self.num_probes!r}"
                )
        elif self.kind == "chi2":
            # A plain int: a law is compared, hashed, and saved as JSON.
            object.__setattr__(self, "num_probes", _checked_probes(self.num_probes))
        else:
            raise ValueError(f"kind must be 'exact' or 'chi2', got {self.kind!r}")

    @classmethod
    def exact(cls) -> "ScaleLaw":
        """The law of a norm without randomness: R = 1."""
        return cls("exact")

    @classmethod
    def chi2(cls, num_probes: int) -> "ScaleLaw":
        """The law of ``num_probes`` Gaussian probes."""
        return cls("chi2", num_probes)

    @property
    def is_exact(self) -> bool:
        """Whether the norm is known exactly, so that S = 1."""
        return self.kind == "exact"

    def require_private(self) -> None:
        """Refuse a law that is too heavy-tailed for private training; warn of a costly one.

        Raises:
            PrivacyError: Fewer than 4 probes.
        """
        if self.num_probes is None:
            return
        if self.num_probes < MIN_PRIVATE_PROBES:
            raise PrivacyError(
                f"num_probes={self.num_probes} is too small for private training, at least "
                f"{MIN_PRIVATE_PROBES} are needed: with k probes the squared sensitivity has mean "
                "k/(k-2), and its heavy tail ruins every guarantee"
            )
        if self.num_probes < FEW_PROBES:
            warnings.warn(
                f"num_probes={self.num_probes} is small: the sensitivity is heavy-tailed and costs "
                f"much noise; {FEW_PROBES} or more are recommended",
                UserWarning,
                stacklevel=3,
            )


def _checked_probes(num_probes: object) -> int:
    if isinstance(num_probes, bool) or not isinstance(num_probes, Integral):
        raise ValueError(f"num_probes must be an int, got {num_probes!r}")
    if num_probes < 1:
        raise ValueError(f"num_probes must be at least 1, got {num_probes}")
    return int(num_probes)


def scale_law(estimator: str, num_probes: int = 32, head_rank: int | None = None) -> ScaleLaw:
    """The law of a named estimator.

    Args:
        estimator: ``"exact"``, ``"ghost"``, ``"tiled"`` (deterministic), ``"hutchinson"`` or
            ``"hutchpp"``.
        num_probes: Gaussian probes; of the tail for ``"hutchpp"``. Deterministic estimators have
            none and ignore it.
        head_rank: Rank of the head of ``"hutchpp"``; it is exact and never hurts, so the tail
            governs whatever its rank.

    Returns:
        The law that accounting charges.

    Raises:
        ValueError: Unknown estimator; num_probes or head_rank out of range; head_rank for an
            estimator without a head.

    Example:
        >>> scale_law("ghost").kind
        'exact'
        >>> scale_law("hutchpp", num_probes=64).num_probes
        64
    """
    if head_rank is not None:
        if estimator != "hutchpp":
            raise ValueError(f"head_rank={head_rank!r} is only for hutchpp, not {estimator!r}")
        whole = isinstance(head_rank, (int, np.integer)) and not isinstance(head_rank, bool)
        if not whole or head_rank < 1:
            raise ValueError(f"head_rank must be an int of at least 1, got {head_rank!r}")
    if estimator in EXACT_ESTIMATORS:
        return ScaleLaw.exact()
    if estimator in RANDOMIZED_ESTIMATORS:
        return ScaleLaw.chi2(num_probes)
    known = ", ".join(EXACT_ESTIMATORS + RANDOMIZED_ESTIMATORS)
    raise ValueError(f"estimator must be one of {known}, got {estimator!r}: no law, no guarantee")


def combine_laws(laws: Iterable[ScaleLaw]) -> ScaleLaw:
    """The law of a model whose parameters use these laws, however dependent their sketches are.

    The smallest k of a randomized parameter governs, because χ²_k/k shrinks in convex order as k
    grows (docs/theory.md, Theorem 1); exact parameters never hurt.

    Raises:
        ValueError: There is no law at all: nothing is counted.

    Example:
        >>> combine_laws([ScaleLaw.exact(), ScaleLaw.chi2(64), ScaleLaw.chi2(32)])
        ScaleLaw(kind='chi2', num_probes=32)
    """
    collected = list(laws)
    if not collected:
        raise ValueError("laws must hold at least one law: a model without parameters has no norm")
    probes = [law.num_probes for law in collected if law.num_probes is not None]
    return ScaleLaw.chi2(min(probes)) if probes else ScaleLaw.exact()


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
        floating-point error included (docs/theory.md, Lemma 7).
    """
    if law.num_probes is None:
        one = np.ones(1)
        return RatioNodes(one, one, one, 0.0)
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
    slack = _GAMMA_ERROR * float(1.0 + 2.0 * np.max(nodes[1:] / np.diff(nodes)))
    return mass - high, high, slack
