"""From what each rank answered to what `lab.run` returns or raises: one text for all ranks."""

import linecache
import pickle
from dataclasses import replace
from typing import NamedTuple

from ..comm import errors as comm_errors
from ..comm.base import Results
from ..comm.errors import CommTimeout, Wait, name_ranks
from ..trace import Event, source_line
from .errors import RunFailed, without_traceback


class RankError(NamedTuple):
    """What one rank raised: the exception's type and message, and [(file, line, function)], outermost first."""

    type: str
    message: str
    frames: list

    @property
    def line(self):
        """The attendee's line, such as "cell:7"."""
        return source_line(*self.frames[-1][:2]) if self.frames else ""


def results(outcomes, rows):
    """Results in rank order of a run in which every rank returned; `outcomes` is {rank: outcome}."""
    outcomes = [outcomes[rank] for rank in sorted(outcomes)]
    values = [pickle.loads(o["value"]) for o in outcomes]
    events = [Event._make(e) for o in outcomes for e in o["events"]]
    seconds = (max(o["t1_ns"] for o in outcomes) - min(o["t0_ns"] for o in outcomes)) / 1e9
    return Results(values, events, rows, seconds)


def error_of(outcomes, picture=()):
    """The exception of a run in which some rank failed by itself; None where every rank returned.

    The attendee's own exceptions come first: that other ranks then waited in vain, as `picture` (list of Wait) shows,
    is a consequence. Of ranks that gave up waiting the first is believed: what others say later may be its consequence.

    Args:    outcomes: {rank: outcome}, in the order in which they came.
    """
    failed = {rank: o["failure"] for rank, o in outcomes.items() if "failure" in o}
    own = {rank: failed[rank] for rank in sorted(failed) if failed[rank]["kind"] in ("error", "result")}
    picture = annotate(picture, outcomes)
    if own:
        return run_failed(own, picture)
    for rank, failure in failed.items():
        if failure["kind"] == "comm":
            name, message, waits = failure["comm"]
            error = getattr(comm_errors, name)(message, annotate(waits, outcomes, picture=picture))
            error.rank = rank
            return without_traceback(error)
    stopped = {rank: failed[rank] for rank in sorted(failed)}
    return RunFailed("\n".join(describe_stopped(stopped)), waits=picture) if stopped else None


def too_late(waits: tuple[Wait, ...], limit: float) -> CommTimeout:
    """The error of a run that its limit has ended: which ranks were still computing, and in which lines.

    With the table of who waits for whom where some were not.
    """
    places = {}
    for wait in waits:
        if wait.state == "running":
            places.setdefault(wait.line, []).append(wait.rank)
    text = f"the run did not end within its limit of {limit:g} s"
    if places:
        who = ", ".join(f"{name_ranks(ranks)}{f' in {line}' if line else ''}" for line, ranks in places.items())
        text += f": still computing {'was' if sum(map(len, places.values())) == 1 else 'were'} {who}"
    return CommTimeout(text, waits if any(wait.state != "running" for wait in waits) else ())


def annotate(waits, outcomes, dead=(), picture=()):
    """`waits`, with what only the ranks' ends tell: that a rank is dead, and the line that a running rank was in.

    picture: what ranks have told the notebook; for those of which `waits` knows nothing.
    """
    known = {w.rank: w for w in picture} | {w.rank: w for w in waits if w.state != "silent"}
    told = []
    for wait in (known[rank] for rank in sorted(known)):
        failure = outcomes.get(wait.rank, {}).get("failure")
        if wait.rank in dead:
            wait = replace(wait, state="dead")
        elif is_interrupted(failure) and (wait.state == "running" or wait.error == "KeyboardInterrupt"):
            line = source_line(*failure["frames"][-1][:2]) if failure["frames"] else wait.line
            wait = replace(wait, state="running", line=line)
        elif wait.op == "start":
            wait = replace(wait, line="")  # the ranks still gather: no line of the attendee's has run
        told.append(wait)
    return tuple(told)


def is_interrupted(failure):
    return failure is not None and failure["kind"] == "interrupt"


def run_failed(own, waits):
    """RunFailed for the exceptions `own`, each kind once, then what every rank was doing."""
    errors = {rank: RankError(f["type"], f["message"], f["frames"]) for rank, f in own.items()}
    kinds = {}
    for rank, error in errors.items():
        kinds.setdefault((error.type, error.line), []).append(rank)
    text = []
    for ranks in kinds.values():
        text += describe_kind(ranks, [errors[r] for r in ranks])
    if len(errors) < len(waits) or any(error.type == "Mismatch" for error in errors.values()):
        text += comm_errors.report(waits, said="\n".join(text))
    return RunFailed("\n".join(text), errors, waits)


def describe_kind(ranks, errors):
    """The lines about one kind of error: who, what, and the attendee's lines that led there."""
    first = errors[0]
    if first.type == "CannotReturn":
        return [f"{name_ranks(ranks)}: {first.message}"]
    text = [f"{name_ranks(ranks)}: {first.type}: {first.message}"]
    others = sorted({e.message for e in errors[1:]} - {first.message})
    text += [f"    and on other ranks: {message}" for message in others[:3]]
    for filename, lineno, function in first.frames[-4:]:
        source = linecache.getline(filename, lineno).strip()
        where = f"    {source_line(filename, lineno)}{f' in {function}' if function else ''}"
        text.append(f"{where}:  {source}" if source else where)
    return text


def describe_stopped(stopped):
    """One line for every place at which ranks were ended; `stopped` is {rank: failure}."""
    places = {}
    for rank, failure in stopped.items():
        line = source_line(*failure["frames"][-1][:2]) if failure["frames"] else ""
        places.setdefault(f"stopped while running{f' ({line})' if line else ''}", []).append(rank)
    return [f"{name_ranks(ranks)}: {what}" for what, ranks in places.items()]
