"""Reads and writes of an answer in memory, element by element, and races of ranks without a barrier between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from greenlet import getcurrent
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from ..comm.base import Comm
    from ..comm.sim.run import SimComm


NOBODY, SEVERAL = -1, -2
WRITE_ONLY = ("copy_", "fill_", "zero_", "set_")  # of the operations in place; the others read what they change
LOOK_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_")  # at shape and dtype
BUFFERS = ("empty", "zeros", "ones", "full", "new_empty", "new_zeros")  # make memory; other operations make temporaries


class Race(NamedTuple):
    """`rank` reads or writes element `i` of the tensor of `owner`; between the same two barriers `other` does as well.

    first: before any barrier, when the tensor of `owner` may be incomplete; last: its owner returns it.
    """

    rank: int
    writes: bool
    owner: int
    i: int
    other: int
    first: bool
    last: bool


@dataclass
class Watched:
    """A tensor, all (n,) of its memory. reads, writes: how often; reader, writer: who did last, after which barrier.

    read, written: {rank: bytes}, by whom.
    """

    owner: int
    reads: Tensor
    writes: Tensor
    reader: Tensor
    read_after: Tensor
    writer: Tensor
    written_after: Tensor
    read: Counter[int]
    written: Counter[int]


class Accesses(TorchDispatchMode):
    """Within it, operations of torch on simulated ranks are counted, and races among them are found.

    A temporary, which an operation returns, counts for nothing: it may stay in registers. Buffers that a rank makes
    with torch.empty or the like do count. What NumPy or messages do is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, Watched] = {}  # by the address of its storage
        self.kept: list[Tensor] = []  # so that no address is used again
        self.comms: dict[object, SimComm] = {}  # by the code that runs for it
        self.returned: dict[int, int] = {}  # rank -> after how many barriers
        self.race: Race | None = None  # the first one

    def __deepcopy__(self, memo: dict[int, object]) -> Accesses:
        """Return this one, which all simulated ranks are given."""
        return self

    def enter(self, comm: Comm, *shared: Tensor) -> None:
        """Note that this code is now rank comm.rank, which has just filled `shared`, tensors of comm.allocate."""
        for x in shared:
            for owner, theirs in enumerate(comm.views(x)):
                self.watch(theirs, owner)
        self.comms[getcurrent()] = cast("SimComm", comm)

    def leave(self, comm: Comm, x: Tensor) -> None:
        """Note that the rank returns `x`: its caller reads it."""
        mine = self.comms.pop(getcurrent())
        self.returned[comm.rank] = mine.meetings
        self._note_read(self.of(x), slice(x.storage_offset(), x.storage_offset() + x.numel()), mine)

    def watch(self, x: Tensor, owner: int) -> None:
        address, n = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes() // x.element_size()
        if address in self.watched or n == 0:
            return
        self.kept.append(x)
        none = torch.full((n,), NOBODY)
        writer = torch.full((n,), owner), torch.zeros(n, dtype=torch.int64)
        counts = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
        last = none, none.clone(), *writer
        self.watched[address] = Watched(owner, *counts, *last, Counter(), Counter())

    def of(self, x: Tensor) -> Watched:
        return self.watched[x.untyped_storage().data_ptr()]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        comm = self.comms.get(getcurrent())
        if comm is None:
            return out
        name = func._schema.name.partition("::")[2]
        if name in BUFFERS:
            self.watch(out, comm.rank)
        elif not _is_view(func) and not name.startswith(LOOK_ONLY):
            for x, written, read in _accesses(func, name, args, kwargs):
                found = self.watched.get(x.untyped_storage().data_ptr())
                if found is None:
                    continue
                place = torch.zeros(len(found.reads), dtype=torch.bool)
                torch.as_strided(place, x.shape, x.stride(), x.storage_offset()).fill_(True)
                if read:
                    self._note_read(found, place, comm)
                    found.read[comm.rank] += x.nbytes
                    found.reads[place] += 1
                if written:
                    self._note_write(found, place, comm)
                    found.written[comm.rank] += x.nbytes
                    found.writes[place] += 1
        return out

    def _note_read(self, found: Watched, place: Tensor | slice, comm: SimComm) -> None:
        now, rank = comm.meetings, comm.rank  # barriers, as the simulated communicator counts them
        self._judge(found, place, comm, found.writer, found.written_after, writes=False)
        again = (found.read_after[place] == now) & (found.reader[place] != rank)
        found.reader[place] = torch.where(again, SEVERAL, rank)
        found.read_after[place] = now

    def _note_write(self, found: Watched, place: Tensor | slice, comm: SimComm) -> None:
        self._judge(found, place, comm, found.writer, found.written_after, writes=True)
        self._judge(found, place, comm, found.reader, found.read_after, writes=True)
        found.writer[place], found.written_after[place] = comm.rank, comm.meetings

    def _judge(
        self, found: Watched, place: Tensor | slice, comm: SimComm, who: Tensor, when: Tensor, writes: bool
    ) -> None:
        """Keep the first race of this rank with ranks that have read, or written, after as many barriers."""
        racing = (who[place] != comm.rank) & (when[place] == comm.meetings)
        if self.race is None and racing.any():
            i = int(torch.arange(len(who))[place][racing][0])
            last = self.returned.get(found.owner) == comm.meetings and writes != (comm.rank == found.owner)
            self.race = Race(comm.rank, writes, found.owner, i, int(who[i]), comm.meetings == 0, last)


def _is_view(func: OpOverload) -> bool:
    """Return True if the operation returns the memory that it is given, unchanged."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _accesses(
    func: OpOverload, name: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yield (tensor, whether it is written, whether it is read) for each tensor that the operation is given."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not written or (name.endswith("_") and name not in WRITE_ONLY)
        for x in value if isinstance(value, list | tuple) else [value]:
            if isinstance(x, Tensor):
                yield x, written, read
