"""Models as folders in Hugging Face format, which runs load: ``dprc prepare-model``."""

import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from dprc.models.smollm2 import smollm2, smollm2_embedding, smollm2_tokenizer
from dprc.models.tiny_llama import TinyLlama, principal_components
from dprc.results import write_result

LLAMA_REPOSITORY = "meta-llama/Llama-3.2-1B"


def save_tiny_llama(preset: TinyLlama, folder: Path) -> None:
    """Make the small model and write it."""
    model = preset.build(principal_components(smollm2_embedding(), preset.hidden_size))
    _save(model, smollm2_tokenizer(), folder, {"preset": "tiny-llama", **preset.__dict__})


def save_smollm2(folder: Path) -> None:
    """Read SmolLM2-135M-Instruct from its package and write it in float32."""
    _save(smollm2(), smollm2_tokenizer(), folder, {"preset": "smollm2-135m"})


def save_llama(folder: Path, source: str | None = None) -> None:
    """Load Llama-3.2-1B, or the causal language model of a folder, and write it.

    Args:
        folder: Where it goes.
        source: A folder in Hugging Face format; from the hub when None.

    Raises:
        FileNotFoundError: ``source`` is no such folder.
        OSError: The hub cannot be reached or gives no access.
    """
    if source is not None and not (Path(source) / "config.json").is_file():
        raise FileNotFoundError(f"--source: {source} holds no model (config.json is missing)")
    name = source or LLAMA_REPOSITORY
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise OSError(
            f"preset llama-3.2-1b: cannot load {name} ({reason}). Give a local copy with --source"
        ) from None
    _save(model, tokenizer, folder, {"preset": "llama-3.2-1b"})


def _save(model: Any, tokenizer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Write model and tokenizer, each file whole; ``model.json`` comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        # One file, whatever its size: its name is known before.
        model.save_pretrained(temporary, max_shard_size="1TB")
        tokenizer.save_pretrained(temporary)
        for file in Path(temporary).iterdir():
            os.replace(file, folder / file.name)
    others = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    write_result(
        folder / "model.json",
        config=config,
        metrics={
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameters_without_embedding": others,
        },
        privacy=None,
        made_by="model",
    )
