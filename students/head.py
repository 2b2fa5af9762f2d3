"""A checkpoint's output head as the kernels take it, for training and for decoding.

Shapes: n rows, D width, V vocabulary.
"""

import torch

from fewstep.errors import RunFailed
from fewstep.kernels.linear_rows_loss import head_logits
from fewstep.kernels.lm_head_stats import Stats, lm_head_stats


def head_of(model) -> dict:
    """Return weight, bias, softcap and scale: what makes logits of hidden rows."""
    head = model.get_output_embeddings()
    head = getattr(head, "original_module", head)
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies
    if getattr(config, "logits_scaling", None):  # Granite divides
        scale = 1.0 / config.logits_scaling
    softcap = getattr(config, "final_logit_softcapping", None)
    return {"weight": head.weight, "bias": getattr(head, "bias", None), "softcap": softcap, "scale": scale}


@torch.no_grad()
def attach(model) -> None:
    """Let decoding ask `kernels/lm_head_stats` what is likely, instead of all logits; not where a class makes its logits in another way."""
    ids = torch.tensor([[0, 1, 2]], device=model.device)
    hidden = model.base_model(input_ids=ids).last_hidden_state[0]
    ours, theirs = head_logits(hidden, **head_of(model)), model(input_ids=ids).logits[0].float()
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
        return
    model.fewstep_head = likely


def likely(model, hidden: torch.Tensor, mask_token_id: int, entropy: bool = False) -> Stats:
    """Return the statistics of [n, D] hidden rows; the mask token is never said.

    Raises:
        RunFailed: hidden states that are not finite, of which no token could be told.
    """
    head = head_of(model)
    mask = mask_token_id if mask_token_id < len(head["weight"]) else None
    said = lm_head_stats(hidden, mask_id=mask, entropy=entropy, **head)
    if bool((said.token < 0).any()):
        raise RunFailed("the student's hidden states are not finite; look at its weights, or use engine.precision fp32")
    return said
