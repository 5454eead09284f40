"""The numbers of the paper, and what each of them is about."""

import os
import re
from typing import NamedTuple

import pandas as pd

# What the paper scores its tasks by.
SCORES = ("accuracy", "rouge1", "exact_match")


class Setting(NamedTuple):
    """What a utility number of the paper was measured on."""

    task: str
    mode: str
    method: str
    epsilon: float


def load_paper_values(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read the paper's numbers: one row each, with its id, quantity, method, setting and value.

    ``digits`` is the number of decimals that the value has in the file.
    """
    paper = pd.read_csv(path, dtype={"value": str, "std": float})
    digits = paper["value"].str.partition(".")[2].str.len()
    return paper.assign(value=paper["value"].astype(float), digits=digits)


def utility_setting(method: str, setting: str) -> Setting:
    """Read task, mode, method and epsilon from a row's words.

    >>> utility_setting("hutchinson k=32", "BBC, epsilon 9")
    Setting(task='bbc', mode='full', method='hutchinson_paper', epsilon=9.0)
    """
    task = re.split(r"\W", setting, maxsplit=1)[0].lower()
    mode = "lora" if "LoRA" in setting else "full"
    epsilon = re.search(r"epsilon ([0-9.]+)", setting)
    name = method.split()[0]
    return Setting(
        task=task,
        mode=mode,
        # The paper's randomized methods share their sketch and are charged by the envelope.
        method=f"{name}_paper" if name in ("hutchinson", "hutchpp") else name,
        epsilon=float(epsilon[1]) if epsilon else float("inf"),
    )


def published_scores(paper: pd.DataFrame) -> pd.DataFrame:
    """Select the paper's scores and say which task, mode, method and epsilon each belongs to.

    Returns:
        Columns task, mode, method, epsilon, mean, std.
    """
    scores = paper[paper["quantity"].isin(SCORES)]
    settings = pd.DataFrame(
        [utility_setting(m, s) for m, s in zip(scores["method"], scores["setting"], strict=True)],
        columns=list(Setting._fields),
    )
    return settings.assign(mean=scores["value"].to_numpy(), std=scores["std"].to_numpy())


def layer_setting(setting: str) -> tuple[int, int, int]:
    """Read in_features, out_features and tokens of a row about one layer.

    >>> layer_setting("layer 8192x2048, T=4096")
    (8192, 2048, 4096)
    """
    match = re.fullmatch(r"layer (\d+)x(\d+), T=(\d+)", setting)
    if match is None:
        raise ValueError(f"not a layer and a number of tokens: {setting!r}")
    in_features, out_features, tokens = map(int, match.groups())
    return in_features, out_features, tokens


def num_probes(method: str) -> int:
    """Read the number of probes of a row's method.

    >>> num_probes("hutchpp k=32")
    32
    """
    match = re.search(r"k=(\d+)", method)
    if match is None:
        raise ValueError(f"no number of probes: {method!r}")
    return int(match[1])
