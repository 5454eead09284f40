"""A small Llama on a public embedding, for two CPU cores."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaModel

from dprc.models.smollm2 import Embedding


@dataclass(frozen=True)
class TinyLlama:
    """A shallow Llama whose token embedding is public: principal components of SmolLM2's.

    The vocabulary is SmolLM2's (49152), so real text is tokenised as for a real model, while the
    trained part fits two CPU cores. The embedding saw no private text and is not trained.

    Args:
        hidden_size: Width, at most SmolLM2's 576.
        layers: Decoder layers.
        heads: Attention heads; must divide the width.
        intermediate_size: Width of the feed-forward blocks.
        seed: Of the random initialisation of everything but the embedding.
    """

    hidden_size: int = 128
    layers: int = 1
    heads: int = 4
    intermediate_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"heads: must divide hidden_size={self.hidden_size} into even parts, got "
                f"{self.heads}"
            )

    def build(self, embedding: Embedding) -> LlamaModel:
        """Return the model on a (vocabulary, hidden_size) embedding."""
        config = LlamaConfig(
            vocab_size=embedding.shape[0],
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=8192,
            use_cache=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = LlamaModel(config)
        with torch.no_grad():
            model.embed_tokens.weight.copy_(torch.from_numpy(embedding))
        return model


def principal_components(matrix: Embedding, count: int) -> Embedding:
    """Project centred rows on their first principal components, scaled to unit mean square.

    Args:
        matrix: (rows, columns).
        count: Number of components, at most the number of columns.

    Raises:
        ValueError: More components than columns.
    """
    if count > matrix.shape[1]:
        raise ValueError(f"hidden_size: at most {matrix.shape[1]} components exist, got {count}")
    centred = matrix - matrix.mean(axis=0)
    values, vectors = np.linalg.eigh(centred.T.astype(np.float64) @ centred)
    chosen = vectors[:, np.argsort(values)[::-1][:count]]
    # An eigenvector's sign is arbitrary: fix it, so that every machine makes the same model.
    signs = np.sign(chosen[np.abs(chosen).argmax(axis=0), np.arange(count)])
    projected = centred @ (chosen * signs)
    scaled: Embedding = (projected / np.sqrt((projected**2).mean())).astype(np.float32)
    return scaled
