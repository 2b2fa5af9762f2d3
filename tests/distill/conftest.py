"""A recipe that is complete and tiny: its teacher is a config.json, for what needs no weights."""

import json
from pathlib import Path

import pytest

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
RECIPE = """\
name: tiny
teacher: {model: teacher}
prompts: {path: prompts.jsonl}
targets: {max_new_tokens: 32}
adapt: {max_steps: 10, learning_rate: 1e-4}
eval: {tasks: [{name: booking, path: eval.jsonl}], samplers: [{name: verify}]}
"""


def write_recipe(folder: Path) -> Path:
    """Write the recipe and its files into `folder`; return the recipe's path."""
    (folder / "teacher").mkdir(parents=True)
    (folder / "teacher" / "config.json").write_text(json.dumps(LLAMA))
    rows = [json.dumps({"instruction": f"prompt {i}", "reference": {"i": i}}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "eval.jsonl").write_text("\n".join(rows[:3]))
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


@pytest.fixture
def recipe_file(tmp_path, monkeypatch):
    """The tiny recipe in a folder of its own; the working folder is an empty one."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return write_recipe(tmp_path / "recipe")


@pytest.fixture
def fake_stages(monkeypatch):
    """Replace what the stages do by writing one file each; yields the list of stages that ran."""
    from fewstep.distill import pipeline

    ran = []

    def runner(stage):
        def run(recipe, folders):
            ran.append(stage)
            (folders[stage] / "out.txt").write_text(stage)
            return {"stage": stage}

        return run

    monkeypatch.setattr(pipeline, "RUNNERS", {stage: runner(stage) for stage in pipeline.RUNNERS})
    monkeypatch.setattr(pipeline.machine, "pin_threads", lambda num: num or 1)
    return ran
