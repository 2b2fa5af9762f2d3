"""Can a model become a student? Asked of the model itself, by changing tokens and seeing what moves.

Shapes: Q positions of one row, D width.
"""

import copy
from typing import Any

import numpy as np
import torch

from fewstep.students.attention import attention_implementation
from fewstep.students.layout import CLEAN, Example, body_hidden, build_batch

PROMPT, RESPONSE, BLOCK = 5, 8, 4
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_top_k", "num_experts_per_token", "topk_group", "n_group")
WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_hidden_size",
    "ffn_dim",
    "n_inner",
)


@torch.no_grad()
def why_not_convertible(model) -> str | None:
    """Return why a causal LM cannot be adapted to block diffusion, or None where it can.

    Three things must hold of its body. A noisy copy of the clean tokens under in-block causal masks
    gets the hidden states of the clean stream: positions are those given, not those of storage, and
    layers keep no state of their own. A token to the right in its block is seen: masks are honoured
    where they allow more than causal attention does. Neither the clean stream nor another block sees it.

    Args:
        model: in eval mode, of any size; two or three forwards of 21 positions are made.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, PROMPT + RESPONSE)
    other = ids.copy()
    other[-BLOCK - 1] = (other[-BLOCK - 1] + vocabulary // 2) % vocabulary  # the last token of the first block
    try:
        causal, batch = _hidden(model, ids, ids, "block_causal_inside")
        block, _ = _hidden(model, ids, ids, "block")
        changed, _ = _hidden(model, ids, other, "block")
    except Exception as error:  # a forward that takes no such masks or positions fails in its own way
        first = (str(error).strip().splitlines() or [""])[0]
        return f"its forward does not take 4-D masks and given positions ({type(error).__name__}: {first[:120]})"
    noisy = (batch.seg[0] != CLEAN).numpy()
    first_block = noisy & (batch.block[0] == 0).numpy()
    size = float(causal.abs().amax().clamp(min=1e-6))
    tolerance = size * (1e-4 if causal.dtype == torch.float32 else 3e-2)
    clean_rows = causal[~noisy][PROMPT:]
    if not float((causal[noisy] - clean_rows).abs().amax()) <= tolerance:
        return (
            "its layers go by the order of storage or keep a state, not by the positions and masks given "
            "(ALiBi, recurrent or linear attention, convolutions)"
        )
    moved = (block - changed).abs().amax(-1)
    if not float(moved[first_block][0]) > tolerance / 100:
        return "its attention ignores a mask that lets a position see to its right"
    if not float(moved[~first_block].amax()) <= tolerance:
        return "its attention ignores a mask that hides a block"
    return None


def why_class_not_convertible(config, model=None) -> str | None:
    """Return why a checkpoint with this config cannot be adapted, or None where it can.

    A small random model of the class is probed; `model` itself only where no small one can be built.

    Args:
        config: the checkpoint's transformers config.
        model: the checkpoint, where it is loaded anyhow.
    """
    if not getattr(config.get_text_config(), "num_attention_heads", None):
        return "its config declares no attention heads (recurrent?), and every layer must be attention"
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what a small random model lacks for speed is no news, and the answer is one line
    try:
        model = tiny_like(config) or model
        return None if model is None else why_not_convertible(model)
    finally:
        logging.set_verbosity(level)


def _hidden(model, clean: np.ndarray, noisy: np.ndarray, attention: str) -> tuple[torch.Tensor, Any]:
    """Return ([Q, D] f32 or the model's dtype on the CPU, the batch) with nothing masked."""
    response = clean[PROMPT:]
    example = Example(
        prompt=clean[:PROMPT],
        response=response,
        noisy=noisy[PROMPT:],
        block=np.arange(RESPONSE) // BLOCK,
        masks=np.zeros((1, RESPONSE), bool),
    )
    batch = build_batch([example], 0, attention, 1.0)
    device = model.get_input_embeddings().weight.device
    return body_hidden(model, batch.to(device), attention).cpu(), batch


def tiny_like(config):
    """Return a small random model of `config`'s class, or None where none can be built from it.

    Every kind of layer of the original is in it, with the original's rotary settings; the widths are
    cut, and the vocabulary.

    Args:
        config: a transformers config, left as it is.
    """
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    text = small.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    width = int(getattr(text, "hidden_size", 0) or 0)
    if not heads or not width:
        return None
    kv = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text, "head_dim", None) or max(1, width // heads))
    kv_small = min(kv, 2)
    heads_small = kv_small * min(2, max(1, heads // kv))
    layers = int(text.num_hidden_layers)
    kept = _layers_with_every_kind(getattr(text, "layer_types", None), layers)
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == layers and layers > 1:
            setattr(text, name, [value[i] for i in range(kept)])
    settings: dict[str, Any] = {
        "num_attention_heads": heads_small,
        "hidden_size": heads_small * head_dim,
        "num_hidden_layers": kept,
        "vocab_size": 64,
        "pad_token_id": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    for name, value in {
        "num_key_value_heads": kv_small,
        "sliding_window": 6,
        **dict.fromkeys(EXPERTS, 4),
        **dict.fromkeys(CHOSEN, 1),
        **dict.fromkeys(WIDTHS, 64),
    }.items():
        if getattr(text, name, None):
            settings[name] = value
    if (getattr(text, "max_position_embeddings", None) or PROMPT + RESPONSE) < PROMPT + RESPONSE:
        settings["max_position_embeddings"] = PROMPT + RESPONSE  # a short table of positions is no fault of the class
    implementation = attention_implementation(text)
    try:
        for name, value in settings.items():
            setattr(text, name, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(text, dtype=torch.float32, attn_implementation=implementation)
            for parameter in model.parameters():  # far from the tiny initial weights that hide every effect
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    except Exception:  # a class whose sizes hang together in a way that this does not know
        return None
    return model.eval()


def _layers_with_every_kind(kinds, layers: int) -> int:
    """Return how many leading layers to keep: at least two, and one of each kind (eight where kinds are not listed)."""
    if not kinds:
        return min(layers, 8)
    return max(min(2, layers), *(list(kinds).index(kind) + 1 for kind in set(kinds)))
