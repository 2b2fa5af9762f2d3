"""`repair`: an oracle mends everything, a parrot nothing, and what is counted is what was changed."""

import pytest
import torch

from fewstep.eval import repair, verdict
from fewstep.students.decoding.forward import Forward
from tests.students.builders import VOCAB, student

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
ANSWERS = [[20 + i % 15 for i in range(19)], [21, 22, 23, 24, 25], [30, 31, 1]]


def scripted(monkeypatch, says):
    """Make every forward say `says(prefix, block)`, a token a position, with certainty; return what it was shown."""
    shown: list[list[int]] = []
    history: dict[int, list[int]] = {}

    def forward(self, starts, clean, noisy, keep):
        logits = torch.zeros(len(noisy), keep, VOCAB)
        for row, block in enumerate(noisy):
            history[row] = clean[row] or history[row]
            shown.append(block)
            for i, token in enumerate(says(history[row], block)):
                logits[row, i, token] = 50.0
        return logits

    monkeypatch.setattr(Forward, "__call__", forward)
    return shown


def truth(prefix, block):
    prompt, answer = next((p, a) for p, a in zip(PROMPTS, ANSWERS) if prefix[: len(p)] == p)
    start = len(prefix) - len(prompt)
    return answer[start : start + len(block)]


def test_an_oracle_repairs_every_error_and_damages_nothing(monkeypatch):
    shown = scripted(monkeypatch, truth)
    found = repair.measure(student(), PROMPTS, ANSWERS, 8, 0.9, seed=0, share=0.3)
    assert found["errors"] + found["right"] == 27 and found["errors"] > 3
    assert (found["repaired"], found["damaged"], found["damaged_clean"]) == (1.0, 0.0, 0.0)
    assert len(shown) == 2 * 5 + 5  # five blocks: one forward mends, the next changes nothing; the clean ones stay


def test_a_parrot_repairs_nothing_and_keeps_what_it_sees(monkeypatch):
    shown = scripted(monkeypatch, lambda prefix, block: block)
    found = repair.measure(student(), PROMPTS, ANSWERS, 8, 0.9, seed=0, share=0.3)
    assert (found["repaired"], found["damaged"]) == (0.0, 0.0)
    wrong = sum(a != b for block, (p, t) in zip(shown, _blocks()) for a, b in zip(block, t))
    assert wrong == found["errors"] and found["clean"] == 27
    assert shown[5:] == [t for _, t in _blocks()]  # the second time there are no errors
    assert all(token in {t for answer in ANSWERS for t in answer} for block in shown for token in block)


def _blocks():
    jobs = [(p + a[:s], a[s : s + 8]) for p, a in zip(PROMPTS, ANSWERS) for s in range(0, len(a), 8)]
    return sorted(jobs, key=lambda job: len(job[0]))


def test_a_vandal_damages_what_was_right_and_an_unsure_one_nothing(monkeypatch):
    scripted(monkeypatch, lambda prefix, block: [3] * len(block))
    found = repair.measure(student(), PROMPTS, ANSWERS, 8, 0.9, seed=0)
    assert (found["damaged"], found["damaged_clean"], found["repaired"]) == (1.0, 1.0, 0.0)
    unsure = repair.measure(student(), PROMPTS, ANSWERS, 8, 1.0, seed=0)
    assert unsure["damaged"] == unsure["damaged_clean"] == 0.0


def test_a_real_student_and_its_sentence():
    found = repair.measure(student(), PROMPTS, ANSWERS, 8, 0.2, seed=1, share=0.5)
    assert 0 <= found["repaired"] <= 1 and found["repaired_ci"][0] <= found["repaired"] <= found["repaired_ci"][1]
    assert f"of {found['errors']} wrong tokens put into 3 right answers (50 %)" in verdict.repaired(found)
    nothing = repair.measure(student(), PROMPTS, ANSWERS, 8, 0.2, seed=1, share=0.0)
    assert nothing["repaired"] is None and nothing["errors"] == 0
    assert verdict.repaired(nothing).startswith("of right answers it damaged")


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_errors_are_other_tokens_at_about_their_share(monkeypatch, share):
    scripted(monkeypatch, lambda prefix, block: block)
    many = [[20 + (i * k) % 15 for i in range(100)] for k in range(1, 20)]
    found = repair.measure(student(), [[5, k] for k in range(1, 20)], many, 8, 0.9, seed=0, share=share)
    assert found["errors"] / 1900 == pytest.approx(share, abs=0.04)
