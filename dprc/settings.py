"""Typed settings of one training run: read from YAML or JSON, unknown keys refused by name."""

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TaskSettings(_Strict):
    """Which text is learned, and how much of it is evaluated."""

    name: str
    data: str  # folder written by `dprc prepare-data`
    max_tokens: int = Field(ge=1)
    chunk_tokens: int = Field(default=1024, ge=1)  # of a language model's loss
    evaluation_documents: int | None = Field(default=None, ge=1)  # of the test split; null: all
    evaluation_batch: int = Field(default=32, ge=1)
    max_new_tokens: int | None = Field(default=None, ge=1)  # null: the task's own


class LoraSettings(_Strict):
    """Low-rank factors beside the frozen layers; there is no dropout."""

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    targets: Literal["qv", "all-linear"] = "qv"  # query and value projections, or every layer


class ModelSettings(_Strict):
    """Which model learns it, and how it is loaded."""

    path: str  # folder written by `dprc prepare-model`
    mode: Literal["full", "lora"] = "full"
    lora: LoraSettings | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"

    @model_validator(mode="after")
    def _fits(self) -> "ModelSettings":
        if self.lora is not None and self.mode != "lora":
            raise ValueError(f"lora is given, but mode is {self.mode!r}; leave it out or set lora")
        if self.attention == "flash_attention_2" and self.dtype == "float32":
            raise ValueError("attention: flash_attention_2 needs dtype bfloat16, got 'float32'")
        return self

    @property
    def lora_or_default(self) -> LoraSettings:
        """The LoRA options, defaults where none are given."""
        return self.lora or LoraSettings()


class MethodSettings(_Strict):
    """How per-sample gradients are clipped; the names are those of ``PrivacyEngine``."""

    estimator: str
    num_probes: int | None = Field(default=None, ge=1)
    sketch: Literal["per_sample", "shared"] | None = None
    head_rank: int | None = Field(default=None, ge=1)
    analysis: Literal["tight", "envelope"] = "tight"
    schedule: Literal["two_pass", "book_keeping"] = "two_pass"

    def accounting(self) -> dict[str, Any]:
        """Return the arguments that calibration and engine share."""
        chosen = {
            "estimator": self.estimator,
            "num_probes": self.num_probes,
            "sketch": self.sketch,
            "head_rank": self.head_rank,
            "analysis": self.analysis,
        }
        return {name: value for name, value in chosen.items() if value is not None}


class PrivacySettings(_Strict):
    """The target; ``noise_multiplier`` is calibrated when left out, and checked when given."""

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    noise_multiplier: float | None = Field(default=None, gt=0)
    max_grad_norm: float = Field(gt=0, allow_inf_nan=False)


class TrainingSettings(_Strict):
    """Sampling and optimization."""

    sample_rate: float = Field(gt=0, le=1)
    steps: int = Field(ge=1)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    momentum: float = Field(default=0.0, ge=0, lt=1)  # of sgd
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_physical_batch: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingSettings":
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is an option of sgd, not of {self.optimizer}; leave it out")
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps must be at most steps={self.steps}, got {self.warmup_steps}"
            )
        return self


class ParallelSettings(_Strict):
    """How several processes, started by torchrun, train one model; one process needs nothing.

    With ``replicate`` each holds all of the model, with ``shard`` its share of every parameter.
    """

    strategy: Literal["replicate", "shard"] = "replicate"


class OutputSettings(_Strict):
    """What is reported and kept on the way; nothing here changes what is learned."""

    evaluate_every: int | None = Field(default=None, ge=1)  # steps; always after the last one
    checkpoint_every: int | None = Field(default=50, ge=1)  # steps; null: only at SIGTERM
    keep_checkpoints: bool = False  # after the run is finished
    save_model: bool = True
    log_every: int | None = Field(default=None, ge=1)  # steps; null: about ten lines a run
    tensorboard: bool = False


class RunSettings(_Strict):
    """One run. ``method`` and ``privacy`` are both given, or both null for a non-private run."""

    task: TaskSettings
    model: ModelSettings
    method: MethodSettings | None
    privacy: PrivacySettings | None
    training: TrainingSettings
    output: OutputSettings = OutputSettings()
    parallel: ParallelSettings = ParallelSettings()
    seed: int = Field(ge=0)
    privacy_seed: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _both_or_neither(self) -> "RunSettings":
        if (self.method is None) != (self.privacy is None):
            raise ValueError("method and privacy must both be given, or both be null")
        return self


class _Loader(yaml.SafeLoader):
    """PyYAML's, but for two habits.

    It reads 1e-5 as text (YAML 1.1 wants 1.0e-5), where JSON and people mean a number; and of a
    key that is given twice it drops the first without a word.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            # Keys that are merged in with << may be given again: that is what merging is for.
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ValueError(f"duplicate key {key.value!r} in line {line}")
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_settings(text: str, *, origin: str) -> RunSettings:
    """Parse the settings of a run.

    Args:
        text: YAML, of which JSON is a part.
        origin: Where the text came from, for the message.

    Raises:
        ValueError: Not YAML, or a key that is unknown, missing or ill-typed: one line names each.
    """
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{origin}: not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{origin}: must hold a mapping of settings")
    try:
        return RunSettings.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(_problem(item) for item in error.errors())
        raise ValueError(f"{origin}: {problems}") from None


def _problem(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "settings"
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    if item["type"] == "missing":
        return f"missing key {key!r}"
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}"
    return f"{key}: {item['msg'].lower()}, got {item['input']!r}"


def read_settings(path: str, stdin: Any) -> RunSettings:
    """Read settings from a file, or from ``stdin`` when the path is ``-``."""
    if path == "-":
        return parse_settings(stdin.read(), origin="standard input")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not text in UTF-8 ({error})") from None
    except OSError as error:
        raise ValueError(f"--config: cannot read {path} ({error.strerror})") from None
    return parse_settings(text, origin=path)
