"""The notes of the processes of a watched script, by rank."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypeAlias, TypedDict

from .places import CommCall, NotedPlace, Place, is_authors, line_at

if TYPE_CHECKING:
    from .collectives import Entry

Event: TypeAlias = dict[str, Any]  # "what", "time_ns", and what belongs to that
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')

SILENT = 3.0  # s without a beat: four a second are written while Python runs


class Beat(TypedDict, total=False):
    """The state of a running process, {} if it has noted none. From "rank" on: if it has come to that."""

    time: float
    cpu: float  # s that it has computed or waited for a core
    place: NotedPlace | None
    call: CommCall | None
    top: list[str | int] | None  # its innermost function and line
    memory: int
    wall_ns: int
    silent: bool  # there was none for some seconds before it was read
    rank: int
    spins: bool  # it asks again and again while it waits
    step: int
    step_ns: int
    ns: dict[str, int]  # of the phases of the last step
    examples: int  # so far


class ParameterShard(TypedDict):
    """A parameter as a rank holds it: `held` of its numbers, and the mesh that it is cut on."""

    held: int
    of: int
    bytes: int
    trained: bool
    squares: NotRequired[float]
    mesh: NotRequired[list[Any]]
    axes: NotRequired[list[str]]
    placements: NotRequired[list[str]]


@dataclass
class RankRecord:
    """A process: its events in order, and its state when it was seen last. number: its rank.

    fault: (file, line, function) of its stack, innermost first, if it was ended from within compiled code.
    """

    number: int
    pid: int
    events: list[Event]
    now: Beat = field(default_factory=Beat)
    fault: list[tuple[str, int, str]] = field(default_factory=list)

    def all(self, what: str) -> list[Event]:
        return [event for event in self.events if event["what"] == what]

    def first(self, what: str) -> Event:
        return next((event for event in self.events if event["what"] == what), {})

    @cached_property
    def entries(self) -> list[Entry]:
        """Its collectives, as they were noted last."""
        return next((event["entries"] for event in reversed(self.events) if "entries" in event), [])

    @property
    def pending(self) -> list[Entry]:
        """The collectives that were not over when they were noted last."""
        return [entry for entry in self.entries if not entry["done"]]

    @property
    def ended(self) -> bool:
        """True if the script has come to its end, without an exception."""
        return bool(self.first("ended")) and not self.first("raised")

    @property
    def still_s(self) -> float:
        """The s since the call began in which it was seen last."""
        begun = [entry["time_ns"] for entry in self.pending] + [(self.now.get("call") or {}).get("number", 0)]
        return (self.now.get("wall_ns", 0) - max(begun)) / 1e9

    @property
    def silent(self) -> bool:
        """True if it had noted no state for some seconds: C++ kept Python's lock."""
        return bool(self.now.get("silent"))

    @property
    def place(self) -> Place | None:
        """The line at which it was seen last."""
        for name, line, _ in self.fault:
            if is_authors(name):
                return line_at(name, line)
        place = self.now.get("place")
        return (place[0], place[1], place[2]) if place else None

    @cached_property
    def steps(self) -> list[Event]:
        """Its first steps, one by one."""
        return self.all("step")

    @cached_property
    def step_count(self) -> int:
        """The number of steps that it has taken."""
        return max([event["upto"] for event in self.all("steps")] + [len(self.steps)])

    def model(self) -> Event:
        """Return the largest of the models that it has called, with the most parameters to train."""
        return max(self.all("model"), key=lambda e: (numbers(e), numbers(e, trained=True)), default={})

    def between(self, begin: int, end: int) -> list[Entry]:
        """Return its collectives that were begun between two times, in ns."""
        return [entry for entry in self.entries if begin <= entry["time_ns"] < end]


def numbers(model: Event, trained: bool = False) -> int:
    """Return how many numbers the parameters of a model have, all of them or the trained ones."""
    return sum(p["of"] for p in model["parameters"].values() if p["trained"] or not trained)


