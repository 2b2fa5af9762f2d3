"""What every forward of a decoding read and gave, request by request, however they were batched."""

from dataclasses import dataclass

import pytest
import torch

from fewstep.students.decoding import decode
from fewstep.students.decoding.cache import BlockCache
from fewstep.students.decoding.forward import Forward
from tests.students.builders import MASK

NEAR_TIE = 1e-4  # logits, as a share of the largest: closer than that, either token is right in fp32


@dataclass
class Seen:
    """One forward of one request: clean tokens up to now, the noisy block, and [n, V] logits of the last n of both."""

    clean: list[int]
    noisy: list[int]
    logits: torch.Tensor


def trace(model, prompts, **given):
    """Return (answers, for each prompt a list of `Seen`, one a forward)."""
    seen: list[list[Seen]] = [[] for _ in prompts]
    call, keep_rows = Forward.__call__, BlockCache.keep

    def watched(self, starts, clean, noisy, keep):
        logits = call(self, starts, clean, noisy, keep)
        if not hasattr(self.cache, "requests"):
            self.cache.requests = list(range(len(starts)))
        C, S = max(map(len, clean)), max(map(len, noisy))
        for row, request in enumerate(self.cache.requests):
            before = seen[request][-1].clean[: starts[row]] if seen[request] else []
            first = max(0, C - len(clean[row]) - (C + S - keep))  # clean tokens end where noisy ones begin
            last = keep - S + len(noisy[row])
            seen[request].append(Seen(before + clean[row], list(noisy[row]), logits[row, first:last].clone()))
        return logits

    def kept(self, rows):
        self.requests = [self.requests[i] for i in rows]
        keep_rows(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "__call__", watched)
        patch.setattr(BlockCache, "keep", kept)
        return decode(model, prompts, **given), seen


def num_near_ties(prompts, ours, theirs, greedy) -> int:
    """Return how many rows part at a near tie between two runs of the same requests, in fp32.

    Until a row parts, both runs must read the same and give the same logits up to 1e-5. It may part only where the
    row is greedy and the two tokens are the best two of the logits they come from, nearer than NEAR_TIE.

    Args:
        ours, theirs: what `trace` returned.
        greedy: for each row, whether nothing was drawn.
    """
    return sum(
        _parts(prompt, a, ours[1][i], b, theirs[1][i], greedy[i])
        for i, (prompt, a, b) in enumerate(zip(prompts, ours[0], theirs[0]))
    )


def _parts(prompt, answer, seen, other, others, greedy: bool) -> bool:
    read = [s.clean + s.noisy for s in seen] + [prompt + answer.ids]
    read_too = [s.clean + s.noisy for s in others] + [prompt + other.ids]
    for step, (x, y) in enumerate(zip(read, read_too)):
        if x != y:
            assert greedy and step, "a row that is drawn, or that has only read its prompt, must not part"
            _require_tie(x, y, seen[step - 1])
            return True
        if step < min(len(seen), len(others)):
            a, b = seen[step].logits, others[step].logits
            finite = a > -torch.inf  # all but the mask token
            assert a.shape == b.shape and torch.equal(finite, b > -torch.inf)
            apart = float((a - b)[finite].abs().amax() / a[finite].abs().amax())
            assert apart <= 1e-5, f"logits are {apart:.1e} apart, more than 1e-05"
    assert len(read) == len(read_too) and answer.ids == other.ids
    return False


def _require_tie(x: list[int], y: list[int], before: Seen) -> None:
    """Assert that the first token in which two runs differ was a near tie in the forward before."""
    differing = [p for p, (a, b) in enumerate(zip(x, y)) if a != b]
    assert differing, "one run went further than the other, though no token differs"
    place = differing[0]
    two = {x[place], y[place]}
    assert MASK not in two, "one run decided a position that the other left open"
    # a token comes from the noisy query at its place, or from the clean one before it
    first = len(before.clean) + len(before.noisy) - len(before.logits)
    queries = [place] if len(before.clean) <= place < len(before.clean) + len(before.noisy) else []
    queries += [place - 1] if first <= place - 1 < len(before.clean) else []
    for query in queries:
        best, token = before.logits[query - first].topk(2)
        finite = before.logits[query - first][before.logits[query - first] > -torch.inf]
        if set(token.tolist()) == two and float(best[0] - best[1]) < NEAR_TIE * float(finite.abs().amax()):
            return
    raise AssertionError(f"tokens {sorted(two)} at position {place} part without a near tie")
