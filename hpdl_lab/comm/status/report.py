"""The report of a stuck run: what every rank was doing, as a table, and one sentence about why.

A list of Wait, one per rank, is the wait-for graph of a run: `describe_waits` prints it, `likely_reason` finds its
fault. Each rule looks at what every rank was doing and returns one sentence, or "". The rules are tried in order, the
surest first: calls that contradict each other, ranks that have ended too early, a cycle of waits, ranks that still
work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...trace import seconds_text

MOST_ROWS = 16  # of the table: of more ranks, one stands for all that do the same in the same line
OTHER_ORDER = "; the next message is the expected one: are they received in the order in which they are sent?"
OTHER_BACKGROUND = ", in the background: is it given the same work in the same order on every rank?"
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Wait:
    """The state of one rank: an edge of the wait-for graph when `state` is "waiting".

    state:   "waiting", "running" (in code, not in a communication), "finished", "failed" (raised), "dead", "idle",
             "silent" (on another host, without news).
    op:      "send", "recv", "barrier", "split", "all_reduce", ...; `peers` are the ranks that it waits for.
    nbytes:  size of the message; seconds: how long it has waited; line: the user's line, such as "cell:7".
    call:    the call of Comm that `op` is a part of, if that is another one: "broadcast", "sendrecv".
    count, dtype, root: of the message or of the call; -1, "" if there is none.
    comm:    the communicator: "" is the whole run, "split 1 color 0" a part of it.
    nth:     this is the nth collective that the rank has called on `comm`; 0 before the first.
    counts:  ((op, line, times), ...): how often it has begun this there. Of waiting ranks: only what it waits in.
    error, message: of a rank that failed: the type of its exception and the first line of its text.
    unreceived: ranks whose messages have arrived and are not received.
    background: what runs in this rank's background (Comm.background) and waits as well, each a Wait. Of a rank that
             waits for its own background, the Wait describes that background.

    Of a rank that does not wait, op, call, count, dtype, root, comm and nth are about what it did last.
    """

    rank: int
    state: str
    op: str = ""
    peers: tuple[int, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    line: str = ""
    call: str = ""
    count: int = -1
    dtype: str = ""
    root: int = -1
    comm: str = ""
    nth: int = 0
    counts: tuple[tuple[str, str, int], ...] = ()
    error: str = ""
    message: str = ""
    unreceived: tuple[int, ...] = ()
    background: tuple[Wait, ...] = ()

    @property
    def collective(self) -> str:
        """The collective that this rank is in, or was in last; "" if it is a message."""
        name = self.call or self.op
        return "" if name in ("", "send", "recv", "sendrecv", "start") else name

    @property
    def counted(self) -> str:
        """The name under which `counts` has it."""
        return self.collective or self.op

    @property
    def times(self) -> int:
        """The number of times that it has begun this at `line`, as far as that is known."""
        return next((n for op, line, n in self.counts if (op, line) == (self.counted, self.line)), 0)

    def __str__(self) -> str:
        at = f"  ({self.line})" if self.line else ""
        if self.state != "waiting":
            return f"rank {self.rank} {self.state}{at}"
        size = f" of {self.nbytes:,} bytes" if self.nbytes else ""
        whom = f" {self.with_whom}" if self.peers else ""
        return f"rank {self.rank} waits in {self.what}{size}{whom} since {seconds_text(self.seconds)}{at}"

    @property
    def what(self) -> str:
        """The operation that it waits in: "recv", "broadcast with root 1 (recv)", "barrier on split 1"."""
        root = f" with root {self.root}" if self.root >= 0 and self.collective else ""
        where = f" on {self.comm}" if self.comm else ""
        return f"{self.call}{root}{where} ({self.op})" if self.call else f"{self.op}{root}{where}"

    @property
    def with_whom(self) -> str:
        return f"{ {'send': 'to', 'recv': 'from'}.get(self.op, 'with') } {name_ranks(self.peers)}"


def name_ranks(ranks: Iterable[int]) -> str:
    """Return a list of ranks as a person would say it: "rank 3", "ranks 0-2, 5"."""
    ranks = sorted(set(ranks))
    spans = []
    for r in ranks:
        if spans and r == spans[-1][1] + 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    text = ", ".join(f"{a}" if a == b else (f"{a}, {b}" if b == a + 1 else f"{a}-{b}") for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def wait_cycle(waits: Sequence[Wait]) -> tuple[int, ...]:
    """Return one cycle of the wait-for graph as ranks in order, or (): 0 waits for 1 waits for 0 gives (0, 1).

    Ranks that have met in a collective do not wait for each other, though news from other hosts may be older.
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


