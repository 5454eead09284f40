"""Public configurations of language models: shapes only, no weights, no network."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LLAMA_3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def _llama_3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def presets() -> dict[str, dict[str, Any]]:
    """Return the settings of each preset, as in the ``config.json`` that its makers published.

    Example:
        >>> presets()["llama-3.2-1b"]["hidden_size"]
        2048
    """
    return {
        "llama-3.2-1b": _LLAMA_3
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": _llama_3_rope(32.0),
        },
        "llama-3.2-3b": _LLAMA_3
        | {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "rope_parameters": _llama_3_rope(32.0),
        },
        "llama-3.1-8b": _LLAMA_3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "head_dim": 128,
            "tie_word_embeddings": False,
            "rope_parameters": _llama_3_rope(8.0),
        },
        "qwen2.5-0.5b": {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "qwen2.5-7b": {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "smollm2-135m": {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
        "gpt2": {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "tie_word_embeddings": True,
        },
    }


@dataclass(frozen=True)
class ModelShape:
    """A model that exists as a configuration only.

    Attributes:
        name: Of the preset, or the path of the file.
        settings: As in a ``config.json``; ``model_type`` says which architecture.
    """

    name: str
    settings: dict[str, Any]

    def config(self, dtype: str = "float32") -> Any:
        """Make the transformers configuration of a causal language model for training.

        Dropout is off and no cache is kept; attention without a mask is told to be causal, so that
        it needs memory linear in the tokens wherever flash attention runs.

        Raises:
            ValueError: An architecture that has no causal language model here, or settings that it
                refuses.
        """
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        settings = dict(self.settings)
        kind = settings.pop("model_type", None)
        if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(
                f"--model: {self.name}: model_type {kind!r} is no causal language model that "
                "transformers knows"
            )
        for name in ("quantization_config", "torch_dtype", "dtype", "transformers_version"):
            settings.pop(name, None)
        try:
            config = CONFIG_MAPPING[kind](**settings)
        except Exception as error:  # each architecture refuses settings in its own way
            raise ValueError(f"--model: {self.name}: {_one_line(error)}") from error
        for name in vars(config):
            if "dropout" in name or name.endswith("_pdrop"):
                setattr(config, name, 0.0)
        config.use_cache = False
        config.dtype = dtype
        return config

    @property
    def max_tokens(self) -> int | None:
        """Positions that the model was made for; None where it does not say."""
        value = self.settings.get("max_position_embeddings", self.settings.get("n_positions"))
        return value if isinstance(value, int) else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def load_shape(name_or_path: str) -> ModelShape:
    """Find a preset, or read a ``config.json``.

    Args:
        name_or_path: Name of a preset (case does not matter; an organisation before a slash is
            ignored), a ``config.json``, or a folder that holds one.

    Raises:
        ValueError: Neither, or a file that holds no configuration.
    """
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"--model: {path} is not JSON: {error}") from error
        if not isinstance(settings, dict) or "model_type" not in settings:
            raise ValueError(f"--model: {path} has no model_type, so it is no model's config.json")
        return ModelShape(str(path), settings)
    known = presets()
    name = name_or_path.lower().rpartition("/")[2]
    if name not in known:
        raise ValueError(
            f"--model: must be one of {', '.join(known)}, or a config.json, got {name_or_path!r}"
        )
    return ModelShape(name, known[name])
