"""On-policy rounds: which texts are kept, what their labels are, and that a resume repeats them bit for bit."""

import numpy as np
import pytest
import torch

from fewstep import records
from fewstep.distill import on_policy, train
from fewstep.distill.config import AdaptConfig, EngineConfig, OnPolicyConfig
from fewstep.distill.examples import draw_example
from fewstep.distill.samples import sample_of
from fewstep.errors import RunFailed, Stopped, UserError
from fewstep.students.attention import attention_of
from fewstep.students.layout import Example, body_hidden, build_batch
from fewstep.teachers.generate import generate
from fewstep.teachers.generation import Generation
from fewstep.teachers.scoring import score
from tests.distill.test_train import go as train_once
from tests.distill.test_train import metrics, weights, world  # noqa: F401  (a fixture)
from tests.tiny import in_memory, tiny_model


class Parrot:
    """A teacher that would always write its prompt's second token, once more than the student did; it counts its calls."""

    def __init__(self, place):
        self.prompts = {row["sample_id"]: row["prompt_ids"] for row in records.read_rows(place / "targets", "train")}
        self.asked: list[list[str]] = []

    def __call__(self, ids, responses):
        self.asked.append(ids)
        out = []
        for i, response in zip(ids, responses):
            token = int(self.prompts[i][1])
            top = [[token, 3, 4, 7]] * len(response)
            logprobs = [[float(np.log(0.9))] + [float(np.log(0.03))] * 3] * len(response)
            out.append(Generation(list(response), "stop", top, logprobs, [0.01] * len(response)))
        return out


def go(place, folder, teacher, **keys):
    on = OnPolicyConfig(rounds=2, prompts=16, threshold=0.5, share=0.5)
    return train_once(place, folder, score=teacher, on_policy=on, objectives={"ce": 1.0, "ar": 1.0, "kd": 0.5}, **keys)


def test_rounds_cut_the_stage_and_their_texts_are_the_students_own(world, tmp_path):  # noqa: F811
    teacher = Parrot(world)
    go(world, tmp_path, teacher)
    assert [m for m in metrics(tmp_path) if "on_policy_round" in m][0]["step"] == 5  # 12 steps in three parts
    assert [len(ids) for ids in teacher.asked] == [16, 16] and teacher.asked[0] != teacher.asked[1]
    for number in (1, 2):
        rows = records.read_rows(on_policy.round_file(tmp_path, number))
        assert rows and all(row["sample_id"].endswith(f"/round{number}") for row in rows)
        for row in rows:  # a text that the teacher would have written is left out
            assert row["response_ids"] != [best[0] for best in row["topk_ids"]]


def test_a_round_decodes_with_the_attention_that_the_student_came_with(world, tmp_path, monkeypatch):  # noqa: F811
    """flex_attention, which packed rows train with on CUDA, knows no decoding; here another stands in for its backward."""
    monkeypatch.setattr(train.block_mask, "serves", lambda model, device: True)
    trained = []

    def dense(model, batch, attention):
        trained.append(model.config._attn_implementation)
        with attention_of(model, "sdpa"):
            return body_hidden(model, batch, attention)

    monkeypatch.setattr("fewstep.distill.trainee.body_hidden", dense)
    teacher = Parrot(world)
    go(world, tmp_path, teacher, engine=EngineConfig(name="plain", packing="packed"))
    assert len(teacher.asked) == 2 and set(trained) == {"flex_attention"}


