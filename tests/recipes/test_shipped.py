"""Every shipped recipe goes through the command line, whole, on the 3M teacher and a few steps."""

import json
import os
import subprocess
import sys

import pytest

from fewstep.distill.recipe import recipes_folder, shipped_recipes

SMALL = [
    f"teacher.model={recipes_folder() / 'quickstart' / 'teacher'}",
    "prompts.limit=24",
    "targets.min_score=0.0",
    "targets.keep={finished: false}",
    "adapt.max_steps=2",
    "adapt.batch_tokens=800",
    "distill.max_steps=2",
    "distill.batch_tokens=800",
    "eval.tasks.0.limit=4",
    "eval.speed_prompts=2",
    "engine.threads=1",
]


def prompts_of(recipe: str, folder):
    """Return the overrides that a recipe of the lab needs: teacher and prompts are made by its runner, not shipped."""
    if not recipe.startswith("lab/") or recipe == "lab/booking":
        return []
    file = folder / "prompts.jsonl"
    rows = [{"id": f"{i}", "instruction": f"bits {i}", "reference": str(i.bit_count())} for i in range(300, 330)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = recipes_folder() / "quickstart" / "teacher"
    return [f"teacher.model={teacher}", f"prompts.path={file}", f"eval.tasks.0.path={file}"]


def clean_environment():
    """This process's environment without what DeepSpeed, used by an earlier test in it, set for itself."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in launcher}
    return kept | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def fewstep(*arguments, runs, **popen):
    command = [sys.executable, "-m", "fewstep", *arguments, "--runs", str(runs)]
    return subprocess.run(command, capture_output=True, text=True, env=clean_environment(), **popen)


def marked(recipe: str):
    """Leave the lab's recipes, which are alike, to the slow tests, but for one."""
    slow = recipe.startswith("lab/") and recipe != "lab/bits"
    return pytest.param(recipe, marks=pytest.mark.slow) if slow else recipe


@pytest.mark.parametrize("recipe", map(marked, shipped_recipes()))
def test_shipped_recipe_runs_from_targets_to_report(recipe, tmp_path):
    small = [*SMALL, *prompts_of(recipe, tmp_path)]
    tmp_path = tmp_path / "runs"
    done = fewstep("run", recipe, *small, runs=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    named = json.loads((tmp_path / f"{recipe.replace('/', '-')}.json").read_text())["stages"]
    assert list(named) == ["targets", "adapt", "distill", "eval", "report"]
    for folder in named.values():
        assert json.loads((tmp_path / folder / "manifest.json").read_text())["status"] == "complete"
    results = json.loads((tmp_path / named["eval"] / "results.json").read_text())
    own = [r for r in results["rows"] if r["system"] == "student" and r["sampler"] == "verify"]
    assert own and all(r["agreement_own"] == 1.0 for r in own)
    page = (tmp_path / named["report"] / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")

    again = fewstep("run", recipe, *small, runs=tmp_path)
    assert again.returncode == 0 and "nothing to do" in again.stdout
