"""The training layout against its written predicate, brute force and cached decoding."""

import numpy as np
import pytest
import torch

from fewstep.students.decoding.forward import Forward
from fewstep.students.decoding.gated import GatedLinear, apply_gated
from fewstep.students.layout import CLEAN, Example, allowed, block_index, body_hidden, build_batch, filled_length
from tests.students.builders import FAMILIES, MASK, VOCAB, student


def example(rng, prompt, response, block_size, first, copies=1, finished=True):
    n = filled_length(response, block_size, first) if finished else response
    tokens = rng.integers(3, 38, prompt + response)
    noisy = np.concatenate([tokens[prompt:], np.full(n - response, 1)])
    masks = rng.random((copies, n)) < 0.5
    block = block_index(n, block_size, first)
    for m in masks:
        for b in range(block[-1] + 1):
            m[np.flatnonzero(block == b)[0]] = True
    return Example(tokens[:prompt], tokens[prompt:], noisy, block, masks)


def brute_force(batch, attention):
    """The specification's predicate, written out pair by pair."""
    B, Q = batch.ids.shape
    out = torch.zeros(B, Q, Q, dtype=torch.bool)
    for b in range(B):
        for q in range(Q):
            if not batch.valid[b, q]:
                out[b, q, q] = True
                continue
            for k in range(Q):
                if not batch.valid[b, k] or (batch.doc is not None and batch.doc[b, q] != batch.doc[b, k]):
                    continue
                q_clean, k_clean = batch.seg[b, q] == CLEAN, batch.seg[b, k] == CLEAN
                if attention == "bidirectional":
                    out[b, q, k] = True
                elif q_clean:
                    out[b, q, k] = bool(k_clean and batch.pos[b, k] <= batch.pos[b, q])
                elif k_clean:
                    out[b, q, k] = bool(batch.pos[b, k] < batch.start[b, q])
                else:
                    same = batch.seg[b, k] == batch.seg[b, q] and batch.block[b, k] == batch.block[b, q]
                    inside = attention == "block" or batch.pos[b, k] <= batch.pos[b, q]
                    out[b, q, k] = bool(same and inside)
    return out


@pytest.mark.parametrize("attention", ["block", "block_causal_inside", "bidirectional"])
@pytest.mark.parametrize("block_size", [1, 3, 8, 32])
def test_allowed_equals_the_predicate(attention, block_size):
    rng = np.random.default_rng(block_size)
    copies = 1 if attention == "bidirectional" else 2
    rows = [example(rng, p, r, block_size, f, copies) for p, r, f in ((3, 5, 1), (6, 12, block_size))]
    batch = build_batch(rows, MASK, attention, 0.1)
    assert torch.equal(allowed(batch, attention), brute_force(batch, attention))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_clean_rows_equal_the_plain_forward(family):
    model = student(family)
    rng = np.random.default_rng(1)
    rows = [example(rng, 5, 7, 4, 1), example(rng, 9, 12, 4, 4)]
    batch = build_batch(rows, MASK, "block", 0.1)
    with torch.no_grad():
        hidden = body_hidden(model, batch, "block").unflatten(0, batch.ids.shape)
        for b, row in enumerate(rows):
            ids = torch.from_numpy(np.concatenate([row.prompt, row.response]))[None]
            plain = model.base_model(input_ids=ids).last_hidden_state
            assert torch.allclose(hidden[b, : ids.shape[1]], plain[0], atol=1e-10)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("attention", ["block", "block_causal_inside", "bidirectional"])
@torch.no_grad()
def test_rows_of_unequal_length_have_the_logits_of_themselves_alone(family, attention):
    model = student(family, attention, dtype=torch.float32)
    head = model.get_output_embeddings()
    rng = np.random.default_rng(2)
    rows = [example(rng, 5, 5, 4, 2), example(rng, 9, 12, 4, 4)]
    together = build_batch(rows, MASK, attention, 0.1)
    C = together.ids.shape[1] - together.num_noisy
    logits = head(body_hidden(model, together, attention)).unflatten(0, together.ids.shape)
    for b, row in enumerate(rows):
        single = head(body_hidden(model, build_batch([row], MASK, attention, 0.1), attention))
        clean, noisy = len(single) - len(row.noisy), len(row.noisy)
        beside = torch.cat([logits[b, :clean], logits[b, C : C + noisy]])
        assert clean > 0 and float((beside - single).abs().amax() / single.abs().amax()) <= 1e-6


