"""`on_tokens`: what is streamed is what is returned, as soon as it is decided."""

import pytest

from fewstep.students.decoding import decode
from tests.students.builders import EOS, student
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
