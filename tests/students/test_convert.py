"""A student is an ordinary checkpoint: mask token, facts, saving, and the decoding that travels with it."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from fewstep.students.config import StudentConfig
from fewstep.students.convert import DECODING, load_student, make_student, save_student
from fewstep.students.decoding import decode
from fewstep.students.decoding.gated import adapter_state
from fewstep.students.lora import apply_lora
from tests.tiny import tiny_model, tiny_tokenizer


def pair(extra_rows=0, kind="llama", tie=False):
    tokenizer = tiny_tokenizer()
    model = tiny_model(kind, vocab=len(tokenizer) + extra_rows, dtype=torch.float32)
    if tie:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model, tokenizer


def test_travelling_files_import_nothing_of_fewstep():
    for file in DECODING.glob("*.py"):
        assert "fewstep." not in file.read_text().replace("config.fewstep", ""), file.name


def published(kind, folder):
    """Save a student whose noisy blocks differ from the base's, and return it as it loads again."""
    model, tokenizer = pair()
    mask = make_student(model, tokenizer, StudentConfig(block_size=8), gated=kind == "gated", seed=0)["mask_token_id"]
    given = None
    if kind != "full":
        adapter = apply_lora(model, 4, 4.0, kind == "gated", mask)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_b" in name.lower():
                    p.normal_(std=0.1)
        if kind == "gated":
            given = {"rank": 4, "alpha": 4.0}
        else:
            adapter.merge(folder / "adapter")
    save_student(model, tokenizer, folder, given)
    for file in DECODING.glob("*.py"):
        assert (folder / "custom_generate" / file.name).read_bytes() == file.read_bytes()
    return load_student(folder)[0]


def test_published_folders_give_the_same_text_with_only_transformers(tmp_path):
    """Full weights, a gated adapter beside the base, and a merged one; rows of unequal length are padded on the left."""
    kinds, prompts, longest, pad = ("full", "gated", "lora"), [[10, 20, 30], [40, 50], [60, 70, 80, 90, 100]], 5, 0
    given = dict(max_new_tokens=12, eos_token_ids=[2])
    expected = {}
    for kind in kinds:
        ours = published(kind, tmp_path / kind)
        greedy = [a.ids for a in decode(ours, prompts, sampler="ar", **given)]
        fewstep = [decode(ours, [p], sampler="threshold", threshold=0.2, **given)[0].ids for p in prompts]
        drawn = decode(ours, prompts, sampler="verify", temperature=1.0, seed=[5, 6, 7], **given)
        expected[kind] = [greedy, fewstep, [a.ids for a in drawn]]
    assert expected["full"][0] == expected["gated"][0] != expected["lora"][0]
    assert len({str(texts[1]) for texts in expected.values()}) == 3
    code = f"""
import sys, json, torch
sys.modules["fewstep"] = None
from transformers import AutoModelForCausalLM
prompts = {prompts}
rows = [[{pad}] * ({longest} - len(p)) + p for p in prompts]
given = dict(input_ids=torch.tensor(rows), attention_mask=torch.tensor([[int(t != {pad}) for t in r] for r in rows]),
             max_new_tokens=12, eos_token_id=2, pad_token_id={pad})
for kind in {kinds}:
    folder = {str(tmp_path)!r} + "/" + kind
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    few = dict(custom_generate=folder, trust_remote_code=True)
    print(json.dumps([kind, [out[:, {longest}:].tolist() for out in (
        model.generate(**given, do_sample=False),
        model.generate(**given, **few, threshold=0.2),
        model.generate(**given, **few, sampler="verify", temperature=1.0, seed=5),
    )]]))
"""
    env = {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "PATH": "",
        "HF_HOME": str(tmp_path / "home"),
    }
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert out.returncode == 0, out.stderr[-2000:]
    said = dict(json.loads(line) for line in out.stdout.splitlines() if line.startswith("["))
    assert said.keys() == expected.keys()
    for kind, runs in expected.items():
        for texts, wanted in zip(said[kind], runs, strict=True):
            widest = max(map(len, texts))
            assert texts == [ids + [pad] * (widest - len(ids)) for ids in wanted]


def test_gated_base_is_saved_bit_equal_and_again_after_a_reload(tmp_path):
    model, tokenizer = pair()
    base = {k: v.clone() for k, v in model.state_dict().items()}
    make_student(model, tokenizer, StudentConfig(), gated=True, seed=0)
    apply_lora(model, 4, None, True, model.config.fewstep["mask_token_id"])
    with torch.no_grad():
        for parameter in adapter_state(model).values():
            parameter.normal_(std=0.1)
    trained = {name: value.clone() for name, value in adapter_state(model).items()}
    for folder in (tmp_path / "first", tmp_path / "second"):
        save_student(model, tokenizer, folder, {"rank": 4, "alpha": 4.0})
        again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert base.keys() == again.keys() and all(torch.equal(base[k], again[k]) for k in base)
        model, tokenizer = load_student(folder)
        kept = adapter_state(model)
        assert trained.keys() == kept.keys() and all(torch.equal(trained[k], kept[k]) for k in trained)


def test_merging_a_gated_adapter_is_refused_in_one_line_and_changes_nothing(tmp_path):
    model, tokenizer = pair()
    make_student(model, tokenizer, StudentConfig(), gated=True, seed=0)
    adapter = apply_lora(model, 4, None, True, model.config.fewstep["mask_token_id"])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="^a gated adapter of rank 4 cannot be merged: .*lora.gated: false$"):
        adapter.merge(tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
