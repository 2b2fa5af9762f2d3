"""Decode a task's prompts with one system and sampler, and measure what came out.

Legend: N prompts, T generated tokens of one answer (with its EOS).
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

NGRAM = 4  # repetition looks at runs of this many tokens


@dataclass
class Answers:
    """All answers of one (task, system, sampler, setting), in the order of the task's prompts."""

    ids: list[list[int]] = field(default_factory=list)  # [N][T], EOS included
    finish_reason: list[str] = field(default_factory=list)  # [N] "stop" or "length"
    nfe: list[int] = field(default_factory=list)  # [N] forwards, prefill included where it yields a token
    steps: list[list[int]] = field(default_factory=list)  # [N][T] forward at which each token was committed
    confidence: list[list[float]] = field(default_factory=list)  # [N][T]; [] where the decoder does not report it
    positions: list[int] = field(default_factory=list)  # [N] positions computed after the prompt
    texts: list[str] = field(default_factory=list)  # [N] without special tokens
    scores: list[float] = field(default_factory=list)  # [N] in [0, 1]

    def to_dict(self) -> dict:
        """Return the JSON-able content; `Answers(**d)` is the way back."""
        return asdict(self)

    @property
    def tokens(self) -> list[int]:
        """Generated tokens of each answer; EOS counts once."""
        return [len(ids) for ids in self.ids]


def decode_in_batches(
    num_prompts: int,
    lengths: Sequence[int],
    batch_size: int,
    answer: Callable[[list[int]], list[Any]],
    after_batch: Callable[[int, list[Any]], None] = lambda n, decoded: None,
) -> list[Any]:
    """Return `answer`'s results in prompt order, having asked for prompts of like length together.

    Args:
        lengths: [N] prompt lengths, by which batches are formed.
        answer: from a list of prompt indices to one result each.
        after_batch: called with the batch's size and results; the place to poll for a stop.
    """
    order = sorted(range(num_prompts), key=lambda i: (lengths[i], i))
    out: list[Any] = [None] * num_prompts
    for start in range(0, num_prompts, batch_size):
        batch = order[start : start + batch_size]
        results = answer(batch)
        assert len(results) == len(batch), f"{len(results)} answers to {len(batch)} prompts"
        for index, result in zip(batch, results):
            out[index] = result
        after_batch(len(batch), results)
    return out


def from_decoded(decoded: Sequence[Any], tokenizer: Any, references: Sequence[Any], score: Callable) -> Answers:
    """Return scored answers of the block decoder (`students.decoding.Decoded`)."""
    answers = Answers(
        ids=[list(map(int, d.ids)) for d in decoded],
        finish_reason=[d.finish_reason for d in decoded],
        nfe=[int(d.nfe) for d in decoded],
        steps=[list(map(int, d.steps)) for d in decoded],
        confidence=[[round(float(c), 4) for c in d.confidence] for d in decoded],
        positions=[int(d.positions) for d in decoded],
    )
    return _scored(answers, tokenizer, references, score)


def from_teacher(generations: Sequence[Any], tokenizer: Any, references: Sequence[Any], score: Callable) -> Answers:
    """Return scored answers of the teacher's cached greedy loop: exactly one token a forward.

    The prefill yields the first token, and the last token is never fed back: T tokens cost T
    forwards and T - 1 positions after the prompt.
    """
    ids = [list(map(int, g.ids)) for g in generations]
    answers = Answers(
        ids=ids,
        finish_reason=[g.finish_reason for g in generations],
        nfe=[len(i) for i in ids],
        steps=[list(range(len(i))) for i in ids],
        confidence=[[] for _ in ids],
        positions=[max(0, len(i) - 1) for i in ids],
    )
    return _scored(answers, tokenizer, references, score)


def _scored(answers: Answers, tokenizer: Any, references: Sequence[Any], score: Callable) -> Answers:
    answers.texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers.ids]
    answers.scores = [float(score(text, reference)) for text, reference in zip(answers.texts, references)]
    return answers


def agreement(ours: Answers, reference: Answers) -> list[float]:
    """Return 1.0 for each prompt whose answer has exactly the reference's token ids, else 0.0. [N]

    Raises:
        ValueError: the two do not answer the same number of prompts.
    """
    if len(ours.ids) != len(reference.ids):
        raise ValueError(f"agreement of {len(ours.ids)} answers with {len(reference.ids)}; give both all prompts")
    return [float(a == b) for a, b in zip(ours.ids, reference.ids)]


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return Σ numerator / Σ denominator: TPF is tokens over forwards, summed over rows before dividing."""
    return sum(numerator) / sum(denominator)


def text_statistics(answers: Answers) -> dict:
    """Return how varied the answers are, over generated tokens without the final EOS.

    Returns:
        repetition: share of an answer's 4-grams that occurred in it before; mean over answers that have one.
        entropy: entropy of an answer's own unigrams in nats; mean over non-empty answers.
        distinct_n: {"1", "2", "3"}: distinct n-grams over all n-grams, all answers together.
        Each is None where no answer is long enough to say.
    """
    bodies = [ids[:-1] if reason == "stop" else ids for ids, reason in zip(answers.ids, answers.finish_reason)]
    repetition, entropies = [], []
    distinct: dict[str, float | None] = {}
    for ids in bodies:
        grams = _ngrams(ids, NGRAM)
        if grams:
            repetition.append(1 - len(set(grams)) / len(grams))
        if ids:
            counts = Counter(ids).values()
            entropies.append(-sum(c / len(ids) * math.log(c / len(ids)) for c in counts))
    for n in (1, 2, 3):
        grams = [gram for ids in bodies for gram in _ngrams(ids, n)]
        distinct[str(n)] = len(set(grams)) / len(grams) if grams else None
    return {"repetition": _mean(repetition), "entropy": _mean(entropies), "distinct_n": distinct}


def _ngrams(ids: list[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
