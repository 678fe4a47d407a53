"""A checkpoint that all ranks write, each its own part, and that is whole at any moment at which the job may die.

    rank r   its shard -> a file with a new name                               no file in use is touched
    rank 0   step, and of each shard its name, start, length, CRC -> "latest"  by a rename: before or after, never half
    loading  "latest" -> the files that overlap a range                        on any number of ranks

Both LATEST and the disk are stand-ins: torch.distributed.checkpoint does the same with .metadata and a file system.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.chunks import bounds
from ..comm import sim
from ..comm.base import Comm
from ..units import counted

LATEST = "latest"  # the file that names the checkpoint to load
PART = "latest.part"  # the same file while it is being written
ITEM = 8  # bytes of an element: float64

Listed = tuple[str, int, int, int]  # name of a file, first element, number of elements, CRC


class Killed(RuntimeError):
    """The whole job is killed: this is raised in every operation of the disk from then on."""


class FileOperation(NamedTuple):
    """An operation of a rank: "write", "finish" (the second half of a write), "rename", "remove" or "read"."""

    rank: int
    what: str
    name: str
    nbytes: int = 0
    old: str = ""  # the name before a rename


class Disk:
    """A stand-in for a shared file system: names and bytes, the same for all ranks.

    `rename` and `remove` are atomic. `write` is not: during it, the first half of the bytes are in the file.

    files:   {name: bytes}; log: the operations that have begun.
    kill_at: the number of operations after which the job is killed, instead of the next one; None for never.
    """

    def __init__(self, files: dict[str, bytes] | None = None, kill_at: int | None = None) -> None:
        self.files = dict(files or {})
        self.kill_at = kill_at
        self.log: list[FileOperation] = []
        self.killed: list[FileOperation] = []  # that were not done any more
        self.comm: Comm | None = None
        self.seconds = 0.0

    def __deepcopy__(self, memo: dict[int, object]) -> Disk:
        return self  # one for all simulated ranks

    def of(self, comm: Comm, seconds: float = 1e-3) -> Disk:
        """Return this disk for the rank of `comm`: each operation takes `seconds` of its virtual time."""
        mine = copy.copy(self)
        mine.comm, mine.seconds = comm, seconds
        return mine

    def write(self, name: str, data: bytes) -> None:
        """Write `data` to the file `name`, new or not. Not atomic."""
        self.begin("write", name, len(data))
        self.files[name] = data[: len(data) // 2]
        self.begin("finish", name)
        self.files[name] = bytes(data)

    def rename(self, old: str, new: str) -> None:
        """Give the file `old` the name `new`, in place of a file that has this name. Atomic."""
        self.begin("rename", new, old=old)
        self.files[new] = self._require(old)
        del self.files[old]

    def remove(self, name: str) -> None:
        """Remove the file `name`. Atomic."""
        self.begin("remove", name)
        self._require(name)
        del self.files[name]

    def read(self, name: str) -> bytes:
        """Return the bytes of the file `name`."""
        data = self._require(name)
        self.begin("read", name, len(data))
        return data

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""
        self._wait()
        return sorted(self.files)

    def _wait(self) -> None:
        """Let time pass, in which other ranks go on."""
        if self.comm is not None:
            self.comm.compute(self.seconds)

    def _require(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(f"there is no file {name!r} on the disk")
        return self.files[name]

    def begin(self, what: str, name: str, nbytes: int = 0, old: str = "") -> None:
        """Let time pass, then note the operation, or kill the job."""
        self._wait()
        now = FileOperation(self.comm.rank if self.comm is not None else 0, what, name, nbytes, old)
        if self.kill_at is not None and len(self.log) >= self.kill_at:
            self.killed.append(now)
            raise Killed("the job was killed")
        self.log.append(now)


def packed(x: Tensor) -> bytes:
    """Return the elements of a float64 tensor as bytes, 8 for each."""
    return x.detach().contiguous().numpy().tobytes()


def shard_name(step: int, rank: int, ranks: int) -> str:
    """Return the name of a file for the shard of one of `ranks` ranks: "step-20.rank-1-of-4"."""
    return f"step-{step}.rank-{rank}-of-{ranks}"


def manifest(step: int, total: int, shards: Iterable[Sequence[object]]) -> bytes:
    """Return the contents of LATEST. shards: (name, start, number of elements, CRC) of each."""
    return json.dumps({"step": step, "total": total, "shards": [[*shard] for shard in shards]}).encode()


def read_latest(data: bytes) -> tuple[int, int, list[Listed]]:
    """Return (step, total, shards) of the contents of LATEST. Raises ValueError if they are damaged."""
    try:
        facts = json.loads(data)
        shards = [(str(name), int(start), int(n), int(crc)) for name, start, n, crc in facts["shards"]]
        return int(facts["step"]), int(facts["total"]), shards
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"{LATEST} is not a whole manifest: {data[:40]!r}...") from None


def save_sharded(comm: Comm, disk: Disk, step: int, shard: Tensor, start: int, total: int) -> None:
    """Save this rank's shard, so that a kill at any moment leaves a whole checkpoint.

        rank 0   write shard ---+                              +--> remove  ---+--> return
        rank 1   write shard ---+--> all written?  --> commit -+               +--> return
        rank 2   write shard ---+    (name, start, n, CRC)                     +--> return

    The file LATEST names one checkpoint: only this checkpoint can be loaded. At the
    commit, LATEST begins to name the new checkpoint instead of the previous one. The job
    may be killed before every operation and in the middle of every write, on all ranks
    at once. Afterwards, any number of ranks load the checkpoint that LATEST names. This
    checkpoint has to be whole. After the first rank has returned from save_sharded,
    LATEST has to name the new checkpoint.

    No rank may hold, send or write more than its shard and 1,000 bytes. The disk has
    room for two checkpoints. After the commit, remove all files that do not belong to
    the new checkpoint: the files of older checkpoints, and the files that a killed job
    left, whole or half-written.

    Helpers: packed(shard) returns the bytes for a file; zlib.crc32(bytes) returns an
             int; shard_name(step, rank, ranks) returns a file name; manifest(step,
             total, shards) returns the bytes for LATEST, and shards has one tuple (name,
             start, number of elements, CRC) per file; PART is the name of a temporary
             file, for the bytes of LATEST. disk.write(name, data) is not atomic;
             disk.rename(old, new) and disk.remove(name) are atomic; disk.names()
             returns all names.
    Args:    step: number of finished training steps, larger than the step in LATEST;
             shard: (n,) float64, the elements [start, start + n) of all `total` elements;
             n differs between ranks, and a higher rank may have a lower start.
    Returns: None, on every rank.
    Ref:     torch.distributed.checkpoint, which writes its file .metadata last.
    """
    data = packed(shard)
    disk.write(shard_name(step, comm.rank, comm.size), data)
    written = comm.gather(torch.tensor([start, len(shard), zlib.crc32(data)]))
    if comm.rank == 0:
        assert written is not None  # gathered here
        names = [shard_name(step, rank, comm.size) for rank in range(comm.size)]
        shards = [(name, *facts) for name, facts in zip(names, written.tolist(), strict=True)]
        disk.write(PART, manifest(step, total, shards))
        disk.rename(PART, LATEST)
        for name in disk.names():
            if name not in (LATEST, *names):
                disk.remove(name)
    comm.barrier()


def load_range(disk: Disk, start: int, stop: int) -> Tensor:
    """Return elements start to stop - 1 of the checkpoint that LATEST names; reads the files that overlap them.

    Raises:  FileNotFoundError if there is no LATEST, or a file is missing; ValueError if a file is damaged, or if the
    files do not hold each of these elements once.
    """
    _, _, shards = read_latest(disk.read(LATEST))
    out, found = torch.zeros(stop - start, dtype=torch.float64), torch.zeros(stop - start, dtype=torch.int64)
    for name, begin, n, crc in shards:
        first, last = max(start, begin), min(stop, begin + n)
        if first < last:
            data = disk.read(name)
            if zlib.crc32(data) != crc:
                raise ValueError(f"{name} is damaged: its CRC is not the one in {LATEST}")
            if len(data) != n * ITEM:
                raise ValueError(f"{name} has {len(data)} bytes, and {counted(n, 'element')} take {n * ITEM}")
            elements = torch.frombuffer(bytearray(data), dtype=torch.float64)
            out[first - start : last - start] = elements[first - begin : last - begin]
            found[first - start : last - start] += 1
    if not bool((found == 1).all()):
        raise ValueError(f"{int((found != 1).sum())} of the elements from {start} to {stop} are not there exactly once")
    return out


def _job(comm: Comm, disk: Disk, save: Callable[..., None], steps: Sequence[int], total: int = 1000) -> None:
    """Save a state of `total` elements after each step, in equal shards; every element is the number of the step."""
    start, stop = bounds(total, comm.size, comm.rank)
    for step in steps:
        save(comm, disk.of(comm), step, torch.full((stop - start,), float(step), dtype=torch.float64), start, total)


def after_kills(save: Callable[..., None], ranks: int, then: int, total: int = 1000) -> list[int]:
    """Kill a job at each operation of its second save, and return the steps that `then` ranks load afterwards.

    The job saves steps 10 and 20, on simulated ranks.
    """
    once, twice, found = Disk(), Disk(), []
    sim.run(ranks, _job, once, save, (10,), total)
    sim.run(ranks, _job, twice, save, (10, 20), total)
    for kill_at in range(len(once.log), len(twice.log)):
        disk = Disk(kill_at=kill_at)
        with suppress(Killed):
            sim.run(ranks, _job, disk, save, (10, 20), total)
        left = Disk(disk.files)
        elements = torch.cat([load_range(left, *bounds(total, then, rank)) for rank in range(then)])
        if len(set(elements.tolist())) != 1:
            raise ValueError("the elements are of several steps")
        found.append(int(elements[0]))
    return found
