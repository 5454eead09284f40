"""When our number counts as the paper's: one rule for each kind of number, for all its rows."""

import math
from typing import Any, NamedTuple

import pandas as pd

# Approximate ratios of times are compared on the paper's device alone.
PAPER_DEVICE = "A100"


class Tolerance(NamedTuple):
    """How far apart two numbers may be.

    Attributes:
        words: The rule, for readers.
        relative: Part of the paper's value; 0 for none.
        absolute: In the unit of the row; 0 for none.
        digits: Whether ours must round to what the paper printed.
        deviations: Standard deviations of the difference; 0 for none.
        bound: Whether ours may be anything at or below the paper's (-1), or above (+1).
    """

    words: str
    relative: float = 0.0
    absolute: float = 0.0
    digits: bool = False
    deviations: float = 0.0
    bound: int = 0

    def accepts(self, ours: float, paper: Any, our_std: float = math.nan) -> bool | None:
        """Tell whether ours counts as the paper's.

        Args:
            ours: Our number.
            paper: A row of the paper's values.
            our_std: Over seeds.

        Returns:
            None where that cannot be said: a standard deviation is missing.
        """
        difference = ours - paper.value
        if self.bound:
            return self.bound * difference >= 0
        if self.digits:
            return round(ours, paper.digits) == round(paper.value, paper.digits)
        if self.deviations:
            width = self.deviations * math.hypot(paper.std, our_std)
            return None if math.isnan(width) else abs(difference) <= width
        return abs(difference) <= max(self.relative * abs(paper.value), self.absolute)


_PRINTED = Tolerance("rounds to what is printed", digits=True)
_SCORE = Tolerance("2 standard deviations of the difference", deviations=2.0)
_TIME = Tolerance(f"25 %, on an {PAPER_DEVICE}", relative=0.25)
_DROP = Tolerance("at most the paper's", bound=-1)
_MEMORY = Tolerance("1 percentage point, under a reading that is named", absolute=1.0)
TOLERANCES = {
    "accuracy": _SCORE,
    "rouge1": _SCORE,
    "exact_match": _SCORE,
    "accuracy_drop_vs_exact": _DROP,
    "rouge1_drop_vs_exact": _DROP,
    "exact_match_drop_vs_exact": _DROP,
    "accuracy_gain_hutchpp_vs_hutch": Tolerance("at least the paper's", bound=1),
    "noise_multiplier": Tolerance("0.5 %", relative=0.005),
    "noise_overhead": Tolerance("half a percentage point", absolute=0.5),
    "flops_saving_vs_exact": _PRINTED,
    "flops_ratio_ghost_over_hutch": _PRINTED,
    "peak_memory_saving_including_inputs": _MEMORY,
    "peak_memory_saving_excluding_inputs": _MEMORY,
    "latency_ratio_hutchpp_over_hutch": _TIME,
    "compute_saving": _TIME,
    "squared_norm_deviation": _DROP,
    "envelope_cdf": _PRINTED,
}


def rules_table() -> pd.DataFrame:
    """Write the rules for readers: which numbers, and how close they must be."""
    kinds: dict[str, list[str]] = {}
    for quantity, tolerance in TOLERANCES.items():
        kinds.setdefault(tolerance.words, []).append(quantity.replace("_", " "))
    return pd.DataFrame(
        {"numbers": [", ".join(names) for names in kinds.values()], "how close": list(kinds)}
    )
