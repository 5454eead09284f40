"""From a prepared folder to a model that a run trains: head, precision, LoRA, checkpointing."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import is_flash_attn_2_available

from dprc.models.lora import add_lora
from dprc.models.smollm2 import smollm2, smollm2_tokenizer
from dprc.recompute import recompute_blocks
from dprc.settings import ModelSettings


class MeanPooledClassifier(nn.Module):
    """A backbone, the mean of its last hidden states over real tokens, and a linear head.

    Args:
        backbone: A transformers model that returns ``last_hidden_state``.
        num_labels: Classes.
        seed: Of the head's initialisation.

    Attributes:
        label_names: Name of each class, kept with the saved model; none if they are not known.
    """

    backbone: Any

    def __init__(self, backbone: Any, num_labels: int, seed: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.label_names: tuple[str, ...] = ()
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


def load_model(
    settings: ModelSettings, *, num_labels: int | None, max_tokens: int, seed: int
) -> tuple[Any, Any]:
    """Load what a run trains.

    A folder that holds a bare backbone, as ``tiny-llama`` does, gives its token embedding alone:
    public and frozen, under blocks that are initialised anew. Any other folder gives its weights.

    Args:
        settings: Folder, mode, LoRA, precision, checkpointing, attention.
        num_labels: Classes of a classification head; None for a language-model head.
        max_tokens: Context length of the run.
        seed: Of every weight that is not loaded.

    Returns:
        (model, tokenizer). What is not trained does not require gradients. The tokenizer has a
        padding token.

    Raises:
        FileNotFoundError: The folder holds no model.
        ValueError: Settings that do not fit the model or the machine; the message names the key.
    """
    folder = Path(settings.path)
    config = _configuration(folder)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_tokens > positions:
        raise ValueError(f"task.max_tokens: the model has {positions} positions, got {max_tokens}")
    if settings.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ValueError(
            "model.attention: flash_attention_2 needs a CUDA device and the package flash-attn; "
            "choose sdpa or eager"
        )
    tokenizer = load_tokenizer(folder)
    options = {
        "dtype": getattr(torch, settings.dtype),
        "attn_implementation": settings.attention,
    }
    if config.architectures == ["LlamaModel"]:
        model = _on_public_embedding(folder, options, num_labels, seed)
    elif num_labels is None:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # the head is not in the folder
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=num_labels, pad_token_id=tokenizer.pad_token_id, **options
            )
    inner = getattr(model, "backbone", model)
    inner.config.use_cache = False  # generation switches it on for itself
    if settings.gradient_checkpointing:
        recompute_blocks(inner)
    if settings.mode == "lora":
        head = next(name for name in ("score", "head", "lm_head") if hasattr(model, name))
        model = add_lora(
            model,
            settings.lora_or_default,
            head=head,
            trains_head=num_labels is not None,
            seed=seed,
        )
    return model, tokenizer


def _configuration(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model.path: {folder} holds no prepared model (config.json is missing). Run: "
            f"dprc prepare-model --preset tiny-llama --out {folder} (for a model of your own: "
            "--preset llama-3.2-1b --source FOLDER)"
        )
    return AutoConfig.from_pretrained(folder)


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Any:
    """Load a tokenizer; where it has no padding token, one that stands in no text is chosen.

    Args:
        name_or_path: ``"smollm2-135m"`` (from its package), or a folder with a tokenizer.json.

    Raises:
        ImportError: The preset's package is not installed.
        FileNotFoundError: Neither a preset nor a folder with a tokenizer.
    """
    if name_or_path == "smollm2-135m":
        return smollm2_tokenizer()
    if not (Path(name_or_path) / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{str(name_or_path)!r} is neither the preset smollm2-135m nor a folder with a "
            "tokenizer.json"
        )
    tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    if tokenizer.pad_token_id is None:
        # Llama 3's own for this purpose; the end of a text elsewhere.
        spare = "<|finetune_right_pad_id|>"
        tokenizer.pad_token = spare if spare in tokenizer.get_vocab() else tokenizer.eos_token
    return tokenizer


def _on_public_embedding(
    folder: Path, options: dict[str, Any], num_labels: int | None, seed: int
) -> Any:
    """Put fresh blocks and a head on the folder's token embedding, which stays frozen."""
    public = LlamaModel.from_pretrained(folder, **options)
    config = public.config
    config.tie_word_embeddings = num_labels is None  # the head of a language model is public too
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = (LlamaModel if num_labels is not None else LlamaForCausalLM)(config)
    fresh.to(options["dtype"])
    fresh.get_input_embeddings().load_state_dict(public.embed_tokens.state_dict())
    fresh.get_input_embeddings().requires_grad_(False)
    if num_labels is None:
        return fresh
    return MeanPooledClassifier(fresh, num_labels, seed).to(options["dtype"])


def name_labels(model: Any, label_names: Sequence[str]) -> None:
    """Let a classifier know what its classes are called, so that its saved form says it.

    Args:
        model: From ``load_model``.
        label_names: In the order of the logits.
    """
    bare = model.get_base_model() if hasattr(model, "peft_config") else model
    if isinstance(bare, MeanPooledClassifier):
        bare.label_names = tuple(label_names)
    else:
        bare.config.id2label = dict(enumerate(label_names))
        bare.config.label2id = {name: index for index, name in enumerate(label_names)}


def load_classifier(folder: Path, num_labels: int, seed: int) -> tuple[Any, Any]:
    """Load a folder's classifier for full fine-tuning in float32.

    Args:
        folder: Written by ``dprc prepare-model``.
        num_labels: Classes.
        seed: Of every weight that is not loaded.

    Returns:
        (model, tokenizer), as ``load_model``, whose errors it raises.
    """
    settings = ModelSettings(path=str(folder))
    return load_model(settings, num_labels=num_labels, max_tokens=1, seed=seed)


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
        return smollm2().to(dtype)
    folder = Path(name_or_path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"--model: {name_or_path!r} is neither the preset smollm2-135m nor a folder with a "
            "config.json"
        )
    if any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(dtype)
