"""End of a simulated run: what every rank was doing, and the error that says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CommError, Deadlock, Mismatch, Wait, likely_reason, name_ranks, wait_report
from .channel import End, MeetingSeat
from .rank import InLane

if TYPE_CHECKING:
    from ..calls import Facts
    from .rank import Scheduling, SimRank


def waits_of(scheduler: Scheduling, running_line: str = "") -> list[Wait]:
    """Return what every rank is doing, in rank order. running_line: the line of the code that runs now, if any does."""
    lying: dict[int, list[int]] = {}  # rank -> ranks whose messages it has not received
    for channel in scheduler.channels.values():
        if channel.sends:
            lying.setdefault(channel.dest, []).append(channel.source)
    lanes: dict[int, list[SimRank]] = {}  # rank -> what runs in its background and waits
    for lane in scheduler.lanes:
        if lane.state == "waiting":
            lanes.setdefault(lane.index, []).append(lane)
    running = tuple(rank.index for rank in scheduler.scheduled if rank.code.running)
    moving = {id(work) for booking in scheduler.bookings for work in booking[3:]}

    def described(rank: SimRank) -> Wait:
        chain = _chain_of(rank)
        others = tuple(described(lane) for lane in lanes.get(rank.index, ()) if lane not in chain)
        return _wait_of(chain[-1], tuple(lying.get(rank.index, ())), running, running_line, moving, others)

    return [described(rank) for rank in scheduler.ranks]


def _chain_of(rank: SimRank) -> list[SimRank]:
    """Return `rank` and, if it waits for its own background, the lane that keeps it waiting, and so on."""
    chain = [rank]
    while chain[-1].state == "waiting" and isinstance(pending := chain[-1].pending, InLane):
        chain.append(pending.lane)
    return chain


def _wait_of(
    rank: SimRank,
    unreceived: tuple[int, ...],
    running: tuple[int, ...],
    running_line: str,
    moving: set[int],
    background: tuple[Wait, ...],
) -> Wait:
    """Return the Wait of one SimRank. running: the rank whose code runs, if any. moving: ids of both ends of messages.

    These messages arrive when virtual time passes, which it does not while a rank runs: so they wait for that rank.
    """
    more: Facts = {"unreceived": unreceived, "background": background}
    pending = rank.pending
    if rank.state == "waiting" and isinstance(pending, End | MeetingSeat):
        waits = pending.waits_for()
        if id(pending) in moving:
            waits["peers"] = running
        return Wait(rank.index, "waiting", seconds=rank.scheduler.seconds - rank.since, **more, **waits)
    info: Facts = rank.calls.facts()
    if rank.state == "failed":
        first_line = str(rank.error).partition("\n")[0]
        info |= {"line": rank.error_line, "error": type(rank.error).__name__, "message": first_line}
    elif rank.state == "running":
        info = {"line": running_line if rank.index in running else ""}
    return Wait(rank.index, rank.state, **more, **info)


def raise_fault(scheduler: Scheduling) -> None:
    """Raise the error of the lowest rank that failed, or Deadlock if some wait forever; nothing after a good end."""
    failed = [rank for rank in scheduler.ranks if rank.error is not None]
    stuck = [rank.index for rank in scheduler.ranks if rank.state == "waiting"]
    if failed and (error := failed[0].error) is not None:
        raise _explained(failed, error, scheduler)
    if stuck:
        waits = waits_of(scheduler)
        raise Deadlock(f"deadlock: {name_ranks(stuck)} can never go on: {likely_reason(waits)}", waits)


def _explained(failed: list[SimRank], error: Exception, scheduler: Scheduling) -> Exception:
    """Return `error`, of the first rank that failed, with notes on its line and on what the others did."""
    size = len(scheduler.ranks)
    same = [r.index for r in failed if type(r.error) is type(error) and str(r.error) == str(error)]
    error.rank = failed[0].index  # pyrefly: ignore[missing-attribute]
    error.add_note(f"on simulated {name_ranks(same)} of {size}, at {failed[0].error_line}")
    if not isinstance(error, CommError):  # which has its own
        waits = tuple(waits_of(scheduler))
        error.waits = waits  # pyrefly: ignore[missing-attribute]
        error.reason = likely_reason(waits)  # pyrefly: ignore[missing-attribute]
        if len(same) < size or isinstance(error, Mismatch):
            error.add_note("\n".join(["meanwhile:", *wait_report(waits)]))
    return error
