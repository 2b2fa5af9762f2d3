"""Two processes under a launcher train the same student as one, and their ZeRO-3 shards come out whole."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fewstep.distill import train
from fewstep.distill.config import AdaptConfig, EngineConfig, TrackConfig
from fewstep.errors import Stopped, UserError
from fewstep.students.config import StudentConfig

from .test_train import ALL, world  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from pathlib import Path
from tests.distill.test_ranks import adapt
adapt(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), accumulation=1, stop_after=int(sys.argv[4]))
"""
STEPS = 6


def adapt(world: Path, folder: Path, zero_stage: int, accumulation: int, stop_after: int = STEPS) -> None:  # noqa: F811
    folder.mkdir(parents=True, exist_ok=True)
    config = AdaptConfig(
        max_steps=STEPS, batch_tokens=300, learning_rate=3e-3, save_steps=3, eval_steps=6, logging_steps=1,
        gradient_accumulation_steps=accumulation, objectives=ALL, guess=0.5, ema=0.8,
    )  # fmt: skip
    asked = iter([None] * (stop_after - 1) + [15])
    with pytest.MonkeyPatch.context() as patched, nullcontext() if stop_after == STEPS else pytest.raises(Stopped):
        patched.setattr(train, "stop_requested", lambda: next(asked, None))
        train.run(
            folder, "adapt", config, StudentConfig(block_size=4), EngineConfig(zero_stage=zero_stage), TrackConfig(),
            world / "teacher", world / "targets", 0, "test",
        )  # fmt: skip


def on_two_ranks(world: Path, folder: Path, zero_stage: int, stop_after: int = STEPS) -> None:  # noqa: F811
    script = folder.parent / "rank.py"
    script.write_text(RANK)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}  # fmt: skip
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(script), str(world), str(folder), str(zero_stage), str(stop_after)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def apart(one: Path, two: Path) -> float:
    """Return the largest difference between two students' weights."""
    a, b = (load_file(folder / "student" / "model.safetensors") for folder in (one, two))
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.fixture(scope="module")
def alone(world, tmp_path_factory):  # noqa: F811
    """ZeRO stage → what one rank with two micro-batches a step trains."""
    made: dict[int, Path] = {}

    def of(zero_stage: int) -> Path:
        if zero_stage not in made:
            made[zero_stage] = tmp_path_factory.mktemp(f"one{zero_stage}")
            adapt(world, made[zero_stage], zero_stage, accumulation=2)
        return made[zero_stage]

    return of


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_two_ranks_equal_one_with_two_micro_batches(world, alone, tmp_path, zero_stage):  # noqa: F811
    on_two_ranks(world, tmp_path / "two", zero_stage)
    assert apart(alone(zero_stage), tmp_path / "two") <= 1e-5  # sums in another order, as between engines


SLOW = pytest.mark.slow


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW), 3])
def test_what_two_ranks_began_one_ends_and_the_reverse(world, alone, tmp_path, zero_stage):  # noqa: F811
    on_two_ranks(world, tmp_path / "two", zero_stage, stop_after=3)
    adapt(world, tmp_path / "two", zero_stage, accumulation=2)
    assert apart(alone(zero_stage), tmp_path / "two") <= 1e-5
    adapt(world, tmp_path / "one", zero_stage, accumulation=2, stop_after=3)
    on_two_ranks(world, tmp_path / "one", zero_stage)
    assert apart(alone(zero_stage), tmp_path / "one") <= 1e-5


def test_a_checkpoint_of_another_engine_is_refused_in_one_line(world, tmp_path):  # noqa: F811
    adapt(world, tmp_path, 1, accumulation=2, stop_after=3)
    with pytest.raises(UserError, match=r"zero_stage 2, but .* zero_stage 1; set .* back"):
        adapt(world, tmp_path, 2, accumulation=2)
