"""The law of an estimator's ratio R = n̂²/n², the only thing accounting needs to know of it.

Clipping by an estimated norm n̂ scales the differing sample's gradient to at most C·S, where
S = R^(-1/2). Which inequality turns a law into a guarantee is the business of
``dprc.accounting.step``; here are the laws, and how they combine.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np

from dprc.accounting import small_head
from dprc.errors import PrivacyError

EXACT_ESTIMATORS = ("exact", "ghost", "tiled")
RANDOMIZED_ESTIMATORS = ("hutchinson", "hutchpp")

# E[1/X] = k/(k-2) for X ~ chi^2_k/k: S has no second moment at k = 2, and at k = 3 its tail is so
# heavy that rare steps without effective clipping dominate every guarantee.
MIN_PRIVATE_PROBES = 4
FEW_PROBES = 16


@dataclass(frozen=True)
class ScaleLaw:
    """The law that R = n̂²/n² is never worse than.

    ``"exact"`` is R = 1. ``"chi2"`` is χ²_k/k, the law of k Gaussian probes on a rank-one gradient,
    which bounds every other gradient in convex order (docs/theory.md, Theorem 1). ``"small_head"``
    is the certified law of Hutch++ with a head of small rank (docs/small_head.md). ``"largest"`` is
    what a model has whose parameters have several of them: below one of its parts, unknown which.

    Attributes:
        kind: ``"exact"``, ``"chi2"``, ``"small_head"`` or ``"largest"``.
        num_probes: k; of the tail for ``"small_head"``, the smallest of the parts for
            ``"largest"``; None for ``"exact"``.
        head_rank: r of ``"small_head"``, else None.
        parts: Two or more laws of ``"largest"``, else empty.

    Raises:
        ValueError: The kind is unknown, or another attribute does not fit it.
        PrivacyError: The pair (head_rank, num_probes) has no certified law.

    Example:
        >>> ScaleLaw.chi2(32)
        ScaleLaw(kind='chi2', num_probes=32, head_rank=None, parts=())
        >>> ScaleLaw.exact().is_exact
        True
    """

    kind: Literal["exact", "chi2", "small_head", "largest"]
    num_probes: int | None = None
    head_rank: int | None = None
    parts: "tuple[ScaleLaw, ...]" = ()

    def __post_init__(self) -> None:
        if self.kind not in ("exact", "chi2", "small_head", "largest"):
            raise ValueError(
                f"kind must be 'exact', 'chi2', 'small_head' or 'largest', got {self.kind!r}"
            )
        if self.kind == "exact" and self.num_probes is not None:
            raise ValueError(f"num_probes must be None for the exact law, got {self.num_probes!r}")
        if self.kind == "small_head":
            object.__setattr__(self, "head_rank", _checked_count("head_rank", self.head_rank))
        elif self.head_rank is not None:
            raise ValueError(f"head_rank must be None for kind {self.kind!r}")
        if (len(self.parts) > 1) != (self.kind == "largest"):
            raise ValueError(f"parts must be two or more laws for 'largest', got {self.parts!r}")
        if self.kind != "exact":
            # A plain int: a law is compared, hashed, and saved as JSON.
            object.__setattr__(self, "num_probes", _checked_count("num_probes", self.num_probes))
        if self.kind == "small_head":
            small_head.load_table(*_pair(self))

    @classmethod
    def exact(cls) -> "ScaleLaw":
        """The law of a norm without randomness: R = 1."""
        return cls("exact")

    @classmethod
    def chi2(cls, num_probes: int) -> "ScaleLaw":
        """The law of ``num_probes`` Gaussian probes."""
        return cls("chi2", num_probes)

    @classmethod
    def small_head(cls, head_rank: int, num_probes: int) -> "ScaleLaw":
        """The certified law of Hutch++ with a head of this rank and so many tail probes."""
        return cls("small_head", num_probes, head_rank)

    @property
    def is_exact(self) -> bool:
        """Whether the norm is known exactly, so that S = 1."""
        return self.kind == "exact"

    @property
    def without_heads(self) -> "ScaleLaw":
        """The law that is charged when nothing is known of heads: χ²_k/k with the fewest probes."""
        return self if self.num_probes is None else ScaleLaw.chi2(self.num_probes)

    def as_dict(self) -> dict[str, Any]:
        """The attributes that the kind uses, as values that JSON can hold."""
        plain: dict[str, Any] = {"kind": self.kind, "num_probes": self.num_probes}
        if self.head_rank is not None:
            plain["head_rank"] = self.head_rank
        if self.parts:
            plain["parts"] = [part.as_dict() for part in self.parts]
        return plain

    @classmethod
    def from_dict(cls, plain: object) -> "ScaleLaw":
        """The law that ``as_dict`` described.

        Raises:
            ValueError: It did not make this.
            PrivacyError: The law is one that this version has no certificate of.
        """
        if not isinstance(plain, dict) or not {"kind", "num_probes"} <= set(plain) <= {
            *("kind", "num_probes", "head_rank", "parts")
        }:
            raise ValueError(f"a law must have the keys kind, num_probes, got {plain!r}")
        if plain["kind"] == "largest":
            return combine_laws(cls.from_dict(part) for part in plain.get("parts", ()))
        return cls(plain["kind"], plain["num_probes"], plain.get("head_rank"))

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


def _checked_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def scale_law(
    estimator: str,
    num_probes: int = 32,
    head_rank: int | None = None,
    *,
    require_certified: bool = False,
) -> ScaleLaw:
    """The law of a named estimator.

    Args:
        estimator: ``"exact"``, ``"ghost"``, ``"tiled"`` (deterministic), ``"hutchinson"`` or
            ``"hutchpp"``.
        num_probes: Gaussian probes; of the tail for ``"hutchpp"``. Deterministic estimators have
            none and ignore it.
        head_rank: Rank of the head of ``"hutchpp"``. With a certified pair (head_rank, num_probes)
            the head is worth what it catches; with another, and without one, it never hurts, and
            the tail is charged like Hutchinson's.
        require_certified: Whether a head_rank without a certified law is an error.

    Returns:
        The law that accounting charges.

    Raises:
        ValueError: Unknown estimator; num_probes or head_rank out of range; head_rank for an
            estimator without a head.
        PrivacyError: The pair is not certified and had to be.

    Warns:
        UserWarning: A head smaller than the tail was asked for, and its pair is not certified.

    Example:
        >>> scale_law("ghost").kind, scale_law("hutchpp", 26, head_rank=2).kind
        ('exact', 'small_head')
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
    if estimator not in RANDOMIZED_ESTIMATORS:
        known = ", ".join(EXACT_ESTIMATORS + RANDOMIZED_ESTIMATORS)
        raise ValueError(
            f"estimator must be one of {known}, got {estimator!r}: no law, no guarantee"
        )
    law = ScaleLaw.chi2(num_probes)
    if head_rank is None:
        return law
    if (head_rank, num_probes) in small_head.certified_pairs():
        return ScaleLaw.small_head(head_rank, num_probes)
    if require_certified:
        raise PrivacyError(small_head.uncertified(head_rank, num_probes))
    if head_rank < num_probes:
        warnings.warn(
            f"{small_head.uncertified(head_rank, num_probes)}; its tail is charged like "
            f"hutchinson's {num_probes} probes",
            UserWarning,
            stacklevel=2,
        )
    return law


