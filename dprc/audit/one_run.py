"""The audit of one training run with many canaries (Steinke, Nasr and Jagielski, 2023)."""

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
_LARGEST = 64.0


def guesses_p_value(
    *, canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
    """Bound the probability of at least so many right guesses about one (ε, δ)-private run.

    Args:
        canaries: m; each is in the data by an independent fair coin.
        guesses: r ≤ m canaries about which a guess was made.
        right: v ≤ r of them that were right.
        epsilon: At least 0.
        delta: In [0, 1].

    Returns:
        β + 2mδ·max_i (P(v - i ≤ W < v)/i) with β = P(W ≥ v), W ~ Binomial(r, e^ε/(1 + e^ε)).

    Raises:
        ValueError: A number out of range.

    Source:
        Theorem 5.2 of "Privacy Auditing with One (1) Training Run", arXiv 2305.08846.
    """
    if not 0 <= right <= guesses <= canaries or canaries < 1:
        raise ValueError(
            "canaries, guesses, right: need 0 <= right <= guesses <= canaries, got "
            f"{right}, {guesses}, {canaries}"
        )
    if epsilon < 0 or not 0 <= delta <= 1:
        raise ValueError(f"epsilon, delta: out of range, got {epsilon!r}, {delta!r}")
    law = stats.binom(guesses, 1.0 / (1.0 + np.exp(-epsilon)))
    tail = float(law.sf(right - 1))
    if delta == 0 or right == 0:
        return min(1.0, tail)
    shortfalls = np.arange(1, right + 1)
    near = np.cumsum(law.pmf(right - shortfalls)) / shortfalls
    return min(1.0, tail + 2 * canaries * delta * float(near.max()))


def one_run_epsilon(
    *, canaries: int, guesses: int, right: int, delta: float, confidence: float
) -> float:
    """Bound ε from below by the number of right guesses about one run.

    Args:
        canaries: As for ``guesses_p_value``.
        guesses: Must not depend on which canaries were in.
        right: As for ``guesses_p_value``.
        delta: As for ``guesses_p_value``.
        confidence: In (0, 1).

    Returns:
        The largest ε refuted at this confidence, rounded down to 1e-6; 0 if none is.

    Raises:
        ValueError: A number out of range.

    Guarantee:
        For every (ε, delta)-private run the bound exceeds ε with probability at most
        1 - confidence.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), got {confidence!r}")

    def refuted(epsilon: float) -> bool:
        value = guesses_p_value(
            canaries=canaries, guesses=guesses, right=right, epsilon=epsilon, delta=delta
        )
        return value < 1.0 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _LARGEST
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def count_right(scores: Array, included: Flags, guesses: int) -> int:
    """Guess the highest scores in and the lowest out, and count the right guesses.

    Args:
        scores: (canaries,).
        included: (canaries,), the truth.
        guesses: Even; half of them are "in".
    """
    order = np.argsort(scores)
    half = guesses // 2
    return int((~included[order[:half]]).sum() + included[order[len(order) - half :]].sum())
