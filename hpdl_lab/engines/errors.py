"""What the engines' room raises: each one is a clear text, in a notebook without a traceback through this package."""

from ..comm.errors import likely_reason, report

ON_PURPOSE = (ValueError, TypeError, LookupError, RuntimeError, OSError, ImportError, KeyboardInterrupt)
BUGS = (KeyError, IndexError, RecursionError)  # which belong to those


def is_bug(error: BaseException) -> bool:
    """Whether `error`, raised in this package, is of a type that it never raises on purpose."""
    return not isinstance(error, ON_PURPOSE) or isinstance(error, BUGS)


class EngineError(RuntimeError):
    """The cluster cannot do what was asked: too many engines, no port, an engine that died before. Says what to do."""

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class EngineMute(EngineError):
    """An engine is alive but answers nothing: compiled code holds its interpreter, or it was suspended."""


class RunFailed(EngineError):
    """The function raised on some ranks. The text shows each kind of error once, with ranks and the line in the cell.

    errors: {rank: RankError}, of the ranks on which it raised. waits: what every rank was doing, in rank order;
    reason: one sentence about it.
    """

    def __init__(self, message, errors=None, waits=()):
        super().__init__(message)
        self.errors = errors or {}
        self.waits, self.reason = tuple(waits), likely_reason(waits)


class RunStopped(KeyboardInterrupt):
    """The run was interrupted from the notebook. `waits` says what every rank was doing; `reason`: see RunFailed."""

    def __init__(self, message, waits=()):
        super().__init__("\n".join([message, *report(waits)]))
        self.waits, self.reason = tuple(waits), likely_reason(waits)

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


def without_traceback(error):
    """Make IPython show only the text of `error`, which says everything: who, what, and the line in the cell."""
    error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]
    return error
