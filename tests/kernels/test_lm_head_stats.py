"""Statistics of the output head against fp64, whatever the chunks; draws against the distribution; what may not be said."""

import pytest
import torch

from fewstep.kernels import lm_head_stats as module
from fewstep.kernels.lm_head_stats import Stats, cases, gumbel, lm_head_stats, lm_head_stats_reference, merge

NAMES = ["max", "second", "logsumexp", "entropy", "argmax", "token", "token_logit"]


def inputs(case, dtype=torch.float32):
    """Return (hidden, weight, the other arguments, the chunk)."""
    g = torch.Generator().manual_seed(case["V"])
    N, D, V = case["N"], case["D"], case["V"]
    hidden, weight = torch.randn(N, D, generator=g).to(dtype), torch.randn(V, D, generator=g).to(dtype)
    keys = {k: case[k] for k in ("scale", "softcap", "mask_id") if k in case}
    if case.get("bias"):
        keys["bias"] = torch.randn(V, generator=g).to(dtype)
    if case.get("allowed"):
        words = torch.randint(-(2**31), 2**31, (N, -(-V // 32)), generator=g).to(torch.int32)
        words[0], words[1] = 0, -1  # one row may say nothing, one everything
        keys["allowed"] = words
    if case.get("temperature"):
        keys["temperature"] = torch.tensor([0.0, 0.5, 1.0, 2.0] * 2)[:N]
        keys["keys"] = some_keys(N)
    return hidden, weight, keys, case["chunk"]


def some_keys(count):
    return torch.randint(2**63 - 1, (count,), generator=torch.Generator().manual_seed(5))


def close(ours: Stats, wanted: Stats):
    """Tolerances of fp32 sums: log-sum-exp 1e-5, probability 1e-6, entropy 5e-5; tokens are the same."""
    for name, most in [("max", 1e-5), ("second", 1e-5), ("logsumexp", 1e-5), ("entropy", 5e-5), ("token_logit", 1e-5), ("probability", 1e-6), ("margin", 1e-6)]:  # fmt: skip
        got, want = getattr(ours, name).double(), getattr(wanted, name).double()
        assert torch.allclose(got, want, rtol=most, atol=most, equal_nan=True), (name, got, want)
    assert torch.equal(ours.argmax, wanted.argmax) and torch.equal(ours.token, wanted.token)


@pytest.mark.parametrize("case", cases(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_equal_the_reference(case, dtype, monkeypatch):
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    hidden, weight, keys, chunk = inputs(case, dtype)
    close(lm_head_stats(hidden, weight, chunk=chunk, **keys), lm_head_stats_reference(hidden, weight, **keys))


@pytest.mark.parametrize("case", cases(), ids=str)
def test_chunks_and_the_batch_change_no_token(case):
    hidden, weight, keys, _ = inputs(case)
    whole = lm_head_stats(hidden, weight, chunk=10**6, **keys)
    for chunk in (256, 512, 1024):
        ours = lm_head_stats(hidden, weight, chunk=chunk, **keys)
        assert torch.equal(ours.token, whole.token) and torch.equal(ours.argmax, whole.argmax)
    per_row = {"allowed", "temperature", "keys"}
    for i in range(len(hidden)):
        own = {k: v[i : i + 1] if k in per_row else v for k, v in keys.items()}
        assert lm_head_stats(hidden[i : i + 1], weight, **own).token == whole.token[i]


def test_ties_go_to_the_lowest_id_within_and_across_chunks():
    weight = torch.zeros(1500, 4)
    hidden = torch.ones(3, 4)
    for best in ([700, 1400], [255, 256], [1023, 1024], [0, 1499], [3, 5]):
        weight.zero_()
        weight[best] = 1.0
        ours = lm_head_stats(hidden, weight, chunk=256)
        assert ours.argmax.tolist() == [best[0]] * 3 and torch.equal(ours.max, ours.second)
        assert torch.allclose(ours.margin, torch.zeros(3))


def test_a_row_that_may_say_nothing_and_one_that_is_broken_give_signals():
    hidden, weight = torch.randn(4, 8), torch.randn(600, 8)
    hidden[1, 3], hidden[2, 0] = torch.nan, torch.inf
    allowed = torch.full((4, 19), -1, dtype=torch.int32)
    allowed[3] = 0
    ours = lm_head_stats(hidden, weight, allowed=allowed, chunk=256)
    assert ours.token[0] >= 0 and ours.token[1:].tolist() == [-1, -1, -1] and ours.argmax[1:].tolist() == [-1, -1, -1]
    assert ours.max[1:3].isnan().all() and ours.max[3] == ours.logsumexp[3] == -torch.inf and ours.entropy[3] == 0
    assert ours.probability[3] == -torch.inf  # never confident enough


def test_the_mask_token_and_forbidden_ids_are_never_said():
    hidden, weight = torch.randn(6, 8), torch.randn(900, 8)
    best = (hidden @ weight.T).argmax(-1)
    for mask in best.tolist():
        assert mask not in lm_head_stats(hidden, weight, mask_id=mask, chunk=256).argmax.tolist()
    only = torch.zeros(6, 29, dtype=torch.int32)
    only[:, 700 // 32] = 1 << (700 % 32)
    ours = lm_head_stats(hidden, weight, allowed=only, chunk=256)
    assert ours.token.tolist() == [700] * 6 and torch.allclose(ours.probability, torch.ones(6))
    assert torch.allclose(ours.entropy, torch.zeros(6), atol=1e-6) and (ours.second == -torch.inf).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_distribution(temperature):
    torch.manual_seed(0)
    hidden, weight, draws = torch.randn(1, 6), torch.randn(300, 6) * 0.7, 20_000
    p = (hidden @ weight.T / temperature).double().softmax(-1)[0]
    ours = lm_head_stats(hidden.expand(draws, -1), weight, temperature=torch.full((draws,), temperature), keys=some_keys(draws), chunk=256)  # fmt: skip
    likely = p * draws >= 5
    seen = torch.bincount(ours.token, minlength=300)
    seen = torch.cat([seen[likely], seen[~likely].sum()[None]]).double()
    wanted = torch.cat([p[likely], p[~likely].sum()[None]]) * draws
    chi = float(((seen - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5  # mean and standard deviation of chi-square: p > 1e-4
    assert torch.allclose(ours.token_logit, (hidden @ weight.T)[0][ours.token], atol=1e-5)
    assert torch.allclose(ours.probability, (hidden @ weight.T).softmax(-1)[0][ours.token], atol=1e-6)  # at T = 1


def test_noise_is_gumbel_and_its_keys_are_independent():
    noise = gumbel(some_keys(3), torch.arange(200_000)).double()
    assert abs(float(noise[0].mean()) - 0.5772) < 0.01 and abs(float(noise[0].var()) - 1.6449) < 0.03
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.01
    neighbours = torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))
    assert abs(float(neighbours[0, 1])) < 0.01


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_of_a_head_merge_exactly(shards):
    hidden, weight = torch.randn(5, 12), torch.randn(1000, 12)
    parts = weight.tensor_split(shards)
    firsts = [sum(len(p) for p in parts[:i]) for i in range(shards)]
    ours = merge([lm_head_stats(hidden, part, first_id=first, chunk=256) for part, first in zip(parts, firsts)])
    close(ours, lm_head_stats_reference(hidden, weight))


def test_logits_never_stand_in_one_piece(monkeypatch):
    made, mm = [], torch.mm

    def spy(*args, **keys):
        out = mm(*args, **keys)
        made.append(out.numel())
        return out

    monkeypatch.setattr(torch, "mm", spy)
    lm_head_stats(torch.randn(40, 4), torch.randn(30_000, 4))
    assert len(made) == 3 and max(made) <= module.AT_ONCE


def test_without_entropy_the_rest_is_the_same():
    hidden, weight = torch.randn(5, 12), torch.randn(1000, 12)
    ours, whole = lm_head_stats(hidden, weight, entropy=False), lm_head_stats(hidden, weight)
    assert ours.entropy.isnan().all()
    assert all(torch.equal(getattr(ours, name), getattr(whole, name)) for name in NAMES if name != "entropy")


def test_drawing_needs_keys():
    with pytest.raises(ValueError, match="a key per row"):
        lm_head_stats(torch.randn(1, 4), torch.randn(9, 4), temperature=torch.ones(1))


def test_no_rows_are_no_work():
    ours = lm_head_stats(torch.randn(0, 4), torch.randn(9, 4))
    assert len(ours.token) == len(ours.probability) == len(ours.margin) == 0