def describe_waits(waits: Sequence[Wait]) -> list[str]:
    """Return the table of who waits for whom as lines of text, then the cycle if there is one."""
    if not waits:
        return []
    rows, more = _chosen(waits)
    cells = [
        HEAD,
        *(cells for w in rows for cells in (_row(w), *(("", "background", *_row(b)[2:]) for b in w.background))),
    ]
    wanted = [i for i in range(len(HEAD)) if any(c[i] for c in cells[1:])]
    widths = {i: max(len(c[i]) for c in cells) for i in wanted}
    lines = ["  " + "  ".join(c[i].ljust(widths[i]) for i in wanted).rstrip() for c in cells]
    lines += [f"  and {len(ranks):,} more in the state of rank {like}: {name_ranks(ranks)}" for like, ranks in more]
    cycle = wait_cycle(waits)
    if cycle:
        lines.append("  cycle: " + " -> ".join(map(str, _shortened((*cycle, cycle[0])))))
    return lines


HEAD = ("rank", "state", "in", "with", "bytes", "elements", "since", "line")


def _row(w: Wait) -> tuple[str, ...]:
    """Return the cells of one rank, in the order of HEAD."""
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


def _chosen(waits: Sequence[Wait]) -> tuple[Sequence[Wait], list[tuple[int, list[int]]]]:
    """Return (the rows to show, [(rank, others that do the same)]): every rank, or of many ranks one of each kind."""
    if len(waits) <= MOST_ROWS:
        return waits, []
    kinds: dict[tuple[object, ...], list[Wait]] = {}
    for w in waits:
        kinds.setdefault((w.state, w.op, w.call, w.root, w.comm, w.line, w.error), []).append(w)
    rows = [same[0] for same in kinds.values()][:MOST_ROWS]
    more = [(same[0].rank, [w.rank for w in same[1:]]) for same in list(kinds.values())[:MOST_ROWS] if len(same) > 1]
    return rows, more


def _shortened(ranks: tuple[int, ...]) -> tuple[int | str, ...]:
    """Return a cycle, without its middle if it is long."""
    return ranks if len(ranks) <= MOST_ROWS else (*ranks[:6], "...", *ranks[-3:])


# -- the likely reason -------------------------------------------------------------------------------------------------


def likely_reason(waits: Sequence[Wait]) -> str:
    """Return one sentence about why ranks got stuck or failed; "" if there is nothing to say."""
    waits = list(waits)
    return next((sentence for rule in RULES if (sentence := rule(waits))), "")


# -- ranks that contradict each other ----------------------------------------------------------------------------------


def collectives_differ(waits: list[Wait]) -> str:
    """Say that the nth collective on one communicator is another on some ranks, or has another root, count or dtype."""
    same = {}
    for w in [w for rank in waits for w in (rank, *rank.background)]:
        if w.collective and w.nth:
            same.setdefault((w.comm, w.nth), {})[w.rank] = (w.collective, w.count, w.dtype, w.root)
    for (comm, _), calls in same.items():
        if len(set(calls.values())) > 1:
            return describe_mismatch(calls) + (OTHER_BACKGROUND if comm.endswith("background") else "")
    return ""


