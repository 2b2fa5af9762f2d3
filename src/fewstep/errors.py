"""What can go wrong, by whose fault, and the exit code that says so."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that says something, or the error's name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class UserError(ValueError):
    """The request itself is wrong: one line naming the thing, the value, the rule and the fix (exit 2)."""


class RunFailed(RuntimeError):
    """The request was right and the work failed while running (exit 1)."""


class Stopped(Exception):
    """A signal asked the run to stop; its state is saved (exit 128 + signal number)."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum
