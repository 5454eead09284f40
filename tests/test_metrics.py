"""Metrics against values computed by hand and against the packages that define them."""

import pytest

from dprc import metrics

SUMMARIES = [
    ("the cat sat on the mat", "the cat was on the mat"),
    ("Requires agencies to report annually.", "Requiring an annual report by each agency"),
    ("", "nothing was written"),
    ("line one.\nline two.", "line two.\nline one."),
]


def test_accuracy_is_the_fraction_of_right_labels():
    assert metrics.accuracy([1, 2, 3, 0], [1, 0, 3, 3]) == {"accuracy": 0.5}


def test_rouge_of_a_pair_counted_by_hand():
    # 5 of 6 words, 3 of 5 pairs ("the cat", "on the", "the mat"), longest common sequence of 5.
    scores = metrics.rouge(["the cat sat on the mat"], [["the cat was on the mat"]])
    assert scores == pytest.approx({"rouge1": 5 / 6, "rouge2": 3 / 5, "rougeL": 5 / 6})


def test_rouge_counts_a_repeated_word_as_often_as_it_stands_in_both():
    # precision 2/4, recall 2/3
    scores = metrics.rouge(["yes yes yes no"], [["yes yes maybe"]])
    assert scores["rouge1"] == pytest.approx(2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3))


def test_rouge_is_the_packages_mean_with_stemming():
    from rouge_score.rouge_scorer import RougeScorer

    ours = metrics.rouge([p for p, _ in SUMMARIES], [[r] for _, r in SUMMARIES])
    for kind, score in ours.items():
        scorer = RougeScorer([kind], use_stemmer=True)
        each = [scorer.score(right, written)[kind].fmeasure for written, right in SUMMARIES]
        assert score == pytest.approx(sum(each) / len(each))
    assert metrics.rouge(["reports"], [["reporting"]])["rouge1"] == 1.0


def test_rouge_takes_the_best_reference():
    assert metrics.rouge(["a b"], [["c d", "a b"]])["rouge2"] == 1.0


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("The Eiffel  Tower.", "eiffel tower"),
        ("an apple, a pear", "apple pear"),
        ("theatre", "theatre"),  # not the article in it
        ("U.S.", "us"),
        ("1,000", "1000"),
        ("l’été", "l’été"),  # SQuAD's punctuation is ASCII
    ],
)
def test_answers_are_normalised_as_squad_does(written, normal):
    assert metrics.normalised_answer(written) == normal


def test_exact_match_and_f1_counted_by_hand():
    predictions = ["The Tower", "in Paris, France", "no", ""]
    references = [["tower"], ["Paris", "Lyon France"], ["yes"], ["something"]]
    scores = metrics.question_answering(predictions, references)
    # "in paris france" and "paris": 1 common word, precision 1/3, recall 1, so 0.5
    assert scores == pytest.approx({"exact_match": 1 / 4, "f1": (1 + 0.5) / 4})


def test_f1_counts_words_as_often_as_they_stand_in_both():
    # precision 2/3, recall 2/2
    scores = metrics.question_answering(["b b b"], [["b b"]])
    assert scores["f1"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.accuracy([], []),
        lambda: metrics.rouge(["a"], []),
        lambda: metrics.question_answering(["a", "b"], [["a"]]),
    ],
)
def test_nothing_to_score_is_refused(call):
    with pytest.raises(ValueError, match="as many, at least one"):
        call()
