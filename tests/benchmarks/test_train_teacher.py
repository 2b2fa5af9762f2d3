"""The small teacher as shipped, and the parts of its training script that could go wrong quietly."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
TEACHER = ROOT / "recipes/quickstart/teacher"


@pytest.fixture(scope="module")
def script():
    lab = str(ROOT / "benchmarks/lab")
    sys.path.insert(0, lab)  # as when the script is run: it imports its neighbour
    try:
        spec = importlib.util.spec_from_file_location("lab_train_teacher", f"{lab}/train_teacher.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(lab)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TEACHER)


def test_teacher_answers_unseen_phrases_exactly(script, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    # 0.989 was measured on 1,000 rows: one miss in 12 can happen, two hardly.
    assert script.exact_match(model, tokenizer, script.TASKS["booking"], "eval", 12, seed=0) >= 11 / 12


def test_teacher_stays_small_and_stops_by_its_own_configuration(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TEACHER)
    assert model.dtype == torch.bfloat16
    assert sum(path.stat().st_size for path in TEACHER.iterdir()) < 10_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|eos|>")
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_teacher_results_are_of_the_shipped_weights(script):
    results = json.loads((ROOT / "benchmarks/results/quickstart_teacher.json").read_text())
    rows = {row["split"]: row for row in results["rows"]}
    assert rows["eval"]["n"] >= 200 and rows["eval"]["exact_match"] >= 0.98
    assert rows["eval"]["bytes"] == (TEACHER / "model.safetensors").stat().st_size
    assert f"{rows['eval']['exact_match']:.4f}" in (TEACHER / "README.md").read_text()


def test_tokenizer_keeps_digits_single_and_text_whole(script, tokenizer):
    for row in script.rows(script.TASKS["booking"], "eval", 50, 9):
        answer = row["response"]
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == answer
        assert len(ids) <= 70  # short answers keep the quickstart quick
        pieces = tokenizer.convert_ids_to_tokens(ids)
        assert all(len(piece) == 1 for piece in pieces if any(c.isdigit() for c in piece))
    assert tokenizer.decode(tokenizer("Zoë’s 1 €")["input_ids"]) == "Zoë’s 1 €"


def test_chat_template_marks_the_answer_and_its_end(tokenizer):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "{}"}] * 2
    out = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == "{}<|eos|>{}<|eos|>"
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>Hi<|assistant|>"
    with pytest.raises(Exception, match="user and assistant turns only, not system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_collate_supervises_the_response_and_one_eos(script, tokenizer):
    pairs = [script.encode(tokenizer, row) for row in script.rows(script.TASKS["booking"], "train", 6, 2)]
    ids, labels = script.collate(pairs, tokenizer.pad_token_id)
    for (prompt, answer), row, label in zip(pairs, ids.tolist(), labels.tolist(), strict=True):
        assert row[: len(prompt) + len(answer)] == prompt + answer
        assert [t for t in label if t != -100] == answer
        assert label[: len(prompt)] == [-100] * len(prompt)
        assert label.count(tokenizer.eos_token_id) == 1
        assert set(row[len(prompt) + len(answer) :]) <= {tokenizer.pad_token_id}
