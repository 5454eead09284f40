"""Laws of small-head Hutch++, certified: what the tables that ship with the package say.

With a head of rank r and k tail probes, E φ(R) ≤ E φ(R*) for every gradient and every convex
decreasing φ, where R* has the put function that ``dprc certify-law`` bounds from above
(docs/small_head.md). Each table holds that bound at some strikes.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from dprc.accounting.puts import PutBound, chi2_puts
from dprc.errors import PrivacyError

_NAME = re.compile(r"small_head_r(\d+)_k(\d+)\.json")


@dataclass(frozen=True, eq=False)
class SmallHeadTable:
    """A certified law.

    Attributes:
        head_rank: r.
        num_probes: k, of the tail.
        puts: Upper bounds on the put function of R*.
        matched_probes: Number of Hutchinson probes, a multiple of 8, whose law is below this one.
        gap: Largest excess of the bound over what a point of the search attains, relative to it:
            to the put below strike 1, to the call above; strikes from 0.8 to 1.3.
        date: When the search ran, ISO 8601.
        code_hash: SHA-256 of the source that ran it.
    """

    head_rank: int
    num_probes: int
    puts: PutBound
    matched_probes: int
    gap: float
    date: str
    code_hash: str


@cache
def certified_pairs() -> tuple[tuple[int, int], ...]:
    """The pairs (head_rank, num_probes) that have a table, in order."""
    folder = resources.files("dprc.accounting") / "tables"
    found = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return tuple(sorted((int(name[1]), int(name[2])) for name in found if name))


@cache
def load_table(head_rank: int, num_probes: int) -> SmallHeadTable:
    """The certified law of a pair.

    Raises:
        PrivacyError: The pair has no table.
    """
    if (head_rank, num_probes) not in certified_pairs():
        raise PrivacyError(uncertified(head_rank, num_probes))
    name = f"small_head_r{head_rank}_k{num_probes}.json"
    text = (resources.files("dprc.accounting") / "tables" / name).read_text(encoding="utf-8")
    stored = json.loads(text)
    strikes = np.array(stored["strikes"])
    return SmallHeadTable(
        stored["head_rank"],
        stored["num_probes"],
        PutBound(strikes, np.array(stored["excess"]) + np.maximum(strikes - 1.0, 0.0)),
        stored["matched_probes"],
        stored["gap"],
        stored["date"],
        stored["code_hash"],
    )


def uncertified(head_rank: int, num_probes: int) -> str:
    """Say that a pair has no table, and which have."""
    known = ", ".join(f"({r}, {k})" for r, k in certified_pairs())
    return (
        f"head_rank={head_rank} with num_probes={num_probes} has no certified law; "
        f"(head_rank, num_probes) must be one of {known}"
    )


def matched_probes(head_rank: int, num_probes: int) -> int:
    """Hutchinson probes for parameters that cannot have a head, beside ones that have.

    Args:
        head_rank: r.
        num_probes: k, of the tail.

    Returns:
        The smallest multiple of 8, n, for which χ²_n/n is below the pair's certified law in convex
        order, so that the pair's law governs the whole model.

    Raises:
        PrivacyError: The pair has no certified law.

    Example:
        >>> matched_probes(2, 26)
        160
    """
    return load_table(head_rank, num_probes).matched_probes


def smallest_matched_probes(puts: PutBound) -> int:
    """The smallest multiple of 8 for which the puts of χ²_n/n are at or below the bound.

    Matrix units like multiples of 8. At the strikes is enough: between them the put function is
    below its chord. It falls with n.
    """
    low, high = 0, 10_000
    while high - low > 1:
        middle = (low + high) // 2
        if dominates(puts, 8 * middle):
            high = middle
        else:
            low = middle
    return 8 * high


def dominates(puts: PutBound, num_probes: int) -> bool:
    """Whether the bound is nowhere below the put function of χ²_n/n."""
    strikes = puts.strikes
    return bool(np.all(chi2_puts(strikes, num_probes) <= puts.at(strikes)))
