"""What an answer sent, read from its events: how many bytes, and to whom."""

from collections import Counter

from .record import Broken


def check_waits(events, p):
    """Raise Broken where a rank started a send and never waited for it: only what was waited for leaves an event."""
    sent = Counter((e.rank, e.peer) for e in events if e.op == "send")
    received = Counter((e.peer, e.rank) for e in events if e.op == "recv")
    for (source, dest), n in sorted((received - sent).items()):
        message = (
            f"The result is right, but with {p} ranks rank {source} did not wait for {n} of its sends to rank {dest}: "
            "until wait() returns, its tensor must not change, and on real ranks the message may still be under way."
        )
        raise Broken("wait", message, events=events, size=p)


def check_bytes(events, p, nbytes, best):
    """Raise Broken where a rank sent more than the best answer does (`best`: a Cost for vectors of `nbytes`)."""
    sent = {r: sum(e.nbytes for e in events if e.op == "send" and e.rank == r) for r in range(p)}
    worst = max(sent, key=sent.get)
    if sent[worst] <= best.nbytes:
        return
    who = "every rank" if len(set(sent.values())) == 1 else f"rank {worst}"
    message = (
        f"The result is right, but with {p} ranks {who} sent {sent[worst]:,} bytes; a ring sends {best.nbytes:,.0f}: "
        f"{why_so_much(sent, worst, nbytes, best)}"
    )
    raise Broken("bytes", message, events=events, size=p)


def why_so_much(sent, worst, nbytes, best):
    """The likely reason for too many bytes: `sent` is {rank: bytes}."""
    others = [n for r, n in sent.items() if r != worst]
    if max(others) < sent[worst] / 2:
        return f"everything passes through rank {worst}, whose link becomes the bottleneck for all."
    if sent[worst] == best.steps * nbytes:
        return "you pass the whole vector at every hop. Cut it into chunks, and send one chunk per step."
    if sent[worst] % nbytes == 0:
        return f"that is {sent[worst] // nbytes} whole vectors. Cut x into chunks, and send one chunk per step."
    return (
        f"that is {sent[worst] / best.nbytes:.2g} times as much. Which chunk is sent that its receiver does not need?"
    )


def messages_sent(events, p):
    """Messages sent by each rank, as a list in rank order."""
    return [sum(e.op == "send" and e.rank == r for e in events) for r in range(p)]


def additions(comm, fn, *args):
    """How often fn(comm, *args) calls a collective that brings the numbers of all ranks together."""
    fn(comm, *args)
    others = ("send", "recv", "broadcast", "barrier")
    return sum(times for (op, _), times in comm.calls.counts.items() if op not in others)


def check_peers(events, p):
    """Raise Broken where a rank sends to anyone but its two neighbours on the ring."""
    for e in events:
        if e.op == "send" and e.peer not in ((e.rank + 1) % p, (e.rank - 1) % p):
            message = (
                f"The result is right, but rank {e.rank} sends to rank {e.peer}: on a ring of {p} ranks it knows only "
                f"its neighbors, rank {(e.rank + 1) % p} and rank {(e.rank - 1) % p}."
            )
            raise Broken("peers", message, events=events, size=p)
