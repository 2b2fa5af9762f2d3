"""Where the examples of a batch stand: each in a row of its own, or several side by side.

Shapes: B rows of C clean and then N noisy positions; M copies of an example's noisy positions.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where one example stands.

    row: its row; doc: which of the row's examples it is, counted from 0.
    clean: where in the row its clean stream begins; copies: where each of its M noisy copies does.
    """

    row: int
    doc: int
    clean: int
    copies: range


@dataclass(frozen=True)
class Places:
    """The places of all examples, in their order, and the widths that hold them.

    num_rows: B. num_clean: C. num_noisy: N.
    """

    places: list[Place]
    num_rows: int
    num_clean: int
    num_noisy: int


def padded(clean: list[int], noisy: list[int], copies: int) -> Places:
    """Give each example a row, as wide as the longest needs.

    Args:
        clean, noisy: positions of each example's clean stream, and of one noisy copy.
        copies: M.
    """
    C, n = max(clean), max(noisy)
    starts = range(C, C + copies * n, n)
    return Places([Place(b, 0, 0, starts) for b in range(len(clean))], len(clean), C, copies * n)


def packed(clean: list[int], noisy: list[int], copies: int, row_tokens: int, multiple: int = 1) -> Places:
    """Put examples side by side: the clean streams of all of a row's examples, then their noisy copies.

    Args:
        clean, noisy, copies: as in `padded`.
        row_tokens: most positions of examples in a row; an example longer than that has a row of its own.
        multiple: C + N is made a multiple of it, so that kernels see few widths.
    """
    rows = fill([c + copies * n for c, n in zip(clean, noisy)], row_tokens)
    C = max(sum(clean[i] for i in row) for row in rows)
    N = max(sum(copies * noisy[i] for i in row) for row in rows)
    N += -(C + N) % multiple
    places: dict[int, Place] = {}
    for b, row in enumerate(rows):
        at, at_noisy = 0, C
        for doc, i in enumerate(row):
            end = at_noisy + copies * noisy[i]
            places[i] = Place(b, doc, at, range(at_noisy, end, noisy[i]))
            at, at_noisy = at + clean[i], end
    return Places([places[i] for i in range(len(clean))], len(rows), C, N)


def fill(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Return rows of indices, none longer than `row_tokens` unless it holds one alone.

    First fit, the longest first: never more than a few rows above the fewest possible.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((b for b, room in enumerate(free) if lengths[i] <= room), None)
        if row is None:
            row = len(rows)
            rows.append([])
            free.append(row_tokens)
        rows[row].append(i)
        free[row] -= lengths[i]
    return [sorted(row) for row in rows]
