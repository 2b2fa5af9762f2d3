"""Output head and confidence in one pass: what a sampler asks of a row's distribution, without its logits ever standing as [N, V].

Shapes: N rows, D width, V vocabulary, C columns of a chunk.

The vocabulary is run through in chunks; of each the row keeps (m, s, t, m2, a): the largest logit, Σ e^(x-m),
Σ e^(x-m)·(x-m), the second largest and where the largest stands. Two such summaries merge exactly, so chunks, tiles and
the shards of a tensor-parallel head give the same result in any order. Entropy is ln s - t/s.

Noise for drawing is keyed by the row's key and the vocabulary id alone: the same token for any chunk, batch and order.

Source: the online softmax (Milakov and Gimelshein) with the entropy's sum beside it; Gumbel-max sampling.
"""

from dataclasses import dataclass, fields

import torch

AT_ONCE = 2**19  # logits: 2 MB, what a core's second cache holds
GROUP = 256  # of which the largest is found first: torch's argmax is slow over a wide row
FEW = 16  # rows below which a CPU makes the product faster the other way round
VECTOR = 64  # numbers that a sum over few rows is folded to, so that it runs over whole vectors
NOTHING = -1e30  # a logit that is not allowed; finite, for 0 · -inf is no number
WORD = 32  # vocabulary ids in a word of a bit-mask


@dataclass
class Stats:
    """What is known of N rows' distributions.

    max, second: [N] f32, the largest logit and the largest of the others; logsumexp, entropy: [N] f32 (nats).
    argmax: [N] int64, the lowest id among equals. token: [N] int64, the drawn one, or argmax; token_logit: [N] f32.
    Where a row may say nothing, tokens are -1 and max, second and logsumexp -inf; where hidden states are not finite,
    max is NaN and tokens are -1.
    """

    max: torch.Tensor
    second: torch.Tensor
    logsumexp: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor
    token: torch.Tensor
    token_logit: torch.Tensor

    @property
    def probability(self) -> torch.Tensor:
        """[N] f32, of `token` at T = 1; -inf where there is none."""
        return torch.where(self.token >= 0, (self.token_logit - self.logsumexp).exp(), -torch.inf)

    @property
    def margin(self) -> torch.Tensor:
        """[N] f32, how far the largest probability is above the second."""
        return (self.max - self.logsumexp).exp() - (self.second - self.logsumexp).exp()