def gated_student(family, attention):
    """Return (a student whose gated adapter has random updates, its mask token)."""
    model = student(family, attention)
    model.config.fewstep |= {"adapter": "gated", "mask_token_id": VOCAB}
    names = apply_gated(model, 4, 4.0, VOCAB)
    assert len(names) >= 4 * model.config.num_hidden_layers  # attention at least; experts are no linear layers
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_b", "mask_vector")):
            torch.nn.init.normal_(parameter, std=0.2)
    return model, VOCAB


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.no_grad()
def test_gated_adapter_moves_noisy_rows_and_no_clean_one(family):
    base = student(family)
    model, _ = gated_student(family, "block")
    batch = build_batch([example(np.random.default_rng(6), 5, 10, 4, 2)], 3, "block", 0.1)
    before, after = body_hidden(base, batch, "block"), body_hidden(model, batch, "block")
    clean = batch.seg.flatten() == CLEAN
    assert torch.equal(after[clean], before[clean])
    assert (after[~clean] - before[~clean]).abs().amax(-1).min() > 1e-3
    for module in model.modules():  # each of them, not only some
        if isinstance(module, GatedLinear):
            kept = module.scale
            module.scale = 0.0
            assert not torch.equal(body_hidden(model, batch, "block"), after)
            module.scale = kept


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("attention", ["block", "block_causal_inside"])
@pytest.mark.parametrize("gated", [False, True])
def test_training_layout_equals_blockwise_cached_inference(family, attention, gated):
    """The central equality: what the loss sees is what the sampler sees."""
    model, mask = gated_student(family, attention) if gated else (student(family, attention), MASK)
    row = example(np.random.default_rng(3), 5, 10, 4, 2)
    batch = build_batch([row], mask, attention, 0.1)
    with torch.no_grad():
        hidden = body_hidden(model, batch, attention)
        trained = model.get_output_embeddings()(hidden)[15:].float()
        cap = getattr(model.config, "final_logit_softcapping", None)
        trained = cap * torch.tanh(trained / cap) if cap else trained
    if not gated:  # whose mask token has no row
        trained[:, mask] = -torch.inf
    forward = Forward(model, capacity=40)
    length, pending = 0, row.prompt.tolist()
    for b in range(row.block[-1] + 1):
        where = np.flatnonzero(row.block == b)
        block = np.where(row.masks[0][where], mask, row.noisy[where]).tolist()
        logits = forward([length], [pending], [block], keep=len(block))[0]
        assert torch.allclose(logits, trained[where], atol=1e-5)  # logits are compared in fp32
        length += len(pending)
        pending = row.noisy[where].tolist()


def test_supervised_rows_name_their_labels_and_exactly_one_first_eos():
    rng = np.random.default_rng(4)
    row = example(rng, 4, 6, 4, 3)
    row.response[-1] = row.noisy[5] = 1
    row.masks[:] = True
    batch = build_batch([row], MASK, "block", 0.1)
    noisy = ~batch.clean
    assert batch.labels[batch.clean].tolist() == row.response.tolist()
    assert batch.labels[noisy].tolist() == row.noisy.tolist()
    first_eos = noisy & (batch.labels == 1) & (batch.weight == 1)
    assert int(first_eos.sum()) == 1
    assert int((noisy & (batch.weight == 0.1)).sum()) == 1  # 6 tokens, blocks of 3 + 4: one position of fill
    flat = batch.ids.flatten()
    assert (flat[batch.rows[noisy]] == MASK).all()


def test_eligible_rows_have_no_visible_token_to_their_right():
    rng = np.random.default_rng(5)
    row = example(rng, 3, 8, 4, 4)
    row.masks[0] = [True, False, True, True, True, True, True, True]
    batch = build_batch([row], MASK, "block", 0.1)
    assert batch.eligible[~batch.clean].tolist() == [False, True, True, True, True, True, True]
