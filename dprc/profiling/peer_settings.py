"""What training steps are compared on: models, how they are trained, batches, and the truth."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dprc.recompute import recompute_blocks

BATCH = 2
VOCABULARY = 4096
MAX_TOKENS = 1 << 17
LORA_RANK = 64  # above the usual 32 probes, so that norms of the factors are estimated too


@dataclass(frozen=True)
class Setting:
    """A model, and how it is trained.

    Args:
        name: For rows and options.
        architecture: ``"llama"``, or ``"gpt2"``, whose position ids have one row for all samples.
        training: ``"full"`` or ``"lora"`` (rank 64 beside every linear layer but the head).
        tied: Whether the head is the embedding.
        checkpointing: None, ``"non_reentrant"`` (transformers' default) or ``"reentrant"``.
        micro_batches: ``backward`` calls of a step; each sees an equal part of the batch.
        hidden_size: Width; a multiple of 16. The MLP has four times as much.
        layers: Depth.
    """

    name: str = "full"
    architecture: str = "llama"
    training: str = "full"
    tied: bool = False
    checkpointing: str | None = None
    micro_batches: int = 1
    hidden_size: int = 512
    layers: int = 4


GRID = tuple(
    Setting(
        f"{training}{'_tied' * tied}{'_checkpointed' * checkpointed}",
        training=training,
        tied=tied,
        checkpointing="non_reentrant" if checkpointed else None,
    )
    for training in ("full", "lora")
    for tied in (False, True)
    for checkpointed in (False, True)
)
SETTINGS = {
    setting.name: setting
    for setting in (
        *GRID,
        Setting("full_checkpointed_reentrant", checkpointing="reentrant"),
        Setting("gpt2", architecture="gpt2"),
        Setting("micro_batches", micro_batches=2),
    )
}


def build_model(setting: Setting) -> Any:
    """Make the model of a setting in training mode, in float32; always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _llama(setting) if setting.architecture == "llama" else _gpt2(setting)
        if setting.checkpointing is not None:
            recompute_blocks(model, use_reentrant=setting.checkpointing == "reentrant")
        if setting.training == "lora":
            model = _with_lora(model)
    return model.train()


def _llama(setting: Setting) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=setting.hidden_size,
        intermediate_size=4 * setting.hidden_size,
        num_hidden_layers=setting.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=setting.tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2(setting: Setting) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=setting.hidden_size,
        n_layer=setting.layers,
        n_head=8,
        n_positions=8192,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=setting.tied,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    # Factors as they are at the start of training, half of them zero, have half their gradients
    # zero, which would hide errors.
    config = LoraConfig(
        r=LORA_RANK,
        lora_alpha=LORA_RANK,
        lora_dropout=0.0,
        target_modules="all-linear",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def make_batch(tokens: int) -> torch.Tensor:
    """Make (2, tokens) random ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (BATCH, tokens), generator=generator)


def whole_losses(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return (B,) mean losses from the whole logits."""
    logits = model(input_ids=ids).logits[:, :-1]
    each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return each.mean(1)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the trained parameters, each once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Truth:
    """Per-sample gradients by brute force.

    Attributes:
        gradients: For each sample, one float64 tensor for each trained parameter.
        norms: (B,), over all parameters.
    """

    gradients: list[list[torch.Tensor]]
    norms: torch.Tensor

    @classmethod
    def of(cls, setting: Setting, ids: torch.Tensor) -> "Truth":
        """Take one backward pass of torch's autograd in float64 for each sample alone.

        The model is the setting's without checkpointing, which changes no gradient. Modules that
        compute in float32 whatever the weights are (rotary angles, RMSNorm's variance) still do.
        """
        model = build_model(replace(setting, checkpointing=None)).double().to(ids.device)
        parameters = trained_parameters(model)
        gradients = []
        for sample in torch.split(ids, 1):
            (loss,) = whole_losses(model, sample)
            gradients.append(list(torch.autograd.grad(loss, parameters)))
        squared = [torch.stack([g.square().sum() for g in own]).sum() for own in gradients]
        return cls(gradients, torch.stack(squared).sqrt())

    def norm_error(self, norms: torch.Tensor) -> float:
        """Return the largest relative error of norms (B,)."""
        if norms.shape != self.norms.shape:
            raise ValueError(
                f"gives norms of shape {tuple(norms.shape)} for {len(self.norms)} samples"
            )
        return float((norms.double() / self.norms - 1).abs().max())

    def sum_error(
        self, total: list[torch.Tensor], norms: torch.Tensor, max_grad_norm: float
    ) -> float:
        """Return the relative error of a clipped sum, given the norms (B,) it was clipped by."""
        factors = (max_grad_norm / norms.double()).clamp(max=1.0)
        size = error = torch.zeros((), dtype=torch.float64, device=self.norms.device)
        for found, *each in zip(total, *self.gradients, strict=True):
            exact = torch.zeros_like(each[0])
            for factor, gradient in zip(factors, each, strict=True):
                exact += factor * gradient
            size = size + exact.square().sum()
            error = error + (found.double() - exact).square().sum()
        return float((error / size).sqrt())
