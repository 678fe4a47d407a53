"""How a simulated run ended: what every rank was doing, and the error that says it."""

from typing import Any

from ...trace import line_of
from ..errors import CommError, Deadlock, Mismatch, Wait, likely_reason, name_ranks, report


def waits_of(scheduler: Any, running_line: str = "") -> list[Any]:
    """What every rank is doing, in rank order. running_line: where the code is that runs now, if any does."""
    lying = {}  # rank -> ranks whose messages it has not received
    for channel in scheduler.channels.values():
        if channel.sends:
            lying.setdefault(channel.dest, []).append(channel.source)
    lanes = {}  # rank -> what runs in its background and waits
    for lane in scheduler.lanes:
        if lane.state == "waiting":
            lanes.setdefault(lane.index, []).append(lane)
    running = tuple(rank.index for rank in scheduler.scheduled if rank.code.running)
    moving = {id(work) for booking in scheduler.bookings for work in booking[3:]}

    def described(rank: Any) -> Any:
        chain = chain_of(rank)
        others = tuple(described(lane) for lane in lanes.get(rank.index, ()) if lane not in chain)
        return wait_of(chain[-1], tuple(lying.get(rank.index, ())), running, running_line, moving, others)

    return [described(rank) for rank in scheduler.ranks]


def chain_of(rank: Any) -> list[Any]:
    """`rank`, and what it waits for in its own background, where it does: that is what keeps it waiting."""
    chain = [rank]
    while chain[-1].state == "waiting" and (lane := getattr(chain[-1].pending, "lane", None)):
        chain.append(lane)
    return chain


def wait_of(
    rank: Any,
    unreceived: tuple[int, ...],
    running: tuple[int, ...],
    running_line: str,
    moving: set,
    background: tuple[Any, ...],
) -> Wait:
    """The Wait of one SimRank. running: the rank whose code runs, if any. moving: messages whose both ends are there.

    These arrive when virtual time passes, which it does not while a rank runs: so that is whom they wait for.
    """
    more: dict[str, Any] = {"unreceived": unreceived, "background": background}
    if rank.state == "waiting":
        info = rank.pending.waits_for()
        if id(rank.pending) in moving:
            info["peers"] = running
        return Wait(rank.index, "waiting", seconds=rank.scheduler.seconds - rank.since, **more, **info)
    info = rank.calls.facts()
    if rank.state == "failed":
        first_line = str(rank.error).partition("\n")[0]
        info |= {"line": rank.error_line, "error": type(rank.error).__name__, "message": first_line}
    elif rank.state == "running":
        info = {"line": running_line if rank.index in running else ""}
    return Wait(rank.index, rank.state, **more, **info)


def raise_fault(scheduler: Any) -> None:
    """Raise what the lowest failing rank raised, or Deadlock where some wait forever; nothing after a good end."""
    failed = [rank for rank in scheduler.ranks if rank.error is not None]
    stuck = [rank.index for rank in scheduler.ranks if rank.state == "waiting"]
    if failed:
        raise explained(failed, scheduler)
    if stuck:
        waits = waits_of(scheduler)
        raise Deadlock(f"deadlock: {name_ranks(stuck)} can never go on: {likely_reason(waits)}", waits)


def explained(failed: list[Any], scheduler: Any) -> Any:
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


def require_no_forgotten_wait(rank: Any) -> None:
    """Raise ForgottenWait where a rank has finished without waiting for a receive, or for its background."""
    if rank.unwaited:
        raise next(iter(rank.unwaited.values())).forgotten()


def raised_line(error: BaseException | None) -> str:
    """The attendee's innermost line in the traceback of `error`."""
    line, entry = "", error.__traceback__
    while entry is not None:
        line = line_of(entry.tb_frame, entry.tb_lineno) or line
        entry = entry.tb_next
    return line
