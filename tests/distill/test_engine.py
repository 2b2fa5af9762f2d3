"""The plain engine: what is rounded to 16 bits must not lose what it was to learn."""

import pytest
import torch

from fewstep.distill.config import EngineConfig
from fewstep.distill.engine import build_engine

RATE, STEPS = 1e-4, 60


class Tied(torch.nn.Module):
    """A weight that is used in two places, and a scalar loss."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8, dtype=dtype)
        self.second = torch.nn.Linear(8, 8, dtype=dtype)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.to(self.first.weight)))).float().square().mean()


def engine(dtype, accumulation=1):
    module = Tied(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return build_engine(EngineConfig(name="plain"), module, optimizer, accumulation, 1.0)


def train(worker, steps, accumulation=1):
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    norms = []
    for _ in range(steps):
        for part in data.chunk(accumulation):
            worker.backward(worker.forward(part) / accumulation)
        norms.append(worker.step(RATE))
    return norms


def weights(worker):
    return torch.cat([p.detach().float().flatten() for p in worker.module.parameters()]).cpu()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_bf16_weights_follow_the_fp32_ones_through_updates_below_their_spacing(accumulation):
    exact, rounded = engine(torch.float32), engine(torch.bfloat16)
    start = weights(exact)
    norms = train(exact, STEPS, accumulation), train(rounded, STEPS, accumulation)
    moved = (weights(exact) - start).norm()
    # a bf16 weight of 0.3 has a spacing of 2e-3, an update is 1e-4: without masters nearly all of them stay put
    assert (weights(rounded) - weights(exact)).norm() < 0.35 * moved
    assert torch.allclose(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=0.05)  # the gradients are rounded
    assert all(p.grad is None for p in rounded.module.parameters())


def test_bf16_training_resumes_bit_for_bit(tmp_path):
    straight, first, second = (engine(torch.bfloat16) for _ in range(3))
    train(straight, 12)
    train(first, 5)
    first.save(tmp_path)
    second.load(tmp_path)
    train(second, 7)
    assert torch.equal(weights(straight), weights(second))
    assert all(
        torch.equal(a, b)
        for a, b in zip(straight.masters.values(), second.masters.values())  # and not only what is rounded
    )
