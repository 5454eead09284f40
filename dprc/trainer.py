"""``PrivateTrainer``: DP-SGD with randomized clipping behind Hugging Face's ``Trainer``."""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments

from dprc.arguments import complaint_of_delta
from dprc.engine import PrivacyEngine
from dprc.errors import PrivacyError
from dprc.losses import causal_lm_loss, classification_loss
from dprc.privacy_card import privacy_facts, write_card
from dprc.sampling import LogicalBatch

LossesFn = Callable[[nn.Module, Mapping[str, Any]], torch.Tensor]

_ENGINE_STATE = "privacy_engine.pt"
_ONE_FIXED_VALUE: tuple[tuple[str, Any, str], ...] = (
    ("fp16", False, "a scaled loss is clipped differently; use bf16"),
    ("fp16_full_eval", False, "it moves the model to half precision; use bf16"),
    ("label_smoothing_factor", 0.0, "its loss is a mean over the batch; write it in losses_fn"),
    ("auto_find_batch_size", False, "it starts a step again, with noise that was used before"),
    ("train_sampling_strategy", "random", "batches must be Poisson samples"),
    ("dataloader_drop_last", False, "a Poisson batch has no fixed size to fall short of"),
    ("dataloader_num_workers", 0, "samples are drawn step by step in the training process"),
    ("include_num_input_tokens_seen", "no", "how many tokens were drawn is not private"),
    ("torch_compile", False, "a compiled model has not been tested with the engine"),
    ("neftune_noise_alpha", None, "its hooks have not been tested with the engine"),
    ("deepspeed", None, "the engine holds whole gradients on one device"),
    ("optim_target_modules", None, "projected gradients have not been tested with the engine"),
    ("use_liger_kernel", False, "its kernels hide the uses of parameters"),
)
# They step inside the backward pass.
_FUSED_OPTIMIZERS = ("lomo", "adalomo")


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """What a private run needs beyond ``TrainingArguments``, whose ``max_grad_norm`` is C.

    Attributes:
        delta: In (0, 1); below one over the number of examples.
        epsilon: Target, above 0; or None and ``noise_multiplier``.
        noise_multiplier: Noise on the sum of clipped gradients in units of C; or None and
            ``epsilon``.
        estimator: As for ``PrivacyEngine``, as are all that follow.
        num_probes: Probes k.
        sketch: ``"per_sample"`` or ``"shared"``.
        head_rank: Rank of the head of ``"hutchpp"``.
        schedule: ``"two_pass"`` or ``"book_keeping"``.
        analysis: ``"tight"`` or ``"envelope"``.
        max_tokens: Declared longest sample; ``"auto"`` needs it.
        privacy_seed: None for secret keys; an int repeats a run and makes it unreleasable.

    Raises:
        ValueError: Not exactly one of ``epsilon`` and ``noise_multiplier``.
    """

    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    estimator: str | None = None
    num_probes: int | None = None
    sketch: str = "per_sample"
    head_rank: int | None = None
    schedule: str = "two_pass"
    analysis: str = "tight"
    max_tokens: int | None = None
    privacy_seed: int | None = None

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                "epsilon, noise_multiplier: give one of them, got "
                f"{self.epsilon!r} and {self.noise_multiplier!r}"
            )

    def make_engine(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, **run: Any
    ) -> PrivacyEngine:
        """Make the engine of a run: ``run`` is its clipping bound, sampling rate, batch size."""
        names = ("estimator", "num_probes", "sketch", "head_rank", "schedule", "analysis")
        options = {name: getattr(self, name) for name in (*names, "max_tokens", "privacy_seed")}
        if self.noise_multiplier is not None:
            return PrivacyEngine(
                model, optimizer, noise_multiplier=self.noise_multiplier, **options, **run
            )
        target: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "steps": steps}
        return PrivacyEngine.with_epsilon(model, optimizer, **target, **options, **run)


class PrivateTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """Hugging Face's ``Trainer`` with differential privacy for each example.

    ``per_device_train_batch_size * gradient_accumulation_steps`` is the *expected* batch size:
    batches are Poisson samples, cut into physical ones of ``per_device_train_batch_size``.
    ``max_grad_norm`` is the clipping bound C of each example's gradient. An epoch is as many steps
    as give each example one expected use. Logs have ``epsilon`` so far.

    Args:
        model: As for ``Trainer``; also a PEFT model.
        args: As for ``Trainer``; copied. What would break the guarantee is refused by name.
        privacy: Target and mechanism.
        losses_fn: From model and batch to (B,) losses, one for each example and a function of it
            alone. When None, ``classification_loss`` for labels (B,) and ``causal_lm_loss`` for
            labels (B, T).
        **others: As for ``Trainer``: train_dataset, eval_dataset, data_collator, callbacks, …

    Attributes:
        engine: The privacy engine; None before ``train``.

    Raises:
        ValueError: An argument that has no private meaning; the message names it.
        TypeError: A dataset without length.
        PrivacyError: ``train`` called twice.

    Guarantee:
        The model after ``train`` is (ε, delta)-private for adding or removing one example of
        ``train_dataset``, with the ε of the last log. The number of examples is public. Losses,
        gradient norms in the logs and checkpoints (they hold the keys) are not private; nor is
        ``eval_dataset`` protected.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1,
        ...                     num_attention_heads=1, intermediate_size=8)
        >>> rows = [{"input_ids": [i % 8, 1], "labels": i % 2} for i in range(40)]
        >>> args = TrainingArguments("unused", per_device_train_batch_size=4, max_steps=2,
        ...                          report_to=[], save_strategy="no", use_cpu=True,
        ...                          disable_tqdm=True, logging_strategy="no")
        >>> trainer = PrivateTrainer(
        ...     BertForSequenceClassification(config), args, train_dataset=rows,
        ...     privacy=PrivacyArguments(epsilon=8.0, delta=1e-3))
        >>> trainer.train().global_step
        2
        >>> trainer.engine.epsilon(1e-3) <= 8.0
        True
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        privacy: PrivacyArguments,
        losses_fn: LossesFn | None = None,
        **others: Any,
    ) -> None:
        _refuse(args, others)
        self.privacy, self._losses_fn = privacy, losses_fn
        self.engine: PrivacyEngine | None = None
        self._max_physical_batch = args.per_device_train_batch_size
        self._expected = args.per_device_train_batch_size * args.gradient_accumulation_steps
        # The Trainer sees one batch a step: the logical one, whose parts training_step() goes over.
        args = copy.copy(args)
        args.gradient_accumulation_steps = 1
        super().__init__(model, args, **others)
        _refuse_collator(self.data_collator)
        size = len(self.train_dataset) if self.train_dataset is not None else 0
        if size and self._expected > size:
            raise ValueError(
                "per_device_train_batch_size * gradient_accumulation_steps: is the expected batch "
                f"size, at most the {size} examples of train_dataset, got {self._expected}"
            )
        complaint = complaint_of_delta(privacy.delta, size)
        if complaint is not None:
            warnings.warn(f"privacy.{complaint}", stacklevel=2)
        self._steps_per_epoch = max(1, round(size / self._expected))

    # --- what the Trainer asks for --------------------------------------------------------------

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train, as ``Trainer.train``; once, since the privacy that was spent is spent.

        Raises:
            PrivacyError: A second call.
        """
        if self.engine is not None:
            raise PrivacyError(
                "train: was called before; another call would spend privacy that nothing accounts "
                "for. Set max_steps or num_train_epochs for all steps, or make a new trainer and "
                "pass resume_from_checkpoint"
            )
        return super().train(*arguments, **options)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refuse: each trial looks at the examples."""
        raise PrivacyError(
            "hyperparameter_search: each trial spends privacy, and no guarantee covers the choice "
            "among them; choose on public data"
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of one epoch's logical batches."""
        if self.train_dataset is None:
            raise ValueError("train_dataset: training needs one")
        dataset, collate_fn = self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate_fn = self._get_collator_with_removed_columns(collate_fn, "training")

        def draw(_: list[int]) -> LogicalBatch:
            share = self._engine().begin_logical_batch(dataset, self._max_physical_batch)
            return LogicalBatch(
                dataset,
                share,
                max_physical_batch=self._max_physical_batch,
                collate_fn=collate_fn,
            )

        # Its items are steps: resuming skips those that were taken, and the engine knows its own.
        steps: Any = range(self._steps_per_epoch)
        return DataLoader(steps, batch_size=1, shuffle=False, collate_fn=draw)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of examples of a loader's dataset."""
        of_steps = isinstance(dataloader.dataset, range)
        return len(self.train_dataset) if of_steps else super().num_examples(dataloader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """Return the logical batch of the next step; each loss is normalised by its own example."""
        return [next(epoch_iterator)], None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the optimizer, and the engine that steps it."""
        inner = super().create_optimizer(model)
        if self.engine is None:
            steps = self.args.max_steps
            if steps <= 0:
                steps = math.ceil(self.args.num_train_epochs * self._steps_per_epoch)
            self.engine = self.privacy.make_engine(
                self.model,
                inner,
                steps=steps,
                max_grad_norm=float(self.args.max_grad_norm),
                sample_rate=self._expected / len(self.train_dataset),
                expected_batch_size=self._expected,
            )
            self.optimizer = _SteppedByEngine(inner, self.engine)
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Give a logical batch's losses to the engine, one physical batch after the other.

        Returns:
            The sum of the losses over the expected batch size. Not private.
        """
        if self._engine().accountant.steps != self.state.global_step:
            raise PrivacyError(
                f"train: the trainer is at step {self.state.global_step}, the accountant at "
                f"{self._engine().accountant.steps}: a checkpoint was loaded in part. Resume with "
                "a version of transformers that PrivateTrainer was tested with (5.24)"
            )
        model.train()
        total = torch.zeros((), device=self.args.device)
        for batch in inputs:
            batch = self._prepare_inputs(batch)
            with self.accelerator.autocast():
                losses = self.compute_losses(model, batch)
            self._engine().backward(losses)
            finite = losses.detach()[losses.detach().isfinite()]
            total += finite.sum() / self._expected
        return total

    def compute_losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return one loss for each example, (B,).

        Raises:
            ValueError: No ``losses_fn``, and labels that no loss of ours fits.
        """
        if self._losses_fn is not None:
            return self._losses_fn(model, inputs)
        labels = inputs.get("labels")
        if labels is not None and labels.dim() == 1 and not labels.is_floating_point():
            return classification_loss(model, inputs)
        if labels is not None and labels.dim() == 2 and not labels.is_floating_point():
            return causal_lm_loss(model, inputs)
        if labels is None:
            raise ValueError(
                "losses_fn: the batch has no labels; add them to the examples, give a "
                "data_collator that does, or give a function from model and batch to losses (B,)"
            )
        raise ValueError(
            f"losses_fn: labels of shape {tuple(labels.shape)} are neither classes (B,) nor "
            "tokens (B, T); give a function from model and batch to losses (B,)"
        )

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Log, with ε so far beside what training reports."""
        if self.engine is not None and ("loss" in logs or "train_loss" in logs):
            logs = {**logs, "epsilon": self.engine.epsilon(self.privacy.delta)}
        super().log(logs, *arguments, **options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing: how many tokens a batch had is not private."""
        return 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and after training the card that says what it promises."""
        super().save_model(output_dir, _internal_call)
        if self.engine is not None and not _internal_call:
            facts = privacy_facts(
                self.engine, delta=self.privacy.delta, epsilon_target=self.privacy.epsilon
            )
            write_card(Path(output_dir or self.args.output_dir), facts)

    # --- what Trainer has no public place for ----------------------------------------------------

    def _engine(self) -> PrivacyEngine:
        if self.engine is None:
            raise PrivacyError("engine: there is none before train()")
        return self.engine

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: each example's gradient is clipped by the engine."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Report none: there is no gradient before the engine's step, nor after it."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        # It holds the keys of noise, sketches and samples: as sensitive as the examples.
        torch.save(self._engine().state_dict(), Path(output_dir) / _ENGINE_STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint) / _ENGINE_STATE
        if not file.is_file():
            raise PrivacyError(
                f"resume_from_checkpoint: {checkpoint} has no {_ENGINE_STATE}, so the privacy "
                "spent and the noise drawn so far are not known. Resume from a checkpoint of "
                "PrivateTrainer, without save_only_model"
            )
        self._engine().load_state_dict(torch.load(file, weights_only=True))


class _SteppedByEngine(torch.optim.Optimizer):
    """An optimizer whose ``step`` is the engine's: noise, accounting, then the real one."""

    def __init__(self, inner: torch.optim.Optimizer, engine: PrivacyEngine) -> None:
        # Not initialised as an optimizer of its own: all state is the real one's.
        self.__dict__["inner"], self.__dict__["engine"] = inner, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["inner"], name, value)

    def __repr__(self) -> str:
        return f"private {self.inner!r}"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take the engine's step."""
        if closure is not None:
            raise PrivacyError("optimizer.step: a closure computes gradients again, without noise")
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the real optimizer's state."""
        return dict(self.inner.state_dict())

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the real optimizer's state."""
        self.inner.load_state_dict(state_dict)

    def add_param_group(self, param_group: Any) -> None:
        """Refuse: the engine knows the parameters it counts."""
        raise PrivacyError("optimizer.add_param_group: make a new trainer with these parameters")


def _refuse(args: TrainingArguments, others: Mapping[str, Any]) -> None:
    """Refuse what would break the guarantee or has no meaning here."""
    for name, allowed, reason in _ONE_FIXED_VALUE:
        value = getattr(args, name, allowed)
        if value != allowed and not (allowed is None and not value):
            raise ValueError(f"args.{name}={value!r}: must be {allowed!r}, since {reason}")
    if args.max_grad_norm is None or not args.max_grad_norm > 0:
        raise ValueError(f"args.max_grad_norm: is C, above 0, got {args.max_grad_norm!r}")
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError(
            f"args.world_size={args.world_size}, args.n_gpu={args.n_gpu}: PrivateTrainer is for "
            "one process and one device; on several, use PrivacyEngine with dprc.distributed, or "
            "dprc train under torchrun"
        )
    if getattr(args, "fsdp", None):
        raise ValueError("args.fsdp: PrivateTrainer is for one process; leave it out")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in _FUSED_OPTIMIZERS:
        raise ValueError(f"args.optim={optimizer!r}: it steps inside the backward pass")
    for name in ("compute_loss_func", "model_init"):
        if others.get(name) is not None:
            way = "give losses_fn" if name == "compute_loss_func" else "give the model"
            raise ValueError(f"{name}: has no private form; {way}")
    dataset = others.get("train_dataset")
    if isinstance(dataset, IterableDataset) or (
        dataset is not None and not hasattr(dataset, "__len__")
    ):
        raise TypeError(
            f"train_dataset: Poisson sampling needs __len__ and __getitem__, got "
            f"{type(dataset).__name__}"
        )


def _refuse_collator(collator: Any) -> None:
    """Refuse collators that join examples."""
    from transformers import DataCollatorWithFlattening

    if isinstance(collator, DataCollatorWithFlattening):
        raise ValueError(
            "data_collator: DataCollatorWithFlattening packs examples into one row, whose gradient "
            "cannot be clipped by example; use one that pads"
        )
