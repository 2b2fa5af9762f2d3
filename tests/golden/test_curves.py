"""Losses of 200 steps, kept: whoever changes a number has to mean it.

    python -m tests.golden.test_curves      writes them anew; say in the commit why they changed

On the machine that wrote them every loss is the same to its last digit; elsewhere the first steps agree, before
the rounding of another processor has been multiplied.
"""

import json
import platform
import tempfile
from pathlib import Path

import pytest
import torch

from fewstep import machine
from fewstep.distill.config import EngineConfig
from tests.distill import test_train
from tests.distill.test_train import go, metrics, world  # noqa: F401  (a fixture)

KEPT = Path(__file__).with_name("curves.json")
ANYWHERE = 20  # steps that agree on any CPU
CURVES = {
    "adapt": {"suffix": 0.3, "random_offset": 0.25, "copies": 2, "block_sizes": (2, 4), "noise": (0.1, 1.0)},
    "distill": {"stage": "distill", "order": "nll", "order_share": 0.5, "anchor": 0.3, "noise": (0.2, 1.0)},
}


def curve(world, folder, name) -> list[float]:  # noqa: F811
    keys = {"max_steps": 200, "learning_rate": 1e-3, "save_steps": 200, "eval_steps": 200} | CURVES[name]
    if "stage" in keys:
        go(world, folder / "before", max_steps=1)
        keys["source"] = folder / "before" / "student"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        go(world, folder / name, engine=EngineConfig(name="plain", threads=1), **keys)
    finally:
        torch.set_num_threads(threads)
    return [row["loss"] for row in metrics(folder / name) if "loss" in row]


def here() -> dict:
    return {"cpu": machine.hardware()["cpu"], "torch": torch.__version__, "system": platform.system()}


@pytest.mark.parametrize("name", CURVES)
def test_curves_are_the_kept_ones(world, tmp_path, name):  # noqa: F811
    kept = json.loads(KEPT.read_text())
    found = curve(world, tmp_path, name)
    assert len(found) == len(kept["curves"][name]) == 200
    assert found[0] > 2 * found[-1]  # it learns: a flat curve would agree with anything
    assert found[:ANYWHERE] == pytest.approx(kept["curves"][name][:ANYWHERE], rel=0, abs=1e-5)
    if here() == kept["machine"]:
        assert found == kept["curves"][name]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:

        class Factory:
            def mktemp(self, name):
                return Path(tempfile.mkdtemp(dir=folder))

        made = test_train.world.__wrapped__(Factory())
        curves = {name: curve(made, Path(tempfile.mkdtemp(dir=folder)), name) for name in CURVES}
    KEPT.write_text(json.dumps({"machine": here(), "curves": curves}, indent=0) + "\n")


if __name__ == "__main__":
    main()
