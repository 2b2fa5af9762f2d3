"""Batches keep the order of prompts; TPF, agreement and text statistics give known numbers."""

import math
from dataclasses import dataclass, field

import pytest

from fewstep.eval import quality
from fewstep.eval.quality import Answers


@dataclass
class Decoded:
    ids: list
    finish_reason: str = "stop"
    nfe: int = 1
    steps: list = field(default_factory=list)
    confidence: list = field(default_factory=list)
    positions: int = 0


class Letters:
    """A tokenizer whose id i is the i-th letter; 0 is special."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(96 + i) for i in ids if i)


def test_decode_in_batches_groups_by_length_and_restores_the_order():
    batches = []

    def answer(indices):
        batches.append(indices)
        return [f"answer {i}" for i in indices]

    seen = []
    out = quality.decode_in_batches(5, [9, 2, 7, 2, 5], 2, answer, lambda n, results: seen.append(n))
    assert out == [f"answer {i}" for i in range(5)]
    assert batches == [[1, 3], [4, 2], [0]]
    assert seen == [2, 2, 1]


def test_from_decoded_scores_the_text_without_special_tokens():
    decoded = [Decoded([1, 2, 0], nfe=2, positions=8), Decoded([3, 3], "length", nfe=1, positions=4)]
    answers = quality.from_decoded(decoded, Letters(), ["ab", "xy"], lambda text, ref: float(text == ref))
    assert answers.texts == ["ab", "cc"]
    assert answers.scores == [1.0, 0.0]
    assert answers.tokens == [3, 2]  # EOS counts once
    assert Answers(**answers.to_dict()) == answers


def test_tpf_sums_before_it_divides():
    answers = quality.from_decoded(
        [Decoded([1] * 30, nfe=2), Decoded([1] * 6, nfe=6)], Letters(), [None] * 2, lambda text, ref: 0.0
    )
    assert quality.ratio(answers.tokens, answers.nfe) == 36 / 8  # not the mean of 15 and 1


def test_teacher_decodes_exactly_one_token_a_forward():
    answers = quality.from_teacher([Decoded([4, 5, 0]), Decoded([4])], Letters(), [None] * 2, lambda text, ref: 1.0)
    assert quality.ratio(answers.tokens, answers.nfe) == 1.0
    assert answers.nfe == [3, 1]
    assert answers.positions == [2, 0]
    assert answers.steps == [[0, 1, 2], [0]]


def test_agreement_is_of_whole_answers():
    ours, theirs = Answers(ids=[[1, 2, 3], [1, 2], [4]]), Answers(ids=[[1, 2, 3], [1, 2, 3], [5]])
    assert quality.agreement(ours, theirs) == [1.0, 0.0, 0.0]  # a shared prefix does not count
    with pytest.raises(ValueError, match="3 answers with 1"):
        quality.agreement(ours, Answers(ids=[[1]]))


def test_text_statistics_of_known_texts():
    loop = Answers(ids=[[7] * 9 + [0], [1, 2, 3, 4]], finish_reason=["stop", "length"])
    found = quality.text_statistics(loop)
    # 9 equal tokens hold 6 four-grams, 1 of them distinct; the other text holds one
    assert found["repetition"] == pytest.approx((5 / 6 + 0) / 2)
    assert found["entropy"] == pytest.approx((0 + math.log(4)) / 2)
    assert found["distinct_n"] == {"1": 5 / 13, "2": 4 / 11, "3": 3 / 9}


def test_text_statistics_of_empty_answers_are_not_numbers():
    found = quality.text_statistics(Answers(ids=[[0]], finish_reason=["stop"]))
    assert found == {"repetition": None, "entropy": None, "distinct_n": {"1": None, "2": None, "3": None}}
