"""Packed rows against padded ones: the predicate, the places, and what the supervised rows hold."""

import itertools
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from fewstep.students.attention import attention_of
from fewstep.students.decoding.forward import Forward
from fewstep.students.layout import CLEAN, allowed, attention_masks, body_hidden, build_batch
from fewstep.students.packing import fill
from tests.students.builders import FAMILIES, MASK, student
from tests.students.test_layout import brute_force, example, gated_student

ATTENTION = ["block", "block_causal_inside", "bidirectional"]
ROW_TOKENS = 90  # of the five examples below: rows of unequal length, the longest of three examples
SHAPES = ((3, 5, 1), (9, 12, 4), (6, 7, 3), (4, 1, 4), (12, 17, 2))  # prompt, response, first block


def examples(attention, block_size=4):
    rng = np.random.default_rng(0)
    copies = 1 if attention == "bidirectional" else 2
    rows = [example(rng, *shape, copies=copies) for shape in ((p, r, block_size, f) for p, r, f in SHAPES)]
    for row in rows:
        row.later = row.masks & (rng.random(row.masks.shape) < 0.5)
    return rows


def both(attention, mask=MASK, **keys):
    """Return the same examples packed and padded."""
    rows = examples(attention)
    tokens = ROW_TOKENS if attention != "bidirectional" else ROW_TOKENS // 2
    packed, padded = (build_batch(rows, mask, attention, 0.1, row_tokens=t, **keys) for t in (tokens, None))
    assert 1 < len(packed.ids) < len(padded.ids) and packed.doc.max() >= 1 and not packed.valid.all()
    return packed, padded


@pytest.mark.parametrize("attention", ATTENTION)
def test_allowed_equals_the_predicate_and_no_example_sees_another(attention):
    packed, _ = both(attention)
    allow = allowed(packed, attention)
    assert torch.equal(allow, brute_force(packed, attention))
    assert not (allow & (packed.doc[:, :, None] != packed.doc[:, None, :])).any()


@pytest.mark.parametrize("attention", ATTENTION)
def test_each_example_stands_whole_in_one_row_behind_the_clean_streams(attention):
    rows = examples(attention)
    packed, _ = both(attention)
    found = []
    for b in range(len(packed.ids)):
        for doc in range(int(packed.doc[b].max()) + 1):
            own = packed.valid[b] & (packed.doc[b] == doc)
            clean = own & (packed.seg[b] == CLEAN)
            copies = [own & (packed.seg[b] == m) for m in range(len(rows[0].masks))]
            assert int(clean.nonzero().max()) < len(clean) - packed.num_noisy <= int(copies[0].nonzero().min())
            assert packed.pos[b, clean].tolist() == list(range(int(clean.sum())))  # positions restart
            found.append([packed.ids[b, clean].tolist(), *(packed.ids[b, c].tolist() for c in copies)])
    wanted = []
    for row in rows:
        clean = row.prompt if attention == "bidirectional" else np.concatenate([row.prompt, row.response])
        wanted.append([clean.tolist(), *(np.where(m, MASK, row.noisy).tolist() for m in row.masks)])
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    "attention, alignment", [*((a, "same_position") for a in ATTENTION), *((a, "shifted") for a in ATTENTION[:2])]
)
def test_supervised_rows_are_the_same(attention, alignment):
    packed, padded = both(attention, alignment=alignment)
    elsewhere = {"ids", "later_ids", "pos", "seg", "block", "start", "valid", "num_noisy", "rows", "doc"}
    for name in {f.name for f in fields(packed)} - elsewhere:
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name
    for name in ("ids", "later_ids", "pos", "seg", "block", "start"):
        ours, theirs = (getattr(batch, name).flatten()[batch.rows] for batch in (packed, padded))
        assert torch.equal(ours, theirs), name


@pytest.fixture
def softmax_in_fp64(monkeypatch):
    """Eager attention casts its softmax to fp32, whose rounding hangs on the width of a row: here it stays in fp64."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.no_grad()
def test_supervised_rows_have_the_hidden_states_of_padded_ones(family, attention, softmax_in_fp64):
    model = student(family, attention)
    ours, theirs = (body_hidden(model, batch, attention)[batch.rows] for batch in both(attention))
    assert float((ours - theirs).abs().max()) <= 1e-10  # fp64 sums over rows of another width


@pytest.mark.parametrize("attention", ["block", "block_causal_inside"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@torch.no_grad()
def test_gated_adapters_gate_the_noisy_copies_of_all(family, attention, softmax_in_fp64):
    model, mask = gated_student(family, attention)
    packed, padded = both(attention, mask)
    ours, theirs = (body_hidden(model, batch, attention)[batch.rows] for batch in (packed, padded))
    assert float((ours - theirs).abs().max()) <= 1e-10


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", [f for f in sorted(FAMILIES) if f != "gpt2"])
@torch.no_grad()
def test_flex_attention_has_the_hidden_states_of_the_dense_mask(family, attention):
    model = student(family, attention).float()  # flex_attention knows no fp64
    packed, _ = both(attention, multiple=16)
    assert packed.ids.shape[1] % 16 == 0
    dense = body_hidden(model, packed, attention)[packed.rows]
    before = model.config._attn_implementation
    with attention_of(model, "flex_attention"), torch.compiler.set_stance("force_eager"):
        masks = attention_masks(model, packed, attention)
        flex = body_hidden(model, packed, attention)[packed.rows]
    assert all(isinstance(mask, BlockMask) for mask in (masks.values() if isinstance(masks, dict) else [masks]))
    assert float((flex - dense).abs().max()) <= 1e-5 and model.config._attn_implementation == before
    with pytest.raises(ValueError, match="flex_attention"), attention_of(model, "flex_attention"):
        Forward(model, capacity=8)  # decoding has masks of its own


def test_fill_keeps_to_the_budget_and_near_the_fewest_rows():
    def fits(rows, lengths):
        return all(len(row) == 1 or sum(lengths[i] for i in row) <= 12 for row in rows)

    rng = np.random.default_rng(0)
    drawn = (rng.integers(1, 14, int(rng.integers(1, 6))).tolist() for _ in range(40))
    for lengths in ([3, 3, 9, 9], *drawn):
        n, rows = len(lengths), fill(lengths, 12)
        assert sorted(i for row in rows for i in row) == list(range(n)) and fits(rows, lengths)
        choices = (
            [[i for i in range(n) if of[i] == b] for b in set(of)] for of in itertools.product(range(n), repeat=n)
        )
        assert len(rows) == min(len(choice) for choice in choices if fits(choice, lengths))  # of so few, the fewest


def test_an_example_longer_than_a_row_may_be_has_one_of_its_own():
    rows = examples("block")
    batch = build_batch(rows, MASK, "block", 0.1, row_tokens=1)
    assert len(batch.ids) == len(rows) and not batch.doc.any()
