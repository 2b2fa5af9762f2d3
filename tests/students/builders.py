"""Tiny random students of real model classes."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB, MASK, EOS = 40, 39, 1
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    max_position_embeddings=256,
    eos_token_id=EOS,
    bos_token_id=2,
    pad_token_id=0,
    initializer_range=0.3,  # far from uniform, so that argmax has no near ties
)
_GROUPED = dict(num_key_value_heads=2)
FAMILIES = {
    "llama": lambda n: LlamaForCausalLM(LlamaConfig(**_COMMON, **_GROUPED, num_hidden_layers=n)),
    "qwen2": lambda n: Qwen2ForCausalLM(Qwen2Config(**_COMMON, **_GROUPED, num_hidden_layers=n)),
    "qwen2_windows": lambda n: Qwen2ForCausalLM(
        Qwen2Config(
            **_COMMON,
            **_GROUPED,
            sliding_window=6,
            use_sliding_window=True,
            num_hidden_layers=n,
            layer_types=["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(n)],
        )
    ),
    "qwen3": lambda n: Qwen3ForCausalLM(Qwen3Config(**_COMMON, **_GROUPED, head_dim=8, num_hidden_layers=n)),
    "mistral": lambda n: MistralForCausalLM(
        MistralConfig(**_COMMON, **_GROUPED, sliding_window=6, num_hidden_layers=n)
    ),
    "gemma2": lambda n: Gemma2ForCausalLM(
        Gemma2Config(
            **_COMMON, **_GROUPED, head_dim=8, sliding_window=6, num_hidden_layers=n, attn_implementation="eager"
        )
    ),
    "gemma3": lambda n: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_COMMON,
            **_GROUPED,
            head_dim=8,
            sliding_window=6,
            num_hidden_layers=n,
            layer_types=["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(n)],
        )
    ),
    "phi3": lambda n: Phi3ForCausalLM(Phi3Config(**_COMMON, **_GROUPED, sliding_window=6, num_hidden_layers=n)),
    "olmo2": lambda n: Olmo2ForCausalLM(Olmo2Config(**_COMMON, **_GROUPED, num_hidden_layers=n)),
    "qwen3_moe": lambda n: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_COMMON,
            **_GROUPED,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            experts_implementation="eager",
            num_hidden_layers=n,
        )
    ),
    "gpt2": lambda n: GPT2LMHeadModel(  # learned absolute positions
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_head=4,
            n_positions=256,
            n_layer=n,
            eos_token_id=EOS,
            bos_token_id=2,
            pad_token_id=0,
            initializer_range=0.3,
        )
    ),
    "gpt_neox": lambda n: GPTNeoXForCausalLM(
        GPTNeoXConfig(**_COMMON, num_hidden_layers=n, attn_implementation="eager")
    ),
}


def student(
    family="llama",
    attention="block",
    block_size=8,
    num_layers=2,
    dtype=torch.float64,
    seed=0,
    alignment="same_position",
):
    """Return a random student of a real class, in eval mode."""
    torch.manual_seed(seed)
    model = FAMILIES[family](num_layers).to(dtype).eval()
    model.config.fewstep = {
        "version": 1,
        "attention": attention,
        "alignment": alignment,
        "block_size": block_size,
        "mask_token_id": MASK,
        "adapter": None,
    }
    model.generation_config.suppress_tokens = [MASK]
    return model
