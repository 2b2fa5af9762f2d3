"""Does `edit` mend errors, and leave alone what is right? Asked by putting errors into right answers.

Shapes: B rows (a block of an answer each), S largest block among them, V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from fewstep.eval import stats
from fewstep.students.decoding.forward import Forward
from fewstep.students.decoding.sampling import most_likely

SHARE = 0.1  # of an answer's tokens that are replaced
ROUNDS = 4  # forwards that a block gets to mend itself
BATCH = 64  # blocks at once


@torch.no_grad()
def measure(
    model,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    block_size: int,
    rewrite: float,
    seed: int,
    share: float = SHARE,
) -> dict:
    """Put wrong tokens into right answers and see how many of them `edit` rewrites to the right one, and what else it rewrites.

    Every block is decided in full, with the right answer before it, and edited until nothing changes (ROUNDS
    forwards at most). Wrong tokens are drawn from those of all answers, at `share` of the positions.

    Args:
        model: the student.
        answers: token ids that are taken as right.
        rewrite: of the sampler `edit`: a token is rewritten where another has more than this probability.

    Returns:
        share, rewrite, errors and repaired (a share of them, with its interval), right (the tokens that were left
        right) and damaged (a share of them, with its interval). A share of nothing is None.
    """
    rng = np.random.default_rng(seed)
    seen = np.unique(np.concatenate([np.asarray(a) for a in answers]))
    jobs = [(i, start) for i, answer in enumerate(answers) for start in range(0, len(answer), block_size)]
    jobs.sort(key=lambda job: len(prompts[job[0]]) + job[1])
    repaired: list[float] = []
    damaged: list[float] = []
    for first in range(0, len(jobs), BATCH):
        batch = jobs[first : first + BATCH]
        truth = [np.asarray(answers[i][start : start + block_size]) for i, start in batch]
        prefix = [list(prompts[i]) + list(answers[i][:start]) for i, start in batch]
        wrong = [rng.random(len(t)) < share for t in truth]
        blocks = [
            np.where(w & (len(seen) > 1), _others(seen, t, rng), t).tolist() for t, w in zip(truth, wrong)
        ]  # fmt: skip
        wrong = [np.asarray(b) != t for b, t in zip(blocks, truth)]
        forward = Forward(model, capacity=max(map(len, prefix)) + max(map(len, truth)))
        starts, clean = [0] * len(batch), prefix
        for _ in range(ROUNDS):
            token, probability = most_likely(forward(starts, clean, blocks, keep=max(map(len, truth))))  # [B, S]
            starts, clean = [len(p) for p in prefix], [[] for _ in batch]
            edited = [
                [new if p > rewrite else old for old, new, p in zip(block, t, ps)]
                for block, t, ps in zip(blocks, token.tolist(), probability.tolist())
            ]
            if edited == blocks:
                break
            blocks = edited
        for block, t, w in zip(blocks, truth, wrong):
            right = np.asarray(block) == t
            repaired += right[w].astype(float).tolist()
            damaged += (~right[~w]).astype(float).tolist()
    return {
        "share": share, "rewrite": rewrite, "errors": len(repaired), "right": len(damaged),
        "repaired": _mean(repaired), "repaired_ci": _interval(repaired, seed),
        "damaged": _mean(damaged), "damaged_ci": _interval(damaged, seed),
    }  # fmt: skip


def _others(seen: np.ndarray, truth: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return for each token another of those seen."""
    place = np.searchsorted(seen, truth)
    return seen[(place + rng.integers(1, max(2, len(seen)), len(truth))) % len(seen)]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _interval(values: list[float], seed: int) -> list[float] | None:
    return list(stats.mean_interval(values, seed=seed)) if values else None
