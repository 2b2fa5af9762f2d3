"""Gated low-rank adapters: they act on noisy positions only, so the clean stream stays the base.

Shapes: B rows, Q positions of which the last `gate.num_noisy` are noisy, D width, R rank.
The clean tokens always come first, in training as in decoding, so the gate is a suffix.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

LINEAR = (nn.Linear, Conv1D)  # GPT-2 has a linear layer of its own, its weight stored the other way round


class Gate:
    """How many of the last positions of a forward are noisy; shared by every gated layer of a model."""

    def __init__(self):
        self.num_noisy = 0


@contextmanager
def noisy(model, num_noisy: int):
    """Open the gate of a gated model for one forward whose last `num_noisy` positions are noisy.

    Closed again whatever happens: a plain forward afterwards is the base's own.
    """
    gate = getattr(model, "fewstep_gate", None)
    if gate is None:
        yield
        return
    gate.num_noisy = num_noisy
    try:
        yield
    finally:
        gate.num_noisy = 0


class GatedLinear(nn.Module):
    """A frozen linear layer plus a low-rank update on noisy positions: y = Wx + scale·B(Ax)."""

    def __init__(self, base: nn.Linear | Conv1D, rank: int, scale: float, gate: Gate):
        super().__init__()
        self.base, self.scale, self.gate = base, scale, gate
        like = dict(device=base.weight.device, dtype=base.weight.dtype)
        wide_in, wide_out = base.weight.shape if isinstance(base, Conv1D) else base.weight.shape[::-1]
        self.lora_a = nn.Parameter(torch.empty(rank, wide_in, **like))
        self.lora_b = nn.Parameter(torch.zeros(wide_out, rank, **like))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        num_noisy = self.gate.num_noisy
        if num_noisy == 0:
            return y
        noisy = x[:, -num_noisy:]
        delta = nn.functional.linear(nn.functional.linear(noisy, self.lora_a), self.lora_b) * self.scale
        return torch.cat([y[:, :-num_noisy], y[:, -num_noisy:] + delta], dim=1)


class GatedEmbedding(nn.Module):
    """The frozen embedding plus a learned vector for a mask id that lies outside the vocabulary."""

    def __init__(self, base: nn.Embedding, mask_token_id: int):
        super().__init__()
        self.base, self.mask_token_id = base, mask_token_id
        self.mask_vector = nn.Parameter(base.weight.detach().mean(0).clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        is_mask = ids == self.mask_token_id
        return torch.where(is_mask[..., None], self.mask_vector, self.base(ids.masked_fill(is_mask, 0)))


def apply_gated(model, rank: int, alpha: float, mask_token_id: int) -> list[str]:
    """Wrap every linear layer of the body and the embedding, freeze the base, return the wrapped names.

    Args:
        model: a causal LM; its output head is left alone.
        rank, alpha: R, and the update's scale times R.
        mask_token_id: an id at or beyond the width of the vocabulary.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    gate, names = Gate(), []
    body = model.base_model
    for name, module in list(body.named_modules()):
        if isinstance(module, LINEAR):
            _replace(body, name, GatedLinear(module, rank, alpha / rank, gate))
            names.append(name)
    embedding = model.get_input_embeddings()
    for name, module in list(body.named_modules()):
        if module is embedding:
            _replace(body, name, GatedEmbedding(embedding, mask_token_id))
    model.fewstep_gate = gate
    return names


def adapter_state(model) -> dict[str, torch.Tensor]:
    """Return the adapter's own tensors, by name."""
    own = ("lora_a", "lora_b", "mask_vector")
    return {n: p.detach() for n, p in model.named_parameters() if n.rsplit(".", 1)[-1] in own}


def save_adapter(model, folder: Path, rank: int, alpha: float) -> None:
    """Write `adapter.safetensors` and `adapter.json` into `folder`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous().cpu() for n, t in adapter_state(model).items()}, str(folder / "adapter.safetensors"))
    (folder / "adapter.json").write_text(json.dumps({"kind": "gated", "rank": rank, "alpha": alpha}) + "\n")


def load_adapter(model, folder: Path) -> None:
    """Wrap a base model and load the adapter that `save_adapter` wrote."""
    from safetensors.torch import load_file

    if hasattr(model, "fewstep_gate"):
        return
    spec = json.loads((Path(folder) / "adapter.json").read_text())
    apply_gated(model, spec["rank"], spec["alpha"], model.config.fewstep["mask_token_id"])
    missing, unexpected = model.load_state_dict(load_file(str(Path(folder) / "adapter.safetensors")), strict=False)
    lost = set(missing) & set(adapter_state(model))
    if lost or unexpected:
        raise ValueError(f"adapter {folder}: tensors missing {sorted(lost)[:3]}, unknown {unexpected[:3]}")


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent) if parent else root, leaf, module)
