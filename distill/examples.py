"""From targets on disk to the examples and micro-batches of one optimizer step.

Everything drawn is keyed by (seed, epoch, sample id) or (seed, epoch): one rank or eight, before or
after a resume, the same sample gets the same masks and the same step gets the same samples.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fewstep import records
from fewstep.distill.config import TrainingConfig
from fewstep.distill.states import anchor, noise, suffix, trajectory, two_step
from fewstep.students.layout import Example, block_index, filled_length

EPOCHS = 10**6  # more than any phase between two on-policy rounds has


@dataclass
class Sample:
    """One target, as the teacher wrote it; arrays as in `Example`, plus the trajectory's order."""

    id: str
    prompt: np.ndarray
    response: np.ndarray
    finished: bool
    topk_ids: np.ndarray | None
    topk_logprobs: np.ndarray | None
    tail_mass: np.ndarray | None
    order: np.ndarray | None = None
    on_policy: bool = False  # the student wrote the response, and the teacher's tokens are its labels


def read_samples(targets: Path, split: str) -> list[Sample]:
    """Read one split of a targets folder into memory, rows without a response left out."""
    samples = []
    for row in records.read_rows(targets / "shards", split):
        if row["response_ids"]:
            samples.append(sample_of(row))
    return samples


def sample_of(row: dict, on_policy: bool = False) -> Sample:
    """Return one row of a shard (`records.SCHEMA`) as a Sample."""
    has = bool(row["topk_ids"]) and len(row["topk_ids"][0]) > 0
    return Sample(
        id=row["sample_id"],
        prompt=np.asarray(row["prompt_ids"], np.int64),
        response=np.asarray(row["response_ids"], np.int64),
        finished=row["finish_reason"] == "stop",
        topk_ids=np.asarray(row["topk_ids"], np.int64) if has else None,
        topk_logprobs=np.asarray(row["topk_logprobs"], np.float32) if has else None,
        tail_mass=np.asarray(row["tail_mass"], np.float32) if has else None,
        on_policy=on_policy,
    )


