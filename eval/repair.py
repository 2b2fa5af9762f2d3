"""Does `edit` mend errors, and leave alone what is right? Asked by putting errors into right answers.

Shapes: B rows (a block of an answer each), S largest block among them, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fewstep.eval import stats
from fewstep.students.decoding.forward import Forward
from fewstep.students.decoding.sampling import most_likely

SHARE = 0.1  # of an answer's tokens that are replaced
ROUNDS = 4  # forwards that a block gets to mend itself
BATCH = 64  # blocks at once


def measure(
    model,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    block_size: int,
    rewrite: float,
    seed: int,
    share: float = SHARE,
) -> dict:
    """Put wrong tokens into right answers and see how many of them `edit` makes right again, and what it does to right ones.

    Wrong tokens are drawn from those of all answers, at `share` of the positions; a second time there are none, and
    whatever is rewritten is damage.

    Args:
        model: the student.
        answers: token ids that are taken as right.
        rewrite: of the sampler `edit`: a token is rewritten where another has more than this probability.

    Returns:
        share, rewrite, n (answers); errors, and repaired, the share of them that became right; right, the tokens that
        stood beside errors, and damaged, the share of them that became wrong; clean, the tokens of answers without
        errors, and damaged_clean. Each share has its interval, over answers; of nothing it is None.
    """
    rng = np.random.default_rng(seed)
    seen = np.unique(np.concatenate([np.asarray(a) for a in answers]))
    spoilt = []
    for answer in map(np.asarray, answers):
        hit = (rng.random(len(answer)) < share) & (len(seen) > 1)
        spoilt.append(np.where(hit, _others(seen, answer, rng), answer))
    wrong = [after != np.asarray(before) for after, before in zip(spoilt, answers)]
    right = [
        after == before for after, before in zip(edited(model, prompts, answers, spoilt, block_size, rewrite), answers)
    ]
    kept = [
        after == before for after, before in zip(edited(model, prompts, answers, answers, block_size, rewrite), answers)
    ]
    found = {"share": share, "rewrite": rewrite, "n": len(answers)}
    found |= _shares("errors", "repaired", [r & w for r, w in zip(right, wrong)], wrong, seed)
    found |= _shares("right", "damaged", [~r & ~w for r, w in zip(right, wrong)], [~w for w in wrong], seed)
    return found | _shares("clean", "damaged_clean", [~k for k in kept], [k | True for k in kept], seed)


@torch.no_grad()
def edited(
    model,
    prompts: Sequence[list[int]],
    truth: Sequence[list[int]],
    decided: Sequence[Sequence[int]],
    block_size: int,
    rewrite: float,
) -> list[np.ndarray]:
    """Return what `edit` makes of decided answers: block by block, with the right answer before each.

    A block is edited until nothing changes, in ROUNDS forwards at most.
    """
    out = [np.array(answer) for answer in decided]
    jobs = [(i, start) for i, answer in enumerate(truth) for start in range(0, len(answer), block_size)]
    jobs.sort(key=lambda job: len(prompts[job[0]]) + job[1])
    for first in range(0, len(jobs), BATCH):
        batch = jobs[first : first + BATCH]
        prefix = [list(prompts[i]) + list(truth[i][:start]) for i, start in batch]
        blocks = [out[i][start : start + block_size].tolist() for i, start in batch]
        S = max(map(len, blocks))
        forward = Forward(model, capacity=max(map(len, prefix)) + S)
        starts, clean = [0] * len(batch), prefix
        for _ in range(ROUNDS):
            token, probability = most_likely(forward(starts, clean, blocks, keep=S))  # [B, S]
            starts, clean = [len(p) for p in prefix], [[] for _ in batch]
            after = [
                [new if p > rewrite else old for old, new, p in zip(block, t, ps)]
                for block, t, ps in zip(blocks, token.tolist(), probability.tolist())
            ]
            if after == blocks:
                break
            blocks = after
        for (i, start), block in zip(batch, blocks):
            out[i][start : start + len(block)] = block
    return out


def _shares(of: str, name: str, hits: list[np.ndarray], among: list[np.ndarray], seed: int) -> dict:
    """Return the count `of` and the share `name` of it, with its interval over the answers that have any."""
    pairs = [(int(h.sum()), int(a.sum())) for h, a in zip(hits, among) if a.any()]
    if not pairs:
        return {of: 0, name: None, f"{name}_ci": None}
    counts, totals = zip(*pairs)
    ci = stats.ratio_interval(counts, totals, seed=seed)
    return {of: sum(totals), name: sum(counts) / sum(totals), f"{name}_ci": None if ci is None else list(ci)}


def _others(seen: np.ndarray, truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return for each token another of those seen."""
    place = np.searchsorted(seen, truth)
    return seen[(place + rng.integers(1, max(2, len(seen)), len(truth))) % len(seen)]
