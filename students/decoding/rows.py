"""What decoding remembers of one row, and how a row comes to its end."""

import time
from collections.abc import Callable


class Row:
    """One prompt being answered.

    `length` counts the tokens in the cache; `pending` are decided tokens that are not there yet;
    `ids` are the generated tokens so far; `on_tokens` is told of each run of them, `on_step` after every
    forward of all of them and of the open block. `stop` is asked how many of them to keep: None while
    nothing ends the text.
    """

    def __init__(
        self,
        index: int,
        prompt: list[int],
        budget: int,
        eos: frozenset[int],
        started: float,
        on_tokens: Callable[[int, list[int]], None] | None = None,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Callable[[list[int], int], int | None] | None = None,
        on_step: Callable[[int, list[int | None]], None] | None = None,
    ):
        self.index, self.budget, self.eos, self.started, self.on_tokens = index, budget, eos, started, on_tokens
        self.temperature, self.top_p, self.seed, self.stop, self.on_step = temperature, top_p, seed, stop, on_step
        self.prompt_length, self.length, self.pending = len(prompt), 0, list(prompt)
        self.ids: list[int] = []
        self.steps: list[int] = []
        self.confidence: list[float] = []
        self.nfe = self.positions = 0
        self.first_token_s: float | None = None
        self.finish_reason: str | None = None

    @property
    def remaining(self) -> int:
        return self.budget - len(self.ids)

    @property
    def position(self) -> int:
        """The absolute position of the next generated token."""
        return self.prompt_length + len(self.ids)

    def count(self, num_positions: int) -> None:
        """Count one forward that computed `num_positions` of this row; a prompt's own are left out."""
        self.positions += num_positions if self.nfe else num_positions - len(self.pending)
        self.nfe += 1

    def saw_token(self) -> None:
        """Note the time at which the first token of the contiguous prefix was decided."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.started

    def show(self, block: list[int], mask: int | None) -> None:
        """Tell `on_step` how the answer stands after a forward: its tokens and those of the open block."""
        if self.on_step is not None:
            self.on_step(self.index, [*self.ids, *(None if token == mask else token for token in block)])

    def extend(self, ids: list[int], steps: list[int], confidence: list[float]) -> bool:
        """Append decided tokens up to the first EOS, stop or the budget; return whether the row is finished."""
        before = len(self.ids)
        for token, step, c in zip(ids, steps, confidence):
            self.ids.append(token)
            self.steps.append(step)
            self.confidence.append(c)
            if token in self.eos:
                self.finish_reason = "stop"
            elif not self.remaining:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        if self.stop is not None and (keep := self.stop(self.ids, before)) is not None:
            del self.ids[keep:], self.steps[keep:], self.confidence[keep:]
            self.finish_reason = "stop"
        if self.on_tokens is not None:
            self.on_tokens(self.index, self.ids[before:])
        return self.finish_reason is not None
