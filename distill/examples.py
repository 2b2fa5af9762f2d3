"""From targets on disk to the examples and micro-batches of one optimizer step.

Everything drawn is keyed by (seed, epoch, sample id) or (seed, epoch): one rank or eight, before or
after a resume, the same sample gets the same masks and the same step gets the same samples.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from fewstep.distill.config import TrainingConfig
from fewstep.distill.samples import Sample, Samples
from fewstep.distill.states import anchor, noise, suffix, trajectory, two_step
from fewstep.students.layout import Example, block_index, filled_length

EPOCHS = 10**6  # more than any phase between two on-policy rounds has


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


def costs(samples: Samples, config: TrainingConfig, block_size: int) -> np.ndarray:
    """Return [N] i32, the most positions, clean and noisy, that each sample takes."""
    copies = config.copies * (2 if config.complementary else 1)
    clean = samples.prompt_lengths + samples.response_lengths
    return clean + copies * (samples.response_lengths + block_size - 1)


class Steps(Sequence[np.ndarray]):
    """Steps of an epoch, each an array of sample indices: parts of one array, so that a million rows cost some megabytes.

    Args:
        order: [N] i32, the samples of one step after those of another.
        bounds: [steps, 2] i32, where each step begins and ends in it.
    """

    def __init__(self, order: np.ndarray, bounds: np.ndarray):
        self._order, self._bounds = order, bounds

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, i):
        first, last = self._bounds[i].tolist()
        return self._order[first:last]


def epoch_steps(costs: np.ndarray, batch_tokens: int, seed: int, epoch: int, least: int) -> Steps:
    """Cut an epoch into optimizer steps of about `batch_tokens` positions and of similar lengths.

    Args:
        costs: [N] positions of each sample.
        least: samples a step needs so that every micro-batch has one.

    Returns:
        The steps; every sample is in one of them.
    """
    costs = np.asarray(costs)
    rng = keyed_rng(seed, epoch, "order")
    order = rng.permutation(len(costs)).astype(np.int32)
    per_step = max(least, batch_tokens // max(1, int(np.mean(costs))))
    window = per_step * 16  # similar lengths meet, yet a step is no fixed set of samples
    ends: list[int] = []
    for first in range(0, len(order), window):
        bucket = order[first : first + window]
        bucket[:] = bucket[np.lexsort((bucket, costs[bucket]))]
        begin = 0
        for end, cost in enumerate(costs[bucket].tolist()):  # from short to long, so this is the step's longest
            if end - begin >= least and cost * (end - begin + 1) > batch_tokens:
                ends.append(first + end)
                begin = end
        ends.append(first + len(bucket))
    bounds = np.stack([np.concatenate([[0], ends[:-1]]), ends], 1).astype(np.int32)
    small = np.diff(bounds, axis=1)[:, 0] < least
    if small.any():  # remainders too small to fill every micro-batch go together, or join the last step
        of_small = np.repeat(small, np.diff(bounds, axis=1)[:, 0])
        left = int(of_small.sum())
        order = np.concatenate([order[~of_small], order[of_small]])
        ends_kept = np.cumsum(np.diff(bounds[~small], axis=1)[:, 0])
        if left >= least or not len(ends_kept):
            ends_kept = np.append(ends_kept, len(order))
        else:
            ends_kept[-1] = len(order)
        bounds = np.stack([np.concatenate([[0], ends_kept[:-1]]), ends_kept], 1).astype(np.int32)
    return Steps(order, bounds[rng.permutation(len(bounds))])


def micro_batches(step: Sequence[int], world_size: int, accumulation: int) -> list[list[Sequence[int]]]:
    """Deal a step's samples to ranks and micro-batches: result[rank][micro] are indices of samples.

    1 rank with accumulation 2 and 2 ranks with accumulation 1 get the same groups.
    """
    groups = [step[i :: world_size * accumulation] for i in range(world_size * accumulation)]
    return [groups[rank::world_size] for rank in range(world_size)]


class StepPlan:
    """Which samples each step trains on; a function of the seed alone, so a resume needs no saved state.

    first, phase: the step from which it counts, and how many plans came before it: its epochs are its own.
    """

    def __init__(
        self, samples: Samples, config: TrainingConfig, block_size: int, seed: int, least: int, first=0, phase=0
    ):
        self.samples, self.costs = samples, costs(samples, config, block_size)
        self.batch_tokens, self.seed, self.least = config.batch_tokens, seed, least
        self.epoch, self.first = phase * EPOCHS, first
        self.steps = self._cut(self.epoch)

    def _cut(self, epoch: int) -> Steps:
        return epoch_steps(self.costs, self.batch_tokens, self.seed, epoch, self.least)

    def at(self, step: int) -> tuple[int, np.ndarray]:
        """Return (epoch, sample indices) of a step; steps are asked for in order."""
        while step >= self.first + len(self.steps):
            self.first += len(self.steps)
            self.epoch += 1
            self.steps = self._cut(self.epoch)
        return self.epoch, self.steps[step - self.first]
