"""The errors of the engines' room, and one text for all ranks made of what each rank answered."""

from __future__ import annotations

import linecache
import signal
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..comm import errors as comm_errors
from ..comm.errors import CommTimeout, Wait, likely_reason, name_ranks, wait_report
from ..trace import source_line

if TYPE_CHECKING:
    from .messages import Frame, TaskFailure, TaskOutcome

E = TypeVar("E", bound=BaseException)
ON_PURPOSE = (ValueError, TypeError, LookupError, RuntimeError, OSError, ImportError, KeyboardInterrupt)
SENTENCES = ("CannotReturn", "ScriptEnded")  # whose messages say everything
BUGS = (KeyError, IndexError, RecursionError)  # which belong to those


def is_bug(error: BaseException) -> bool:
    """Return True if `error`, raised in this package, is of a type that it never raises on purpose."""
    return not isinstance(error, ON_PURPOSE) or isinstance(error, BUGS)


class _WithoutTraceback:
    """An exception whose text says everything: IPython shows no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class EngineError(_WithoutTraceback, RuntimeError):
    """A request that the cluster cannot fulfil: too many engines, no port, a dead engine. Says what to do."""


class EngineMute(EngineError):
    """An engine that is alive but answers nothing: compiled code holds its interpreter, or it was suspended."""


class _RankError(NamedTuple):
    """An exception on one rank: type and message, and frames as (file, line, function), outermost first.

    frames: of the attendee's code. library: of what it called, if the attendee's line does not explain the error.
    """

    type: str
    message: str
    frames: list[Frame]
    library: list[Frame]

    @property
    def line(self) -> str:
        """The attendee's line, such as "cell:7"."""
        return source_line(*self.frames[-1][:2]) if self.frames else ""


class RunFailed(EngineError):
    """A run in which some ranks raised. The text shows each kind of error once, with ranks and the line in the cell.

    errors: {rank: RankError}, of the ranks on which it raised. waits: what every rank was doing, in rank order;
    reason: one sentence about it.
    """

    def __init__(self, message: str, errors: dict[int, _RankError] | None = None, waits: Sequence[Wait] = ()) -> None:
        super().__init__(message)
        self.errors = errors or {}
        self.waits, self.reason = tuple(waits), likely_reason(waits)


class RunStopped(_WithoutTraceback, KeyboardInterrupt):
    """A run that was interrupted from the notebook. `waits` says what every rank was doing; `reason`: see RunFailed."""

    def __init__(self, message: str, waits: Sequence[Wait] = ()) -> None:
        super().__init__("\n".join([message, *wait_report(waits)]))
        self.waits, self.reason = tuple(waits), likely_reason(waits)


def without_traceback(error: E) -> E:
    """Make IPython show only the text of `error`, which says everything: who, what, and the line in the cell."""
    vars(error)["_render_traceback_"] = lambda: [f"{type(error).__name__}: {error}"]
    return error


def error_of(outcomes: dict[int, TaskOutcome], picture: Sequence[Wait] = ()) -> Exception | None:
    """Return the exception of a run in which some rank failed by itself; None if every rank returned.

    The attendee's own exceptions come first: that other ranks then waited in vain, as `picture` (list of Wait) shows,
    is a consequence. Of ranks that gave up waiting the first is believed: what others say later may be its consequence.

    Args:    outcomes: {rank: outcome}, in the order in which they came.
    """
    failed = {rank: o["failure"] for rank, o in outcomes.items() if "failure" in o}
    own = {rank: failed[rank] for rank in sorted(failed) if failed[rank]["kind"] in ("error", "result")}
    picture = annotate(picture, outcomes)
    if own:
        return _run_failed(own, picture)
    # torch's groups fail on a rank, a CommError, once another has come to its deadline and has broken them off.
    for rank, failure in sorted(failed.items(), key=lambda item: item[1].get("comm", ("",))[0] == "CommError"):
        if failure["kind"] == "comm":
            name, message, waits = failure["comm"]
            error = getattr(comm_errors, name)(message, annotate(waits, outcomes, picture=picture))
            error.rank = rank
            return without_traceback(error)
    stopped = {rank: failed[rank] for rank in sorted(failed)}
    return RunFailed("\n".join(_describe_stopped(stopped)), waits=picture) if stopped else None


def too_late(waits: tuple[Wait, ...], limit: float | None) -> CommTimeout:
    """Return the error of a run that its limit has ended: the ranks that were still computing, and their lines.

    With the table of who waits for whom if some were not.
    """
    places: dict[str, list[int]] = {}
    for wait in waits:
        if wait.state == "running":
            places.setdefault(wait.line, []).append(wait.rank)
    text = f"the run did not end within its limit of {limit:g} s"
    if places:
        who = ", ".join(f"{name_ranks(ranks)}{f' in {line}' if line else ''}" for line, ranks in places.items())
        text += f": still computing {'was' if sum(map(len, places.values())) == 1 else 'were'} {who}"
    return CommTimeout(text, waits if any(wait.state != "running" for wait in waits) else ())


