"""Recipes: what loads, what is refused, and that every refusal is one line which helps."""

from pathlib import Path

import pytest

from fewstep.distill.recipe import Recipe, known_keys, load_recipe, recipes_folder, shipped_recipes
from fewstep.errors import UserError


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_recipe_reads_1e_4_as_a_number_everywhere(recipe_file):
    overrides = [
        "adapt.weight_decay=5e-5",
        "eval.samplers=[{name: threshold, threshold: [9e-1, 5E-1]}]",
        "adapt.noise=[1e-2, 1]",
    ]
    recipe = load_recipe(recipe_file, overrides)
    assert recipe.adapt.learning_rate == 1e-4
    assert recipe.adapt.weight_decay == 5e-5
    assert recipe.eval.samplers[0].threshold == [0.9, 0.5]
    assert recipe.adapt.noise == (0.01, 1.0)


def test_paths_are_relative_to_the_recipe_and_overrides_to_the_working_folder(recipe_file):
    (recipe_file.parent / "sub").mkdir()
    text = recipe_file.read_text().replace("max_new_tokens: 32", "few_shot: sub/f.jsonl, keep: {json_schema: s.json}")
    recipe_file.write_text(text)
    recipe = load_recipe(recipe_file, ["eval.tasks.0.path=mine.jsonl", "student={base: ./base}"])
    home = recipe_file.parent
    assert recipe.prompts.path == home / "prompts.jsonl"
    assert recipe.targets.few_shot == home / "sub/f.jsonl"
    assert recipe.targets.keep.json_schema == home / "s.json"
    assert recipe.teacher.model == str(home / "teacher")  # a folder is there
    assert recipe.eval.tasks[0].path == Path.cwd() / "mine.jsonl"
    assert recipe.student.base == str(Path.cwd() / "base")


@pytest.mark.parametrize(
    ("model", "local"),
    [("org/model", False), ("teacher", True), ("w.gguf", True), ("package://m/w.gguf", False), ("https://h/v1", False)],
)
def test_teacher_model_is_a_path_only_where_one_is_meant(recipe_file, model, local):
    recipe_file.write_text(recipe_file.read_text().replace("{model: teacher}", f"{{model: '{model}'}}"))
    base = ["student.base=org/base"] if model.startswith("http") else []
    assert load_recipe(recipe_file, base).teacher.model == (str(recipe_file.parent / model) if local else model)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("adapt.learning_rat=1", ["adapt.learning_rat:", "unknown key (value 1)", "did you mean adapt.learning_rate?"]),
        ("pormpts={}", ["pormpts:", "did you mean prompts?"]),
        ("learning_rate=1", ["learning_rate:", "did you mean"]),
        (
            "adapt.objectives={ce: {wieght: 1}}",
            ["adapt.objectives.ce.wieght:", "did you mean adapt.objectives.ce.weight?"],
        ),
        ("eval.tasks.0.pth=x", ["eval.tasks.0.pth:", "did you mean eval.tasks.0.path?"]),
        ("adapt.max_steps=abc", ["adapt.max_steps", "got 'abc'", "must be a valid integer"]),
        ("adapt.max_steps=true", ["adapt.max_steps:", "got true", "must be an integer"]),
        ("adapt.max_steps=0", ["adapt.max_steps", "got 0", "greater than or equal to 1", "it is 400"]),
        ("adapt.lora=true", ["adapt.lora:", "got true", "a mapping of keys or null"]),
        ("engine.name=dspeed", ["engine.name", "got 'dspeed'", "'deepspeed' or 'plain'"]),
        ("student.mask_token=foo", ["student.mask_token", "got 'foo'", "'auto' or must be a valid integer"]),
        ("prompts=null", ["prompts:", "got null", "a mapping of keys"]),
        ("prompts={}", ["give one of path, hf and reasoning_gym"]),
        ("name=a b", ["name", "got 'a b'", "must match"]),
        ("seed.x=1", ["seed", "got {'x': 1}"]),
        ("name.x=1", ["name.x: name is 'tiny', which has no keys"]),
        ("foo", ["'foo' is no override", "key=value"]),
        ("eval.tasks.7.path=x", ["eval.tasks.7.path:", "a list of 1"]),
        (
            "eval.samplers=[{name: fixed, threshold: 0.5}]",
            ["eval.samplers.0", "`threshold` is a setting of threshold, klass, edit, not of fixed"],
        ),
        ("adapt.noise=[1", ["the value of adapt.noise, line 1", "not valid YAML"]),
        ("targets.top_logprobs=0", ["distill.objectives.kd", "targets.top_logprobs is 0"]),
        ("adapt.objectives={ce: 0}", ["adapt.objectives", "no objective has a weight above 0"]),
        ("adapt.lora={gated: true}", ["adapt.objectives.ar", "gated"]),
        ("student.attention=bidirectional", ["objectives.ar", "bidirectional"]),
    ],
)
def test_a_wrong_recipe_is_refused_in_one_line(recipe_file, override, parts):
    message = refusal(recipe_file, override)
    for part in parts:
        assert part in message


