"""Tiny random versions of real architectures; every dimension is another number."""

from collections.abc import Callable

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.truth import perturb_

VOCABULARY = 53
TOKENS = 7
BATCH = 3


def _llama(**options):
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options)))


def _gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=24, n_layer=2, n_head=4, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _lora():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(_llama(), config)


def _bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "gpt2": _gpt2,
    "lora": _lora,
}
MODELS = CAUSAL | {"bert": _bert}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a model with every parameter moved off its initial value, without dropout."""
    torch.manual_seed(0)
    return perturb_(MODELS[name]()).to(dtype).train()


def batch(size: int = BATCH, tokens: int = TOKENS, seed: int = 5) -> dict[str, torch.Tensor]:
    """Make a batch of ids of different lengths, right-padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, tokens), generator=generator)
    lengths = torch.randint(2, tokens + 1, (size,), generator=generator)
    mask = (torch.arange(tokens) < lengths.unsqueeze(1)).long()
    labels = torch.randint(3, (size,), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def losses(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return one loss for each sample: its own tokens' mean, or its label's cross-entropy."""
    labels = inputs["labels"]
    output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    if output.logits.dim() == 2:
        return F.cross_entropy(output.logits, labels, reduction="none")
    targets = inputs["input_ids"][:, 1:]
    mask = inputs["attention_mask"][:, 1:].to(output.logits.dtype)
    each = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), targets, reduction="none")
    return (each * mask).sum(1) / mask.sum(1).clamp(min=1)
