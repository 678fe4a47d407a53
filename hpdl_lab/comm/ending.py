"""How a simulated run ended: what every rank was doing, and the error that says it."""

from greenlet import getcurrent

from ..trace import line_of
from .errors import CommError, Deadlock, ForgottenWait, Mismatch, Wait, likely_reason, name_ranks, report


def waits_of(scheduler, running_line=""):
    """What every rank is doing, in rank order. running_line: where the code is that runs now, if any does."""
    lying = {}  # rank -> ranks whose messages it has not received
    for channel in scheduler.channels.values():
        if channel.sends:
            lying.setdefault(channel.dest, []).append(channel.source)
    here = getcurrent()
    running = tuple(rank.index for rank in scheduler.ranks if rank.coroutine is here)
    moving = {id(work) for booking in scheduler.bookings for work in booking[3:]}
    return [wait_of(rank, tuple(lying.get(rank.index, ())), running, running_line, moving) for rank in scheduler.ranks]


def wait_of(rank, unreceived, running, running_line, moving):
    """The Wait of one SimRank. running: the rank whose code runs, if any. moving: messages whose both ends are there.

    These arrive when virtual time passes, which it does not while a rank runs: so that is whom they wait for.
    """
    if rank.state == "waiting":
        told = rank.pending.waits_for()
        if id(rank.pending) in moving:
            told["peers"] = running
        seconds = rank.scheduler.seconds - rank.since
        return Wait(rank.index, "waiting", seconds=seconds, unreceived=unreceived, **told)
    told = rank.calls.facts()
    if rank.state == "failed":
        first_line = str(rank.error).partition("\n")[0]
        told |= {"line": rank.error_line, "error": type(rank.error).__name__, "message": first_line}
    elif rank.state == "running":
        told = {"line": running_line if rank.index in running else ""}
    return Wait(rank.index, rank.state, unreceived=unreceived, **told)


def raise_fault(scheduler):
    """Raise what the lowest failing rank raised, or Deadlock where some wait for ever; nothing after a good end."""
    failed = [rank for rank in scheduler.ranks if rank.error is not None]
    stuck = [rank.index for rank in scheduler.ranks if rank.state == "waiting"]
    if failed:
        raise explained(failed, scheduler)
    if stuck:
        waits = waits_of(scheduler)
        raise Deadlock(f"deadlock: {name_ranks(stuck)} can never go on: {likely_reason(waits)}", waits)


def explained(failed, scheduler):
    """The exception of the first rank that failed, with notes on where it was raised and what the others did."""
    first, size = failed[0].error, len(scheduler.ranks)
    same = [r.index for r in failed if type(r.error) is type(first) and str(r.error) == str(first)]
    first.rank = failed[0].index
    first.add_note(f"on simulated {name_ranks(same)} of {size}, at {failed[0].error_line}")
    if not isinstance(first, CommError):  # which has its own
        first.waits = tuple(waits_of(scheduler))
        first.reason = likely_reason(first.waits)
        if len(same) < size or isinstance(first, Mismatch):
            first.add_note("\n".join(["meanwhile:", *report(first.waits)]))
    return first


def require_no_forgotten_wait(rank):
    """Raise ForgottenWait where a rank has finished without waiting for what it receives."""
    if rank.unwaited:
        work = next(iter(rank.unwaited.values()))
        raise ForgottenWait.of(rank.index, work.comm.members[work.peer], work.line)


def raised_line(error):
    """The attendee's innermost line in the traceback of `error`."""
    line, entry = "", error.__traceback__
    while entry is not None:
        line = line_of(entry.tb_frame, entry.tb_lineno) or line
        entry = entry.tb_next
    return line
