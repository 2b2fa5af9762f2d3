"""`on_tokens`: what is streamed is what is returned, as soon as it is decided."""

import pytest

from fewstep.students.decoding import decode
from tests.students.builders import EOS, MASK, student
from tests.students.test_decoding import SETTINGS, prompts


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attention", ["block", "block_causal_inside", "bidirectional"])
def test_streamed_pieces_concatenate_to_the_ids(settings, attention):
    if attention == "bidirectional" and settings["sampler"] in ("verify", "ar"):
        pytest.skip("refused; see test_verify_is_refused_without_a_clean_stream")
    batch, pieces = prompts(5), {i: [] for i in range(5)}
    given = dict(max_new_tokens=21, eos_token_ids=[EOS], **settings)
    plain = decode(student(attention=attention), batch, **given)
    done = decode(student(attention=attention), batch, on_tokens=lambda i, ids: pieces[i].append(ids), **given)
    assert [d.ids for d in done] == [d.ids for d in plain]
    for i, answer in enumerate(done):
        assert sum(pieces[i], []) == answer.ids
        assert all(pieces[i])
    assert max(len(p) for p in pieces.values()) >= 3  # in pieces, not at the end


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("attention", ["block", "bidirectional"])
def test_on_step_shows_the_answer_after_every_forward(settings, attention):
    if attention == "bidirectional" and settings["sampler"] in ("verify", "ar"):
        pytest.skip("refused; see test_verify_is_refused_without_a_clean_stream")
    batch, states = prompts(5), {i: [] for i in range(5)}
    given = dict(max_new_tokens=21, eos_token_ids=[EOS], **settings)
    done = decode(student(attention=attention), batch, on_step=lambda i, ids: states[i].append(ids), **given)
    changed = 0
    for i, answer in enumerate(done):
        assert len(states[i]) == answer.nfe and states[i][-1] == answer.ids
        for place, (token, step) in enumerate(zip(answer.ids, answer.steps)):
            # decided for good in the forward that `steps` names: there from then on, and not before
            assert all(ids[place] == token for ids in states[i][step:])
            earlier = states[i][step - 1] if step else []
            assert place >= len(earlier) or earlier[place] != token
            changed += any(place < len(ids) and ids[place] not in (None, token) for ids in states[i])
        assert MASK not in sum(states[i], [])
    assert (changed > 0) == (settings["sampler"] in ("remask", "edit"))


def test_pieces_of_ar_come_one_token_a_forward():
    pieces = []
    decode(
        student(),
        prompts(1),
        sampler="ar",
        max_new_tokens=9,
        eos_token_ids=[],
        on_tokens=lambda i, ids: pieces.append(ids),
    )
    assert [len(p) for p in pieces] == [1] * 9


def test_what_on_tokens_raises_ends_the_decoding():
    class Enough(Exception):
        pass

    seen = []

    def stop(index, ids):
        seen.append(ids)
        raise Enough

    with pytest.raises(Enough):
        decode(student(), prompts(2), sampler="ar", max_new_tokens=50, eos_token_ids=[], on_tokens=stop)
    assert len(seen) == 1
