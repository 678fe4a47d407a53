"""What a communicator raises, and the wait-for edges that its errors carry."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """What one rank is doing: an edge of the wait-for graph when `state` is "waiting".

    state:   "waiting", "running" (in code, not in a communication), "finished", "failed" (raised), "dead", "idle".
    op:      "send", "recv", "barrier", "split", "all_reduce", ...; `peers` are the ranks that it waits for.
    nbytes:  size of the message; seconds: how long it has waited; line: the attendee's line, such as "cell:7".
    """

    rank: int
    state: str
    op: str = ""
    peers: tuple = ()
    nbytes: int = 0
    seconds: float = 0.0
    line: str = ""

    def __str__(self):
        at = f"  ({self.line})" if self.line else ""
        if self.state != "waiting":
            return f"rank {self.rank} {self.state}{at}"
        word = {"send": "to", "recv": "from"}.get(self.op, "with")
        size = f" of {self.nbytes:,} bytes" if self.nbytes else ""
        whom = f" {word} {name_ranks(self.peers)}" if self.peers else ""
        return f"rank {self.rank} waits in {self.op}{size}{whom} since {self.seconds:.3g} s{at}"


class CommError(RuntimeError):
    """A communication that cannot end well. `waits` says what every rank was doing, in rank order."""

    def __init__(self, message, waits=()):
        super().__init__(message, tuple(waits))
        self.waits = tuple(waits)

    def __str__(self):
        return "\n".join([self.args[0], *describe_waits(self.waits)])


class CommTimeout(CommError):
    """A peer did not answer before the deadline."""


class Deadlock(CommError):
    """No rank can ever go on: proved by the scheduler of simulated ranks."""


class RankFailed(CommError):
    """A peer has died, so that what it owed will never arrive."""


def name_ranks(ranks):
    """A list of ranks as a person would say it: "rank 3", "ranks 0-2, 5"."""
    ranks = sorted(set(ranks))
    spans = []
    for r in ranks:
        if spans and r == spans[-1][1] + 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    text = ", ".join(f"{a}" if a == b else (f"{a}, {b}" if b == a + 1 else f"{a}-{b}") for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def wait_cycle(waits):
    """One cycle of the wait-for graph as ranks in order, or (): 0 waits for 1 waits for 0 gives (0, 1)."""
    edges = {w.rank: w.peers for w in waits if w.state == "waiting"}
    visited = set()
    for start in edges:
        path, on_path = [], {}
        node = start
        while node in edges and node not in visited:
            if node in on_path:
                return tuple(path[on_path[node] :])
            on_path[node] = len(path)
            path.append(node)
            node = next((p for p in edges[node] if p in edges), None)
        visited.update(path)
    return ()


def describe_waits(waits):
    """The table of who waits for whom, one line per rank, then the cycle where there is one."""
    lines = [f"  {w}" for w in waits]
    cycle = wait_cycle(waits)
    if cycle:
        lines.append("  cycle: " + " -> ".join(str(r) for r in (*cycle, cycle[0])))
    return lines


def likely_reason(waits):
    """One sentence for the commonest ways in which ranks get stuck."""
    stuck = {w.rank: w for w in waits if w.state == "waiting"}
    failed = [w for w in waits if w.state in ("failed", "dead")]
    if failed:
        verb = "raised an error" if failed[0].state == "failed" else "died"
        return f"{name_ranks(w.rank for w in failed)} {verb} and never arrived"
    cycle = [stuck[r] for r in wait_cycle(waits)]
    ops = {w.op for w in cycle}
    who = name_ranks(w.rank for w in cycle) if cycle else ""
    if ops == {"recv"}:
        return f"{who} all receive first and nobody has sent"
    if ops == {"send"}:
        return f"{who} all send first and nobody has posted a receive: use comm.sendrecv"
    gone = {w.rank for w in waits if w.state == "finished"}
    left = [w for w in stuck.values() if gone & set(w.peers)]
    if left:
        w = left[0]
        peers = name_ranks(gone & set(w.peers))
        return (
            f"rank {w.rank} waits in {w.op} for {peers}, which has already finished: "
            "do all ranks make the same number of steps?"
        )
    if cycle:
        return "each waits for the next: " + ", ".join(
            f"rank {w.rank} in {w.op} for {name_ranks(w.peers)}" for w in cycle
        )
    return "the ranks do not call the same operations in the same order"
