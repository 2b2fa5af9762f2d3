"""Whatever is wrong with a request is said before any work: exit 2, one line, nothing written."""

import json
from pathlib import Path

import pytest

from fewstep.distill import checks
from fewstep.distill.cli import _exit_code
from fewstep.runstore import require_disk


def everything_under(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def refused(capsys, tmp_path: Path, *arguments: str) -> str:
    """Run the command line; return its one line after checking the exit code and that no file changed."""
    before = everything_under(tmp_path)
    capsys.readouterr()
    code = _exit_code(list(arguments))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("fewstep: error: ") and "Traceback" not in err
    assert everything_under(tmp_path) == before
    return err


def edit_config(recipe_file: Path, **changes) -> None:
    file = recipe_file.parent / "teacher" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("adapt.learning_rat=1", ["adapt.learning_rat", "adapt.learning_rate"]),
        ("adapt.max_steps=many", ["adapt.max_steps", "'many'", "integer"]),
        ("prompts.path=none.jsonl", ["none.jsonl", "cannot be read"]),
        ("eval.tasks.0.path=none.jsonl", ["eval.tasks.0 (booking)", "none.jsonl", "cannot be read"]),
        ("targets.few_shot=none.jsonl", ["none.jsonl", "cannot be read"]),
        ("targets.keep.json_schema=none.json", ["targets.keep.json_schema", "none.json"]),
        ("targets.keep.regex='['", ["targets.keep.regex", "no regular expression"]),
        ("targets.keep.correct=true", ["targets.keep.correct", "set prompts.checker"]),
        ("teacher.model=./nowhere", ["teacher.model", "no such folder"]),
        ("teacher.model=nowhere.gguf", ["teacher.model", "nowhere.gguf"]),
        ("teacher.model=package://no_such_module/x.gguf", ["teacher.model", "no_such_module"]),
        ("teacher.model=https://host/v1", ["student.base is missing", "a teacher behind a server has no weights"]),
        ("prompts.field=question", ["line 1", "no field `question`"]),
        ("prompts.checker=boking", ["prompts.checker", "did you mean booking?"]),
        ("eval.tasks=[]", ["eval.tasks is empty", "name at least one"]),
        ("eval.tasks.0.name=bookin", ["eval.tasks.0.name", "did you mean booking?"]),
        ("adapt.objectives={cee: 1.0}", ["adapt.objectives", "'cee'", "did you mean ce?"]),
        ("targets.max_new_tokens=1025", ["line 1", "context of 1024", "lower targets.max_new_tokens"]),
    ],
)
def test_wrong_value_is_refused(recipe_file, tmp_path, capsys, monkeypatch, command, override, parts):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(checks._Tokenizer, "count", lambda self, messages, most, tools=None: 10)
    message = refused(capsys, tmp_path, command, str(recipe_file), override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"instruction": "a"}\n{"instruction": \n', ["prompts.jsonl, line 2", "not JSON"]),
        ('{"instruction": "a"}\n\n["b"]\n', ["prompts.jsonl, line 3", "JSON object"]),
        ('{"instruction": "a"}\n{"instruction": "  "}\n', ["prompts.jsonl, line 2", "empty"]),
        ("\n\n", ["prompts.jsonl", "no prompts"]),
    ],
)
def test_broken_prompts_are_refused_by_line(recipe_file, tmp_path, capsys, content, parts):
    (recipe_file.parent / "prompts.jsonl").write_text(content)
    message = refused(capsys, tmp_path, "run", str(recipe_file))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM is not a decoder-only"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "model_type": "t5"},
            "not a decoder-only",
        ),
        ({"model_type": "nosuchfamily"}, "no code for model_type"),
    ],
)
def test_teacher_that_is_no_decoder_is_refused(recipe_file, tmp_path, capsys, command, changes, part):
    edit_config(recipe_file, **changes)
    assert part in refused(capsys, tmp_path, command, str(recipe_file))


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("model_type", "sizes", "reason"),
    [
        ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "ALiBi"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "cannot become a student"),
        ("mamba", {"num_hidden_layers": 2}, "recurrent"),
        ("qwen3_next", {"num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8}, "linear attention"),
    ],
)  # fmt: skip
def test_teacher_whose_layers_are_not_plain_attention_is_refused_with_the_reason(
    recipe_file, tmp_path, capsys, command, model_type, sizes, reason
):
    file = recipe_file.parent / "teacher" / "config.json"
    names = {"mpt": "MptForCausalLM", "bloom": "BloomForCausalLM", "mamba": "MambaForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}  # fmt: skip
    shape = {"vocab_size": 512, "hidden_size": 64, "max_position_embeddings": 1024}
    file.write_text(json.dumps({"model_type": model_type, "architectures": [names[model_type]], **shape, **sizes}))
    message = refused(capsys, tmp_path, command, str(recipe_file))
    assert "teacher.model" in message and "cannot become a student" in message and reason in message


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize("positions", [40, 32])
def test_learned_positions_too_few_for_prompt_and_answer_are_refused(
    recipe_file, tmp_path, capsys, monkeypatch, command, positions
):
    monkeypatch.setattr(checks._Tokenizer, "count", lambda self, messages, most, tools=None: 9)
    write_gpt2(recipe_file, positions)
    message = refused(capsys, tmp_path, command, str(recipe_file))
    assert f"prompts.jsonl, line 1: 9 tokens with what the teacher sees before it, and an answer of up to 32, exceed the teacher's context of {positions}" in message  # fmt: skip


@pytest.mark.parametrize("positions", [41, 1024])
def test_learned_positions_that_suffice_are_taken(recipe_file, monkeypatch, capsys, positions):
    monkeypatch.setattr(checks._Tokenizer, "count", lambda self, messages, most, tools=None: 9)
    write_gpt2(recipe_file, positions)
    assert _exit_code(["plan", str(recipe_file)]) == 0
    assert f"context {positions}" in capsys.readouterr().out


def write_gpt2(recipe_file: Path, positions: int) -> None:
    """Make the teacher a GPT-2, whose context is the length of its table of positions."""
    shape = {"vocab_size": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": positions}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **shape}
    (recipe_file.parent / "teacher" / "config.json").write_text(json.dumps(config))


def test_base_with_another_vocabulary_is_refused_naming_both_sizes(recipe_file, tmp_path, capsys):
    base = recipe_file.parent / "base"
    base.mkdir()
    config = json.loads((recipe_file.parent / "teacher" / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": 777}))
    message = refused(capsys, tmp_path, "run", str(recipe_file), f"student.base={base}")
    assert "777" in message and "512" in message


def test_prompt_longer_than_the_context_is_refused_by_line(recipe_file, tmp_path, capsys):
    """The teacher's own tokenizer decides: 1200 bytes may be 300 tokens, which fit, or 1200, which do not."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "aaa": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(recipe_file.parent / "teacher")
    prompts = recipe_file.parent / "prompts.jsonl"
    prompts.write_text('{"instruction": "a"}\n' + json.dumps({"instruction": "aaa " * 300}))
    assert _exit_code(["plan", str(recipe_file)]) == 0  # 300 tokens
    prompts.write_text('{"instruction": "a"}\n' + json.dumps({"instruction": "aaa " * 993}))
    message = refused(capsys, tmp_path, "run", str(recipe_file))
    assert "prompts.jsonl, line 2: 993 tokens" in message and "up to 32" in message and "context of 1024" in message
    prompts.write_text(json.dumps({"instruction": "aaa " * 992}))  # exactly full
    assert _exit_code(["plan", str(recipe_file)]) == 0


def test_no_room_on_the_disk_is_refused_before_the_work(recipe_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checks, "require_disk", lambda path, need, what: require_disk(path, need + 2**60, what))
    message = refused(capsys, tmp_path, "run", str(recipe_file))
    assert "tiny (targets, adapt, distill, eval, report) needs" in message and "are free" in message


def test_runs_that_is_a_file_is_refused(recipe_file, tmp_path, capsys):
    assert "is a file" in refused(capsys, tmp_path, "run", str(recipe_file), "--runs", str(recipe_file))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["run"], "missing argument 'recipe'"),
        (["plan", "x", "--foo"], "no such option: --foo"),
        (["run", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["init", "a/b"], "must be letters"),
        (["generate", "nowhere", "hi"], "no config.json there"),
        (["generate", "nowhere", "hi", "--steps", "x"], "--steps"),
    ],
)
def test_wrong_command_line_is_refused(recipe_file, tmp_path, capsys, arguments, part):
    assert part in refused(capsys, tmp_path, *arguments).lower()