def combine_laws(laws: Iterable[ScaleLaw]) -> ScaleLaw:
    """The law of a model whose parameters use these laws, however dependent their sketches are.

    R is a mean of the parameters' ratios, so the pointwise maximum of the laws' put functions
    bounds it (docs/small_head.md). The smallest k of χ²_k/k governs, because that law shrinks in
    convex order as k grows (docs/theory.md, Theorem 1); exact parameters never hurt.

    Raises:
        ValueError: There is no law at all: nothing is counted.

    Example:
        >>> combine_laws([ScaleLaw.exact(), ScaleLaw.chi2(64), ScaleLaw.chi2(32)]).num_probes
        32
        >>> combine_laws([ScaleLaw.small_head(2, 26), ScaleLaw.chi2(160)]).kind
        'small_head'
    """
    collected = list(laws)
    if not collected:
        raise ValueError("laws must hold at least one law: a model without parameters has no norm")
    single = {part for law in collected for part in (law.parts or (law,)) if not part.is_exact}
    heads = sorted((law for law in single if law.head_rank is not None), key=_pair)
    # A head with no fewer columns before a tail with no fewer probes is below another in convex
    # order, and so need not be kept.
    kept = [law for law in heads if not any(_rules_out(other, law) for other in heads)]
    probes = [law.num_probes for law in single if law.head_rank is None and law.num_probes]
    matched = [small_head.load_table(*_pair(law)).matched_probes for law in kept]
    if probes and not any(min(probes) >= least for least in matched):
        # A head never hurts: its law is below that of its tail alone.
        kept = [law for law in kept if _pair(law)[1] < min(probes)]
        kept.append(ScaleLaw.chi2(min(probes)))
    if len(kept) > 1:
        fewest = min(_pair(law)[1] for law in kept)
        return ScaleLaw("largest", fewest, None, tuple(kept))
    return kept[0] if kept else ScaleLaw.exact()


def _pair(law: ScaleLaw) -> tuple[int, int]:
    """Rank of the head, 0 without one, and probes."""
    return law.head_rank or 0, law.num_probes or 0


def _rules_out(other: ScaleLaw, law: ScaleLaw) -> bool:
    """Whether a different law has a head and a tail that are no larger."""
    return other != law and all(a <= b for a, b in zip(_pair(other), _pair(law), strict=True))
