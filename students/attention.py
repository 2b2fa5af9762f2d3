"""Which attention implementation a checkpoint's masks are safe with, and another one for a while."""

from contextlib import contextmanager

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def attention_implementation(config) -> str:
    """Return the fastest implementation that honours this checkpoint's masks: "sdpa", or "eager" where that refuses.

    sdpa takes no soft-capped scores, and some classes (attention sinks, ALiBi) have no code for it.
    """
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return "eager"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"


@contextmanager
def attention_of(model, implementation: str):
    """Let the model's layers use another attention implementation for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