def test_stopped_and_resumed_rounds_equal_undisturbed_bit_for_bit(world, tmp_path, monkeypatch):  # noqa: F811
    go(world, tmp_path / "whole", Parrot(world))
    for stop_after in (3, 6, 9):
        folder, asked = tmp_path / f"cut{stop_after}", iter([None] * (stop_after - 1) + [15])
        monkeypatch.setattr(train, "stop_requested", lambda asked=asked: next(asked, None))
        with pytest.raises(Stopped):
            go(world, folder, Parrot(world))
        monkeypatch.undo()
        go(world, folder, Parrot(world))
        a, b = weights(tmp_path / "whole"), weights(folder)
        assert all(torch.equal(a[k], b[k]) for k in a)
        assert (folder / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()


def test_a_lost_round_is_not_drawn_anew_in_its_middle(world, tmp_path, monkeypatch):  # noqa: F811
    asked = iter([None] * 5 + [15])
    monkeypatch.setattr(train, "stop_requested", lambda: next(asked, None))
    with pytest.raises(Stopped):
        go(world, tmp_path, Parrot(world))
    monkeypatch.undo()
    on_policy.round_file(tmp_path, 1).unlink()
    with pytest.raises(RunFailed, match="01.parquet is gone"):
        go(world, tmp_path, Parrot(world))


def test_labels_are_the_teachers_and_count_where_nothing_wrong_is_masked_before_them():
    response, right = np.array([11, 12, 13, 14, 15, 1]), np.array([11, 22, 13, 24, 15, 1])
    row = Example(
        prompt=np.array([5, 6]), response=response, noisy=np.concatenate([response, [1, 1]]),
        block=np.repeat([0, 1], 4), masks=np.array([[False, True, True, True, False, True, True, True]]), labels=right,
    )  # fmt: skip
    batch = build_batch([row], 99, "block", 0.1)
    noisy = ~batch.clean
    assert batch.labels[batch.clean].tolist() == right.tolist()
    assert batch.labels[noisy].tolist() == [22, 13, 24, 1, 1, 1]
    assert batch.weight[noisy].tolist() == pytest.approx([1, 0, 0, 1, 0.1, 0.1])  # 12 is wrong and masked
    row.masks = np.array([[False, False, True, True, True, True, False, True]])
    batch = build_batch([row], 99, "block", 0.1)
    assert batch.weight[~batch.clean].tolist() == pytest.approx(
        [1, 1, 0, 0, 0.1]
    )  # a visible token stands right of 15, EOS


def test_a_students_text_is_masked_to_its_blocks_ends_and_never_guessed():
    row = dict(sample_id="a", prompt_ids=[5, 6], response_ids=[7, 8, 9, 10, 1], finish_reason="stop",
               topk_ids=[[7, 3], [9, 3], [9, 3], [10, 3], [1, 3]], topk_logprobs=[[-0.1, -3.0]] * 5, tail_mass=[0.05] * 5)  # fmt: skip
    sample = sample_of(row, on_policy=True)
    config = AdaptConfig(guess=0.9, objectives={"ce": 1.0, "correction": 1.0, "consistency": 1.0})
    for epoch in range(20):
        drawn = draw_example(sample, config, 4, 1, 0, epoch, 0.5)
        assert not drawn.guess and drawn.labels.tolist() == [7, 9, 9, 10, 1] and not drawn.later.any()
        for b in range(drawn.block[-1] + 1):
            masked = drawn.masks[0][drawn.block == b]
            assert masked[masked.argmax() :].all() and masked.any()


def test_few_texts_are_repeated_to_their_share_with_masks_of_their_own(tmp_path):
    row = dict(sample_id="a/round1", prompt_ids=[5], response_ids=[7, 1], finish_reason="stop", topk_ids=[[8], [1]],
               topk_logprobs=[[-0.1]] * 2, tail_mass=[0.1] * 2, text="", reference="", split="train")  # fmt: skip
    records.write_shard(tmp_path / "01.parquet", [row, {**row, "sample_id": "b/round1"}])
    targets = [sample_of({**row, "sample_id": f"t{i}"}) for i in range(9)]
    pool, found = on_policy.mixed(in_memory(targets), tmp_path / "01.parquet", share=0.25, seed=0)
    ids = [s.id for s in pool[9:]]
    assert found == 2 and pool[:9] == targets and {i.rpartition("#")[0] for i in ids} == {"a/round1", "b/round1"}
    assert [i[-1] for i in ids] == ["0", "0", "1"] and all(s.on_policy for s in pool[9:])


def test_of_many_texts_those_left_out_are_not_the_long_ones(tmp_path):
    rows = [
        dict(sample_id=f"{i}/round1", prompt_ids=[5] * (i + 1), response_ids=[7, 1], finish_reason="stop", topk_ids=[[8], [1]],
             topk_logprobs=[[-0.1]] * 2, tail_mass=[0.1] * 2, text="", reference="", split="train")
        for i in range(40)
    ]  # fmt: skip
    records.write_shard(tmp_path / "01.parquet", rows)
    targets = [sample_of({**rows[0], "sample_id": f"t{i}"}) for i in range(40)]
    pool, _ = on_policy.mixed(in_memory(targets), tmp_path / "01.parquet", share=0.25, seed=0)
    lengths = [len(s.prompt) for s in pool[40:]]
    assert len(lengths) == 13 and min(lengths) <= 10 and max(lengths) > 30


def test_scores_equal_what_the_teacher_said_of_its_own_text():
    model = tiny_model("llama", dtype=torch.float64)
    prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    own = generate(model, prompts, max_new_tokens=9, eos_ids=[2], top_logprobs=5)
    scored = score(model, prompts, [g.ids for g in own], 5, batch_size=2)
    for a, b in zip(own, scored):
        assert a.topk_ids == b.topk_ids
        assert np.allclose(a.topk_logprobs, b.topk_logprobs, atol=1e-9) and np.allclose(
            a.tail_mass, b.tail_mass, atol=1e-9
        )


def test_rounds_that_do_not_fit_are_refused(world, tmp_path):  # noqa: F811
    with pytest.raises(UserError, match="adapt.on_policy.rounds: 2 do not fit into 2 steps"):
        go(world, tmp_path, None, max_steps=2)
