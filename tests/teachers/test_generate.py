"""Batched, cached, prefix-sharing decoding against the plain forward of one row."""

import random
import weakref

import pytest
import torch
from tiny import VOCAB, WINDOW, tiny_model

from fewstep.teachers import batch as module
from fewstep.teachers.batch import prefill_prefix, shared_prefix
from fewstep.teachers.generate import generate, row_seed

EOS = list(range(0, VOCAB, 9))  # many, so that rows of one batch end at different steps
PREFIX = [5, 17, 99, 4, 31, 8]
KINDS = ["llama", "qwen2", "gpt_neox", "mistral"]


def prompts(prefix=(), seed=0, count=9, longest=13):
    rng = random.Random(seed)
    return [[*prefix, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest)))] for _ in range(count)]


def plain(model, prompt, max_new_tokens, eos=EOS):
    """Decode one row greedily with no cache, no batch and no padding: (ids, log-probs of each step [len, V])."""
    ids, steps = list(prompt), []
    with torch.no_grad():
        while len(steps) < max_new_tokens:
            logits = model(torch.tensor([ids])).logits[0, -1]
            steps.append(torch.log_softmax(logits, -1))
            ids.append(int(logits.argmax()))
            if ids[-1] in eos:
                break
    return ids[len(prompt) :], torch.stack(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_equals_plain_forward(kind):
    model = tiny_model(kind, dtype=torch.float64)
    rows = prompts(PREFIX)
    answers = generate(model, rows, max_new_tokens=24, eos_ids=EOS, prefix=PREFIX, top_logprobs=7, batch_size=4)
    lengths = set()
    for row, answer in zip(rows, answers):
        ids, logprobs = plain(model, row, 24)
        assert answer.ids == ids
        assert answer.finish_reason == ("stop" if ids[-1] in EOS else "length")
        top, top_ids = logprobs.topk(7, -1)
        assert answer.topk_ids == top_ids.tolist()
        assert (torch.tensor(answer.topk_logprobs) - top).abs().max() <= 1e-5  # stored as float32
        # the tail summed on its own, from the entries that were not kept
        tail = logprobs.exp().scatter(-1, top_ids, 0.0).sum(-1)
        assert (torch.tensor(answer.tail_mass, dtype=torch.float64) - tail).abs().max() <= 1e-9
        lengths.add(len(ids))
    assert len(lengths) > 2  # rows left their batches at different steps
    # some rows are longer than the window of "mistral", so that it is at work
    assert max(len(r) + len(a.ids) for r, a in zip(rows, answers)) > WINDOW


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_generate_logprobs_fp32_match_plain_forward(kind):
    model = tiny_model(kind)
    rows = prompts(PREFIX)
    answers = generate(model, rows, max_new_tokens=12, eos_ids=EOS, prefix=PREFIX, top_logprobs=16, batch_size=8)
    for row, answer in zip(rows, answers):
        ids, logprobs = plain(model, row, 12)
        assert answer.ids == ids
        kept = logprobs.gather(-1, torch.tensor(answer.topk_ids))
        assert (torch.tensor(answer.topk_logprobs) - kept).abs().max() <= 1e-5  # fp32 sums in another order
        mass = torch.tensor(answer.topk_logprobs).exp().sum(-1) + torch.tensor(answer.tail_mass)
        assert (mass - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_generate_batch_equals_alone_in_any_order(kind):
    model = tiny_model(kind, dtype=torch.float64)
    rows = prompts(count=7)
    alone = [generate(model, [row], max_new_tokens=20, eos_ids=EOS)[0].ids for row in rows]
    for batch_size in (2, 3, 16):
        order = random.Random(batch_size).sample(range(len(rows)), len(rows))
        answers = generate(model, [rows[i] for i in order], max_new_tokens=20, eos_ids=EOS, batch_size=batch_size)
        assert [a.ids for a in answers] == [alone[i] for i in order]


@pytest.mark.parametrize("kind", KINDS)
def test_generate_prefix_changes_nothing(kind):
    model = tiny_model(kind, dtype=torch.float64)
    rows = prompts(PREFIX)
    without = generate(model, rows, max_new_tokens=20, eos_ids=EOS, batch_size=4)
    ready = prefill_prefix(model, PREFIX)
    for prefix in (PREFIX, ready, ready, PREFIX[:2]):
        answers = generate(model, rows, max_new_tokens=20, eos_ids=EOS, batch_size=4, prefix=prefix)
        assert [a.ids for a in answers] == [a.ids for a in without]


def test_generate_computes_the_prefix_once_and_drops_finished_rows():
    model = tiny_model()
    seen = []
    handle = model.model.register_forward_pre_hook(
        lambda _m, _a, kw: seen.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    widths = []
    head = model.lm_head.register_forward_pre_hook(lambda _m, args: widths.append(args[0].shape[1]))
    rows = prompts(PREFIX, count=6)
    answers = generate(model, rows, max_new_tokens=20, eos_ids=EOS, prefix=PREFIX, batch_size=6)
    handle.remove()
    head.remove()
    assert set(widths) == {1}  # the head runs over last positions only
    longest = max(map(len, rows)) - len(PREFIX)
    alive = [sum(len(a.ids) > step for a in answers) for step in range(1, max(len(a.ids) for a in answers))]
    assert seen == [(1, len(PREFIX)), (6, longest), *[(count, 1) for count in alive]]
    assert alive[-1] < 6


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox"])
@pytest.mark.parametrize("prefix", [PREFIX, []], ids=["prefix", "none"])
def test_generate_fills_the_places_of_rows_that_ended(kind, prefix, monkeypatch):
    empty, joined, shifted, widths = torch.Tensor.new_empty, [], [], []
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    join, shift, step = module.Batch.join, module._Slab.shift, module.Batch.step
    monkeypatch.setattr(module.Batch, "join", lambda self, other: (joined.append(len(other.rows)), join(self, other)))
    monkeypatch.setattr(module._Slab, "shift", lambda self, own, n: (shifted.append(own), shift(self, own, n)))
    monkeypatch.setattr(module.Batch, "step", lambda self, m: (widths.append(len(self.rows)), step(self, m))[1])
    model = tiny_model(kind, dtype=torch.float64)
    rows = prompts(prefix, count=40)
    answers = generate(model, rows, max_new_tokens=20, eos_ids=EOS, prefix=prefix, top_logprobs=3, batch_size=8)
    for row, answer in zip(rows, answers):
        ids, logprobs = plain(model, row, 20)
        assert answer.ids == ids and answer.finish_reason == ("stop" if ids[-1] in EOS else "length")
        assert (torch.tensor(answer.topk_logprobs) - logprobs.topk(3, -1).values).abs().max() <= 1e-5
    assert sum(joined) >= 16 and shifted and max(widths) <= 8
    assert sum(widths) / len(widths) > 5  # of 8 places; five batches that each run down to one row have 3.5


@pytest.mark.parametrize("limit", [2, 12])
def test_generate_holds_a_batch_and_what_joins_it_and_no_more(limit, monkeypatch):
    alive, most = weakref.WeakSet(), []
    start = module._Slab.lazy_initialization

    def counted(self, *states):
        alive.add(self)
        most.append(len(alive))
        start(self, *states)

    monkeypatch.setattr(module._Slab, "lazy_initialization", counted)
    model = tiny_model()
    generate(model, prompts(count=40), max_new_tokens=limit, eos_ids=EOS if limit > 2 else [], batch_size=4)
    layers = len(model.model.layers)
    assert len(most) > 4 * layers and max(most) == (2 if limit > 2 else 1) * layers  # a slab a layer


def test_generate_counts_every_answer_once():
    model, counted = tiny_model(), []
    rows = prompts(count=30)
    answers = generate(model, rows, max_new_tokens=9, eos_ids=EOS, batch_size=4, on_batch=lambda *c: counted.append(c))
    assert [sum(c) for c in zip(*counted)] == [30, sum(len(a.ids) for a in answers)]


def test_generate_batches_prompts_of_like_length():
    model = tiny_model()
    seen = []
    model.model.register_forward_pre_hook(
        lambda _m, _a, kw: seen.append(tuple(kw["input_ids"].shape)), with_kwargs=True
    )
    done = []
    rows = [[5] * n for n in (2, 30, 3, 31)]
    generate(model, rows, max_new_tokens=1, eos_ids=[], batch_size=2, on_batch=lambda *counts: done.append(counts))
    assert seen == [(2, 31), (2, 3)] and done == [(2, 2), (2, 2)]


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_generate_sampled_rows_do_not_depend_on_batch_or_order(kind):
    model = tiny_model(kind, dtype=torch.float64)
    rows = prompts(PREFIX, count=7)
    seeds = [row_seed(3, f"row-{i}") for i in range(len(rows))]
    settings = dict(max_new_tokens=16, eos_ids=EOS, temperature=1.5)
    alone = [generate(model, [r], seeds=[s], **settings)[0].ids for r, s in zip(rows, seeds)]
    order = [4, 0, 6, 2, 5, 1, 3]
    together = generate(
        model, [rows[i] for i in order], seeds=[seeds[i] for i in order], prefix=PREFIX, batch_size=5, **settings
    )
    assert [a.ids for a in together] == [alone[i] for i in order]
    other = generate(model, rows, seeds=[s + 1 for s in seeds], **settings)
    assert [a.ids for a in other] != alone


def test_generate_draws_from_the_distribution():
    model = tiny_model(vocab=12, dtype=torch.float64)
    prompt, count = [3, 4, 5], 4000
    draws = generate(
        model, [prompt] * count, max_new_tokens=1, eos_ids=[], temperature=2.0, seeds=list(range(count)), batch_size=500
    )
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / 2.0, -1)
    found = torch.bincount(torch.tensor([a.ids[0] for a in draws]), minlength=12) / count
    # 5 standard deviations of a frequency over 4,000 draws are at most 5 * 0.5 / sqrt(4000) = 0.04
    assert (found - expected).abs().max() < 0.04


def test_generate_keeps_logprobs_at_temperature_one():
    model = tiny_model(dtype=torch.float64)
    cold = generate(model, [[5, 6, 7]], max_new_tokens=1, eos_ids=[], top_logprobs=5)[0]
    hot = generate(model, [[5, 6, 7]], max_new_tokens=1, eos_ids=[], top_logprobs=5, temperature=3.0, seeds=[1])[0]
    assert hot.topk_logprobs == cold.topk_logprobs and hot.tail_mass == cold.tail_mass


def test_generate_refuses_what_it_cannot_answer():
    model = tiny_model()
    with pytest.raises(ValueError, match="prefix"):
        generate(model, [[1, 2, 3], [9, 2, 3]], max_new_tokens=1, eos_ids=[], prefix=[1, 2])
    with pytest.raises(ValueError, match="prefix"):
        generate(model, [[1, 2]], max_new_tokens=1, eos_ids=[], prefix=[1, 2])
    with pytest.raises(ValueError, match="prefix"):
        generate(model, [[]], max_new_tokens=1, eos_ids=[])
    with pytest.raises(ValueError, match="seed"):
        generate(model, [[1]], max_new_tokens=1, eos_ids=[], temperature=1.0)


def test_generate_stops_exactly_at_max_new_tokens():
    model = tiny_model()
    answer = generate(model, [[5, 6, 7]], max_new_tokens=3, eos_ids=[])[0]
    assert len(answer.ids) == 3 and answer.finish_reason == "length"
    last = generate(model, [[5, 6, 7]], max_new_tokens=3, eos_ids=[answer.ids[2]])[0]
    if answer.ids[2] not in answer.ids[:2]:
        assert last.ids == answer.ids and last.finish_reason == "stop"


def test_shared_prefix_leaves_each_prompt_a_token():
    assert shared_prefix([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9]]) == [1, 2]
    assert shared_prefix([[1, 2], [1, 2, 3]]) == [1]
    assert shared_prefix([[1, 2, 3]]) == [1, 2]
    assert shared_prefix([[1], [2]]) == shared_prefix([]) == []


def test_compact_moves_only_into_holes():
    for seed in range(200):
        rng = random.Random(seed)
        size = rng.randint(1, 9)
        alive = sorted(rng.sample(range(size), rng.randint(1, size)))
        kept = module._compact(alive)
        assert sorted(kept) == alive and all(old >= new for new, old in enumerate(kept))