def describe_mismatch(calls: dict[int, tuple[str, int, str, int]]) -> str:
    """Return how ranks contradict each other that should call the same: `calls` is {rank: (name, count, dtype, root)}.

    count: elements, dtype: their name, root: a rank; -1, "", -1 if a call has none. The few are named first.
    """
    names = {rank: call[0] for rank, call in calls.items()}
    counts = {rank: call[1] for rank, call in calls.items()}
    dtypes = {rank: call[2] for rank, call in calls.items()}
    roots = {rank: call[3] for rank, call in calls.items()}
    name = next(iter(names.values()))
    if len(set(names.values())) == 2:
        (few, ranks), (many, others) = _groups(names)
        return f"{_calling(ranks)} {few} where {_calling(others)} {many}"
    if len(set(names.values())) > 2:
        return ", ".join(f"{_calling(ranks)} {one}" for one, ranks in _groups(names))
    if len(set(roots.values())) > 1:
        return _by_ranks(f"{name} with", {r: f"root {root}" for r, root in roots.items()})
    if len(set(dtypes.values())) > 1 and len(set(counts.values())) > 1:
        both = {r: f"{counts[r]:,} {dtypes[r]}" for r in calls}
        return "counts and dtypes differ: " + _by_ranks(f"{name} of", both, in_order=True)
    if len(set(dtypes.values())) > 1:
        return "dtypes differ: " + _by_ranks(f"{name} of", dtypes, in_order=True)
    return "counts differ: " + _by_ranks(f"{name} of", {r: f"{n:,} elements" for r, n in counts.items()}, in_order=True)


def _groups(values: Mapping[int, str], in_order: bool = False) -> list[tuple[str, list[int]]]:
    """Return {rank: value} as [(value, ranks)]: the smallest group first, or the one with the lowest rank."""
    found: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        found.setdefault(value, []).append(rank)
    return list(found.items()) if in_order else sorted(found.items(), key=lambda group: len(group[1]))


def _by_ranks(what: str, values: Mapping[int, str], in_order: bool = False) -> str:
    """ "rank 1 calls broadcast with root 1, ranks 0, 2, 3 with root 0" """
    parts = [(name_ranks(ranks), value) for value, ranks in _groups(values, in_order)]
    first = f"{_calling(_groups(values, in_order)[0][1])} {what} {parts[0][1]}"
    return ", ".join([first, *(f"{who} {what.split()[-1]} {value}" for who, value in parts[1:])])


def _calling(ranks: list[int]) -> str:
    return f"{name_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'}"


def _said_why(waits: list[Wait]) -> str:
    """Return the error of a rank that says how ranks contradict each other, or what one has forgotten."""
    return next((w.message for w in waits if w.state == "failed" and w.error in ("Mismatch", "ForgottenWait")), "")


def mismatch(source: int, dest: int, sent: tuple[int, str], expected: tuple[int, str]) -> str:
    """Say how the two ends of a message contradict each other: `sent` and `expected` are (count, name of the dtype)."""
    if sent[1] == expected[1]:
        return f"counts differ: rank {source} sends {sent[0]:,} elements, rank {dest} expects {expected[0]:,}"
    if sent[0] == expected[0]:
        return f"dtypes differ: rank {source} sends {sent[1]}, rank {dest} expects {expected[1]}"
    return (
        f"counts and dtypes differ: rank {source} sends {sent[0]:,} {sent[1]}, "
        f"rank {dest} expects {expected[0]:,} {expected[1]}"
    )


# -- ranks that have ended ---------------------------------------------------------------------------------------------


def _raised(waits: list[Wait]) -> str:
    failed = [w for w in waits if w.state == "failed"]
    if not failed:
        return ""
    first = failed[0]
    same = [w.rank for w in failed if (w.error, w.line) == (first.error, first.line)]
    never = " and never arrived" if any(w.state == "waiting" for w in waits) else ""
    return f"{name_ranks(same)} raised {first.error or 'an error'}{_at(first.line)}{never}"


