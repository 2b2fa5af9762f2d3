"""A student is an ordinary checkpoint: mask token, facts, saving, and the decoding that travels with it."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewstep.errors import UserError
from fewstep.students.config import StudentConfig
from fewstep.students.convert import DECODING, load_student, make_student, save_student, unused_token
from fewstep.students.decoding import decode
from fewstep.students.lora import apply_lora
from tests.tiny import tiny_model, tiny_tokenizer


def pair(extra_rows=0, kind="llama", tie=False):
    tokenizer = tiny_tokenizer()
    model = tiny_model(kind, vocab=len(tokenizer) + extra_rows, dtype=torch.float32)
    if tie:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model, tokenizer


@pytest.mark.parametrize("tie", [True, False])
def test_new_mask_row_changes_no_other_row_and_no_logit(tie):
    model, tokenizer = pair(tie=tie)
    ids = torch.randint(3, 200, (2, 9))
    with torch.no_grad():
        before, rows = model(ids).logits, model.get_input_embeddings().weight.clone()
        facts = make_student(model, tokenizer, StudentConfig(), gated=False, seed=0)
        after = model(ids).logits
    assert facts["mask_token_id"] == len(tokenizer)
    assert torch.equal(after[..., : len(tokenizer)], before)
    assert torch.equal(model.get_input_embeddings().weight[: len(rows)], rows)
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer) + 1
    assert torch.isfinite(after).all()


def test_unused_row_is_preferred_and_nothing_is_resized():
    model, tokenizer = pair(extra_rows=5)
    assert unused_token(model, tokenizer) == len(tokenizer)
    make_student(model, tokenizer, StudentConfig(), gated=False, seed=0)
    assert model.config.fewstep["mask_token_id"] == len(tokenizer)
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) + 5


@pytest.mark.parametrize("mask", [2, 50, 10_000])
def test_mask_token_that_the_tokenizer_can_emit_is_refused(mask):
    model, tokenizer = pair(extra_rows=5)
    with pytest.raises(UserError, match=f"student.mask_token={mask}.*use auto"):
        make_student(model, tokenizer, StudentConfig(mask_token=mask), gated=False, seed=0)


def test_travelling_files_import_nothing_of_fewstep():
    for file in DECODING.glob("*.py"):
        assert "fewstep." not in file.read_text().replace("config.fewstep", ""), file.name


@pytest.mark.parametrize("gated", [False, True])
def test_published_folder_gives_the_same_text_with_only_transformers(tmp_path, gated):
    model, tokenizer = pair()
    make_student(model, tokenizer, StudentConfig(block_size=8), gated=gated, seed=0)
    lora = None
    if gated:
        lora = {"rank": 4, "alpha": 4.0}
        apply_lora(model, 4, 4.0, True, model.config.fewstep["mask_token_id"])
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("lora_b"):
                    p.normal_(std=0.1)
    save_student(model, tokenizer, tmp_path, lora)
    for file in DECODING.glob("*.py"):
        assert (tmp_path / "custom_generate" / file.name).read_bytes() == file.read_bytes()

    prompts = [[10, 20, 30], [40, 50, 60]]
    ours, _ = load_student(tmp_path)
    expected = [
        decode(ours, [p], sampler="threshold", threshold=0.2, max_new_tokens=12, eos_token_ids=[2])[0].ids
        for p in prompts
    ]
    plain = decode(ours, prompts, sampler="ar", max_new_tokens=12, eos_token_ids=[2])
    code = f"""
import sys, torch
sys.modules["fewstep"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).eval()
ids = torch.tensor({prompts})
print(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=2).tolist())
for p in {prompts}:
    print(model.generate(input_ids=torch.tensor([p]), custom_generate={str(tmp_path)!r}, trust_remote_code=True,
                         threshold=0.2, max_new_tokens=12, eos_token_id=2)[0, 3:].tolist())
"""
    env = {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "PATH": "",
        "HF_HOME": str(tmp_path / "home"),
    }
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert out.returncode == 0, out.stderr[-2000:]
    lines = [eval(line) for line in out.stdout.splitlines() if line.startswith("[")]
    for row, want in zip(lines[0], plain):
        assert row[3 : 3 + len(want.ids)] == want.ids
    assert lines[1:] == expected


def test_gated_base_is_saved_bit_equal(tmp_path):
    model, tokenizer = pair()
    base = {k: v.clone() for k, v in model.state_dict().items()}
    make_student(model, tokenizer, StudentConfig(), gated=True, seed=0)
    apply_lora(model, 4, None, True, model.config.fewstep["mask_token_id"])
    save_student(model, tokenizer, tmp_path, {"rank": 4, "alpha": 4.0})
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert base.keys() == again.keys() and all(torch.equal(base[k], again[k]) for k in base)


def test_prompt_of_a_new_mask_row_cannot_be_spelled():
    model, tokenizer = pair()
    make_student(model, tokenizer, StudentConfig(), gated=False, seed=0)
    mask = model.config.fewstep["mask_token_id"]
    assert mask not in tokenizer("<mask> [MASK] <|mask|> " + "".join(map(chr, range(32, 127))))["input_ids"]
