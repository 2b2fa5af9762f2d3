"""`shifted`: the position before a token says it; the loss reads the same rows as the sampler."""

import numpy as np
import pytest
import torch

from fewstep.students.decoding import decode
from fewstep.students.decoding.forward import Forward
from fewstep.students.layout import body_hidden, build_batch
from tests.students.builders import EOS, MASK, student
from tests.students.test_decoding import prompts
from tests.students.test_layout import example


@pytest.mark.parametrize("attention", ["block", "block_causal_inside"])
def test_supervised_rows_say_what_blockwise_decoding_reads(attention):
    model = student(attention=attention, alignment="shifted")
    row = example(np.random.default_rng(3), 5, 10, 4, 2)
    batch = build_batch([row], MASK, attention, 0.1, alignment="shifted")
    with torch.no_grad():
        logits = model.get_output_embeddings()(body_hidden(model, batch, attention)[batch.rows[~batch.clean]])
    logits[:, MASK] = -torch.inf
    forward, length, pending, read = Forward(model, capacity=40), 0, row.prompt.tolist(), []
    for b in range(row.block[-1] + 1):
        where = np.flatnonzero(row.block == b)
        block = np.where(row.masks[0][where], MASK, row.noisy[where]).tolist()
        first = forward([length], [pending], [block], keep=len(block))[0]
        length += len(pending)
        again = forward([length], [[]], [block], keep=len(block))[0]  # a later step: no clean token runs
        assert torch.allclose(first, again, atol=1e-6)
        read.append(first[row.masks[0][where]])
        pending = row.noisy[where].tolist()
    assert torch.allclose(logits.float(), torch.cat(read), atol=1e-5)
    assert batch.labels[~batch.clean].tolist() == row.noisy[row.masks[0]].tolist()


def test_the_first_token_of_a_block_is_said_by_the_clean_stream():
    model = student(alignment="shifted", block_size=1)
    for prompt in prompts(5):
        common = dict(max_new_tokens=12, eos_token_ids=[EOS])
        by_ones = decode(model, [prompt], sampler="threshold", block_size=1, **common)[0]
        assert by_ones.ids == decode(model, [prompt], sampler="ar", **common)[0].ids


@pytest.mark.parametrize("sampler", ["threshold", "verify"])
def test_batch_equals_singles_and_verify_the_ar_text(sampler):
    model, batch = student(alignment="shifted"), prompts(7)
    common = dict(max_new_tokens=21, eos_token_ids=[EOS])
    together = [a.ids for a in decode(model, batch, sampler=sampler, **common)]
    assert together == [decode(model, [p], sampler=sampler, **common)[0].ids for p in batch]
    if sampler == "verify":
        assert together == [a.ids for a in decode(model, batch, sampler="ar", **common)]
