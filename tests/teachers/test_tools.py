"""Tools that a prompt has: shown to teacher and student alike, or refused."""

import json

import pytest
from tiny import TEMPLATE, save_tiny, tiny_model, tiny_tokenizer

from fewstep.distill.plan import plan
from fewstep.distill.recipe import load_recipe
from fewstep.errors import UserError
from fewstep.eval import systems
from fewstep.eval.tasks import answer
from fewstep.records import read_rows
from fewstep.teachers import collect
from fewstep.teachers.config import PromptsConfig, TeacherConfig
from fewstep.teachers.preview import prompt_text
from fewstep.teachers.prompts import read_prompts
from tests.teachers.test_collect import EOS, folder, settings

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
SHOWS_TOOLS = "{% if tools %}{{ '<|im_start|>tools ' + tools[0].function.name + '<|im_end|>' }}{% endif %}" + TEMPLATE


def test_tools_of_a_prompt_are_shown_to_teacher_and_student_alike(tmp_path):
    model = str(save_tiny(tmp_path / "teacher", eos_ids=EOS))
    tiny_tokenizer(template=SHOWS_TOOLS).save_pretrained(model)
    rows = [
        {"instruction": "x", "tools": TOOLS},
        {"instruction": "x", "tools": json.dumps(TOOLS)},
        {"instruction": "x", "tools": []},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = PromptsConfig(path=tmp_path / "p.jsonl", held_out=0.0)
    collect.run(folder(tmp_path, "t"), TeacherConfig(model=model, dtype="float32"), asked, settings(), 0)
    one, two, three = read_rows(tmp_path / "t")
    tokenizer = tiny_tokenizer(template=SHOWS_TOOLS)
    assert "<|im_start|>tools weather<|im_end|>" in tokenizer.decode(one["prompt_ids"])
    assert one["prompt_ids"] == two["prompt_ids"] != three["prompt_ids"]
    assert two["sample_id"] == f"{one['sample_id']}-2" and three["sample_id"] != one["sample_id"]
    alike = PromptsConfig(path=tmp_path / "p.jsonl", dedupe=True)
    assert [bool(p.tools) for p in read_prompts(alike)] == [True, False]


def test_tools_that_are_none_are_refused(tmp_path):
    asked = PromptsConfig(path=tmp_path / "p.jsonl", held_out=0.0)
    for tools, words in (("{", "which is no JSON"), ({"a": 1}, "a list of JSON schemas"), (["x"], "an object each")):
        (tmp_path / "p.jsonl").write_text(json.dumps({"instruction": "x", "tools": tools}))
        with pytest.raises(UserError, match=words):
            read_prompts(asked)


def test_evaluation_and_plan_show_them_too(tmp_path):
    tiny_tokenizer(template=SHOWS_TOOLS).save_pretrained(tmp_path)
    shown = prompt_text(str(tmp_path), None, [{"role": "user", "content": "x"}], TOOLS)
    assert shown is not None and shown.startswith("<|im_start|>tools weather<|im_end|>")
    rows = [{"instruction": "x", "reference": "1", "tools": TOOLS}, {"instruction": "x", "reference": "1"}]
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told, plain = answer.load(tmp_path / "e.jsonl")
    assert told.tools == TOOLS and plain.tools is None
    assert answer.prompt_hash([told]) != answer.prompt_hash([plain])


def test_the_systems_of_an_evaluation_are_asked_with_the_tools(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer(template=SHOWS_TOOLS)
    models = systems.Models(TeacherConfig(model="m"), tmp_path, settings(), {})
    monkeypatch.setattr(models, "get", lambda system: (tiny_model(), tokenizer))
    item = answer.Item("a", [{"role": "user", "content": "x"}], "1", TOOLS)
    for system in ("teacher", "student"):
        (ids,) = models.prompts(system, [item])
        assert "<|im_start|>tools weather" in tokenizer.decode(ids)


@pytest.mark.parametrize(("prompts", "task"), [("", "tools"), ("tools", "")])
def test_tools_that_no_one_would_see_are_refused_before_any_work(tmp_path, prompts, task):
    model = save_tiny(tmp_path / "teacher", eos_ids=EOS)
    for name, told in (("p", prompts), ("e", task)):
        rows = [{"instruction": f"{name} b", "reference": "1"}, {"instruction": f"{name} c", "reference": "1"}]
        rows[1] |= {"tools": TOOLS} if told else {}
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "r.yaml").write_text(
        f"name: r\nteacher: {{model: '{model}'}}\nprompts: {{path: p.jsonl}}\neval: {{tasks: [{{name: answer, path: e.jsonl}}]}}\n"
    )
    with pytest.raises(
        UserError,
        match=f"{'e' if task else 'p'}.jsonl, line 2: its prompt has tools, and the teacher cannot be shown them",
    ):
        plan(load_recipe(tmp_path / "r.yaml"), tmp_path / "runs")
