"""`model.generate(…, custom_generate=…)`: few-step decoding for anyone with only transformers.

model.generate(input_ids, custom_generate=folder, trust_remote_code=True, threshold=0.9)
"""

import torch

from .decode import SETTINGS, decode
from .gated import load_adapter
from .levels import settings_of
from .stops import stop_at

# what a given generation_config may ask for without effect here: at these values it has none anywhere
NEUTRAL = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "top_k": (0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0.0,),
}

DEFAULT_LENGTH = 20  # tokens, in transformers


def generate(
    model,
    inputs=None,
    generation_config=None,
    *,
    input_ids=None,
    attention_mask=None,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    eos_token_id=None,
    pad_token_id: int | None = None,
    sampler: str | None = None,
    block_size: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer=None,
    effort: str | None = None,
    **others,
) -> torch.Tensor:
    """Answer a batch of prompts in few steps; like `model.generate`, prompts come first in each row.

    Args:
        model: the student, as `AutoModelForCausalLM` loaded it.
        inputs, input_ids: [B, L] int64 prompt ids, padded on either side where `attention_mask` is 0.
        max_new_tokens, max_length: of an answer; of prompt and answer. Default: as `model.generate`, 20 new tokens.
        generation_config: read for max_new_tokens, max_length, eos_token_id and pad_token_id; one that is given also for
            do_sample, temperature, top_p and stop_strings.
        sampler: `threshold` (default), `verify` (the AR model's own text or distribution), `ar`, or another of `decode`'s.
        block_size: default and most: the student's own.
        do_sample, temperature, top_p: greedy unless do_sample is true or a temperature above 0 is given.
        seed: row i draws with seed + i; default: from torch's global generator.
        stop_strings, tokenizer: a row also ends once it has written one of the strings.
        effort: a level of the student's generation config (`low`, `medium`, `high`, `lossless`) in place of a sampler
            and its settings.
        others: the sampler's settings, such as `threshold` or `steps`.

    Returns:
        [B, L + T] int64: prompts, then answers, padded on the right.

    Raises:
        ValueError: for an argument that this decoding does not know, so that no setting is ignored.
    """
    unknown = sorted(k for k, v in others.items() if k not in SETTINGS and v is not None and v is not False)
    if unknown:
        raise ValueError(f"few-step decoding does not take {', '.join(unknown)}; leave it out")
    settings = {k: v for k, v in others.items() if k in SETTINGS and v is not None}
    settings |= {k: v for k, v in (("sampler", sampler), ("block_size", block_size)) if v is not None}
    if effort is not None:
        if settings:
            raise ValueError(f"effort names the sampler and its settings: leave out {', '.join(settings)}")
        settings = settings_of(getattr(model.generation_config, "fewstep_effort", None), effort)
    prompts = input_ids if input_ids is not None else inputs
    if prompts is None:
        raise ValueError("few-step decoding needs input_ids")
    config = generation_config or model.generation_config
    if generation_config is not None:
        refused = [k for k, neutral in NEUTRAL.items() if getattr(config, k, None) not in (None, *neutral)]
        if refused:
            raise ValueError(f"few-step decoding does not take generation_config.{refused[0]}; leave it out")
        do_sample = config.do_sample if do_sample is None else do_sample
        stop_strings = config.stop_strings if stop_strings is None else stop_strings
    if max_new_tokens is None:
        max_new_tokens = _budget(config, max_length, prompts.shape[1])
    eos = eos_token_id if eos_token_id is not None else config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    pad = pad_token_id if pad_token_id is not None else config.pad_token_id
    pad = pad if pad is not None else (eos[0] if eos else 0)
    keep = attention_mask.bool() if attention_mask is not None else torch.ones_like(prompts, dtype=torch.bool)
    if (getattr(model.config, "fewstep", None) or {}).get("adapter") == "gated":
        _load_hub_adapter(model)
    if temperature is None:
        temperature = (1.0 if config.temperature is None else config.temperature) if do_sample else 0.0
    if do_sample is False:
        temperature = 0.0
    if top_p is None:
        top_p = 1.0 if config.top_p is None else config.top_p
    if seed is None:
        seed = int(torch.randint(2**62, (1,))) if temperature > 0 else 0
    if stop_strings and tokenizer is None:
        raise ValueError("stop_strings needs the tokenizer: give tokenizer=…")
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or [])
    model.eval()
    answers = decode(
        model,
        [row[k].tolist() for row, k in zip(prompts, keep)],
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos,
        temperature=temperature,
        top_p=top_p,
        seed=[seed + i for i in range(len(prompts))],
        stop=stop_at(strings, tokenizer) if strings else None,
        **settings,
    )
    longest = max(len(a.ids) for a in answers)
    tail = torch.tensor([a.ids + [pad] * (longest - len(a.ids)) for a in answers], device=prompts.device)
    return torch.cat([prompts, tail.to(prompts.dtype)], dim=1)


def _budget(config, max_length: int | None, prompt: int) -> int:
    """Return how many tokens an answer may have where `max_new_tokens` was not given."""
    if max_length is None and config.max_new_tokens is not None:
        return config.max_new_tokens
    length = config.max_length if max_length is None else max_length
    if length is None or (max_length is None and length == DEFAULT_LENGTH):  # transformers adds its default
        return DEFAULT_LENGTH
    if length <= prompt:
        raise ValueError(f"max_length={length} leaves no room behind {prompt} prompt tokens; give max_new_tokens")
    return length - prompt


def _load_hub_adapter(model) -> None:
    """Apply `fewstep_adapter/` from the folder or Hub repository that the model came from."""
    from pathlib import Path

    from transformers.utils import cached_file

    files = [cached_file(model.name_or_path, f"fewstep_adapter/{f}") for f in ("adapter.json", "adapter.safetensors")]
    load_adapter(model, Path(files[0]).parent)
