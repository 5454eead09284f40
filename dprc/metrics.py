"""Scores of labels and written answers, computed here: no script is fetched from a hub.

Every metric takes predictions and references of equal length and gives fractions in [0, 1], means
over the documents.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
    """Return ``accuracy``, the fraction of right labels.

    Raises:
        ValueError: Nothing to score, or lengths that differ.
    """
    _check(predictions, references)
    right = sum(p == r for p, r in zip(predictions, references, strict=True))
    return {"accuracy": right / len(predictions)}


def rouge(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return ``rouge1``, ``rouge2`` and ``rougeL``: mean F-measures with Porter stemming.

    Args:
        predictions: Written texts.
        references: Right texts of each document, one or more; the best one counts.

    Raises:
        ValueError: Nothing to score, or lengths that differ.

    Source:
        Lin 2004, by the package rouge-score. ROUGE-L is that of the whole text, not of its lines.
    """
    from rouge_score.rouge_scorer import RougeScorer

    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(kinds, use_stemmer=True)
    _check(predictions, references)
    scores = [
        scorer.score_multi(targets, text)
        for text, targets in zip(predictions, references, strict=True)
    ]
    return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}


def normalised_answer(text: str) -> str:
    """Return an answer as SQuAD compares it: lower case, no punctuation, articles or extra spaces.

    >>> normalised_answer("  The Beatles' first  album.")
    'beatles first album'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def question_answering(
    predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return ``exact_match`` and ``f1``, the best over each question's right answers.

    Args:
        predictions: Written answers.
        references: Right answers of each question, one or more.

    Raises:
        ValueError: Nothing to score, or lengths that differ.

    Source:
        Rajpurkar et al. 2016 (SQuAD 1.1): normalisation, and F1 of the bags of words.
    """
    _check(predictions, references)
    pairs = list(zip(predictions, references, strict=True))
    return {
        "exact_match": _mean_best(_exact, pairs),
        "f1": _mean_best(_f1, pairs),
    }


def _mean_best(
    score_fn: Callable[[str, str], float], pairs: Sequence[tuple[str, Sequence[str]]]
) -> float:
    return sum(max(score_fn(text, right) for right in answers) for text, answers in pairs) / len(
        pairs
    )


def _exact(prediction: str, answer: str) -> float:
    return float(normalised_answer(prediction) == normalised_answer(answer))


def _f1(prediction: str, answer: str) -> float:
    written, right = normalised_answer(prediction).split(), normalised_answer(answer).split()
    common = sum((Counter(written) & Counter(right)).values())
    return 2 * common / (len(written) + len(right)) if common else 0.0


def _check(predictions: Sequence[object], references: Sequence[object]) -> None:
    if not predictions or len(predictions) != len(references):
        raise ValueError(
            f"predictions and references must be as many, at least one: got {len(predictions)} "
            f"and {len(references)}"
        )