def lm_head_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    mask_id: int | None = None,
    allowed: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
    entropy: bool = True,
    first_id: int = 0,
    chunk: int | None = None,
) -> Stats:
    """Return the statistics of hidden @ weightᵀ, each row's own.

    Args:
        hidden: [N, D] after the final norm, any floating dtype; sums are in f32.
        weight: [V, D]; bias: [V] or None. scale multiplies logits, softcap makes them c·tanh(logits / c).
        mask_id: a row of the weight that is never said (the mask token), or None.
        allowed: [N, ⌈V / 32⌉] int32, bit i % 32 of word i // 32 says whether the weight's row i may be said; None: all may.
        temperature: [N] f32; where above 0 `token` is drawn at it (statistics stay those at T = 1). Needs keys.
        keys: [N] int64, what a row's noise hangs on: 63 well mixed bits of its request, position and step.
        entropy: whether it is wanted: if not it is NaN, and two sums over [N, V] are saved.
        first_id: the id of the weight's first row, where it is a shard of a larger head.
        chunk: C; None: as many as the caches hold.

    Returns:
        Stats of [N]; ids are those of the whole head.
    """
    N, V = len(hidden), len(weight)
    if N == 0:
        floats, ids = hidden.new_empty(0, dtype=torch.float32), hidden.new_empty(0, dtype=torch.int64)
        return Stats(floats, floats, floats, floats, ids, ids, floats)
    chunk = max(GROUP, (chunk or AT_ONCE // N) // GROUP * GROUP)
    draws = temperature is not None and bool((temperature > 0).any())
    if draws and keys is None:
        raise ValueError("temperature is above 0: drawing needs a key per row")
    hidden = hidden.float().contiguous()
    columns = hidden.T.contiguous()  # [D, N]: with the vocabulary in rows sums run over whole vectors
    buffer = columns.new_empty(min(chunk, V), N)
    powers = torch.empty_like(buffer)
    kept = []
    for first in range(0, V, chunk):
        ids = slice(first, min(first + chunk, V))
        x, e = buffer[: ids.stop - first], powers[: ids.stop - first]
        if N < FEW:
            x.copy_(torch.mm(hidden, weight[ids].float().T, out=e.view(N, -1)).T)
        else:
            torch.mm(weight[ids].float(), columns, out=x)
        _shape(x, None if bias is None else bias[ids], scale, softcap)
        _forbid(x, ids, mask_id, allowed)
        kept.append(_of_chunk(x, e, first + first_id, (temperature, keys) if draws else None, entropy))
    return _stats(_merge(kept))


@dataclass
class _Sums:
    """What a part of the vocabulary leaves of each row; ids are the whole head's."""

    m: torch.Tensor
    s: torch.Tensor
    t: torch.Tensor
    m2: torch.Tensor
    a: torch.Tensor
    best: torch.Tensor  # what `token` was chosen by: the largest logit / T plus noise, or m
    token: torch.Tensor
    token_logit: torch.Tensor


def _of_chunk(x: torch.Tensor, e: torch.Tensor, first: int, noise, entropy: bool) -> _Sums:
    """Return the sums over [C, N] logits, which are overwritten; e: [C, N] scratch."""
    C, N = x.shape
    m, second, a = _two_largest(x)
    if noise is not None:
        temperature, keys = noise
        warm = temperature > 0
        y = (
            x / torch.where(warm, temperature, 1.0)
            + gumbel(keys, torch.arange(first, first + C, device=x.device)).T * warm
        )
        top, token = y.masked_fill_(x <= NOTHING, -torch.inf).max(0)
        token_logit = x.gather(0, token[None])[0]
    else:
        top, token, token_logit = m, a, m
    x -= m
    torch.exp(x, out=e)
    s = e.sum(0)
    t = e.mul_(x).sum(0) if entropy else torch.full_like(s, torch.nan)
    return _Sums(m, s, t, second, a + first, top, token + first, token_logit)


def _two_largest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest of each of N columns, the largest of its others, and where the first stands (the lowest place).

    The largest of each group of rows first, then the two of the best group: torch's argmax is slow over a long column.
    """
    C, N = x.shape
    whole = C - C % GROUP
    fold = 1 << max(0, (VECTOR // N).bit_length() - 1)
    parts = [x[:whole].view(-1, GROUP // fold, fold * N).amax(1).view(-1, fold, N).amax(1)] if whole else []
    groups = torch.cat([*parts, x[whole:].amax(0, keepdim=True)]) if whole < C else parts[0]
    best = groups.argmax(0)
    if whole == C:
        near = x.view(-1, GROUP, N).gather(0, best.expand(1, GROUP, N))[0]
    else:
        inside = best * GROUP + torch.arange(GROUP, device=x.device)[:, None]
        near = x.gather(0, inside.clamp(max=C - 1)).masked_fill_(inside >= C, -torch.inf)
    at = near.argmax(0)
    m = near.gather(0, at[None])[0]
    second = near.scatter(0, at[None], -torch.inf).amax(0)
    if len(groups) > 1:
        second = torch.maximum(second, groups.scatter(0, best[None], -torch.inf).amax(0))
    return m, second, best * GROUP + at


def _merge(parts: list[_Sums]) -> _Sums:
    """Return the sums over all parts, in the order of their ids: among equals the first wins."""
    if len(parts) == 1:
        return parts[0]
    all_of = {f.name: torch.stack([getattr(part, f.name) for part in parts]) for f in fields(_Sums)}  # [parts, N]
    m, first = all_of["m"].max(0)
    down = all_of["m"] - m
    c = down.exp()
    s, t = (c * all_of["s"]).sum(0), (c * (all_of["t"] + all_of["s"] * down)).sum(0)
    others = all_of["m"].scatter(0, first[None], -torch.inf).amax(0)
    best, drawn = all_of["best"].max(0)
    at = lambda name, place: all_of[name].gather(0, place[None])[0]  # noqa: E731
    return _Sums(
        m,
        s,
        t,
        torch.maximum(others, at("m2", first)),
        at("a", first),
        best,
        at("token", drawn),
        at("token_logit", drawn),
    )


def merge(parts: list[Stats]) -> Stats:
    """Return the statistics of a head from those of its shards, in the order of their ids; nothing may be drawn."""
    out = parts[0]
    for part in parts[1:]:
        m = torch.maximum(out.max, part.max)
        lse = torch.logaddexp(out.logsumexp, part.logsumexp)
        # H = lse - Σ p·x, and a shard's Σ p·x counts with its share of the probability
        mean = sum(
            torch.where(p.argmax >= 0, (p.logsumexp - lse).exp() * (p.logsumexp - p.entropy), 0.0) for p in (out, part)
        )
        later = part.max > out.max
        second = torch.maximum(torch.minimum(out.max, part.max), torch.where(later, part.second, out.second))
        a = torch.where(later, part.argmax, out.argmax)
        entropy = torch.where(a >= 0, lse - mean, 0.0)
        out = Stats(m, second, lse, entropy, a, a, m)
    return out


def _stats(sums: _Sums) -> Stats:
    """Return the statistics that the sums over the whole vocabulary are, with the signals for rows that say nothing."""
    some, known = sums.m > NOTHING, sums.m.isfinite() & sums.s.isfinite()
    said = some & known
    low = torch.where(known, -torch.inf, torch.nan)
    pick = lambda value, other: torch.where(said, value, other)  # noqa: E731
    return Stats(
        max=pick(sums.m, low), second=pick(torch.where(sums.m2 > NOTHING, sums.m2, -torch.inf), low),
        logsumexp=pick(sums.m + sums.s.log(), low), entropy=pick(sums.s.log() - sums.t / sums.s, torch.where(known, 0.0, torch.nan)),
        argmax=pick(sums.a, -1), token=pick(sums.token, -1),
        token_logit=pick(sums.token_logit, low),
    )  # fmt: skip


def _shape(x: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float | None) -> None:
    """Make products logits, in place."""
    if bias is not None:
        x += bias[:, None]
    if scale != 1.0:
        x *= scale
    if softcap:
        x.div_(softcap).tanh_().mul_(softcap)


def _forbid(x: torch.Tensor, ids: slice, mask_id: int | None, allowed: torch.Tensor | None) -> None:
    """Put NOTHING where a row may not say an id; ids count from the weight's first row."""
    if mask_id is not None and ids.start <= mask_id < ids.stop:
        x[mask_id - ids.start] = NOTHING
    if allowed is not None:
        words = allowed[:, ids.start // WORD : -(-ids.stop // WORD)].T  # chunks begin at whole words
        bits = (words[:, None] >> torch.arange(WORD, dtype=torch.int32, device=x.device)[:, None]) & 1
        x.masked_fill_(bits.flatten(0, 1)[: ids.stop - ids.start] == 0, NOTHING)


# --- Noise ---------------------------------------------------------------------------------------


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [N, C] f32 Gumbel noise of [N] keys and [C] vocabulary ids.

    -ln(E) of an exponential E = -ln(1 - v), v = (h + ½)·2⁻³² from a 32-bit hash: small E, which win, are resolved to 2⁻³³.
    """
    h = _mix(_mix((ids * 0x9E3779B9 & 0xFFFFFFFF) ^ (keys[:, None] & 0xFFFFFFFF)) ^ (keys[:, None] >> 32))
    v = (h.double() + 0.5) * 2.0**-32
    return -(-torch.log1p(-v)).log().float()


def _mix(h: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3's finalizer of 32-bit numbers held in int64."""
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


# --- The reference, and what is checked ----------------------------------------------------------


def lm_head_stats_reference(
    hidden, weight, *, bias=None, scale=1.0, softcap=None, mask_id=None, allowed=None, temperature=None, keys=None
) -> Stats:  # fmt: skip
    """Compute the same in fp64 from all logits at once."""
    x = hidden.double() @ weight.double().T
    x = (x if bias is None else x + bias.double()) * scale
    x = softcap * torch.tanh(x / softcap) if softcap else x
    known = x.isfinite().all(-1)
    if mask_id is not None:
        x[:, mask_id] = -torch.inf
    if allowed is not None:
        ids = torch.arange(len(weight))
        x = x.masked_fill((allowed[:, ids // WORD] >> (ids % WORD)) & 1 == 0, -torch.inf)
    some = (x > -torch.inf).any(-1) & known
    x = torch.where(some[:, None], x, 0.0)
    logp = x.log_softmax(-1)
    entropy = -torch.where(logp > -torch.inf, logp.exp() * logp, 0.0).sum(-1)
    top, a = x.max(-1)
    second = x.scatter(-1, a[:, None], -torch.inf).amax(-1)
    token = a
    if temperature is not None:
        noisy = x / torch.where(temperature > 0, temperature, 1.0)[:, None].double()
        noisy = noisy + gumbel(keys, torch.arange(x.shape[1])).double() * (temperature > 0)[:, None]
        token = noisy.argmax(-1)
    low = torch.where(known, -torch.inf, torch.nan).double()
    pick = lambda value, other: torch.where(some, value, other)  # noqa: E731
    logit = x.gather(-1, token[:, None])[:, 0]
    return Stats(
        pick(top, low), pick(second, low), pick(x.logsumexp(-1), low), pick(entropy, torch.where(known, 0.0, torch.nan).double()),
        pick(a, -1), pick(token, -1), pick(logit, low),
    )  # fmt: skip


def cases() -> list[dict]:
    """Return (N, D, V, and what else) to check: odd sizes, one row, one id, chunks that do and do not divide V."""
    return [
        dict(N=5, D=19, V=1001, chunk=256),
        dict(N=1, D=8, V=1, chunk=256),
        dict(N=3, D=16, V=256, chunk=256),
        dict(N=4, D=24, V=5003, chunk=512, softcap=3.0),
        dict(N=7, D=16, V=777, chunk=4096, bias=True, scale=0.3),
        dict(N=6, D=16, V=2050, chunk=1024, mask_id=1025),
        dict(N=6, D=16, V=2050, chunk=512, allowed=True),
        dict(N=8, D=16, V=3000, chunk=768, temperature=True, mask_id=0),
    ]
