"""The blocks of a BlockMask against the rule that it was made from, pair by pair."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fewstep.kernels.block_mask import BLOCK, block_mask, cases, dense_mask, path, serves

CPU = torch.device("cpu")


def rule(rows, length):
    """Return a rule with blocks of all three kinds: documents, most of them seen causally, the first of each row whole."""
    doc = (torch.arange(length) * 3 // length).expand(rows, -1)

    def sees(b, _head, q, k):
        return (doc[b, q] == doc[b, k]) & ((q >= k) | (doc[b, q] == 0))

    return sees


@pytest.mark.parametrize("rows, length", cases())
def test_a_block_is_left_out_where_nothing_is_seen_and_whole_where_all_is(rows, length):
    sees = rule(rows, length)
    made, dense = block_mask(sees, rows, length, CPU), dense_mask(sees, rows, length, CPU)
    kinds = set()
    for b in range(rows):
        for i in range(-(-length // BLOCK)):
            part = made.kv_indices[b, 0, i, : made.kv_num_blocks[b, 0, i]].tolist()
            full = made.full_kv_indices[b, 0, i, : made.full_kv_num_blocks[b, 0, i]].tolist()
            for j in range(-(-length // BLOCK)):
                seen = dense[b, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                kind = "full" if j in full else "part" if j in part else "none"
                kinds.add(kind)
                assert {"full": bool(seen.all()), "part": bool(seen.any()), "none": not seen.any()}[kind], (b, i, j)
                assert kind != "full" or seen.shape == (BLOCK, BLOCK)
    assert made.shape == (rows, 1, length, length)
    assert length < 400 or kinds == {"full", "part", "none"}


def test_the_dense_mask_is_the_rule_of_every_pair():
    dense = dense_mask(rule(2, 9), 2, 9, CPU)
    sees = rule(2, 9)
    assert [[[bool(sees(b, 0, q, k)) for k in range(9)] for q in range(9)] for b in range(2)] == dense.tolist()


def test_where_it_serves():
    def model(width, kind=LlamaForCausalLM):
        settings = {"vocab_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2}
        if kind is GPT2LMHeadModel:
            return kind(GPT2Config(vocab_size=9, n_layer=1, n_head=2, n_embd=2 * width))
        return kind(LlamaConfig(hidden_size=2 * width, intermediate_size=8, **settings))

    cuda = torch.device("cuda")
    assert path("cuda") == "flex_attention" and serves(model(16), cuda)
    assert path("cpu") == "dense: flex_attention has no backward pass on cpu" and not serves(model(16), CPU)
    assert not serves(model(8), cuda)  # no kernel for heads so narrow
    assert not serves(model(16, GPT2LMHeadModel), cuda)