@dataclass
class WatchedRun:
    """A watched script, after its end.

    ranks: in order. others: processes that are no ranks. stalled: ranks waited for each other, and were ended for it.
    exit_code: of the launcher. failures: [rank, pid, exit code] of ranks that failed, as torchrun reports.
    """

    script: str
    ranks: list[RankRecord]
    others: list[RankRecord]
    seconds: float = 0.0
    exit_code: int = 0
    stalled: bool = False
    interrupted: bool = False
    failures: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def backend(self) -> str:
        met = [event for rank in self.ranks for event in rank.all("met")]
        return str(max(met, key=lambda event: event["size"])["backend"]) if met else "no process group"


def _read_process(folder: Path, pid: int) -> RankRecord:
    """Read what a process has noted; its number is -1 if it is no rank."""
    lines = (folder / f"{pid}.jsonl").read_text(errors="replace").split("\n")[:-1]
    events = [json.loads(line) for line in lines]
    now = read_beat(folder, pid)
    if now:
        now["silent"] = time.monotonic() - now["time"] > SILENT
    return RankRecord(_number_of(events), pid, events, now, _fault(folder, pid))


def _fault(folder: Path, pid: int) -> list[tuple[str, int, str]]:
    """Read the stack of the main thread that Python's faulthandler has written, [] if it has not."""
    path = folder / f"{pid}.fault"
    text = path.read_text(errors="replace") if path.exists() else ""
    stacks = [FRAME.findall(part) for part in text.split("Thread 0x")]
    found = [[(name, int(line), function) for name, line, function in stack] for stack in stacks]
    return next((stack for stack in found if any(is_authors(name) for name, _, _ in stack)), [])


def _number_of(events: list[Event]) -> int:
    """Return the rank of a process as it has noted it, -1 for none."""
    met = max((event for event in events if event["what"] == "met"), key=lambda event: event["size"], default=None)
    if met is not None:  # of the largest: a process may be a job of one rank for MPI
        return int(met["rank"])
    for what in ("meets", "began"):
        rank = next((event["rank"] for event in events if event["what"] == what), None)
        if rank is not None and rank >= 0:
            return int(rank)
    return -1


def read_beat(folder: Path, pid: int) -> Beat:
    """Read the state of a process, {} if it has noted none."""
    try:
        beat: Beat = json.loads((folder / f"{pid}.now").read_text())
    except FileNotFoundError:
        return {}
    return beat


def pids(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.jsonl"))


def read_ranks(folder: Path, alone: bool = False) -> tuple[list[RankRecord], list[RankRecord]]:
    """Read all processes: (ranks in order, others). alone: no launcher has given ranks, a single process is rank 0.

    A process to which a launcher gave a rank is none if its own children met in a process group, or if its parent has
    the same rank already.
    """
    found = [_read_process(folder, pid) for pid in pids(folder)]
    parents = {process.pid: process.events[0]["ppid"] for process in found if process.events}
    met = {process.pid for process in found if process.first("meets") or process.first("met")}
    above = {parents[pid] for pid in met if pid in parents} - met
    ranks: dict[int, RankRecord] = {}
    for process in found:
        taken = ranks.get(process.number)
        if process.number < 0 or process.pid in above:
            continue
        if taken is None or process.pid in met and taken.pid not in met:
            ranks[process.number] = process
    if alone and not ranks and found:
        first = min(found, key=lambda process: process.events[0]["time_ns"] if process.events else 0)
        ranks[0] = RankRecord(0, first.pid, first.events, first.now)
    chosen = [ranks[number] for number in sorted(ranks)]
    return chosen, [process for process in found if process not in chosen]


def line_name(place: NotedPlace | None) -> str:
    """Return "train.py:41"."""
    return f"{Path(place[0]).name}:{place[1]}" if place else "an unknown line"


def code_of(place: NotedPlace | None) -> str:
    """Return "train.py:41, `loss.backward()`"."""
    return f"{line_name(place)}, `{place[2]}`" if place and place[2] else line_name(place)
