"""What every sampler owes each row: its own settings, its budget, its EOS, its stop strings."""

import importlib
import math
import random

import pytest
import torch

from fewstep.students.decoding import decode
from fewstep.students.decoding.decode import BLOCKWISE, SAMPLERS
from fewstep.students.decoding.stops import stop_at
from tests.students.builders import EOS, MASK, student

decode_file = importlib.import_module("fewstep.students.decoding.decode")  # the package's `decode` is the function


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_settings_and_draws_may_differ_by_row(sampler):
    model, rng = student(), random.Random(sampler)
    prompts = [[5, 6, 7]] * 4
    own = [drawn_settings(sampler, rng) for _ in prompts]
    given = {name: [one[name] for one in own] for name in own[0]}
    given |= dict(max_new_tokens=[9, 20, 20, 13], temperature=[0.0, 1.0, 0.0, 1.0], top_p=[1.0, 0.5, 1.0, 1.0], seed=[0, 1, 2, 3])  # fmt: skip
    together = decode(model, prompts, sampler=sampler, eos_token_ids=[EOS], **given)
    for i, answer in enumerate(together):
        row = {name: values[i] for name, values in given.items()}
        alone = decode(model, [prompts[i]], sampler=sampler, eos_token_ids=[EOS], **row)[0]
        assert (alone.ids, alone.nfe, alone.steps) == (answer.ids, answer.nfe, answer.steps)
    assert [len(a.ids) for a in together] != [20] * 4 and len({tuple(a.ids) for a in together}) >= 3
    name = next(iter(own[0]), "seed")
    with pytest.raises(ValueError, match=f"{name} has 3 values for 4 prompts"):
        decode(model, prompts, sampler=sampler, max_new_tokens=4, eos_token_ids=[], **{name: given[name][:3]})


class _Scripted:
    """Stand in for `Forward`: each position of the answer has its token and its confidence, whatever the block holds."""

    attention, mask_token_id, head, device = "block", MASK, None, torch.device("cpu")

    def __init__(self, model, capacity):
        self.cache, self.prompt = None, 3

    def __call__(self, starts, clean, noisy, keep):
        first = starts[0] + len(clean[0]) - self.prompt
        logits = torch.zeros(1, keep, MASK + 1)
        for i in range(len(noisy[0])):
            token, confidence = self.script[first + i]
            logits[0, keep - len(noisy[0]) + i, token] = math.log(confidence / (1 - confidence) * MASK)
        logits[..., MASK] = -torch.inf
        return logits


def test_an_eos_inside_a_block_waits_for_what_is_before_it_and_cuts_what_is_after_it(monkeypatch):
    def run(script, **settings):
        made = type("Scripted", (_Scripted,), {"script": script})
        monkeypatch.setattr(decode_file, "Forward", made)
        return decode(student(block_size=5), [[5, 6, 7]], max_new_tokens=10, eos_token_ids=[EOS], **settings)[0]

    late = [(10, 0.5), (11, 0.6), (EOS, 0.99), (12, 0.98), (13, 0.7)] * 2
    answer = run(late, sampler="threshold", threshold=0.9)
    assert answer.ids == [10, 11, EOS] and answer.finish_reason == "stop"
    assert answer.steps == [2, 1, 0] and answer.nfe == 3  # 12 was decided in the first forward, 13 never waited for
    for sampler in BLOCKWISE:
        assert run(late, sampler=sampler).ids == [10, 11, EOS], sampler
    early = [(10, 0.97), (EOS, 0.5), (EOS, 0.99), (12, 0.98), (13, 0.4)] * 2
    answer = run(early, sampler="threshold", threshold=0.9)
    assert answer.ids == [10, EOS] and answer.steps == [0, 1] and answer.finish_reason == "stop"
    at_once = run(early, sampler="threshold", threshold=0.0)
    assert at_once.ids == [10, EOS] and at_once.nfe == 1
    last = [(10, 0.5)] * 4 + [(EOS, 0.99)]
    assert run(last, sampler="threshold").ids == [10] * 4 + [EOS]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_repeats_and_another_differs(sampler):
    model = student()
    prompts = [[5, 6, 7], [8, 9]]

    def texts(seed):
        answers = decode(
            model, prompts, sampler=sampler, max_new_tokens=24, eos_token_ids=[], temperature=1.0, seed=seed
        )
        return [a.ids for a in answers]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def drawn_settings(sampler, rng):
    """Return a value for each of the sampler's settings, over its whole range, the ends included."""
    out = {}
    for name, setting in (BLOCKWISE[sampler].settings if sampler in BLOCKWISE else {}).items():
        high = min(setting.high, 12 if setting.whole else 3.0)
        out[name] = rng.choice([int(setting.low), rng.randint(int(setting.low), int(high))]) if setting.whole else rng.choice([setting.low, high, rng.uniform(setting.low, high)])  # fmt: skip
    return out


def check_limits(answers, budget, eos=EOS):
    for answer in answers:
        assert 1 <= len(answer.ids) <= budget and MASK not in answer.ids and eos not in answer.ids[:-1]
        assert (answer.finish_reason == "stop") == (answer.ids[-1] == eos)
        assert answer.finish_reason == "stop" or len(answer.ids) == budget
        assert len(answer.steps) == len(answer.confidence) == len(answer.ids) and max(answer.steps) < answer.nfe
        assert all(0 <= c <= 1 + 1e-6 for c in answer.confidence)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_random_cases_hold_their_limits(sampler):
    model = student(block_size=32)
    rng = random.Random(sampler)
    together = 0
    for case in range(12):
        block_size = None if sampler == "ar" else rng.randrange(1, 33)
        prompts = [[rng.randrange(3, 38) for _ in range(rng.randrange(1, 66))] for _ in range(rng.randrange(1, 6))]
        budget = rng.randrange(1, 71)
        answers = decode(
            model, prompts, sampler=sampler, max_new_tokens=budget, eos_token_ids=[EOS], block_size=block_size,
            temperature=rng.choice([0.0, 0.7, 1.5]), top_p=rng.choice([0.5, 1.0]), seed=case, **drawn_settings(sampler, rng),
        )  # fmt: skip
        check_limits(answers, budget)
        together += sum(len(a.steps) - len(set(a.steps)) for a in answers)
    assert (together == 0) == (sampler == "ar")  # several tokens were committed at once somewhere


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_stop_string_ends_its_row_at_the_token_that_completes_it(sampler):
    class Letters:
        def decode(self, ids):
            return "".join(chr(60 + i) for i in ids)

    model, prompts = student(), [[5, 6, 7], [8, 9], [11, 3]]
    whole = decode(model, prompts, sampler=sampler, max_new_tokens=24, eos_token_ids=[])
    string = Letters().decode(whole[0].ids[4:6])
    stopped = decode(
        model, prompts, sampler=sampler, max_new_tokens=24, eos_token_ids=[], stop=stop_at([string], Letters())
    )
    for a, b in zip(whole, stopped):
        text = Letters().decode(a.ids)
        end = text.find(string) + len(string) if string in text else 24
        assert b.ids == a.ids[:end] and b.finish_reason == ("stop" if string in text else "length")
        assert len(b.steps) == len(b.confidence) == len(b.ids)
    with pytest.raises(ValueError, match="must not be empty"):
        stop_at([""], Letters())


def test_a_stop_string_may_span_more_tokens_than_it_has_characters():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode("utf-8", "replace")

    string = "\N{SLIGHTLY SMILING FACE}" * 4
    ids = list(("a" * 30 + string + "b").encode())
    assert stop_at([string], Bytes())(ids, 0) == len(ids) - 1
