"""Copies of the training state in the memory of other hosts: a failure is repaired from there, and not from a file.

    rank        0        1        2        3
    its own     s0       s1       s2       s3
    kept        s3       s0       s1       s2      one copy, on the next rank: if 2 is lost, 3 has s2

Only if a rank and all ranks with its copies are lost together, the job goes back to the checkpoint in the file system.
Ref: Wang et al. 2023 (Gemini), doi:10.1145/3600006.3613145.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.base import Comm
from ..comm.status.report import name_ranks
from ..units import require_int, require_number
from .interval import checkpoint_interval, goodput

MONTHS = 10  # that are simulated


class AllCopiesLost(RuntimeError):
    """A rank and all ranks with its copies have lost their memory: the state must come from the file system."""


def copy_to_next(comm: Comm, shard: Tensor, copies: int = 1) -> dict[int, Tensor]:
    """Send the shard of each rank to the next `copies` ranks. Collective.

    Args:    shard: this rank's, of the same shape and dtype on every rank; copies: the same on every rank.
    Returns: the shards that this rank keeps for others, {rank: its shard}.
    Raises:  ValueError for more copies than there are other ranks.
    Steps: copies.   Bytes per rank: copies times the bytes of the shard.
    """
    require_int("copies", copies, 0, comm.size - 1)
    kept = {}
    for k in range(1, copies + 1):
        before, after = (comm.rank - k) % comm.size, (comm.rank + k) % comm.size
        kept[before] = comm.sendrecv(shard, after, torch.empty_like(shard), before)
    return kept


def surviving_holder(rank: int, lost: Collection[int], size: int, copies: int = 1) -> int:
    """Return the nearest rank that still has a copy of the shard of `rank`. Raises AllCopiesLost."""
    having = [(rank + k) % size for k in range(1, copies + 1)]
    for other in having:
        if other not in lost:
            return other
    copied = f"with all its copies, on {name_ranks(having)}" if copies else "and has no copy"
    raise AllCopiesLost(f"the shard of rank {rank} is lost, {copied}: it must come from the file")


def _restore(comm: Comm, shard: Tensor, kept: dict[int, Tensor], lost: Collection[int], copies: int = 1) -> Tensor:
    """Give the ranks in `lost` their shards back, from the ranks after them. Collective.

    The copies that these ranks kept for others are still missing: call `copy_to_next` again.

    Args:    shard: overwritten on a rank in `lost`; kept: as `copy_to_next` has returned it, empty on a rank in `lost`;
             lost, copies: the same on every rank.
    Returns: the shard.
    Raises:  AllCopiesLost on every rank, before any message.
    """
    sources = {rank: surviving_holder(rank, lost, comm.size, copies) for rank in sorted(lost)}
    for rank, source in sources.items():
        if comm.rank == source:
            comm.send(kept[rank], rank)
        elif comm.rank == rank:
            comm.recv(shard, source)
    return shard


def lose_and_restore(comm: Comm, lost: Collection[int], copies: int = 1, n: int = 3) -> tuple[Tensor, Tensor]:
    """Copy a shard of n random numbers, wipe the memory of the ranks in `lost`, and restore it.

    Returns: this rank's shard before and after, (n,) float64 each.   Raises: see `_restore`.
    """
    shard = torch.randn(n, generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64)
    kept, before = copy_to_next(comm, shard, copies), shard.clone()
    if comm.rank in lost:
        shard.fill_(torch.nan)
        kept.clear()
    return before, _restore(comm, shard, kept, lost, copies)


@dataclass(frozen=True)
class ReplicatedJob:
    """A job whose hosts fail one at a time, or together with the next ones.

    mtbf_s: mean time between two failures of the job; write_s: seconds to write a checkpoint to the file system, and
    to read it; shard_nbytes: the training state of a host; link: bytes/s between two hosts; start_s: seconds from a
    failure until the new host is ready to read. together: the chance that the next host is lost, too, in a failure that
    has reached the one before it, such as by a rack without power; 0: hosts never fail together.
    """

    mtbf_s: float
    write_s: float
    shard_nbytes: float
    link: float = 50e9
    start_s: float = 300.0
    together: float = 0.05

    def __post_init__(self) -> None:
        for name in ("mtbf_s", "write_s", "shard_nbytes", "link"):
            require_number(name, getattr(self, name), above=0)
        require_number("start_s", self.start_s, 0)
        require_number("together", self.together, 0, 1)

    def memory(self, copies: int) -> float:
        """Return the bytes of a host's memory that hold the copies of others."""
        return copies * self.shard_nbytes

    def all_lost(self, copies: int) -> float:
        """Return the share of the failures in which a shard and all its copies are lost: 1 without a copy."""
        return self.together**copies

    def goodput(self, copies: int) -> float:
        """Return the goodput with so many copies, and with the best intervals between copies and between files.

        Training stands still while a copy is sent. Failures that the memory repairs are simulated apart from failures
        that need the file, and their goodputs multiplied: each interval has the failures that it is for.
        """
        require_int("copies", copies, 0)
        lost, send_s, share = self.all_lost(copies), self.shard_nbytes / self.link, 1.0
        for part, write_s, read_s in ((1 - lost, copies * send_s, send_s), (lost, self.write_s, self.write_s)):
            if part:
                mtbf_s, restart_s = self.mtbf_s / part, self.start_s + read_s
                interval_s = checkpoint_interval(write_s, mtbf_s, 1)
                share *= goodput(interval_s, write_s, mtbf_s, 1, restart_s=restart_s, months=MONTHS)
        return share
