"""Ask before killing: SIGTERM and SIGUSR1 stop a run where its state is saved.

By default a signal sets a flag that loops poll between steps: a loop that sees `stop_requested()`
saves and raises `Stopped`. Inside `stop_at_once` the signal raises `Stopped` itself, for work that
loses little wherever it is left. The command line turns Stopped into the exit code 128 + signal.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fewstep.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_requested: int | None = None
_at_once: str | None = None


def _request(signum: int, _frame: FrameType | None) -> None:
    global _requested
    _requested = signum
    if _at_once is not None:
        raise Stopped(signum, _at_once)


def install() -> None:
    """Catch the signals from now on; forget those of before."""
    global _requested
    _requested = None
    for signum in SIGNALS:
        signal.signal(signum, _request)


def stop_requested() -> int | None:
    """Return the signal that asked this process to stop, if one did."""
    return _requested


def raise_if_stopped(where: str) -> None:
    """Raise Stopped if a signal came; call it where the state is saved, and say so in `where`."""
    if _requested is not None:
        raise Stopped(_requested, where)


@contextmanager
def stop_at_once(where: str) -> Iterator[None]:
    """Let a signal raise Stopped with the text `where`, at any line inside the block."""
    global _at_once
    raise_if_stopped(where)
    _at_once = where
    try:
        yield
    finally:
        _at_once = None
