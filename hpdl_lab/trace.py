"""The one event log: who sent what to whom, how many bytes, from when to when, in which line of the user's code.

Checks count these events, the cost model is compared with them, timelines and live plots draw them, the report of a
stuck run quotes them, and they export as Chrome/Perfetto trace JSON, from which they are read again, as are traces of
torch.profiler. `now_ns` is the only clock of real ranks.
"""

from __future__ import annotations

import copy
import functools
import gzip
import itertools
import json
import os
import re
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

Clock: TypeAlias = Callable[[], int]  # ns
Row: TypeAlias = dict[str, Any]  # of Chrome's JSON

now_ns = time.monotonic_ns
LANE_STEPS = 10**9  # the steps of a rank's nth lane are counted from n times this

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
INSTALLED = tuple({folder + os.sep for path in _LIBRARIES for folder in (path, os.path.realpath(path))})
LIBRARIES = (PACKAGE, *INSTALLED, "<frozen")  # how the names of files begin whose lines no user wrote
user_files: list[str] = []  # of this package, whose lines count as a user's: its examples add themselves


class Event(NamedTuple):
    """An operation of one rank.

    `step` counts the events of a rank in the order in which they were posted; (rank, step) is the key of an event.
    `peer` is -1 and `nbytes` 0 if the operation has none. `line` is the user's line, such as "cell:7".
    `lane` is "" for what the rank itself does, "background" for what runs in its background (Comm.background).
    """

    rank: int
    step: int
    op: str
    t0_ns: int
    t1_ns: int
    peer: int = -1
    nbytes: int = 0
    line: str = ""
    lane: str = ""


class _Log:
    """Events of one rank, packed into 48 bytes each: a run of 1,024 simulated ranks has millions. Iterating unpacks.

    Several threads may append.
    """

    LAYOUT = struct.Struct("<qqqqiIII")  # step, t0_ns, t1_ns, nbytes, peer, and the numbers of op, line and lane

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._packed = bytearray()
        self._numbers = itertools.count()
        self._names: dict[str, int] = {}  # op, line or lane -> its number

    def append(self, step: int, op: str, t0_ns: int, t1_ns: int, peer: int, nbytes: int, line: str, lane: str) -> None:
        names = self._names
        try:
            op_at, line_at, lane_at = names[op], names[line], names[lane]
        except KeyError:
            op_at, line_at, lane_at = (names.setdefault(name, next(self._numbers)) for name in (op, line, lane))
        self._packed += self.LAYOUT.pack(step, t0_ns, t1_ns, nbytes, peer, op_at, line_at, lane_at)

    def __len__(self) -> int:
        return len(self._packed) // self.LAYOUT.size

    def __iter__(self) -> Iterator[Event]:
        packed = bytes(self._packed)
        names = {number: name for name, number in self._names.items()}
        for step, t0_ns, t1_ns, nbytes, peer, op, line, lane in self.LAYOUT.iter_unpack(packed):
            yield Event(self.rank, step, names[op], t0_ns, t1_ns, peer, nbytes, names[line], names[lane])


