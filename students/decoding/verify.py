"""`verify`: lossless self-speculation. Noisy blocks draft, the clean stream decides.

Shapes: B rows still active, C clean and S noisy queries, V vocabulary.

The clean stream's next token (the anchor) is always known. One forward runs `[anchor + draft]`
causally, which writes the cache and yields the clean stream's own tokens, and drafts the block after
it on the assumption that the whole draft is accepted. Where it is not, the next forward checks the
rest of the draft behind the true token, or redrafts from the true anchor. Without a draft (`block_size` 1) this is ordinary cached AR decoding.
"""

from .forward import Forward
from .rows import Row


def verify(forward: Forward, rows: list[Row], block_size: int) -> None:
    """Decode every row to its end, in place; the output is the clean stream's greedy text.

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
    drafts: dict[int, list[int]] = {row.index: [] for row in rows}  # tokens proposed to follow the anchor
    redraft: dict[int, bool] = {row.index: False for row in rows}
    active, prefill = list(rows), True
    while active:
        clean, noisy = [], []
        for row in active:
            if redraft[row.index]:
                clean.append([])
                noisy.append(row.pending + [mask] * min(block_size - 1, row.remaining))
                continue
            draft = drafts[row.index]
            clean.append(row.pending + draft)
            ends = bool(draft) and draft[-1] in row.eos  # nothing follows an EOS
            room = row.remaining - len(draft)  # tokens after the draft: the next anchor and its draft
            noisy.append([mask] * min(block_size, room) if block_size > 1 and room > 1 and not ends else [])
        for row, c, x in zip(active, clean, noisy):
            row.count(len(c) + len(x))
        C, S = max(map(len, clean)), max(map(len, noisy))
        # right-aligned clean tokens: at prefill only each row's last prompt token is read
        keep = S + (1 if prefill else C)
        logits = forward([r.length for r in active], clean, noisy, keep=keep)
        top, token = logits.max(-1)
        confidence = (top - logits.logsumexp(-1)).exp()
        token, confidence = token.tolist(), confidence.tolist()  # [B, keep]
        for i, row in enumerate(active):
            noisy_tokens = token[i][keep - S :]
            if redraft[row.index]:
                drafts[row.index] = _cut(noisy_tokens[1 : len(noisy[i])], row.eos, row.remaining - 1)
                redraft[row.index] = False
                continue
            draft = drafts[row.index]
            first = keep - S - 1 - len(draft)  # the query of the anchor, or of the last prompt token
            decided, agreed = [], 0
            for j in range(len(draft) + 1):
                decided.append(token[i][first + j])
                if j < len(draft) and draft[j] == decided[j]:
                    agreed += 1
                else:
                    break
            row.length += len(row.pending) + agreed
            row.saw_token()
            forwards = [row.nfe - 1] * len(decided)
            row.extend(decided, forwards, confidence[i][first : first + len(decided)])
            row.pending = decided[-1:]
            if agreed == len(draft):
                drafts[row.index] = _cut(noisy_tokens[1 : len(noisy[i])], row.eos, row.remaining - 1)
                continue
            # One wrong token seldom spoils the rest: what followed it is checked behind the right one, in a
            # forward that yields a token anyhow. Only a draft that failed at once is drawn anew.
            rest = draft[agreed + 1 :] if agreed else []
            drafts[row.index] = _cut(rest, row.eos, row.remaining - 1)
            redraft[row.index] = not rest and row.remaining > 1
        prefill = False
        kept = [i for i, row in enumerate(active) if row.finish_reason is None]
        if len(kept) < len(active):
            active = [active[i] for i in kept]
            if active:
                forward.cache.keep(kept)


def _cut(draft: list[int], eos: frozenset[int], room: int) -> list[int]:
    """End a draft after its first EOS and at `room` tokens."""
    end = next((i + 1 for i, t in enumerate(draft) if t in eos), len(draft))
    return draft[: max(0, min(end, room))]
