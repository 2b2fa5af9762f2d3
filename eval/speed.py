"""Tokens per second at batch 1: every system answers the same prompt before any sees the next.

A speed-up over a slow baseline is no result, so AR decoding is timed in each way at hand (the
library's `generate`, our own loop without drafting; the student's weights with its prompt, the
teacher with its few-shot prefix already in the cache), and the faster one is the baseline. Systems
alternate prompt by prompt in one process, starting with another one each time, so that drift of the
machine (heat, neighbours) meets all of them alike.
"""

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from fewstep import signals
from fewstep.students.decoding import decode

PILOT = 8  # prompts on which the ways to run one AR baseline are compared before the slower is dropped


@dataclass(frozen=True)
class Timing:
    """One answer: tokens generated, seconds it took, seconds to the first token of the contiguous prefix."""

    tokens: int
    seconds: float
    first_token_s: float | None

    def to_dict(self) -> dict:
        """Return the JSON-able content; `Timing(**d)` is the way back."""
        return asdict(self)


@dataclass(frozen=True)
class Contestant:
    """One way to answer the i-th speed prompt."""

    key: str  # unique among the contestants
    implementation: str
    answer: Callable[[int], Timing]


def ar_ways(
    key: str,
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    eos: list[int],
    prefix: Sequence[int] = (),
) -> list[Contestant]:
    """Return every way at hand to decode one token a forward with this model and these prompts.

    Args:
        key: shared by all, since only the fastest will compete.
        prompts: [N] whole prompts.
        prefix: ids that start every prompt and are kept in a cache, by those ways that can.
    """
    given = {"max_new_tokens": max_new_tokens, "eos": eos}
    return [
        hf_generate(key, model, prompts, prefix=prefix, **given),
        plain_loop(key, model, prompts, prefix=prefix, **given),
        own_loop(key, model, prompts, "ar", max_new_tokens, eos, {}),
    ]


def own_loop(
    key: str,
    model: Any,
    prompts: Sequence[list[int]],
    sampler: str,
    max_new_tokens: int,
    eos: list[int],
    settings: dict,
) -> Contestant:
    """Return the block decoder as a contestant; with the sampler "ar" it is our loop without drafting."""

    def answer(i: int) -> Timing:
        start = now(model)
        done = decode(
            model, [prompts[i]], sampler=sampler, max_new_tokens=max_new_tokens, eos_token_ids=eos, **settings
        )[0]
        return Timing(len(done.ids), now(model) - start, float(done.first_token_s))

    return Contestant(key, "our decoder", answer)


def plain_loop(
    key: str,
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    eos: list[int],
    prefix: Sequence[int] = (),
) -> Contestant:
    """Return the barest cached greedy loop as a contestant: forward, argmax, append.

    Args:
        prefix: ids that start every prompt. They are run once, here; each answer starts from a copy of
            that cache, made before its clock starts, as a warm server would.
    """
    warm = _run_prefix(model, prefix)
    ends, cut, name = set(eos), len(prefix), _cache_name(model)

    @torch.inference_mode()
    def answer(i: int) -> Timing:
        cache = copy.deepcopy(warm)
        start = now(model)
        feed = torch.tensor([list(prompts[i][cut:])], device=model.device)  # [1, L]
        count, first = 0, None
        while True:
            logits = model(feed, use_cache=True, logits_to_keep=1, **{name: cache}).logits
            feed = logits[:, -1].argmax(-1, keepdim=True)  # [1, 1]
            count, token = count + 1, int(feed)
            first = first or now(model) - start
            if token in ends or count == max_new_tokens:
                return Timing(count, now(model) - start, first)

    return Contestant(key, "plain loop" + (", prefix cached" if prefix else ""), answer)


@torch.inference_mode()
def _run_prefix(model: Any, prefix: Sequence[int]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    if prefix:
        model(torch.tensor([list(prefix)], device=model.device), use_cache=True, **{_cache_name(model): cache})
    return cache


def _cache_name(model: Any) -> str:
    """Return the name of the cache's argument, which changed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _FirstToken(StoppingCriteria):
    """Note when the first token is there; never stop anything."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.at is None:
            if input_ids.is_cuda:  # the token is only queued yet
                torch.cuda.synchronize(input_ids.device)
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def hf_generate(
    key: str,
    model: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    eos: list[int],
    prefix: Sequence[int] = (),
    lookup: int | None = None,
) -> Contestant:
    """Return cached greedy `model.generate` as a contestant; `prefix` as for `plain_loop`.

    Args:
        lookup: assisted generation by prompt lookup, with this many tokens proposed at once.
    """
    warm, name = _run_prefix(model, prefix), _cache_name(model)
    settings = copy.deepcopy(model.generation_config)  # keeps what it suppresses, such as a mask token
    settings.update(do_sample=False, num_beams=1, use_cache=True, temperature=None, top_p=None, top_k=None)
    settings.update(
        max_new_tokens=max_new_tokens, max_length=None, eos_token_id=eos or None, pad_token_id=eos[0] if eos else None
    )
    settings.prompt_lookup_num_tokens = lookup

    def answer(i: int) -> Timing:
        ids = torch.tensor([list(prompts[i])], device=model.device)  # [1, L]
        cache, first = copy.deepcopy(warm), _FirstToken()
        start = now(model)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                stopping_criteria=StoppingCriteriaList([first]),
                **{name: cache},
            )
        seconds = now(model) - start
        return Timing(out.shape[1] - ids.shape[1], seconds, None if first.at is None else first.at - start)

    assisted = ", assisted by prompt lookup" if lookup else ""
    return Contestant(key, "transformers generate" + (", prefix cached" if prefix else "") + assisted, answer)


def time_alternating(
    contestants: Sequence[Contestant],
    num_prompts: int,
    *,
    warmup: int = 1,
    after_prompt: Callable[[], None] = lambda: None,
) -> dict[str, list[Timing]]:
    """Return each contestant's timings of prompts 0…num_prompts-1, taken in turn.

    Prompt i is answered by all contestants before prompt i+1; who goes first moves on by one with
    every prompt. The warm-up answers the first prompts once more before, and is thrown away.

    Raises:
        Stopped: a signal asked for it, between two prompts.
    """
    for i in range(min(warmup, num_prompts)):
        for contestant in contestants:
            contestant.answer(i)
    timings: dict[str, list[Timing]] = {c.key: [] for c in contestants}
    for i in range(num_prompts):
        signals.raise_if_stopped("the speed measurement starts anew when the stage is run again")
        turn = i % len(contestants)
        for contestant in [*contestants[turn:], *contestants[:turn]]:
            timings[contestant.key].append(contestant.answer(i))
        after_prompt()
    return timings


def rate(timings: Sequence[Timing]) -> float:
    """Return tokens per second: Σ tokens / Σ seconds."""
    return sum(t.tokens for t in timings) / sum(t.seconds for t in timings)


def fastest(ways: Sequence[Contestant], num_prompts: int) -> tuple[Contestant, dict[str, float]]:
    """Return the fastest of several ways to do the same, by a short alternating pilot, and all rates.

    Returns:
        The winner, and implementation → tokens/s.
    """
    racing = [Contestant(way.implementation, way.implementation, way.answer) for way in ways]
    timings = time_alternating(racing, min(PILOT, num_prompts))
    rates = {name: rate(found) for name, found in timings.items()}
    return max(ways, key=lambda way: rates[way.implementation]), rates


def now(model: Any) -> float:
    """Return the seconds of a clock, once the model's device has done what was asked of it."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
