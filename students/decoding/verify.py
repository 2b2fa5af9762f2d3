"""`verify`: lossless self-speculation. Noisy blocks draft, the clean stream decides.

Shapes: B rows still active, C clean and S noisy queries, V vocabulary.

With a temperature it is speculative sampling: a drafted token x is accepted with probability
min(1, p(x)/q(x)), else one is drawn from (p - q)+; p is the clean stream's distribution and q the
noisy block's, both after temperature and top-p. Each draft comes from one forward, its tokens drawn
independently, so what follows a rejected token is still a draw from its q and may be checked.

The clean stream's next token (the anchor) is always known. One forward runs `[anchor + draft]`
causally, which writes the cache and yields the clean stream's own tokens, and drafts the block after
it on the assumption that the whole draft is accepted. Where it is not, the next forward checks the
rest of the draft behind the true token, or redrafts from the true anchor. Without a draft (`block_size` 1) this is ordinary cached AR decoding.
"""

import torch

from .forward import Forward
from .rows import Row
from .sampling import ACCEPT, AGAIN, DRAFT, distribution, draw, most_likely, uniform


def verify(forward: Forward, rows: list[Row], block_size: int) -> None:
    """Decode every row to its end, in place: the clean stream's greedy text, or a draw from its distribution.

    Args:
        forward: the student with an empty cache.
        rows: one per prompt.
        block_size: anchor and draft together; 1 drafts nothing.

    Raises:
        ValueError: for a student without a causal clean stream.
    """
    if forward.attention == "bidirectional":
        raise ValueError(
            "sampler `verify` needs a causal clean stream; a bidirectional student has none: use threshold"
        )
    mask = forward.mask_token_id
    if mask is None and block_size > 1:
        raise ValueError("this model is no few-step student: its config.json has no `fewstep` section; use sampler ar")
    drafts: dict[int, _Drafted] = {row.index: _Drafted() for row in rows}  # tokens proposed to follow the anchor
    redraft: dict[int, bool] = {row.index: False for row in rows}
    active, prefill = list(rows), True
    while active:
        clean, noisy = [], []
        for row in active:
            if redraft[row.index]:
                clean.append([])
                noisy.append(row.pending + [mask] * min(block_size - 1, row.remaining))
                continue
            draft = drafts[row.index].ids
            clean.append(row.pending + draft)
            ends = bool(draft) and draft[-1] in row.eos  # nothing follows an EOS
            room = row.remaining - len(draft)  # tokens after the draft: the next anchor and its draft
            noisy.append([mask] * min(block_size, room) if block_size > 1 and room > 1 and not ends else [])
        for row, c, x in zip(active, clean, noisy):
            row.count(len(c) + len(x))
        C, S = max(map(len, clean)), max(map(len, noisy))
        # right-aligned clean tokens: at prefill only each row's last prompt token is read
        keep = S + (1 if prefill else C)
        asked = [r.length for r in active], clean, noisy, keep
        if forward.head is not None and all(row.temperature == 0 for row in active):
            said, logits = forward.likely(*asked), [None] * len(active)
            found = said.token.view(-1, keep), said.probability.view(-1, keep)
        else:
            logits = forward(*asked)
            found = most_likely(logits)
        token, confidence = (t.tolist() for t in found)  # [B, keep]
        for i, row in enumerate(active):
            drafted = _Drafted() if not noisy[i] else _propose(row, logits[i], token[i], keep - S, len(noisy[i]))
            if redraft[row.index]:
                drafts[row.index] = drafted.cut(row.eos, row.remaining - 1)
                redraft[row.index] = False
                row.show([], mask)
                continue
            draft = drafts[row.index]
            first = keep - S - 1 - len(draft.ids)  # the query of the anchor, or of the last prompt token
            decided, agreed, sure = [], 0, []
            for j in range(len(draft.ids) + 1):
                if row.temperature > 0:
                    chosen, same = _decide(row, logits[i, first + j], draft, j)
                    sure.append(float(logits[i, first + j].log_softmax(-1)[chosen].exp()))
                else:
                    chosen = token[i][first + j]
                    same = j < len(draft.ids) and draft.ids[j] == chosen
                    sure.append(confidence[i][first + j])
                decided.append(chosen)
                if not same:
                    break
                agreed += 1
            row.length += len(row.pending) + agreed
            row.saw_token()
            row.extend(decided, [row.nfe - 1] * len(decided), sure)
            row.show([], mask)
            row.pending = decided[-1:]
            if agreed == len(draft.ids):
                drafts[row.index] = drafted.cut(row.eos, row.remaining - 1)
                continue
            # One wrong token seldom spoils the rest: what followed it is checked behind the right one, in a
            # forward that yields a token anyhow. Only a draft that failed at once is drawn anew.
            rest = draft.after(agreed + 1) if agreed else _Drafted()
            drafts[row.index] = rest.cut(row.eos, row.remaining - 1)
            redraft[row.index] = not rest.ids and row.remaining > 1
        prefill = False
        kept = [i for i, row in enumerate(active) if row.finish_reason is None]
        if len(kept) < len(active):
            active = [active[i] for i in kept]
            if active:
                forward.cache.keep(kept)


class _Drafted:
    """Tokens proposed to follow the anchor, and where they were drawn the [n, V] f64 distributions they came from."""

    def __init__(self, ids: list[int] | None = None, q: torch.Tensor | None = None):
        self.ids, self.q = ids or [], q

    def after(self, first: int) -> "_Drafted":
        return _Drafted(self.ids[first:], None if self.q is None else self.q[first:])

    def cut(self, eos: frozenset[int], room: int) -> "_Drafted":
        """End the draft after its first EOS and at `room` tokens."""
        end = next((i + 1 for i, t in enumerate(self.ids) if t in eos), len(self.ids))
        return _Drafted(self.ids[: max(0, min(end, room))], self.q)


def _propose(row: Row, logits: torch.Tensor | None, token: list[int], first: int, count: int) -> _Drafted:
    """Return the draft behind the anchor: the tokens of `count` noisy queries from `first` on, but the anchor's own.

    Args:
        logits: [keep, V], or None where nothing is drawn; token: [keep] most likely tokens.
    """
    if row.temperature == 0:
        return _Drafted(token[first + 1 : first + count])
    q = distribution(logits[first + 1 : first + count], row.temperature, row.top_p)
    # nothing else is drawn for this purpose at this step, so the place in the draft may stand for the position
    return _Drafted([draw(one, row.seed, place, row.nfe, DRAFT) for place, one in enumerate(q)], q)


def _decide(row: Row, logits: torch.Tensor, draft: _Drafted, j: int) -> tuple[int, bool]:
    """Return the token behind j accepted ones, and whether it is the drafted one.

    Args:
        logits: [V] of the clean stream.
    """
    p = distribution(logits[None], row.temperature, row.top_p)[0]
    position = row.position + j
    if j >= len(draft.ids):
        return draw(p, row.seed, position, row.nfe, AGAIN), False
    q, x = draft.q[j], draft.ids[j]
    if float(uniform(row.seed, position, row.nfe, ACCEPT, 1)) * float(q[x]) < float(p[x]):
        return x, True
    left = (p - q).clamp(min=0)
    return draw(left / left.sum(), row.seed, position, row.nfe, AGAIN), False
