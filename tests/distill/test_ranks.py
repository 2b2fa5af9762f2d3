"""Two processes under a launcher train the same student as one, and their ZeRO-3 shards come out whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fewstep.distill import train
from fewstep.distill.config import AdaptConfig, EngineConfig, TrackConfig
from fewstep.students.config import StudentConfig

from .test_train import ALL, world  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from pathlib import Path
from tests.distill.test_ranks import adapt
adapt(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), accumulation=1)
"""


def adapt(world: Path, folder: Path, zero_stage: int, accumulation: int) -> None:  # noqa: F811
    folder.mkdir(parents=True, exist_ok=True)
    config = AdaptConfig(
        max_steps=6, batch_tokens=300, learning_rate=3e-3, save_steps=3, eval_steps=6, logging_steps=1,
        gradient_accumulation_steps=accumulation, objectives=ALL, guess=0.5,
    )  # fmt: skip
    train.run(
        folder, "adapt", config, StudentConfig(block_size=4), EngineConfig(zero_stage=zero_stage), TrackConfig(),
        world / "teacher", world / "targets", 0, "test",
    )  # fmt: skip


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_two_ranks_equal_one_with_two_micro_batches(world, tmp_path, zero_stage):  # noqa: F811
    adapt(world, tmp_path / "one", zero_stage, accumulation=2)
    (tmp_path / "rank.py").write_text(RANK)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}  # fmt: skip
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "rank.py"), str(world), str(tmp_path / "two"), str(zero_stage)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    a, b = (load_file(tmp_path / name / "student" / "model.safetensors") for name in ("one", "two"))
    assert a.keys() == b.keys()
    assert max(float((a[k] - b[k]).abs().max()) for k in a) <= 1e-5  # sums in another order, as between engines
