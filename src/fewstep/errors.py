"""What can go wrong, by whose fault, and the exit code that says so."""


class UserError(ValueError):
    """The request itself is wrong: one line naming the thing, the value, the rule and the fix (exit 2)."""


class RunFailed(RuntimeError):
    """The request was right and the work failed while running (exit 1)."""


class Stopped(Exception):
    """A signal asked the run to stop; its state is saved (exit 128 + signal number)."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum
