"""What one rank of a run was doing, as a record; what a list of these records looks like to people.

A list of Wait, one per rank, is the wait-for graph of a run: `reasons.py` finds its fault, `describe_waits` prints it.
"""

from dataclasses import dataclass

from ...trace import seconds_text

MOST_ROWS = 16  # of the table: of more ranks, one stands for all that do the same in the same line


@dataclass(frozen=True)
class Wait:
    """What one rank is doing: an edge of the wait-for graph when `state` is "waiting".

    state:   "waiting", "running" (in code, not in a communication), "finished", "failed" (raised), "dead", "idle",
             "silent" (on another host, and not heard of).
    op:      "send", "recv", "barrier", "split", "all_reduce", ...; `peers` are the ranks that it waits for.
    nbytes:  size of the message; seconds: how long it has waited; line: the attendee's line, such as "cell:7".
    call:    the call of Comm that `op` is a part of, where that is another one: "broadcast", "sendrecv".
    count, dtype, root: of the message or of the call; -1, "" where there is none.
    comm:    the communicator: "" is that of the run, "split 1 color 0" a part of it.
    nth:     this is the nth collective that the rank has called on `comm`; 0 before the first.
    counts:  ((op, line, times), ...): how often it has begun what where. Of waiting ranks: what it waits in.
    error, message: of a rank that failed: the type of its exception and the first line of its text.
    unreceived: ranks whose messages have arrived and are not received.
    beside:  what runs in the background of this rank (Comm.background) and waits as well, each a Wait. Of a rank that
             waits for its own background, the Wait is that of the background.

    Of a rank that does not wait, op, call, count, dtype, root, comm and nth are those of what it did last.
    """

    rank: int
    state: str
    op: str = ""
    peers: tuple = ()
    nbytes: int = 0
    seconds: float = 0.0
    line: str = ""
    call: str = ""
    count: int = -1
    dtype: str = ""
    root: int = -1
    comm: str = ""
    nth: int = 0
    counts: tuple = ()
    error: str = ""
    message: str = ""
    unreceived: tuple = ()
    beside: tuple = ()

    @property
    def collective(self):
        """The collective that this rank is in, or was in last; "" where it is a message."""
        name = self.call or self.op
        return "" if name in ("", "send", "recv", "sendrecv", "start") else name

    @property
    def counted(self):
        """The name under which `counts` has it."""
        return self.collective or self.op

    @property
    def times(self):
        """How often it has begun this at `line`, as far as that is known."""
        return next((n for op, line, n in self.counts if (op, line) == (self.counted, self.line)), 0)

    def __str__(self):
        at = f"  ({self.line})" if self.line else ""
        if self.state != "waiting":
            return f"rank {self.rank} {self.state}{at}"
        size = f" of {self.nbytes:,} bytes" if self.nbytes else ""
        whom = f" {self.with_whom}" if self.peers else ""
        return f"rank {self.rank} waits in {self.what}{size}{whom} since {seconds_text(self.seconds)}{at}"

    @property
    def what(self):
        """What it waits in: "recv", "broadcast with root 1 (recv)", "barrier on split 1"."""
        root = f" with root {self.root}" if self.root >= 0 and self.collective else ""
        where = f" on {self.comm}" if self.comm else ""
        return f"{self.call}{root}{where} ({self.op})" if self.call else f"{self.op}{root}{where}"

    @property
    def with_whom(self):
        return f"{ {'send': 'to', 'recv': 'from'}.get(self.op, 'with') } {name_ranks(self.peers)}"


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
    """One cycle of the wait-for graph as ranks in order, or (): 0 waits for 1 waits for 0 gives (0, 1).

    Ranks that have met in a collective do not wait for each other, though what is heard from other hosts may be older.
    """
    waiting = {w.rank: w for w in waits if w.state == "waiting" and w.op != "start"}
    met = {rank: (w.op, w.comm, w.nth) if w.nth and not w.call else rank for rank, w in waiting.items()}
    edges = {rank: [p for p in w.peers if met.get(p) != met[rank]] for rank, w in waiting.items()}
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
    """The table of who waits for whom as lines of text, then the cycle where there is one."""
    if not waits:
        return []
    rows, more = chosen(waits)
    cells = [HEAD, *(cells for w in rows for cells in (row(w), *(("", "beside", *row(b)[2:]) for b in w.beside)))]
    wanted = [i for i in range(len(HEAD)) if any(c[i] for c in cells[1:])]
    widths = {i: max(len(c[i]) for c in cells) for i in wanted}
    lines = ["  " + "  ".join(c[i].ljust(widths[i]) for i in wanted).rstrip() for c in cells]
    lines += [f"  and {len(ranks):,} more that do as rank {like}: {name_ranks(ranks)}" for like, ranks in more]
    cycle = wait_cycle(waits)
    if cycle:
        lines.append("  cycle: " + " -> ".join(map(str, shortened((*cycle, cycle[0])))))
    return lines


HEAD = ("rank", "state", "in", "with", "bytes", "elements", "since", "line")


def row(w):
    """The cells of one rank, in the order of HEAD."""
    if w.state != "waiting":
        last = {"failed": w.error, "finished": f"after {w.counted}" if w.op else ""}.get(w.state, "")
        return (str(w.rank), w.state, last, "", "", "", "", w.line)
    return (
        str(w.rank),
        w.state,
        w.what,
        w.with_whom if w.peers else "",
        f"{w.nbytes:,}" if w.nbytes else "",
        f"{w.count:,} {w.dtype}" if w.count >= 0 and w.dtype else "",
        seconds_text(w.seconds),
        w.line,
    )


def chosen(waits):
    """(the rows to show, [(rank, others that do the same as it)]): every rank, or of many ranks one of each kind."""
    if len(waits) <= MOST_ROWS:
        return waits, []
    kinds = {}
    for w in waits:
        kinds.setdefault((w.state, w.op, w.call, w.root, w.comm, w.line, w.error), []).append(w)
    rows = [same[0] for same in kinds.values()][:MOST_ROWS]
    more = [(same[0].rank, [w.rank for w in same[1:]]) for same in list(kinds.values())[:MOST_ROWS] if len(same) > 1]
    return rows, more


def shortened(ranks):
    """A long cycle, without its middle."""
    return ranks if len(ranks) <= MOST_ROWS else (*ranks[:6], "...", *ranks[-3:])