def _died(waits: list[Wait]) -> str:
    dead = [w.rank for w in waits if w.state == "dead"]
    return f"{name_ranks(dead)} died and never arrived" if dead else ""


def _left_early(waits: list[Wait]) -> str:
    """Name a rank that has finished, and came to the line of a wait less often than the rank that waits there."""
    for w, gone in _waits_for_finished(waits):
        came = {f.rank: _times_of(f, w.counted, w.line) for f in gone}
        few = [rank for rank, times in came.items() if 0 < times < w.times]
        if few and w.line:
            missing = counted_noun(w.times - came[few[0]], "step")
            it = "it" if len(few) == 1 else "they"
            return (
                f"{name_ranks(few)} left the loop {missing} early: {it} came to {line_place(w.line)} "
                f"{counted_noun(came[few[0]], 'time')}, rank {w.rank} {counted_noun(w.times, 'time')}"
            )
    return ""


def _never_called(waits: list[Wait]) -> str:
    """Name a rank that has finished without the operation in which another waits for it."""
    for w, gone in _waits_for_finished(waits):
        owed = {"recv": "send", "send": "recv"}.get(w.counted, w.counted)
        what = {"send": f"sent to rank {w.rank}", "recv": f"received from rank {w.rank}"}.get(owed, f"called {owed}")
        if w.collective and not w.comm:  # of all ranks: who else has left?
            gone = [f for f in waits if f.state == "finished" and not _has_called(f, owed)] or gone
        if any(_has_called(f, owed) for f in gone):  # but not this one
            what += " once more" if w.collective else f" what it waits for{_at(w.line)}"
        it = "it" if len(gone) == 1 else "they"
        return f"{name_ranks(f.rank for f in gone)} never {what}: {it} finished{_brackets(gone[0].line)}"
    return ""


def _wrong_source(waits: list[Wait]) -> str:
    """Name a rank that receives from one that has sent nothing and finished, while a message of another lies there."""
    for w, gone in _waits_for_finished(waits):
        others = [rank for rank in w.unreceived if rank not in w.peers]
        if w.op == "recv" and others and not any(_has_called(f, "send") for f in gone):
            return (
                f"rank {w.rank} receives from {name_ranks(w.peers)}, but {name_ranks(others)} sent to it: "
                "is the source right?"
            )
    return ""


def _has_called(w: Wait, op: str) -> bool:
    return any(o == op for o, _, _ in w.counts)


def _waits_for_finished(waits: list[Wait]) -> Iterator[tuple[Wait, list[Wait]]]:
    """Yield (a rank that waits, its peers that have finished), if there are any."""
    finished = {w.rank: w for w in waits if w.state == "finished"}
    for w in waits:
        if w.state == "waiting" and w.op != "start":
            gone = [finished[p] for p in w.peers if p in finished]
            if gone:
                yield w, gone


def _times_of(w: Wait, op: str, line: str) -> int:
    return next((n for o, at, n in w.counts if (o, at) == (op, line)), 0)


# -- ranks that wait in a circle ---------------------------------------------------------------------------------------


def _opposite_communicators(waits: list[Wait]) -> str:
    cycle = _cycle_of(waits)
    if len({w.comm for w in cycle}) < 2 or not all(w.collective for w in cycle):
        return ""
    text = ", ".join(f"rank {w.rank} waits in {w.collective} on {w.comm or 'all ranks'}" for w in cycle)
    return f"{counted_noun(len({w.comm for w in cycle}), 'communicator')} in opposite order: {text}"


def _all_exchange(waits: list[Wait]) -> str:
    """Each rank is in sendrecv with a rank that is in sendrecv with another."""
    cycle = _cycle_of(waits)
    if len(cycle) < 3 or {w.call for w in cycle} != {"sendrecv"}:
        return ""
    pairs = ", ".join(f"{w.rank} with {w.peers[0]}" for w in cycle[:4]) + (", ..." if len(cycle) > 4 else "")
    return f"{_everybody(cycle)} exchange with one who exchanges with another: {pairs}"


