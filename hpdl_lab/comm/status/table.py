"""The status table: what every rank of this machine is doing, in a file that all map, readable when they are stuck.

One slot per rank of MPI_COMM_WORLD. A rank writes only its own slot, and only when a wait has become long enough to be
of interest; a process that opens the file reads all slots without the ranks' help.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...trace import now_ns
from ..calls import Facts
from ..errors import Wait
from ..hosts import shared_file

STATES = ("absent", "running", "waiting", "finished", "failed", "idle")
MAX_PEERS = 32  # named in a slot; a wait for more ranks names the first of them
MAX_FACTS = 1024  # bytes
MAX_TEXT = 160  # characters of one fact

# version, pid, run, state, number of peers, nbytes, since, until, op, line, peers, bytes of facts, facts as JSON
SLOT = struct.Struct(f"<QqqBxHxxxxQqq24s96s{MAX_PEERS}HH{MAX_FACTS}s")
VERSION = struct.Struct("<Q")
HEADER = struct.Struct("<8sQ")  # magic, size
MAGIC = b"hpdl-brd"


class Slot(NamedTuple):
    """The state that one rank has published. Times in ns of the monotonic clock; until_ns is 0 while the state lasts.

    facts: what else errors.Wait tells, by the names of its fields; in `unreceived` are ranks of MPI_COMM_WORLD.
    """

    pid: int
    run: int
    state: str
    op: str
    peers: tuple[int, ...]
    nbytes: int
    since_ns: int
    until_ns: int
    line: str
    facts: Facts

    def moved(self, ns: int) -> Slot:
        """This slot, read on a clock that is `ns` behind."""
        return self._replace(since_ns=self.since_ns + ns, until_ns=self.until_ns and self.until_ns + ns)

    def in_run(self, run: int) -> Slot:
        """This slot as seen from `run`: who is in a later one has finished it, who is in an earlier one is idle."""
        if self.run == run or self.state in ("absent", "silent", "dead"):
            return self
        return self._replace(state="finished" if self.run > run else "idle", op="", line="", facts={})

    def died(self) -> Slot:
        """Return the slot of a rank whose process has ended in this state."""
        return self._replace(state="dead", op="", facts={})

    def wait(self, rank: int, number: dict[int, int]) -> Wait:
        """Return this slot as the Wait of rank `rank` of a run; number: {rank of MPI_COMM_WORLD: rank of the run}."""
        facts = {**self.facts, "unreceived": [number[r] for r in self.facts.get("unreceived", ()) if r in number]}
        facts: Facts = {
            name: tuple(map(_as_tuple, fact)) if isinstance(fact, list) else fact for name, fact in facts.items()
        }
        if self.state != "waiting":
            return Wait(rank, self.state, self.op, line=self.line, **facts)
        peers = tuple(number[p] for p in self.peers if p in number)
        seconds = ((self.until_ns or now_ns()) - self.since_ns) / 1e9
        return Wait(rank, "waiting", self.op, peers, self.nbytes, seconds, self.line, **facts)


def open_together(
    rank: int, hosts: list[str], tell: Callable[[str], list[str]], attach: Callable[[str], StatusTable]
) -> StatusTable:
    """Return what `attach` makes of the path of a table, one file for the ranks of each host. Collective.

    The file has no name any more when all have opened it.   tell: tell(note) returns the notes of all ranks.
    """
    first = hosts.index(hosts[rank])
    mine = ""
    if rank == first:
        mine = shared_file("status")
        StatusTable.create(mine, len(hosts)).close()
    table = attach(tell(mine)[first])
    tell("opened")
    if mine:
        os.unlink(mine)
    return table


class Status(Protocol):
    """The status table as the waits of a rank use it."""

    def publish(
        self,
        rank: int,
        state: str,
        run: int = 0,
        op: str = "",
        peers: Sequence[int] = (),
        nbytes: int = 0,
        since_ns: int = 0,
        until_ns: int = 0,
        line: str = "",
        facts: Facts | None = None,
    ) -> None: ...

    def end_wait(self, rank: int) -> None: ...

    def exchange(self, members: tuple[int, ...]) -> None: ...

    def leave(self, members: tuple[int, ...]) -> None: ...

    def slot(self, rank: int) -> Slot: ...

    def died(self, rank: int) -> bool: ...

    def is_unreachable(self, rank: int) -> bool: ...

    def waits(self, ranks: Sequence[int] | None = None, run: int | None = None) -> list[Wait]: ...


def waits_of(status: Status, ranks: Sequence[int], run: int | None) -> list[Wait]:
    """Return what `ranks` do, as StatusTable.waits."""
    number = {rank: i for i, rank in enumerate(ranks)}
    slots = {rank: status.slot(rank).died() if status.died(rank) else status.slot(rank) for rank in ranks}
    if run is not None:
        slots = {rank: slot.in_run(run) for rank, slot in slots.items()}
    return [slot.wait(number[rank], number) for rank, slot in slots.items() if slot.state != "absent"]


class StatusTable:
    """The slots of `size` ranks in the file `path`."""

    now = staticmethod(now_ns)

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        magic, self.size = HEADER.unpack_from(self._memory)
        if magic != MAGIC:
            raise ValueError(f"{path} is not a status table")
        # pid: pidfd, which cannot be mistaken when the system gives the pid to another process
        self._watched: dict[int, int] = {}

    @classmethod
    def create(cls, path: str, size: int) -> StatusTable:
        """Write an empty status table for `size` ranks to `path`, readable by this user only, and open it."""
        if size < 1:
            raise ValueError(f"a status table needs at least 1 rank, got {size}")
        with open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600), "wb") as file:
            file.write(HEADER.pack(MAGIC, size) + bytes(size * SLOT.size))
        return cls(path)

    @classmethod
    def open(cls, path: str) -> StatusTable:
        """Open the table that somebody has created at `path`."""
        return cls(path)

    def close(self) -> None:
        """Let go of the file and of the processes that were watched."""
        for watch in self._watched.values():
            os.close(watch)
        self._watched = {}
        self._memory.close()

    # -- writing ----------------------------------------------------------------------------------------------------

    def publish(
        self,
        rank: int,
        state: str,
        run: int = 0,
        op: str = "",
        peers: Sequence[int] = (),
        nbytes: int = 0,
        since_ns: int = 0,
        until_ns: int = 0,
        line: str = "",
        facts: Facts | None = None,
    ) -> None:
        """Replace slot `rank`, which must be this process's own. `peers` are ranks of MPI_COMM_WORLD."""
        raw = _packed(facts or {})
        at = self._at(rank)
        (version,) = VERSION.unpack_from(self._memory, at)
        version += version % 2  # odd where an interrupt ended the last publishing half way
        named = tuple(peers)[:MAX_PEERS]
        body = SLOT.pack(
            version + 2,
            os.getpid(),
            run,
            STATES.index(state),
            len(named),
            nbytes,
            since_ns or now_ns(),
            until_ns,
            op.encode()[:24],
            line.encode()[-96:],
            *named,
            *(0,) * (MAX_PEERS - len(named)),
            len(raw),
            raw,
        )
        # An odd version says that the slot is being written: readers try again.
        VERSION.pack_into(self._memory, at, version + 1)
        self._memory[at + VERSION.size : at + SLOT.size] = body[VERSION.size :]
        VERSION.pack_into(self._memory, at, version + 2)

    def end_wait(self, rank: int, now: Callable[[], int] = now_ns) -> None:
        """Keep the wait in slot `rank` as it is, but stop its clock: the rank has given up."""
        slot = self.slot(rank)
        ended = (slot.op, slot.peers, slot.nbytes, slot.since_ns, now(), slot.line, slot.facts)
        self.publish(rank, slot.state, slot.run, *ended)

    # -- news of other hosts; a table that all ranks share has none (see remote.py) --------------------------------

    def begin_run(self, run: int) -> None:
        """This rank begins `run`: drop reports of earlier ones."""

    def exchange(self, members: tuple[int, ...]) -> None:
        """This rank waits for long: send the states of this host to `members` on others, and receive theirs."""

    def leave(self, members: tuple[int, ...]) -> None:
        """This rank ends the run, and tells `members` on other hosts."""

    def flush(self) -> bool:
        """Receive the rest; true when all that was sent has left."""
        return True

    # -- reading ----------------------------------------------------------------------------------------------------

    def slot(self, rank: int) -> Slot:
        """Return the Slot of `rank`."""
        at = self._at(rank)
        for _ in range(100):
            (before,) = VERSION.unpack_from(self._memory, at)
            _, pid, run, state, count, nbytes, since, until, op, line, *more = SLOT.unpack_from(self._memory, at)
            (after,) = VERSION.unpack_from(self._memory, at)
            if before == after and not before % 2:
                break  # otherwise its writer was killed while writing: take what is there
        peers, (size, facts) = tuple(more[:count]), more[-2:]
        return Slot(
            pid, run, STATES[state], _text(op), peers, nbytes, since, until, _text(line), _unpacked(facts[:size])
        )

    def is_dead(self, rank: int) -> bool:
        """Return True if the process that published slot `rank` has ended; False also if nothing was published."""
        pid = self.slot(rank).pid
        if pid == 0 or pid == os.getpid():
            return False
        if not hasattr(os, "pidfd_open"):
            return _is_gone(pid)
        if pid not in self._watched:
            try:
                self._watched[pid] = os.pidfd_open(pid)
            except OSError:
                return _is_gone(pid)
        ended = select.poll()
        ended.register(self._watched[pid], select.POLLIN)
        return bool(ended.poll(0))

    def mark_dead(self, rank: int) -> None:
        """Note that the process of `rank` has ended, for ranks of other hosts: ranks of this host see it themselves."""

    def is_unreachable(self, rank: int) -> bool:
        """True if MPI must not be given a message to `rank`, as it would try to connect to it and not return."""
        return False

    def died(self, rank: int) -> bool:
        """True when the process of `rank` has ended in the middle of its work."""
        return self.slot(rank).state in ("running", "waiting", "failed") and self.is_dead(rank)

    def waits(self, ranks: Sequence[int] | None = None, run: int | None = None) -> list[Wait]:
        """Return what the ranks are doing, as list[errors.Wait].

        ranks: ranks of MPI_COMM_WORLD; the answer numbers them, and their peers, 0, 1, ... in this order. None: all.
        run: what ranks do in other runs is left out; None: all. A rank that never published is left out.
        """
        return waits_of(self, range(self.size) if ranks is None else ranks, run)

    def _at(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"no rank {rank} in a status table of {self.size}")
        return HEADER.size + rank * SLOT.size


def _packed(facts: Facts) -> bytes:
    """Return the facts as bytes, without defaults; the longest are cut or left out."""
    facts = {k: v[:MAX_TEXT] if isinstance(v, str) else v for k, v in facts.items() if v not in ("", (), -1)}
    while len(raw := json.dumps(facts, separators=(",", ":")).encode()) > MAX_FACTS:
        del facts[max(facts, key=lambda name: len(json.dumps(facts[name])))]
    return raw


def _unpacked(raw: bytes) -> Facts:
    """Return the facts from bytes; {} if their writer was killed while writing."""
    try:
        return json.loads(raw) if raw else {}
    except ValueError:
        return {}


def _as_tuple(fact: object) -> object:
    return tuple(fact) if isinstance(fact, list) else fact


def _text(raw: bytes) -> str:
    """Return a field of fixed length as a string."""
    return raw.rstrip(b"\0").decode(errors="replace")


def _is_gone(pid: int) -> bool:
    """True when `pid` has ended, also while its parent has not yet noticed."""
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
