"""Tiny checkpoints for tests: random weights, a byte-level tokenizer with a chat template, nothing downloaded."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2; the bytes follow
VOCAB = len(SPECIAL) + 256
PAD, BOS, EOS = 0, 1, 2
WINDOW = 8  # of "mistral"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_hidden_layers=2,
    max_position_embeddings=512,
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
    initializer_range=0.3,  # far from uniform, so that argmax has no near ties
)
KINDS = {
    "llama": lambda v: LlamaForCausalLM(LlamaConfig(vocab_size=v, num_key_value_heads=2, **_SIZES)),
    "qwen2": lambda v: Qwen2ForCausalLM(Qwen2Config(vocab_size=v, num_key_value_heads=2, **_SIZES)),
    "gpt_neox": lambda v: GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=v, **_SIZES)),
    "mistral": lambda v: MistralForCausalLM(
        MistralConfig(vocab_size=v, num_key_value_heads=2, sliding_window=WINDOW, **_SIZES)
    ),
}


def tiny_model(kind: str = "llama", vocab: int = VOCAB, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random 2-layer causal LM of a real class, in eval mode; the caller's random state is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return KINDS[kind](vocab).to(dtype).eval()


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte, with ChatML's markers."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + symbols)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[0]
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tiny(folder: Path, kind: str = "llama", seed: int = 0, eos_ids: list[int] | None = None) -> Path:
    """Save a tiny checkpoint with its tokenizer; `eos_ids` go into its generation config, so that answers end soon."""
    model = tiny_model(kind, seed=seed)
    if eos_ids is not None:
        model.generation_config.eos_token_id = eos_ids
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def in_memory(samples: list) -> Any:
    """Return training samples that lie on no disk as `Samples`."""
    import numpy as np

    from fewstep.distill.samples import Samples

    nothing = np.zeros(0, np.int64)
    return Samples(None, nothing, nothing, samples)
