"""The answer task: what stands behind the last `=` is the answer, and nothing else counts."""

import json

import pytest

from fewstep.errors import UserError
from fewstep.eval.tasks import answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1+2=3", 1.0),
        ("1+1=2+1=3", 1.0),
        ("3", 1.0),
        (" 1+2= 3 \n", 1.0),
        ("1+2=3=4", 0.0),
        ("1+2=33", 0.0),
        ("3=", 0.0),
        ("", 0.0),
        ("wrong working=3", 1.0),  # the working is not scored
    ],
)
def test_score_gives_the_answer_sheet(text, expected):
    assert answer.score(text, "3") == expected


def test_load_reads_rows_and_refuses_a_reference_that_is_no_text(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"id": "a", "instruction": "1+2", "reference": "3"}) + "\n")
    (item,) = answer.load(file)
    assert item == answer.Item("a", [{"role": "user", "content": "1+2"}], "3")
    file.write_text(json.dumps({"instruction": "1+2", "reference": 3}) + "\n")
    with pytest.raises(UserError, match=r"t\.jsonl:1 has 3 as 'reference': it must be the final answer, a text"):
        answer.load(file)
