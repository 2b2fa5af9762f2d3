"""Show how far long work is: a bar on a terminal, a line every 30 seconds without one."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fewstep.machine import rank

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


class Progress:
    """What `progress` yields; `advance` is all that loops call."""

    def __init__(self, label: str, total: float | None, unit: str, bar: Any = None):
        self.label, self.total, self.unit = label, total, unit
        self.done = 0.0
        self.note = ""
        self._bar = bar
        self._task = None if bar is None else bar.add_task(label, total=total, note="", rate="")
        self._start = self._last_line = time.monotonic()

    def advance(self, n: float = 1, note: str = "") -> None:
        """Count `n` more units as done; `note` stands at the end of the line."""
        self.done += n
        self.note = note or self.note
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=self.note, rate=self._rate())
        elif time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            self.print()

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{self.done / seconds:,.1f} {self.unit}/s"

    def print(self) -> None:
        """Print the state to stderr, on one rank of several."""
        if rank() == 0:
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the state as one line: done, rate, time left, note."""
        seconds = time.monotonic() - self._start
        text = f"{self.label}: {self.done:,.0f}"
        if self.total:
            text += f"/{self.total:,.0f} {self.unit}, {self._rate()}"
            if 0 < self.done < self.total:
                text += f", {_clock(seconds * (self.total - self.done) / self.done)} left"
        else:
            text += f" {self.unit}, {self._rate()}"
        if self.total is None or self.done >= self.total:
            text += f", took {_clock(seconds)}"
        return text + (f", {self.note}" if self.note else "")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextmanager
def progress(label: str, total: float | None, unit: str = "tokens") -> Iterator[Progress]:
    """Yield a counter that shows the rate and the time left of work with `total` units; rank 0 alone shows it."""
    if rank() > 0 or not sys.stderr.isatty():
        counter = Progress(label, total, unit)
        try:
            yield counter
        finally:
            counter.print()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f}" if total else "{task.completed:,.0f}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    ]
    with Bar(*columns, console=Console(stderr=True)) as bar:
        yield Progress(label, total, unit, bar)
