"""Each sampler's rule against its definition, and drawing: keyed, lossless under `verify`, by row."""

import itertools
import math

import numpy as np
import pytest
import torch

from fewstep.eval.config import OWNERS, SamplerConfig
from fewstep.students.decoding import decode
from fewstep.students.decoding import verify as verify_file
from fewstep.students.decoding.decode import BLOCKWISE, SAMPLERS, SETTINGS
from fewstep.students.decoding.sampler import Draft
from fewstep.students.decoding.sampling import distribution, draw, most_likely, uniform
from tests.students.builders import student

S, V = 6, 9


def made_draft(seed=0, batch=4, candidates=None, committed=None, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(batch, S, V, generator=generator)
    token = logits.argmax(-1)
    if candidates is None:
        candidates = torch.rand(batch, S, generator=generator) < 0.8
        candidates[:, 0] = True
    probability = logits.softmax(-1).amax(-1)
    committed = ~candidates if committed is None else committed
    ids = torch.randint(V, (batch, S), generator=generator)
    step, size = torch.zeros(batch, dtype=torch.long), torch.full((batch,), S)
    return Draft(logits, token, probability, candidates, ids, committed, step, size)


def column(value, batch=4):
    return torch.full((batch, 1), float(value))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("factor", [0.05, 0.4, 1.5])
def test_factor_commits_the_largest_number_its_rule_allows(seed, factor):
    draft = made_draft(seed)
    chosen = BLOCKWISE["factor"].select(draft, factor=column(factor)) & draft.candidates
    for b in range(4):
        order = sorted(range(S), key=lambda i: -float(draft.confidence[b, i]))
        allowed = [n for n in range(1, S + 1) if (n + 1) * (1 - float(draft.confidence[b, order[n - 1]])) < factor]
        assert chosen[b].nonzero().flatten().tolist() == sorted(order[: max(allowed, default=0)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gamma", [0.0, 0.3, 2.0])
def test_entropy_commits_within_its_budget(seed, gamma):
    draft = made_draft(seed, scale=2.0)
    chosen = BLOCKWISE["entropy"].select(draft, gamma=column(gamma)) & draft.candidates
    for b in range(4):
        p = draft.logits[b].softmax(-1)
        entropy = (-(p * p.log()).sum(-1)).tolist()
        order = sorted((i for i in range(S) if draft.candidates[b, i]), key=lambda i: entropy[i])
        largest = max(
            k for k in range(1, len(order) + 1)
            if sum(entropy[i] for i in order[:k]) - max(entropy[i] for i in order[:k]) <= gamma + 1e-6
        )  # fmt: skip
        assert chosen[b].nonzero().flatten().tolist() == sorted(order[:largest])


@pytest.mark.parametrize("leading", [0, 1, 3])
def test_threshold_commits_the_sure_and_the_first_open_ones(leading):
    draft = made_draft(4, scale=1.0)
    chosen = BLOCKWISE["threshold"].select(draft, threshold=column(0.5), leading=column(leading)) & draft.candidates
    for b in range(4):
        open_ = draft.candidates[b].nonzero().flatten().tolist()
        sure = [i for i in open_ if draft.confidence[b, i] >= 0.5]
        assert chosen[b].nonzero().flatten().tolist() == sorted({*sure, *open_[:leading]})


def test_leading_one_decides_a_block_from_left_to_right_where_nothing_is_sure():
    model, given = student(block_size=8), dict(max_new_tokens=16, eos_token_ids=[], threshold=1.0)
    ahead = decode(model, [[5, 9, 11]], sampler="threshold", leading=1, **given)[0]
    assert ahead.steps == list(range(16)) and ahead.nfe == 16
    surest = decode(model, [[5, 9, 11]], sampler="threshold", **given)[0]
    assert sorted(surest.steps) == list(range(16)) and surest.steps != ahead.steps


@pytest.mark.parametrize("margin", [0.0, 0.3, 0.9])
def test_margin_compares_the_two_best(margin):
    draft = made_draft(1)
    chosen = BLOCKWISE["margin"].select(draft, margin=column(margin))
    best = draft.logits.softmax(-1).sort(-1, descending=True).values
    assert torch.equal(chosen, best[..., 0] - best[..., 1] >= margin)


def test_klass_waits_until_a_confident_distribution_has_settled():
    klass = BLOCKWISE["klass"]
    draft = made_draft(2, candidates=torch.ones(4, S, dtype=torch.bool))
    settings = {"threshold": column(0.5), "kl": column(0.01), "history": column(2)}
    draft.previous = torch.full((4, S, V), torch.nan)
    assert not klass.stays(draft, **settings).any()  # no step before
    draft.previous = draft.logprobs.clone()
    draft.previous[0, 0] = draft.previous[0, 0].roll(1)
    stays = klass.stays(draft, **settings)
    p, q = draft.logprobs[0, 0].exp(), draft.previous[0, 0]
    assert float((p * (p.log() - q)).sum()) > 0.01 and not stays[0, 0] and stays.sum() == 4 * S - 1
    draft.stable = torch.full((4, S), 1)
    assert not klass.select(draft, **settings).any()
    draft.stable[1] = 2
    chosen = klass.select(draft, **settings)
    assert torch.equal(chosen[1], draft.confidence[1] > 0.5) and chosen.sum() == chosen[1].sum()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_remask_decides_as_many_a_step_as_fixed_and_takes_the_least_sure_back(steps, share):
    model = student(block_size=8)
    prompt = [5, 9, 11]
    answer = decode(model, [prompt], sampler="remask", max_new_tokens=16, eos_token_ids=[], steps=steps, share=share)[0]
    fixed = decode(model, [prompt], sampler="fixed", max_new_tokens=16, eos_token_ids=[], steps=steps)[0]
    assert answer.nfe == fixed.nfe == 2 * steps
    draft = made_draft(3, batch=1, candidates=torch.tensor([[True, True, True, True, False, False]]))
    draft.step = torch.tensor([1])
    draft.decided = torch.ones(1, S, dtype=torch.bool)
    draft.decided_confidence = torch.tensor([[0.9, 0.2, 0.8, 0.1, 0.7, 0.6]])
    back = BLOCKWISE["remask"].revise(draft, steps=column(3, 1), share=column(0.5, 1))
    assert back.tolist() == [[False, True, False, True, False, False]]  # two of three steps done: 4 of 6 stay


def test_remask_changes_what_is_written_and_edit_rewrites_it():
    model = student(block_size=8)
    prompts = [[5 + i, 9, 11] for i in range(12)]
    given = dict(max_new_tokens=16, eos_token_ids=[])
    fixed = decode(model, prompts, sampler="fixed", steps=4, **given)
    remasked = decode(model, prompts, sampler="remask", steps=4, share=0.5, **given)
    assert [a.ids for a in decode(model, prompts, sampler="remask", steps=4, share=0.0, **given)] == [
        a.ids for a in fixed
    ]
    assert any(a.ids != b.ids for a, b in zip(fixed, remasked))
    plain = decode(model, prompts, sampler="threshold", threshold=0.3, **given)
    never = decode(model, prompts, sampler="edit", threshold=0.3, rewrite=1.0, **given)
    often = decode(model, prompts, sampler="edit", threshold=0.3, rewrite=0.2, **given)
    assert [a.ids for a in never] == [a.ids for a in plain] and any(a.ids != b.ids for a, b in zip(plain, often))


def test_edit_rewrites_only_what_was_decided_before_this_forward():
    candidates = torch.tensor([[True, True, True, False, False, False]])
    draft = made_draft(4, batch=1, candidates=candidates, scale=9.0)
    draft.ids[0, 3] = draft.token[0, 3]
    draft.ids[0, 4] = (draft.token[0, 4] + 1) % V
    draft.ids[0, 5] = (draft.token[0, 5] + 1) % V
    sure = draft.logits.softmax(-1).amax(-1)[0]
    change = BLOCKWISE["edit"].revise(draft, threshold=column(0.9, 1), rewrite=column(float(sure[4]) - 1e-3, 1))
    assert change[0, 4] and not change[0, :4].any() and bool(change[0, 5]) == bool(sure[5] > sure[4] - 1e-3)


def test_every_sampler_has_a_file_a_config_and_the_same_settings():
    taken = {k: tuple(n for n, s in BLOCKWISE.items() if k in s.settings) for k in SETTINGS}
    assert {k: set(v) for k, v in taken.items()} == {k: set(v) for k, v in OWNERS.items()}
    names = SamplerConfig.model_fields["name"].annotation.__args__
    assert set(names) == set(SAMPLERS) - {"ar"}
    for name, sampler in BLOCKWISE.items():
        assert sampler.select.__module__.endswith(f".{name}")
        assert all(setting.takes(setting.default) for setting in sampler.settings.values())


# --- Drawing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("V", [1, 255, 4096, 4097, 9999, 49152])
def test_the_most_likely_token_is_the_first_of_the_largest(V):
    logits = torch.randint(0, 40, (3, 5, V), generator=torch.Generator().manual_seed(V)).float() / 10
    token, probability = most_likely(logits)
    largest = logits == logits.max(-1, keepdim=True).values
    assert torch.equal(token, largest.int().argmax(-1))  # many ties, and the first of them
    assert torch.allclose(probability, logits.double().softmax(-1).max(-1).values.float(), rtol=1e-5)
    logits[0, 0, V // 2] = torch.nan
    assert most_likely(logits)[0][0, 0] == V // 2


def test_top_p_keeps_the_smallest_set_that_holds_the_mass():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert distribution(logits, 1.0, 0.8)[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert distribution(logits, 1.0, 0.81)[0].tolist() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    assert distribution(logits, 1.0, 1e-9)[0].tolist() == [1, 0, 0, 0]
    assert distribution(logits, 0.0, 1.0)[0].tolist() == [1, 0, 0, 0]
    hot = distribution(logits, 2.0, 1.0)[0]
    assert hot.tolist() == pytest.approx((torch.tensor([0.5, 0.3, 0.15, 0.05]).sqrt() / sum(map(math.sqrt, [0.5, 0.3, 0.15, 0.05]))).tolist(), abs=1e-6)  # fmt: skip


def test_draws_follow_the_distribution_and_the_key():
    p = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    counts = np.bincount([draw(p, seed=1, position=i, step=0) for i in range(20_000)], minlength=4)
    assert (((counts - 20_000 * p.numpy()) ** 2) / (20_000 * p.numpy())).sum() < 16.3  # χ², 3 degrees, 0.1 %
    assert draw(p, 7, 3, 2) == draw(p, 7, 3, 2)
    keys = list(itertools.product(range(3), range(3), range(3), range(3)))
    assert len({float(uniform(*key, 1)) for key in keys}) == len(keys)


def chi_square(counts: dict, expected: dict, draws: int) -> tuple[float, int]:
    """Return (χ², degrees of freedom) with cells of fewer than five expected draws pooled."""
    small = [k for k, p in expected.items() if p * draws < 5]
    cells = [(counts.get(k, 0), p * draws) for k, p in expected.items() if p * draws >= 5]
    cells.append((sum(counts.get(k, 0) for k in small), sum(expected[k] for k in small) * draws))
    cells = [(c, e) for c, e in cells if e > 0]
    return sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.9)])
def test_verify_draws_from_the_ar_distribution(temperature, top_p):
    check_verify_draws_from_ar(temperature, top_p, draws=4000)


def check_verify_draws_from_ar(temperature, top_p, draws, length=5):
    """All answers of up to five tokens over two letters and an EOS: exact AR probabilities against draws."""
    model = student(block_size=4, num_layers=1)
    letters, end = (5, 6), 7
    only = torch.full((40,), -1e4)
    only[list(letters)] = 0.0
    only[end] = -1.0  # seldom enough that answers grow long
    hook = model.lm_head.register_forward_hook(lambda m, i, out: 0.15 * out + only.to(out.dtype))
    prompt = [8, 9, 10]

    def ar(ids):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        return distribution(logits[None], temperature, top_p)[0].tolist()

    def grow(ids, p):
        if len(ids) == length or ids[-1:] == [end]:
            return {tuple(ids): p}
        following = ar(prompt + ids)
        assert sum(following[t] for t in (*letters, end)) == pytest.approx(1.0, abs=1e-9)
        return {k: v for t in (*letters, end) for k, v in grow([*ids, t], p * following[t]).items()}

    expected = {k: p for k, p in grow([], 1.0).items() if p > 0}
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-9)
    counts: dict[tuple, int] = {}
    seen = {"longest": 0, "rest": 0, "redraft": 0}
    after, propose = verify_file._Drafted.after, verify_file._propose

    def watched_after(self, first):
        rest = after(self, first)
        seen["rest"] += bool(rest.ids)
        seen["redraft"] += not rest.ids
        return rest

    def watched_propose(*args):
        draft = propose(*args)
        seen["longest"] = max(seen["longest"], len(draft.ids))
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify_file._Drafted, "after", watched_after)
        patch.setattr(verify_file, "_propose", watched_propose)
        for start in range(0, draws, 500):
            answers = decode(
                model, [prompt] * 500, sampler="verify", max_new_tokens=length, eos_token_ids=[end],
                temperature=temperature, top_p=top_p, seed=list(range(start, start + 500)),
            )  # fmt: skip
            for answer in answers:
                counts[tuple(answer.ids)] = counts.get(tuple(answer.ids), 0) + 1
    hook.remove()
    assert seen["longest"] == 3 and seen["rest"] > draws / 100 and seen["redraft"] > draws / 100
    assert set(counts) <= set(expected)
    value, degrees = chi_square(counts, expected, draws)
    assert degrees >= 5 and value < degrees + 2.33 * math.sqrt(2 * degrees) + 4  # 1 % of χ², and a little


def test_extreme_numbers_are_refused_or_harmless():
    model = student()
    greedy = decode(model, [[5, 6]], sampler="ar", max_new_tokens=6, eos_token_ids=[])[0].ids
    cold = decode(model, [[5, 6]], sampler="ar", max_new_tokens=6, eos_token_ids=[], temperature=1e-308)[0].ids
    assert cold == greedy
    for sampler, setting in (("entropy", {"gamma": float("inf")}), ("fixed", {"steps": 10**400}), ("factor", {"factor": float("nan")})):  # fmt: skip
        with pytest.raises(ValueError, match=f"the sampler `{sampler}` needs"):
            decode(model, [[5, 6]], sampler=sampler, max_new_tokens=6, eos_token_ids=[], **setting)