def _all_receive_first(waits: list[Wait]) -> str:
    cycle = _cycle_of(waits)
    return f"{_everybody(cycle)} receive first and no rank has sent" if {w.op for w in cycle} == {"recv"} else ""


def _all_send_first(waits: list[Wait]) -> str:
    cycle = _cycle_of(waits)
    if {w.op for w in cycle} != {"send"}:
        return ""
    return (
        f"{_everybody(cycle)} send first and no rank has posted a receive: let one receive first, or use comm.sendrecv"
    )


def _waits_in_a_circle(waits: list[Wait]) -> str:
    cycle = _cycle_of(waits)
    each = ", ".join(f"rank {w.rank} in {w.what} for {name_ranks(w.peers)}" for w in cycle)
    return f"each waits for the next: {each}" if cycle else ""


def _cycle_of(waits: list[Wait]) -> list[Wait]:
    """Return the ranks of a cycle."""
    by_rank = {w.rank: w for w in waits}
    return [by_rank[rank] for rank in wait_cycle(waits)]


def _everybody(cycle: list[Wait]) -> str:
    """ "ranks 0 and 1 both", "ranks 0-3 all" """
    ranks = sorted(w.rank for w in cycle)
    return f"ranks {ranks[0]} and {ranks[1]} both" if len(ranks) == 2 else f"{name_ranks(ranks)} all"


# -- ranks without news ------------------------------------------------------------------------------------------------


def _not_begun(waits: list[Wait]) -> str:
    """The others wait for a rank that has not begun the run."""
    late = sorted(w.rank for w in waits if (w.state, w.op) == ("waiting", "start") or w.state == "idle")
    if not late or not any(w.op != "start" and set(late) & set(w.peers) for w in waits if w.state == "waiting"):
        return ""
    return f"{name_ranks(late)} {_has_have(late)} not begun yet: not a deadlock, a deadline"


def _straggler(waits: list[Wait]) -> str:
    """The others wait for a rank that still works."""
    busy = {w.rank: w for w in waits if w.state == "running"}
    late = sorted({p for w in waits if w.state == "waiting" for p in w.peers if p in busy})
    if not late:
        return ""
    where = _brackets(busy[late[0]].line)
    return f"{name_ranks(late)} {_is_are(late)} still computing{where}: not a deadlock, a deadline"


def _not_heard_of(waits: list[Wait]) -> str:
    silent = sorted({w.rank for w in waits if w.state == "silent"})
    if not silent:
        return ""
    return f"{name_ranks(silent)} on another host {_has_have(silent)} sent no status: computing, or gone"


def _out_of_step(waits: list[Wait]) -> str:
    if not any(w.state == "waiting" and w.op != "start" for w in waits):
        return ""
    return "the ranks do not call the same operations in the same order"


def line_place(line: str) -> str:
    """ "cell:4" -> "line 4", as people say it of the cell that they look at; a file keeps its name."""
    return f"line {line[5:]}" if line.startswith("cell:") else line


def _at(line: str) -> str:
    return f" at {line_place(line)}" if line else ""


def _brackets(line: str) -> str:
    return f" ({line})" if line else ""


def counted_noun(n: int, noun: str) -> str:
    return f"{WORDS[n] if n < len(WORDS) else f'{n:,}'} {noun}{'' if n == 1 else 's'}"


def _is_are(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _has_have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


RULES = (
    collectives_differ,
    _said_why,
    _raised,
    _died,
    _opposite_communicators,
    _all_exchange,
    _all_receive_first,
    _all_send_first,
    _left_early,
    _wrong_source,
    _never_called,
    _waits_in_a_circle,
    _not_begun,
    _straggler,
    _not_heard_of,
    _out_of_step,
)
