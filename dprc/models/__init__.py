"""Models: presets and their folders, heads, LoRA."""

from dprc.models.loading import (
    MeanPooledClassifier,
    load_causal_lm,
    load_classifier,
    load_model,
    load_tokenizer,
    name_labels,
)
from dprc.models.prepare import save_llama, save_smollm2, save_tiny_llama
from dprc.models.smollm2 import smollm2, smollm2_embedding, smollm2_tokenizer
from dprc.models.tiny_llama import TinyLlama, principal_components

__all__ = [
    "MeanPooledClassifier",
    "TinyLlama",
    "load_causal_lm",
    "load_classifier",
    "load_model",
    "load_tokenizer",
    "name_labels",
    "principal_components",
    "save_llama",
    "save_smollm2",
    "save_tiny_llama",
    "smollm2",
    "smollm2_embedding",
    "smollm2_tokenizer",
]
