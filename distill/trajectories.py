"""Record the order in which the undistilled student decides a response, one token a step.

Shapes: B rows (a block of a response each), S block size.
"""

import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from fewstep import machine
from fewstep.distill.samples import Sample, Samples, flat
from fewstep.errors import RunFailed
from fewstep.progress import progress
from fewstep.runstore import write_atomic
from fewstep.signals import raise_if_stopped
from fewstep.students.decoding.forward import Forward

SHARD = 128  # samples
ANEW = "delete the stage's trajectories/ folder to record them anew"
STOPPED = "trajectories: stopped; finished shards are kept, the same command goes on"


def nll_order(sample: Sample) -> np.ndarray:
    """Return the order by the teacher's own surprise: likely tokens first, blocks left to the caller.

    A token outside the stored top-k counts as the whole tail.

    Raises:
        ValueError: if the targets carry no log-probabilities.
    """
    if sample.topk_ids is None:
        raise ValueError("order: nll needs the teacher's log-probabilities: set targets.top_logprobs above 0")
    is_token = (sample.topk_ids == sample.response[:, None]) & np.isfinite(sample.topk_logprobs)
    kept = np.where(is_token, sample.topk_logprobs, -np.inf).max(1)
    tail = np.log(np.maximum(sample.tail_mass, 1e-9))
    surprise = -np.where(is_token.any(1), kept, tail)
    return np.argsort(np.argsort(surprise, kind="stable"), kind="stable")


def record(model, samples: Samples, folder: Path, block_size: int, batch_size: int = 64) -> None:
    """Write `folder/NNNNN.parquet` with each sample's order; shards that exist are kept.

    Under a launcher the ranks share the shards, and each waits until all are there.

    Args:
        model: the undistilled student in eval mode.
        samples: in a fixed order, so that a shard always holds the same ones.
        block_size: S of the blocks, counted from the response's first token.
        batch_size: blocks decoded together.

    Raises:
        Stopped: between shards, on a signal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = range(0, len(samples), SHARD)
    world_size = machine.world_size()
    with progress("trajectories", total=int(samples.response_lengths.sum())) as bar:
        for number, first in enumerate(shards):
            path = folder / f"{number:05d}.parquet"
            if not path.exists() and number % world_size == machine.rank():
                raise_if_stopped(STOPPED)
                shard = samples[first : first + SHARD]
                orders = _orders(model, shard, block_size, batch_size)
                table = pa.table({"sample_id": [s.id for s in shard], "order": [o.tolist() for o in orders]})
                sink = pa.BufferOutputStream()
                pq.write_table(table, sink)
                write_atomic(path, sink.getvalue().to_pybytes())
            bar.advance(int(samples.response_lengths[first : first + SHARD].sum()))
    while not all((folder / f"{number:05d}.parquet").exists() for number in range(len(shards))):
        raise_if_stopped(STOPPED)
        time.sleep(0.2)
    write_atomic(folder / "trajectories.json", json.dumps({"block_size": block_size, "samples": len(samples)}) + "\n")


def attach(samples: Samples, folder: Path, scratch: Path) -> Samples:
    """Return the samples, each with the order that `folder` holds for it.

    Args:
        scratch: gets the orders as flat files.

    Raises:
        RunFailed: where one is missing or belongs to a response of another length.
    """
    orders = flat(sorted(folder.glob("*.parquet")), ["sample_id", "order"], scratch / "orders")
    lengths = orders.lengths("order")
    if len(lengths) != len(samples):
        raise RunFailed(f"trajectories of {len(lengths)} samples, where there are {len(samples)}; {ANEW}")

    def of(sample: Sample, place: int) -> np.ndarray:
        recorded = orders.row("sample_id", place).tobytes().decode()
        if recorded != sample.id or lengths[place] != len(sample.response):
            found = f"{lengths[place]} positions" if recorded == sample.id else f"that of {recorded} in its place"
            raise RunFailed(
                f"trajectory of sample {sample.id}: {found}, the response has {len(sample.response)}; {ANEW}"
            )
        return orders.row("order", place)

    for place in np.flatnonzero(lengths != samples.response_lengths)[:1]:
        of(samples[place], int(place))
    return samples.ordered(of)


def _orders(model, samples: list[Sample], block_size: int, batch_size: int) -> list[np.ndarray]:
    """Unmask each block to the teacher's own tokens, most confident position first."""
    jobs = [(k, start) for k, s in enumerate(samples) for start in range(0, len(s.response), block_size)]
    jobs.sort(key=lambda job: len(samples[job[0]].prompt) + job[1])
    orders = [np.zeros(len(s.response), np.int64) for s in samples]
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        truth = [samples[k].response[start : start + block_size].tolist() for k, start in batch]
        prefix = [samples[k].prompt.tolist() + samples[k].response[:start].tolist() for k, start in batch]
        S = max(map(len, truth))
        forward = Forward(model, capacity=max(map(len, prefix)) + S)
        mask = forward.mask_token_id
        noisy = [[mask] * len(t) for t in truth]
        starts, clean = [0] * len(batch), prefix
        for step in range(S):
            logits = forward(starts, clean, noisy, keep=S)  # [B, S, V]
            starts, clean = [len(p) for p in prefix], [[] for _ in batch]
            confidence = (logits.amax(-1) - logits.logsumexp(-1)).exp()
            open_ = torch.tensor([[t == mask for t in x] + [False] * (S - len(x)) for x in noisy])
            best = confidence.masked_fill(~open_.to(confidence.device), -1.0).argmax(-1).tolist()
            for row, ((k, start), position) in enumerate(zip(batch, best)):
                if step < len(truth[row]):
                    orders[k][start + position] = step
                    noisy[row][position] = truth[row][position]
    return orders
