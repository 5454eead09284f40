"""A few real articles and a very small model, in the folders that runs load."""

from dataclasses import replace

import torch

from dprc import tasks
from dprc.models import TinyLlama
from dprc.results import write_result

VOCABULARY = 300
TRAIN = 80


class FewArticles:
    """The task under its own name, cut so that a run takes a second."""

    name = "bbc_offline"

    def read(self):
        whole = tasks.get("bbc_offline").read()
        cut = [
            tuple(replace(example, text=example.text[:200]) for example in part)
            for part in (whole.train[:TRAIN], whole.test[:30])
        ]
        return tasks.Dataset(*cut, whole.label_names, whole.documents_read)


def save_few_articles(root):
    """Write a few real articles, and a model on a random public embedding with a byte tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tasks.save_dataset(FewArticles(), root / "data")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<pad>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(
        root / "model"
    )
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY, 16, generator=generator).numpy()
    TinyLlama(hidden_size=16, heads=2, intermediate_size=24).build(embedding).save_pretrained(
        root / "model"
    )
    write_result(root / "model" / "model.json", config={}, metrics={}, privacy=None)