class Trace:
    """The events of one rank. `clock` is the rank's time in ns: monotonic on real ranks, virtual on simulated ones."""

    def __init__(self, rank: int, clock: Clock = now_ns, enabled: bool = True, limit: int = 200_000) -> None:
        self.rank = rank
        self.clock = clock
        self.enabled = enabled
        self.limit = limit
        self.dropped = 0  # events after `limit`, which bounds the memory of a long run
        self.lane = ""  # of the events that are added here
        self.line_of_call = ""  # the line that has started this, if no line of the user's has led here
        self._steps = itertools.count()
        self._lanes = itertools.count(LANE_STEPS, LANE_STEPS)  # where the steps of the next lane begin
        self.log = _Log(rank)

    def in_lane(self, lane: str, clock: Clock | None = None) -> Trace:
        """Return the trace of this rank's background: its events go to the same log, in `lane`, by its own `clock`.

        Its steps are counted apart, so that they do not depend on which came first.
        """
        other = copy.copy(self)
        other.lane, other.clock = lane, clock or self.clock
        other._steps = itertools.count(next(self._lanes))
        return other

    @property
    def events(self) -> list[Event]:
        """Events so far, in the order in which they ended: a new list."""
        return list(self.log)

    def line(self) -> str:
        """Return the user's line of what happens now."""
        return caller_line() or self.line_of_call

    def step(self) -> int:
        """Return the next step number of this rank: taken when an operation is posted."""
        return next(self._steps)

    def add(
        self,
        step: int,
        op: str,
        t0_ns: int,
        t1_ns: int,
        peer: int = -1,
        nbytes: int = 0,
        line: str = "",
        lane: str = "",
    ) -> None:
        """Record one finished operation."""
        if not self.enabled:
            return
        if len(self.log) >= self.limit:
            self.dropped += 1
            return
        self.log.append(step, op, t0_ns, t1_ns, peer, nbytes, line, lane or self.lane)

    @contextmanager
    def span(self, op: str) -> Generator[None]:
        """Record the time between entry and exit as one event: `with comm.trace.span("forward"): ...`."""
        step, t0 = self.step(), self.clock()
        try:
            yield
        finally:
            self.add(step, op, t0, self.clock(), line=self.line())


def caller_line() -> str:
    """Return the user's innermost line that led here: "cell:7" in a notebook, "script.py:7" in a file, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_code(name) and not _is_generated(frame):
            return source_line(name, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of(frame: FrameType, lineno: int) -> str:
    """Return the same name for line `lineno` of one frame; "" for a frame that is not of user code."""
    name = frame.f_code.co_filename
    return source_line(name, lineno) if is_user_code(name) and not _is_generated(frame) else ""


def _is_generated(frame: FrameType) -> bool:
    """Return True for what a namedtuple or a dataclass has written for itself: it has no line in any file."""
    if frame.f_code.co_filename != "<string>":
        return False
    return str(frame.f_globals.get("__name__")).startswith("namedtuple_") or frame.f_code.co_name.startswith("__")


@functools.lru_cache(maxsize=4096)
def is_user_code(filename: str) -> bool:
    """Return True for code neither of this package nor of an installed one, and for the files in `user_files`."""
    return filename in user_files or not filename.startswith(LIBRARIES)


@functools.lru_cache(maxsize=4096)
def source_line(filename: str, lineno: int) -> str:
    """Return the name of a line for people: the cells of a notebook have no file name worth showing."""
    if re.search(r"ipykernel_|ipython-input|<cell", filename):
        return f"cell:{lineno}"
    return f"{os.path.basename(filename)}:{lineno}"


def seconds_text(seconds: float) -> str:
    """Write three digits and the unit that suits: 0.0021 -> "2.1 ms"."""
    for unit, scale in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{number_text(seconds / scale)} {unit}"
    return f"{number_text(seconds * 1e9)} ns" if seconds > 0 else "0 s"


def duration_text(seconds: float) -> str:
    """Write hours from one hour on: 9000 -> "2.5 h"; below, as seconds_text."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else seconds_text(seconds)


