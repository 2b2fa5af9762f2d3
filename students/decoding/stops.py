"""Ending an answer at a string: tokens are kept up to the one that completes it."""

from collections.abc import Callable


def stop_at(strings: list[str], tokenizer) -> Callable[[list[int], int], int | None]:
    """Return a function of (ids, tokens already checked) → how many ids to keep, or None to go on.

    Args:
        strings: non-empty; the first to be completed ends the answer.
        tokenizer: turns ids into text; special tokens count as the text they stand for.

    Raises:
        ValueError: for an empty string, which every text holds.
    """
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError("stop strings must not be empty")
    longest = max(len(s.encode()) for s in strings)  # a byte-level token may be a quarter of a character

    def keep(ids: list[int], checked: int) -> int | None:
        for end in range(checked + 1, len(ids) + 1):
            text = tokenizer.decode(ids[max(0, end - longest - 4) : end])
            if any(s in text for s in strings):
                return end
        return None

    return keep
