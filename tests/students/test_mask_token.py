"""The mask token's row, and nothing beside it: chosen, trained with an adapter, merged, saved and loaded again."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fewstep.errors import UserError
from fewstep.students.config import StudentConfig
from fewstep.students.convert import load_student, make_student, save_student, unused_token
from fewstep.students.lora import apply_lora
from tests.students.test_convert import pair
from tests.tiny import tiny_model, tiny_tokenizer

LOADS = {"student": lambda folder: load_student(folder)[0], "transformers": AutoModelForCausalLM.from_pretrained}


def rows_of(model):
    return model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()


@torch.no_grad()
def logits_of(model, ids):
    return model(ids).logits


def train_one_step(model, ids, mask):
    """Take one step on whatever is trainable, with the mask token among the inputs."""
    noisy = ids.clone()
    noisy[:, ::2] = mask
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.05)
    torch.nn.functional.cross_entropy(model(noisy).logits.flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_no_other_row_changes_and_logits_survive_merge_save_and_reload(tmp_path, tie, spare, lora):
    model, tokenizer = pair(extra_rows=spare, tie=tie)
    ids = torch.randint(3, len(tokenizer), (2, 9), generator=torch.Generator().manual_seed(0))
    before, old = logits_of(model, ids), [rows.clone() for rows in rows_of(model)]
    width = len(old[0])
    mask = make_student(model, tokenizer, StudentConfig(), gated=False, seed=0)["mask_token_id"]
    assert mask == len(tokenizer) and len(rows_of(model)[0]) == len(rows_of(model)[1]) == max(width, mask + 1)
    others = [i for i in range(width) if i != mask]
    assert torch.equal(logits_of(model, ids)[..., :width], before)  # every old row, spare ones too, bit for bit
    untrained = [rows.clone() for rows in rows_of(model)]
    with_mask = torch.cat([ids, ids.new_tensor([[mask], [mask]])], 1)
    folder = tmp_path / "student"
    if lora:
        adapter = apply_lora(model, 4, None, False, mask)
        train_one_step(model, ids, mask)
        apart = logits_of(model, with_mask)
        adapter.merge(folder / "adapter")
        assert not torch.equal(rows_of(model)[0][mask], untrained[0][mask])
    final = logits_of(model, with_mask)
    if lora:  # W + BA is rounded once when it is merged, W·x and BA·x apart before: fp32, two layers
        assert float((final - apart)[..., others].abs().amax() / apart.abs().amax()) < 1e-5
        assert float((final[:, :-1, :width] - before)[..., others].abs().amax()) > 1e-2  # and it had learned
    save_student(model, tokenizer, folder)
    for name, load in LOADS.items():
        again = load(folder)
        assert torch.equal(logits_of(again, with_mask), final), name
        for rows, kept, fresh in zip(rows_of(again), old, untrained):
            assert torch.equal(rows[others], kept[others])
            assert len(rows) == len(fresh) and (lora or torch.equal(rows, fresh))
        assert (rows_of(again)[0].data_ptr() == rows_of(again)[1].data_ptr()) == tie
        assert torch.isfinite(rows_of(again)[0]).all()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file() == lora
    assert not (folder / "adapter_config.json").exists()  # or transformers would put the adapter on top again


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


def named_tokenizer():
    """Return a tokenizer that gives a name to one row nobody uses: it encodes to that row's id."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>"]})
    return tokenizer


@pytest.mark.parametrize("spare", [0, 3])
def test_a_row_with_a_name_in_the_tokenizer_is_never_the_mask_token(tmp_path, spare):
    """A prompt that spells the name would put the mask token into the clean stream."""
    tokenizer = named_tokenizer()
    named = tokenizer.convert_tokens_to_ids("<|reserved_0|>")
    assert tokenizer("a<|reserved_0|>b")["input_ids"][1] == named == len(tokenizer) - 1
    model = tiny_model(vocab=len(tokenizer) + spare)
    assert unused_token(model, tokenizer) == (named + 1 if spare else None)
    with pytest.raises(UserError, match=f"student.mask_token={named}.*use auto"):
        make_student(model, tokenizer, StudentConfig(mask_token=named), gated=False, seed=0)
    mask = make_student(model, tokenizer, StudentConfig(), gated=False, seed=0)["mask_token_id"]
    assert mask == named + 1
    save_student(model, tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("<|reserved_0|>", "<|reserved_1|>", "<mask>", "[MASK]", "<|mask|>", "".join(map(chr, range(32, 127)))):
        assert mask not in again(text)["input_ids"]
        assert mask not in again.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
