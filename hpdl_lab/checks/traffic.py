"""Messages of an answer, read from its events: how many, how many bytes, and to whom."""

from collections import Counter

from ..collectives.cost import Cost
from ..comm.base import Comm
from ..trace import Event
from ..units import counted
from .ranks import off_by
from .record import Answer, Broken

ROUNDING = 0.01  # more bytes than the best answer's are allowed, as if pieces are not cut evenly


def miscount(events: list[Event], p: int, steps: int) -> str:
    """Return what to say if every rank sent another number of messages than the `steps` that are needed, or ""."""
    sent = messages_sent(events, p)
    if len(set(sent)) > 1 or sent[0] == steps:
        return ""
    if sent[0] == 0:
        return "No rank sent anything."
    why = off_by(sent[0], steps, "step")
    if sent[0] == 2 * steps:
        why = "all is done twice"
    elif 2 * sent[0] == steps == 2 * (p - 1):
        why = "only one of the two halves is done"
    return f"With {p} ranks every rank sent {counted(sent[0], 'message')}, where {steps} are needed: {why}."


def check_waits(events: list[Event], p: int) -> None:
    """Raise Broken if a rank started a send and never waited for it: only what was waited for leaves an event."""
    sent = Counter((e.rank, e.peer) for e in events if e.op == "send")
    received = Counter((e.peer, e.rank) for e in events if e.op == "recv")
    for (source, dest), n in sorted((received - sent).items()):
        raise Broken(f"""wait: The result is right, but with {p} ranks rank {source} did not wait for {n} of its sends
            to rank {dest}: until wait() returns, its tensor must not change.""")


def in_barriers(events: list[Event]) -> str:
    """Return what to say of ranks that wait in barriers; "" if they do not."""
    n = max(Counter(e.rank for e in events if e.op == "barrier").values(), default=0)
    text = f"a rank waits in {counted(n, 'barrier')}, and none is needed: there all stand still for the slowest."
    return text if n else ""


def check_bytes(events: list[Event], p: int, nbytes: int, best: Cost) -> int:
    """Return the most bytes that a rank sent; raise Broken if the best answer, a Cost for `nbytes`, sends less.

    Too many messages come before too many bytes: a loop that goes round once too often sends both.
    """
    sent = {r: sum(e.nbytes for e in events if e.op == "send" and e.rank == r) for r in range(p)}
    worst = max(sent, key=lambda r: sent[r])
    if sent[worst] <= best.nbytes * (1 + ROUNDING):
        return sent[worst]
    if best.steps < min(messages_sent(events, p)) <= 2 * best.steps and (why := miscount(events, p, best.steps)):
        raise Broken(f"steps: The result is right, but it takes too long. {why}")
    who = "every rank" if len(set(sent.values())) == 1 else f"rank {worst}"
    raise Broken(f"""bytes: The result is right, but with {p} ranks {who} sent {sent[worst]:,} bytes; a ring sends
        {best.nbytes:,.0f}: {_why_so_much(sent, worst, nbytes, best, messages_sent(events, p))}""")


def _why_so_much(sent: dict[int, int], worst: int, nbytes: int, best: Cost, messages: list[int]) -> str:
    """Return the likely reason for too many bytes: `sent` is {rank: bytes}, `messages` how many each rank sent."""
    others = [n for r, n in sent.items() if r != worst]
    if max(others) < sent[worst] / 2:
        return f"everything passes through rank {worst}, whose link becomes the bottleneck for all."
    if sent[worst] == best.steps * nbytes:
        return "you pass the whole vector at every hop. Cut it into chunks, and send one chunk per step."
    if sent[worst] % nbytes == 0:
        return f"""that is {counted(sent[worst] // nbytes, "whole vector")}. Cut x into chunks, and send one chunk per
            step."""
    if set(messages) == {best.steps} and sent[worst] == 2 * best.nbytes:
        return "as many messages, each twice as large: is what you send of the dtype of x?"
    return f"""that is {sent[worst] / best.nbytes:.2g} times as much. Which chunk is sent that its receiver does not
        need?"""


def messages_sent(events: list[Event], p: int) -> list[int]:
    """Return the number of messages of each rank, in rank order."""
    return [sum(e.op == "send" and e.rank == r for e in events) for r in range(p)]


def additions(comm: Comm, fn: Answer, *args: object) -> int:
    """Count calls by fn(comm, *args) of collectives that bring the numbers of all ranks together."""
    fn(comm, *args)
    others = ("send", "recv", "broadcast", "barrier")
    return sum(times for (op, _), times in comm.calls.counts.items() if op not in others)


def check_peers(events: list[Event], p: int) -> None:
    """Raise Broken if a rank sends to anyone but its two neighbors on the ring."""
    for e in events:
        if e.op == "send" and e.peer not in ((e.rank + 1) % p, (e.rank - 1) % p):
            raise Broken(f"""peers: The result is right, but rank {e.rank} sends to rank {e.peer}: on a ring of {p}
                ranks it knows only its neighbors, rank {(e.rank + 1) % p} and rank {(e.rank - 1) % p}.""")