def keyed_rng(*key) -> np.random.Generator:
    """Return a generator that depends on `key` alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], np.uint64)))


def draw_example(
    sample: Sample,
    config: TrainingConfig,
    block_size: int,
    eos: int,
    seed: int,
    epoch: int,
    progress: float,
    context: int | None = None,
) -> Example:
    """Cut a response into blocks and draw the masks of its noisy copies.

    Args:
        block_size: of this phase of the curriculum.
        eos: fills the last block of a finished response.
        progress: share of the stage's steps done, in [0, 1].
        context: positions that the model has; the fill ends there, as a block does in decoding.
    """
    rng = keyed_rng(seed, epoch, sample.id)
    shifted = rng.random() < config.random_offset
    first = int(rng.integers(1, block_size + 1)) if shifted else block_size
    n = filled_length(len(sample.response), block_size, first) if sample.finished else len(sample.response)
    if context is not None:
        n = min(n, context - len(sample.prompt))
    noisy = np.concatenate([sample.response, np.full(n - len(sample.response), eos)])
    block = block_index(n, block_size, first)
    guess = bool(config.guess) and rng.random() < config.guess and not sample.on_policy
    low, high = (config.guess_noise, config.guess_noise) if guess else config.noise_at(progress)
    # a recorded trajectory is one of unshifted blocks; the teacher's surprise belongs to a position alone
    known = sample.order is not None and (config.order == "nll" or not shifted) and not guess
    order = _extend_order(sample.order, n) if known and rng.random() < config.order_share else None
    if order is not None:
        drawn = trajectory.masks(block, order, rng, low, high, config.copies)
    else:
        drawn = noise.masks(block, rng, low, high, config.copies, config.right_weighted)
    # the teacher's labels of a student's text hold for what is masked to a block's end
    tailed = 1.0 if sample.on_policy else 0.0 if guess else config.suffix
    if tailed:
        tails = suffix.masks(block, rng, config.copies)
        swap = rng.random((config.copies, int(block[-1]) + 1)) < tailed
        drawn = np.where(swap[:, block], tails, drawn)
    if config.complementary:
        # a block that was masked whole has an empty complement: it stays masked, so no block goes unsupervised
        other = ~drawn
        empty = np.stack([np.bincount(block, weights=o) == 0 for o in other])
        drawn = np.concatenate([drawn, np.where(empty[:, block], drawn, other)])
    if config.anchor:
        drawn = anchor.unmask(drawn, block, rng, config.anchor)
    later = None
    if "consistency" in config.used():  # a guessed sample has no later state: it is nowhere masked
        later = (
            np.zeros_like(drawn)
            if guess or sample.on_policy
            else two_step.later(drawn, block, order, rng, config.reveal)
        )
    return Example(
        prompt=sample.prompt,
        response=sample.response,
        noisy=noisy,
        block=block,
        masks=drawn,
        later=later,
        guess=guess,
        topk_ids=sample.topk_ids,
        topk_logprobs=sample.topk_logprobs,
        tail_mass=sample.tail_mass,
        labels=sample.topk_ids[:, 0] if sample.on_policy and sample.topk_ids is not None else None,
    )


def _extend_order(order: np.ndarray, n: int) -> np.ndarray:
    """Give the EOS fill after a recorded response the last places of its block, left to right."""
    if len(order) > n:
        raise ValueError(f"trajectory has {len(order)} positions, the filled response {n}: record it anew")
    return np.concatenate([order, order.max() + 1 + np.arange(n - len(order))])


def curriculum_block_size(config: TrainingConfig, largest: int, step: int, seed: int) -> int:
    """Return the block size of a step: equal phases over `config.block_sizes`, then drawn anew each step."""
    sizes = config.block_sizes or (largest,)
    progress, phased = step / config.max_steps, 1.0 - config.random_block_size
    if progress >= phased:
        any_of = {largest} | {size for size in (4 * 2**i for i in range(largest.bit_length())) if size < largest}
        return int(keyed_rng(seed, step, "block size").choice(sorted(any_of)))
    return sizes[min(int(progress / phased * len(sizes)), len(sizes) - 1)]


def cost(sample: Sample, config: TrainingConfig, block_size: int) -> int:
    """Return the most positions, clean and noisy, that one sample takes."""
    copies = config.copies * (2 if config.complementary else 1)
    clean = len(sample.prompt) + len(sample.response)
    return clean + copies * (len(sample.response) + block_size - 1)


def epoch_steps(costs: list[int], batch_tokens: int, seed: int, epoch: int, least: int) -> list[list[int]]:
    """Cut an epoch into optimizer steps of about `batch_tokens` positions and of similar lengths.

    Args:
        costs: positions of each sample.
        least: samples a step needs so that every micro-batch has one.

    Returns:
        A list of steps, each a list of sample indices; every sample appears once.
    """
    rng = keyed_rng(seed, epoch, "order")
    shuffled = rng.permutation(len(costs))
    per_step = max(least, batch_tokens // max(1, int(np.mean(costs))))
    window = per_step * 16  # similar lengths meet, yet a step is no fixed set of samples
    steps: list[list[int]] = []
    for first in range(0, len(shuffled), window):
        bucket = sorted(shuffled[first : first + window].tolist(), key=lambda i: (costs[i], i))
        current: list[int] = []
        for i in bucket:
            widest = max([costs[i]] + [costs[j] for j in current])
            if len(current) >= least and widest * (len(current) + 1) > batch_tokens:
                steps.append(current)
                current = []
            current.append(i)
        steps.append(current)
    short = [s for s in steps if len(s) < least]
    steps = [s for s in steps if len(s) >= least]
    if short:  # remainders too small to fill every micro-batch go together, or join the last step
        left = [i for s in short for i in s]
        if len(left) >= least or not steps:
            steps.append(left)
        else:
            steps[-1] = steps[-1] + left
    return [steps[i] for i in rng.permutation(len(steps))]


def micro_batches(step: list[int], world_size: int, accumulation: int) -> list[list[list[int]]]:
    """Deal a step's samples to ranks and micro-batches: result[rank][micro] is a list of samples.

    1 rank with accumulation 2 and 2 ranks with accumulation 1 get the same groups.
    """
    groups = [step[i :: world_size * accumulation] for i in range(world_size * accumulation)]
    return [groups[rank::world_size] for rank in range(world_size)]


class StepPlan:
    """Which samples each step trains on; a function of the seed alone, so a resume needs no saved state.

    first, phase: the step from which it counts, and how many plans came before it: its epochs are its own.
    """

    def __init__(self, samples, config: TrainingConfig, block_size: int, seed: int, least: int, first=0, phase=0):
        self.samples, self.costs = samples, [cost(s, config, block_size) for s in samples]
        self.batch_tokens, self.seed, self.least = config.batch_tokens, seed, least
        self.epoch, self.first = phase * EPOCHS, first
        self.steps = self._cut(self.epoch)

    def _cut(self, epoch: int) -> list[list[int]]:
        return epoch_steps(self.costs, self.batch_tokens, self.seed, epoch, self.least)

    def at(self, step: int) -> tuple[int, list[int]]:
        """Return (epoch, sample indices) of a step; steps are asked for in order."""
        while step >= self.first + len(self.steps):
            self.first += len(self.steps)
            self.epoch += 1
            self.steps = self._cut(self.epoch)
        return self.epoch, self.steps[step - self.first]
