"""The errors of a communicator, with the table and the likely reason that its errors carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .status.report import Wait, describe_waits, likely_reason, name_ranks, wait_cycle

__all__ = [
    "CommError",
    "CommTimeout",
    "Deadlock",
    "ForgottenWait",
    "Mismatch",
    "RankFailed",
    "Wait",
    "WrongAnswer",
    "describe_waits",
    "explainers",
    "likely_reason",
    "name_ranks",
    "wait_cycle",
]

explainers: set[Callable[[Exception, type], None]] = set()  # each may add to the error that ends a simulated rank


class CommError(RuntimeError):
    """A communication that cannot end well. `waits` says what every rank was doing, in rank order."""

    def __init__(self, message: str, waits: Sequence[Wait] = ()) -> None:
        super().__init__(message, tuple(waits))
        self.waits = tuple(waits)

    @property
    def reason(self) -> str:
        """A sentence about why it came to this; "" if nothing is known."""
        return likely_reason(self.waits)

    def __str__(self) -> str:
        return "\n".join([self.args[0], *wait_report(self.waits, self.args[0])])


class CommTimeout(CommError):
    """A peer did not answer before the deadline."""


class Deadlock(CommError):
    """No rank can ever go on: proved by the scheduler of simulated ranks."""


class RankFailed(CommError):
    """A peer has died, so that what it owed will never arrive."""


class Mismatch(ValueError):
    """Ranks contradict each other: another count, dtype, root or operation than the others. Says the numbers."""


class ForgottenWait(ValueError):
    """A rank has returned without waiting for what it receives, or for what runs in the background.

    Its tensor may hold the result by now, or not.
    """

    @classmethod
    def of(cls, rank: int, source: int, line: str) -> ForgottenWait:
        at = f" ({line})" if line else ""
        return cls(f"rank {rank} never waited for its receive from rank {source}{at}: call wait() before x is read")

    @classmethod
    def of_background(cls, rank: int, what: str, line: str) -> ForgottenWait:
        """what: the name of the function that runs, or has run, in the background."""
        at = f" ({line})" if line else ""
        how = "call wait(), which also says what went wrong there"
        return cls(f"rank {rank} never waited for {what} in the background{at}: {how}")


def wait_report(waits: Sequence[Wait], said: str = "") -> list[str]:
    """Return the lines under an error: the table of who waits for whom, and the reason unless `said` has it."""
    reason = likely_reason(waits)
    return [*describe_waits(waits), *([f"  likely: {reason}"] if reason and reason not in said else [])]


class WrongAnswer(ValueError):
    """A function that does not do what the collective does is neither timed nor trained with."""
