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


def _decoder(kind, **options):
    """Make a decoder of another family from the common sizes."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 44,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**(sizes | options))
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def _opt():
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=24, ffn_dim=44, num_hidden_layers=2, dropout=0.0,
        num_attention_heads=4, max_position_embeddings=32, word_embed_proj_dim=20,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


def _lora_all():
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0)
    return peft.get_peft_model(_llama(), config)


def _t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=6, d_ff=44, num_layers=2, num_heads=4,
        dropout_rate=0.0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            parameter.requires_grad_(False)
    return model


def _vit():
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=44,
        image_size=16, patch_size=4, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


_GROUPED = {"num_key_value_heads": 2}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tie_word_embeddings=True),
    "gpt2": _gpt2,
    "lora": _lora,
    "bert": _bert,
}
# Trained like the others, but not with every option of every test.
MORE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: _decoder("Qwen2", **_GROUPED),
    "qwen3": lambda: _decoder("Qwen3", head_dim=6, **_GROUPED),
    "mistral": lambda: _decoder("Mistral", head_dim=6, **_GROUPED),
    "gemma2": lambda: _decoder("Gemma2", head_dim=6, **_GROUPED),
    "gpt_neox": lambda: _decoder("GPTNeoX", attention_dropout=0.0, hidden_dropout=0.0),
    "opt": _opt,
    "mixtral": lambda: _decoder("Mixtral", num_local_experts=4, **_GROUPED),
    "lora_all": _lora_all,
    "t5": _t5,
    "vit": _vit,
}
# Float32 inside, whatever the model's dtype: its experts' grouped product knows no float64.
FLOAT32_ONLY = ("mixtral",)


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a model with every parameter moved off its initial value, without dropout."""
    torch.manual_seed(0)
    model = perturb_((MODELS | MORE_MODELS)[name]())
    return model.to(torch.float32 if name in FLOAT32_ONLY else dtype).train()


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
    if isinstance(model, transformers.ViTForImageClassification):
        generator = torch.Generator().manual_seed(int(inputs["input_ids"].sum()))
        pixels = torch.randn(len(labels), 3, 16, 16, generator=generator)
        logits = model(pixel_values=pixels.to(next(model.parameters()).dtype)).logits
        return F.cross_entropy(logits, labels, reduction="none")
    if isinstance(model, transformers.T5ForConditionalGeneration):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids).logits
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)
    output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    if output.logits.dim() == 2:
        return F.cross_entropy(output.logits, labels, reduction="none")
    targets = inputs["input_ids"][:, 1:]
    mask = inputs["attention_mask"][:, 1:].to(output.logits.dtype)
    each = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), targets, reduction="none")
    return (each * mask).sum(1) / mask.sum(1).clamp(min=1)
