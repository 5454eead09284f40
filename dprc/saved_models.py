"""The model of a finished run as a folder: Hugging Face format, and the way back."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from dprc.models import MeanPooledClassifier

_HEAD, _CLASSIFIER = "head.safetensors", "classifier.json"
_ADAPTERS, _BASE = "adapter_config.json", "base"


def save_model(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer; of a model with adapters, only the adapters.

    A ``MeanPooledClassifier`` is written as its backbone, in the format of its library, with
    ``head.safetensors`` and ``classifier.json`` beside it. The model under adapters is written to
    ``base`` if it cannot be loaded from anywhere else.

    Args:
        model: With ``save_pretrained``, or a ``MeanPooledClassifier`` around such a model; no
            engine holds it any more. Adapters may be taken off it.
        tokenizer: Goes with it; None for none.
        folder: Replaced as a whole.

    Raises:
        TypeError: A model that has no such format.
        OSError: It cannot be written.
    """
    check_savable(model)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        if hasattr(model, "peft_config"):
            _save_adapters(model, temporary, lasting=folder)
        else:
            _save_whole(model, temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_savable(model: nn.Module) -> None:
    """Refuse, before it is trained, a model that ``save_model`` has no format for.

    Raises:
        TypeError: It has none.
    """
    if not hasattr(_body(model), "save_pretrained"):
        raise TypeError(
            f"output.save_model: {type(model).__name__} has no save_pretrained; switch save_model "
            "off and save the model yourself"
        )


def _body(model: Any) -> Any:
    return model.backbone if isinstance(model, MeanPooledClassifier) else model


def _save_whole(model: Any, folder: Path) -> None:
    _body(model).save_pretrained(folder)
    if isinstance(model, MeanPooledClassifier):
        save_file(model.head.state_dict(), folder / _HEAD)
        about = {
            "num_labels": model.head.out_features,
            "label_names": list(model.label_names),
            "pooling": "mean over real tokens",
        }
        (folder / _CLASSIFIER).write_text(json.dumps(about, indent=2) + "\n")


def _save_adapters(model: Any, folder: Path, *, lasting: Path) -> None:
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in
    if not _comes_from_a_folder(model.get_base_model()):
        _save_whole(model.unload(), folder / _BASE)
        _name_base(folder / "adapter_config.json", lasting / _BASE)


def _name_base(config_file: Path, base: Path) -> None:
    """Let adapters name the base beside them: on another they would load with random parts.

    PEFT takes a path as it stands, so it is absolute; in a folder that was moved it is not found.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = str(base.resolve())
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _comes_from_a_folder(base: Any) -> bool:
    """Whether a base model can be loaded as it was; a bare backbone is no model with a head."""
    name = getattr(getattr(base, "config", None), "_name_or_path", "")
    file = Path(name or ".") / "config.json"
    if not name or not file.is_file():
        return False
    architectures = json.loads(file.read_text(encoding="utf-8")).get("architectures") or ["?"]
    return "For" in architectures[0] or "LMHead" in architectures[0]


def load_classifier_folder(folder: Path) -> tuple[nn.Module, Any]:
    """Load a ``MeanPooledClassifier`` that ``save_model`` wrote, with its adapters if it has some.

    Args:
        folder: Of the model.

    Returns:
        (model, tokenizer); the model is in evaluation mode, ``label_names`` (of the base under
        adapters) says what its classes are.

    Raises:
        FileNotFoundError: The folder holds no such classifier.
    """
    from transformers import AutoTokenizer

    if (folder / _ADAPTERS).is_file() and (folder / _BASE / _CLASSIFIER).is_file():
        from peft import PeftModel

        base = _load_whole(folder / _BASE)
        model: nn.Module = PeftModel.from_pretrained(base, str(folder))
    else:
        model = _load_whole(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def _load_whole(folder: Path) -> MeanPooledClassifier:
    from transformers import AutoModel

    if not (folder / _CLASSIFIER).is_file():
        raise FileNotFoundError(
            f"{folder}: holds no classifier of dprc train ({_CLASSIFIER} is missing); load another "
            "model with the class that its config.json names"
        )
    about = json.loads((folder / _CLASSIFIER).read_text(encoding="utf-8"))
    weights = load_file(folder / _HEAD)
    model = MeanPooledClassifier(AutoModel.from_pretrained(folder), about["num_labels"], seed=0)
    model.head.to(weights["weight"].dtype).load_state_dict(weights)
    model.label_names = tuple(about["label_names"])
    return model
