"""Messages of MPI, and collectives that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ...features import compiled_module
from ..buffers import DTYPES, ITEMSIZE, buffer_of
from ..status.operation import InThread
from ..transport import Transport

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py.MPI import Comm

    from ... import _core
    from ..buffers import Array
    from ..status.waiting import Waiting
    from ..transport import Carried, Meant, Ranks

SEGMENT = 256 * 1024  # bytes, of the compiled ring; 16 to 512 KiB were tried
SMALL = 2046  # bytes: larger messages are announced, without their count in the tag (csrc/mpi.cpp)


class _Job(Protocol):
    """The place of this process in an MPI job (session.Session)."""

    MPI: ModuleType
    mpi: _core.Mpi
    threads: bool  # two of them may call MPI at a time
    cancelled: list[object]


class MpiTransport(Transport):
    """session: this process's place in the job. handles: of two MPI communicators of the same ranks."""

    def __init__(self, session: _Job, handles: tuple[int, int], rank: int, size: int) -> None:
        self.session, self.core = session, compiled_module()
        self.can_double = session.threads
        self.doubles: tuple[int, ...] | None = None  # the handles of `double`; () while they are being made
        self.group = self.core.Group(session.mpi, *handles, rank, size)

    @property
    def handles(self) -> tuple[int, ...]:
        """The handles of all MPI communicators that were made for this."""
        return self.group.comm, self.group.inner, *(self.doubles or ())

    def as_mpi4py(self) -> Comm:
        """Return this communicator as mpi4py's."""
        return self.session.MPI.Comm.fromhandle(self.group.comm)

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, work: Carried, x: Array, dst: int) -> None:
        self.core.send(work, self.group, x, dst)

    def receive(self, work: Carried, x: Array, src: int) -> None:
        self.core.receive(work, self.group, x, src)

    def announces(self, peer: int, wanted: tuple[int, str]) -> bool:
        MPI, status = self.session.MPI, self.session.MPI.Status()
        if not self.as_mpi4py().Iprobe(peer, MPI.ANY_TAG, status):
            return False
        count, dtype = wanted
        tag = status.Get_tag()  # dtype in 4 bits, count in 11; the largest says that it is announced
        large = count * ITEMSIZE[dtype] > SMALL
        return tag == DTYPES.index(dtype) | (SMALL + 1 if large else count) << 4

    def unreceived(self) -> tuple[int, ...]:
        MPI, status = self.session.MPI, self.session.MPI.Status()
        return (status.Get_source(),) if self.as_mpi4py().Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) else ()

    # -- ranks ------------------------------------------------------------------------------------------------------

    def consensus(self, rank: int, call: Meant, note: bytes) -> _core.Consensus:
        return self.core.Consensus(self.group, self.core.Call(*call), note)

    def part(self, comm: Ranks, chosen: Sequence[int], number: int) -> MpiTransport:
        # MPI_Comm_split blocks. There is no peer to blame: ranks that have left have finished their part.
        parent, place = self.as_mpi4py(), (min(chosen), chosen.index(comm.rank))
        split = InThread(lambda: [parent.Split(*place).handle for _ in range(2)])
        comm.complete(split, "split", ())
        first, second = split.result
        return MpiTransport(self.session, (first, second), chosen.index(comm.rank), len(chosen))

    def double(self, comm: Ranks, waiting: Waiting) -> MpiTransport:
        # No rank calls a collective on the inner communicator: the ranks may come at any time.
        session, duplicates = self.session, self.core.Duplicates(self.session.mpi, self.group.inner)
        self.doubles = ()  # under way
        session.cancelled.append(duplicates)
        waiting.finish(duplicates, "background", waiting.missing(comm.members, "background"))
        session.cancelled.remove(duplicates)
        handles = self.doubles = duplicates.first, duplicates.second
        return MpiTransport(session, handles, comm.rank, comm.size)

    # -- collectives ------------------------------------------------------------------------------------------------

    def begin_all_reduce(self, progress: _core.Progress, x: Array, traced: bool) -> _core.Task:
        _, count, dtype, _ = buffer_of(x, "all_reduce")
        call = self.core.Call("all_reduce", count, DTYPES.index(dtype), -1)
        return progress.all_reduce_by_messages(self.group, call, x, SEGMENT, traced)

    def all_reduce(self, comm: Ranks, op: str, x: Array) -> None:
        """Around a ring, in segments, compiled."""
        trace = comm.trace
        with comm.together(op, x) as line:
            ring = self.core.Ring(self.group, x, SEGMENT, trace.enabled)
            comm.complete(ring, op, comm.others, ring.nbytes, lambda: comm.facts_of(op, (x,)))
            for end, peer, nbytes, t0, t1 in ring.transfers():
                trace.add(trace.step(), end, t0, t1, comm.names[peer], nbytes, line)

    def mpi_all_reduce(self, comm: Ranks, x: Array) -> None:
        with comm.together("mpi_all_reduce", x):
            self.core.mpi.all_reduce(self.group, x, x)  # blocks, but everybody is on the way into it
