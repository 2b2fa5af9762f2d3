"""What a training step has seen and cost: masked share, positions a second, memory, utilisation."""

import time
from collections.abc import Callable

import torch

from fewstep.machine import GPU_FLOPS, peak_memory_mb
from fewstep.students.layout import CLEAN, Batch


class Meter:
    """Counts what passes by between two readings.

    Args:
        parameters: of the model. frozen: most of them take no gradient (adapters).
        ranks: that share the work.
    """

    def __init__(self, parameters: int, frozen: bool, ranks: int):
        self.flops_a_position = (4 if frozen else 6) * parameters
        self.peak = ranks * _peak_flops()
        self.started = self.since = time.perf_counter()
        self.positions = 0

    def saw(self, batches: list[Batch]) -> None:
        """Count the positions of one step of this rank."""
        self.positions += sum(int(batch.valid.sum()) for batch in batches)

    def read(
        self, batches: list[Batch], all_sum: Callable[[list[float]], list[float]]
    ) -> tuple[float, dict[str, float]]:
        """Return (the share of the last step's noisy positions that were masked or guessed, figures with timings), over all ranks.

        The share is one step's, so that a resume repeats it. `mfu` is the share of the GPUs' peak that the model's own
        arithmetic took since the last reading, where the peak is known.
        """
        noisy = sum(int((batch.valid & (batch.seg != CLEAN)).sum()) for batch in batches)
        masked = sum(int((~batch.clean).sum()) for batch in batches)
        positions, noisy, masked = all_sum([float(self.positions), float(noisy), float(masked)])
        now = time.perf_counter()
        rate = positions / max(now - self.since, 1e-9)
        perf = {
            "seconds": now - self.started,
            "positions": positions,
            "positions_per_s": rate,
            "memory_mb": _memory_mb(),
        }
        if self.peak:
            perf["mfu"] = rate * self.flops_a_position / self.peak
        self.since, self.positions = now, 0
        return masked / noisy if noisy else 0.0, perf


def _peak_flops() -> float:
    """Return the bf16 FLOPs a second of this rank's GPU; 0 where there is none, or its peak is not known."""
    if not torch.cuda.is_available():
        return 0.0
    name = torch.cuda.get_device_name()
    return next((flops for known, flops in GPU_FLOPS.items() if known in name), 0.0)


def _memory_mb() -> float:
    """Return the most memory that this process has had: the GPU's, or else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_memory_mb()