def annotate(
    waits: Sequence[Wait], outcomes: dict[int, TaskOutcome], dead: Collection[int] = (), picture: Sequence[Wait] = ()
) -> tuple[Wait, ...]:
    """Return `waits`, with what only the ranks' ends tell: that a rank is dead, the line that a running rank was in.

    picture: what ranks have said to the notebook, for ranks that are silent in `waits`.
    """
    known = {w.rank: w for w in picture} | {w.rank: w for w in waits if w.state != "silent"}
    annotated: list[Wait] = []
    for wait in (known[rank] for rank in sorted(known)):
        failure = outcomes.get(wait.rank, {}).get("failure")
        if wait.rank in dead:
            wait = replace(wait, state="dead")
        elif (
            failure
            and failure["kind"] == "interrupt"
            and (wait.state == "running" or wait.error == "KeyboardInterrupt")
        ):
            line = source_line(*failure["frames"][-1][:2]) if failure["frames"] else wait.line
            wait = replace(wait, state="running", line=line)
        elif wait.op == "start":
            wait = replace(wait, line="")  # the ranks still gather: no line of the attendee's has run
        annotated.append(wait)
    return tuple(annotated)


def _run_failed(own: dict[int, TaskFailure], waits: Sequence[Wait]) -> RunFailed:
    """Make the RunFailed of the exceptions `own`, each kind once, then what every rank was doing."""
    errors = {rank: _RankError(f["type"], f["message"], f["frames"], f["library"]) for rank, f in own.items()}
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for rank, error in errors.items():
        sentence = error.message if error.type in SENTENCES else ""
        kinds.setdefault((error.type, error.line, sentence), []).append(rank)
    text: list[str] = []
    for ranks in kinds.values():
        text += _describe_kind(ranks, [errors[r] for r in ranks])
    if len(errors) < len(waits) or any(error.type == "Mismatch" for error in errors.values()):
        text += comm_errors.wait_report(waits, said="\n".join(text))
    return RunFailed("\n".join(text), errors, waits)


def _describe_kind(ranks: list[int], errors: list[_RankError]) -> list[str]:
    """Return the lines about one kind of error: ranks, error, and the attendee's lines that led there."""
    first = errors[0]
    if first.type in SENTENCES:
        return [f"{name_ranks(ranks)}: {first.message}"]
    text = [f"{name_ranks(ranks)}: {first.type}: {first.message}"]
    others = sorted({e.message for e in errors[1:]} - {first.message})
    text += [f"    and on other ranks: {message}" for message in others[:3]]
    for filename, lineno, function in [*first.frames[-4:], *first.library]:
        source = linecache.getline(filename, lineno).strip()
        where = f"    {source_line(filename, lineno)}{f' in {function}' if function else ''}"
        text.append(f"{where}:  {source}" if source else where)
    return text


def _describe_stopped(stopped: dict[int, TaskFailure]) -> list[str]:
    """Write one line for every place at which ranks were ended; `stopped` is {rank: failure}."""
    places: dict[str, list[int]] = {}
    for rank, failure in stopped.items():
        line = source_line(*failure["frames"][-1][:2]) if failure["frames"] else ""
        places.setdefault(f"stopped while running{f' ({line})' if line else ''}", []).append(rank)
    return [f"{name_ranks(ranks)}: {what}" for what, ranks in places.items()]


OFTEN = {
    signal.SIGKILL: "kill -9, or the machine ran out of memory",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGBUS: "a crash in compiled code, or /dev/shm is full",
}


def ending(status: str) -> str:
    """Return how an engine ended, from the exit status that the shell wrote, such as "137"."""
    try:
        code = int(status)
    except ValueError:
        return status.strip() or "ended"  # what the relay says of an engine that could not say it itself
    if code - 128 not in set(signal.Signals):
        return f"ended with exit status {code}"
    number = signal.Signals(code - 128)
    hint = f": {OFTEN[number]}" if number in OFTEN else ""
    return f"was killed by signal {number.value} ({number.name}{hint})"


def dead_text(dead: dict[int, str]) -> str:
    """Write {rank: how} as a sentence: "rank 2 was killed by signal 9 (SIGKILL: ...)"."""
    ways: dict[str, list[int]] = {}
    for rank, how in sorted(dead.items()):
        ways.setdefault(how, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} {how}" for how, ranks in ways.items())
