"""The exponential mean of the weights that a stage trains."""

from pathlib import Path

import torch

WARM_UP = 10  # steps after which the mean begins to forget its start


class Ema:
    """e ← d·e + (1 - d)·w after every step, in float32, with d = min(decay, (1 + step) / (WARM_UP + step)).

    Under ZeRO-3 each rank keeps the mean of its own partitions; on disk the mean is whole, so that any
    number of ranks can read it.

    Args:
        parameters: name → parameter, the trained ones, as the engine holds them.
        device: where the ranks exchange tensors.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], decay: float, device: torch.device):
        self.parameters, self.decay, self.device = parameters, decay, device
        self.mean = {name: _held(p).detach().float().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after `step` steps."""
        decay = min(self.decay, (1 + step) / (WARM_UP + step))
        for name, parameter in self.parameters.items():
            self.mean[name].lerp_(_held(parameter).float(), 1 - decay)

    @torch.no_grad()
    def give(self) -> None:
        """Put the mean in the place of the weights; the optimizer must take no step after it."""
        for name, parameter in self.parameters.items():
            _held(parameter).copy_(self.mean[name])
            if hasattr(parameter, "ds_id") and parameter.ds_status.name == "AVAILABLE":
                parameter.partition(has_been_updated=False)  # a gathered copy holds the last weights still

    def save(self, folder: Path, rank: int) -> None:
        """Write `ema.pt`; every rank has to call it."""
        whole = {
            name: _whole(self.mean[name].to(self.device), parameter) for name, parameter in self.parameters.items()
        }
        if rank == 0:
            torch.save(whole, folder / "ema.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "ema.pt", map_location="cpu", weights_only=True)
        for name, parameter in self.parameters.items():
            self.mean[name].copy_(_part(saved[name], parameter))


def _held(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return what this rank holds of a parameter: under ZeRO-3 its partition, else all of it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter


def _whole(held: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not hasattr(parameter, "ds_id"):
        return held.cpu()
    ranks = torch.distributed.get_world_size()
    parts = held.new_empty(ranks * held.numel())
    torch.distributed.all_gather_into_tensor(parts, held)
    return parts[: parameter.ds_numel].view(parameter.ds_shape).cpu()


def _part(whole: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's share of a whole mean; a partition behind the last number is padding."""
    if not hasattr(parameter, "ds_id"):
        return whole
    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
    own = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(own, (0, size - own.numel()))
