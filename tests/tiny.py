"""Very small models and tokenizers in the folders that runs load."""

import torch


def byte_tokenizer(*, pad=True, bos=False):
    """A tokenizer whose tokens are bytes: a text of ASCII letters has as many tokens as letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>"} | ({"pad_token": "<pad>"} if pad else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def causal_lm(seed=0, **changes):
    """A random two-layer Llama with tied embeddings, in evaluation mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {
        "vocab_size": 260,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**options | changes)).eval()


def save_causal_lm(folder, *, pad=True, bos=False, **changes):
    """Write model and tokenizer as ``dprc prepare-model`` does, but for model.json."""
    causal_lm(**changes).save_pretrained(folder)
    byte_tokenizer(pad=pad, bos=bos).save_pretrained(folder)
    return folder
