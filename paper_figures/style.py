"""One order, one name and one colour for each method, in every table and figure."""

from typing import NamedTuple

import pandas as pd


class MethodStyle(NamedTuple):
    """How a method looks."""

    label: str
    color: str
    marker: str


# Okabe and Ito's colours, and two of Tol's: told apart with any colour vision, and in print by
# their markers.
METHODS = {
    "nonprivate": MethodStyle("no privacy", "#000000", ""),
    "exact": MethodStyle("exact clipping", "#0072B2", "o"),
    "hutchinson_paper": MethodStyle("Hutchinson, shared sketch, envelope analysis", "#D55E00", "s"),
    "hutchinson_shared": MethodStyle("Hutchinson, shared sketch, tight analysis", "#882255", "P"),
    "hutchinson": MethodStyle("Hutchinson, per-sample sketch, tight analysis", "#009E73", "^"),
    "hutchpp_paper": MethodStyle("Hutch++, shared sketch, envelope analysis", "#CC79A7", "D"),
    "hutchpp": MethodStyle("Hutch++, per-sample sketch, tight analysis", "#E69F00", "v"),
    "hutchpp_small_head": MethodStyle("Hutch++, small head, per-sample sketch", "#332288", "<"),
}
ESTIMATORS = {
    "exact": MethodStyle("exact", "#0072B2", "o"),
    "tiled": MethodStyle("exact, tiled", "#56B4E9", "X"),
    "ghost": MethodStyle("ghost", "#666666", "P"),
    "hutchinson": MethodStyle("Hutchinson", "#009E73", "^"),
    "hutchpp": MethodStyle("Hutch++", "#E69F00", "v"),
    # Results know it as hutchpp with a head_rank.
    "hutchpp_small_head": MethodStyle("Hutch++, small head", "#332288", "<"),
}
SCHEDULES = {"two_pass": "two passes", "book_keeping": "book-keeping"}
MODELS = {"llama-3.2-1b": "Llama-3.2-1B"}
RANDOMIZED = ("hutchinson", "hutchpp")
# Where Llama-3.2-1B has a linear layer of (in_features, out_features).
LLAMA_LAYERS = {
    (8192, 2048): "down",
    (2048, 8192): "gate, up",
    (2048, 2048): "q, o",
    (2048, 512): "k, v",
    (2048, 128256): "head",
}
# How many of each it has: 16 blocks, and the head.
LLAMA_COUNTS = {
    (8192, 2048): 16,
    (2048, 8192): 32,
    (2048, 2048): 32,
    (2048, 512): 32,
    (2048, 128256): 1,
}


class TaskStyle(NamedTuple):
    """What a task is called and how it is scored."""

    label: str
    metric: str
    metric_label: str
    paper_task: str | None  # the task of the paper whose values belong in its panel
    scale: float  # from the fraction of the result file to the unit of the paper


TASKS = {
    "bbc": TaskStyle("BBC news", "accuracy", "accuracy (%)", "bbc", 100.0),
    "billsum": TaskStyle("BillSum", "rouge1", "ROUGE-1", "billsum", 1.0),
    "hotpotqa": TaskStyle("HotpotQA", "exact_match", "exact match (%)", "hotpotqa", 100.0),
    "bbc_offline": TaskStyle("BBC news, offline twin", "accuracy", "accuracy (%)", "bbc", 100.0),
    "aclsum_summary": TaskStyle("ACLSum, summaries", "rouge1", "ROUGE-1", None, 1.0),
    "aclsum_qa": TaskStyle("ACLSum, questions", "f1", "F1", None, 1.0),
}
MODES = {"full": "full fine-tuning", "lora": "LoRA"}


def layer_name(in_features: int, out_features: int) -> str:
    """Write a layer as in × out, with its place in Llama-3.2-1B where it has one.

    >>> layer_name(2048, 512)
    '2048 × 512 (k, v)'
    """
    place = LLAMA_LAYERS.get((in_features, out_features))
    return f"{in_features} × {out_features}" + (f" ({place})" if place else "")


def sort_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """Order rows by layer as first seen, tokens, probes and estimator, each in the one order."""
    layers = rows[["in_features", "out_features"]].drop_duplicates().reset_index(drop=True)
    ordered = rows.merge(layers.assign(layer=layers.index)).assign(
        place=lambda merged: merged["estimator"].map(list(ESTIMATORS).index)
    )
    keys = ["layer", "tokens", "num_probes", "place"]
    # Deterministic norms have no probes and come first.
    ordered = ordered.sort_values(keys, na_position="first")
    return ordered[list(rows.columns)].reset_index(drop=True)


def sort_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Order rows by task, mode, method and falling epsilon, each in the one fixed order."""
    orders = {"task": TASKS, "mode": MODES, "method": METHODS}
    keys = pd.DataFrame(
        {name: rows[name].map({key: i for i, key in enumerate(o)}) for name, o in orders.items()}
    ).assign(epsilon=-rows["epsilon"])
    return rows.loc[keys.sort_values(list(keys)).index].reset_index(drop=True)