def test_a_gated_adapter_with_few_shot_is_refused(recipe_file):
    gated = ["adapt.lora={gated: true}", "adapt.objectives={ce: 1}", "distill=null", "targets.system_prompt=Be brief."]
    assert "adapt.lora.gated: the untouched teacher must see its own prompt" in refusal(recipe_file, *gated)
    assert load_recipe(recipe_file, gated[:-1]).adapt.lora.gated


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name: a\nprompts: {path: x", ["recipe.yaml, line 2: not valid YAML"]),
        ("name: a\nseed: 1\nseed: 2\n", ["recipe.yaml, line 3: not valid YAML: key seed is given twice"]),
        ("- a\n", ["a recipe is a mapping"]),
        ("", ["a recipe is a mapping"]),
    ],
)
def test_broken_yaml_is_refused_with_its_line(recipe_file, text, parts):
    recipe_file.write_text(text)
    message = refusal(recipe_file)
    for part in parts:
        assert part in message


def test_recipe_that_does_not_exist_names_the_nearest_one(recipe_file, monkeypatch, tmp_path):
    assert "does not exist" in refusal(Path("nowhere.yaml"))
    monkeypatch.setattr("fewstep.distill.recipe.shipped_recipes", lambda: ["quickstart"])
    assert "did you mean quickstart?" in refusal(Path("quikstart"))
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    assert f"did you mean {tmp_path / 'mine.yaml'}?" in refusal(tmp_path / "mine")


def test_an_override_is_blamed_in_place_of_the_file(recipe_file):
    assert refusal(recipe_file, "adapt.max_steps=x").startswith("adapt.max_steps: got 'x'")
    assert refusal(recipe_file, "adapt.noise=[0.5, x]").startswith("adapt.noise")
    assert refusal(recipe_file, "adapt.max_steps=5", "adapt.lerning_rate=3").startswith("adapt.lerning_rate: unknown")
    assert refusal(recipe_file, "adapt.lora.gated=true").startswith(f"{recipe_file.name} with the overrides: adapt.")
    broken = recipe_file.with_name("broken.yaml")
    broken.write_text(recipe_file.read_text() + "\nseed: x\n")
    for others in ([], ["adapt.max_steps=5"]):
        assert refusal(broken, *others).startswith("broken.yaml: seed (seed of everything random): got 'x'")
    assert load_recipe(broken, ["seed=3"]).seed == 3


def test_sections_are_set_by_dotted_overrides_even_where_the_recipe_has_none(recipe_file):
    recipe = load_recipe(recipe_file, ["track.wandb.project=p", "adapt.lora.rank=4", "distill=null", "seed=7"])
    assert (recipe.track.wandb.project, recipe.adapt.lora.rank, recipe.distill, recipe.seed) == ("p", 4, None, 7)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_loads_by_name_and_by_path(name):
    by_name = load_recipe(name)
    assert by_name == load_recipe(recipes_folder() / f"{name}.yaml")
    assert isinstance(by_name, Recipe)


def test_docs_of_recipes_are_up_to_date():
    from fewstep.distill.recipe_docs import page

    docs = recipes_folder().parent / "docs" / "recipes.md"
    assert docs.read_text() == page(), "run `make docs`"


def test_every_key_has_a_class_docstring_and_the_docs_name_it():
    from fewstep.distill.recipe_docs import page

    text = page()
    for key, _, owner in known_keys():
        assert owner.__doc__, owner
        assert f"`{'.'.join(key[1:]) or key[0]}`" in text
