"""From tokens to text as they come: whole characters only, and nothing at or after a stop string."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are no character, or not yet


class Detokenizer:
    """Turn tokens into text one by one; the pieces concatenate to the text of all of them.

    A token may hold part of a character, and a decoder may treat the first token of a text in its own
    way. So each piece is what a token adds to the text of a window, which starts one piece earlier.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._done = 0  # the window, and where in it the text that was not returned yet begins

    def add(self, token: int) -> str:
        """Return what `token` adds; "" while it ends within a character or is a special token."""
        self._ids.append(token)
        before, now = self._decode(self._ids[self._start : self._done]), self._decode(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith(REPLACEMENT):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """Return what is left at the end: bytes that never became a character."""
        before, now = self._decode(self._ids[self._start : self._done]), self._decode(self._ids[self._start :])
        self._start = self._done = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Stops:
    """Cut a text before the first of several strings that is completed in it.

    Text that may still become a stop string is held back, so what was returned never has to be taken
    back, and where the text is split into pieces makes no difference.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = strings
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Return the part of the text that is sure to stay; "" for good once `hit`."""
        if self.hit:
            return ""
        self._held += text
        found = [(at + len(s), at) for s in self._strings if (at := self._held.find(s)) >= 0]
        if found:
            self.hit = True
            return self._held[: min(found)[1]]
        keep = min(len(self._held), max(map(len, self._strings), default=1) - 1)
        while keep and not any(s.startswith(self._held[-keep:]) for s in self._strings):
            keep -= 1
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sure

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        left, self._held = "" if self.hit else self._held, ""
        return left