def number_text(value: float) -> str:
    """Write three digits: 0.123, 12.3, 123, 12,300; an exponent only below 0.0001."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}".replace("e-0", "e-")


def bytes_sent(events: Iterable[Event]) -> dict[int, int]:
    """Count the bytes sent by each rank: {rank: bytes}."""
    total: dict[int, int] = {}
    for e in events:
        if e.op == "send":
            total[e.rank] = total.get(e.rank, 0) + e.nbytes
    return total


def to_chrome(events: list[Event]) -> Row:
    """Return events as Chrome trace JSON (a dict): one process per rank, one thread per lane, times in microseconds.

    Opens in Perfetto.
    """
    origin = min((e.t0_ns for e in events), default=0)
    rows: list[Row] = [
        {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for rank in sorted({e.rank for e in events})
    ]
    threads = {lane: tid for tid, lane in enumerate(sorted({"", *(e.lane for e in events)}))}
    for rank, lane in sorted({(e.rank, e.lane) for e in events if e.lane}):
        rows.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": threads[lane], "args": {"name": lane}})
    for e in events:
        args: Row = {"step": e.step, "line": e.line}
        if e.peer >= 0:
            args["peer"] = e.peer
        if e.peer >= 0 or e.nbytes:  # collectives have bytes, but no single peer
            args["nbytes"] = e.nbytes
        rows.append(
            {
                "name": e.op,
                "ph": "X",
                "pid": e.rank,
                "tid": threads[e.lane],
                "ts": (e.t0_ns - origin) / 1e3,
                "dur": (e.t1_ns - e.t0_ns) / 1e3,
                "args": args,
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ns"}


def save_chrome(events: list[Event], path: str | os.PathLike[str]) -> None:
    """Write `to_chrome(events)` to `path`."""
    with open(path, "w") as file:
        json.dump(to_chrome(events), file)


def load_chrome(*paths: str | os.PathLike[str]) -> list[Event]:
    """Return the events of Chrome traces, .json or .json.gz: one of `save_chrome`, or one of torch.profiler per rank.

    Raises: ValueError for a file that is no such trace; OSError.
    """
    events: list[Event] = []
    for i, path in enumerate(paths):
        with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path) as file:
            try:
                found = json.load(file)
                rows = [row for row in found["traceEvents"] if row["ph"] in "MXs"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is no Chrome trace: {error!r}") from error
        if any("step" in row["args"] for row in rows if row["ph"] == "X"):
            events += _from_chrome(rows)
        else:
            events += _from_profiler(rows, found.get("distributedInfo", {}).get("rank", i))
    return sorted(events, key=lambda e: e.t0_ns)


def _from_chrome(rows: list[Row]) -> list[Event]:
    """Return the events in the rows of `to_chrome`; times count from the first event."""
    lanes = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    return [
        Event(
            *(row["pid"], row["args"]["step"], row["name"]),
            *(round(row["ts"] * 1e3), round((row["ts"] + row["dur"]) * 1e3)),
            *(row["args"].get("peer", -1), row["args"].get("nbytes", 0), row["args"]["line"]),
            lanes.get((row["pid"], row["tid"]), ""),
        )
        for row in rows
        if row["ph"] == "X"
    ]


def _from_profiler(rows: list[Row], rank: int) -> list[Event]:
    """Return the events of one rank in the rows of torch.profiler: input, forward, backward, update, communication.

    Forward are the operations that have a backward, backward is what autograd's engine evaluates: one event from the
    first to the last of them, or to the next call of torch.distributed.
    """
    differentiated = {(row["tid"], row["ts"]) for row in rows if row["ph"] == "s" and row["cat"] == "fwdbwd"}
    bars: list[tuple[str, float, float]] = []  # (op, start, end) in us
    background: list[tuple[str, float, float]] = []
    going_on = False
    for row in sorted((row for row in rows if row["ph"] == "X"), key=lambda row: (row["ts"], -row["dur"])):
        start, end = row["ts"], row["ts"] + row["dur"]
        if communication := re.match(r"(?:gloo|nccl):(\w+)", row["name"]):
            background.append((communication[1], start, end))
        elif bars and start < bars[-1][2]:
            pass  # a part of what is going on
        elif row["name"].startswith("c10d::"):
            going_on = False
        elif op := _phase_of(row["name"]) or ("forward" if (row["tid"], start) in differentiated else ""):
            if going_on and bars[-1][0] == op:
                bars[-1] = op, bars[-1][1], end
            else:
                bars.append((op, start, end))
            going_on = op in ("forward", "backward")
    lanes = [(*bar, "") for bar in bars] + [(*bar, "background") for bar in background]
    return [
        Event(rank, step, op, round(start * 1e3), round(end * 1e3), lane=lane)
        for step, (op, start, end, lane) in enumerate(lanes)
    ]


def _phase_of(name: str) -> str:
    """Return the lab's name of a phase of training that begins with, or is, this operation of torch.profiler, or ""."""
    phases = {"enumerate(DataLoader)": "input", "autograd::engine::": "backward", "Optimizer.step#": "update"}
    return next((phase for begin, phase in phases.items() if name.startswith(begin)), "")
