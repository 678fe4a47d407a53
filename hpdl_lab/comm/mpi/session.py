"""Real ranks: processes that MPI has started, one communicator for each run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import time
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

from ...features import compiled_module
from ..errors import CommError, name_ranks
from ..hosts import core_mask, host_id, oversubscribed
from ..real import RealComm
from ..status.operation import InThread
from ..status.remote import RemoteStatus
from ..status.table import StatusTable, open_together
from ..status.waiting import NAP, RARELY, SLICE, DeferredInterrupt, Waiting, finish_blindly
from ..work import still_pending
from .library import load_mpi
from .transport import MpiTransport

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

    from ..base import OnRow
    from ..status.waiting import Waiting as Waits
    from ..transport import Pending, Transport

    class Make(Protocol):
        """A maker of communicators, called as RealComm is."""

        def __call__(
            self,
            session: Session,
            transport: Transport,
            members: tuple[int, ...],
            waiting: Waits,
            on_row: OnRow | None,
            trace: bool,
            /,
        ) -> RealComm: ...


LAST_LOOK = 0.1  # s: for a rank that gives up, to find that it is too late for that
LAST_HELP = 1.0  # s: to receive the messages that are left, when ranks leave
ARRIVALS = 16_383  # numbers that tell them apart


def world(deadline: float = 10.0, make: Make = RealComm) -> RealComm:
    """Return the communicator of all ranks of this MPI job. Collective. deadline: the most s of one wait."""
    session = session_of_this_process()
    session.worlds += 1
    return session.comm(run=session.worlds, deadline=deadline, make=make)


@functools.cache
def session_of_this_process() -> Session:
    """Return the Session of this process: MPI can be started once in it."""
    return Session()


class Session:
    """This process's place in an MPI job, from which fresh communicators are made, one for each run."""

    def __init__(self) -> None:
        """Start MPI and open the status table. Collective over all ranks of the job. Does not import torch."""
        self.core = compiled_module()
        self.MPI, self.mpi = load_mpi()
        self.rank, self.size = self.MPI.COMM_WORLD.rank, self.MPI.COMM_WORLD.size
        self.worlds = 0
        # ranks: handle of the communicator that their runs duplicate
        self.parents: dict[tuple[int, ...], int] = {}
        # ranks: communicators of runs that this rank has left
        self.closed: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        # messages of closed communicators that MPI has not done with: their memory must stay
        self.pending_sends: list[Pending] = []
        self.cancelled: list[object] = []  # collectives that did not complete: likewise
        self.unfreed: list[tuple[int, ...]] = []  # communicators in which something is left
        self.open: list[RealComm] = []
        self.threads = self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE  # may two of them call MPI at a time?
        everybody = tuple(range(self.size))
        duplicates = self.core.Duplicates(self.mpi, self.MPI.COMM_WORLD.handle)
        finish_blindly(duplicates, "MPI_Comm_idup")
        self.control = self.core.Group(self.mpi, duplicates.first, duplicates.second, self.rank, self.size)
        self.parents[everybody] = duplicates.first
        self.hosts = self._tell(host_id())
        self.oversubscribed = oversubscribed(self.hosts, self._tell(core_mask()), self.rank)
        self.status = open_together(self.rank, self.hosts, self._tell, self._board_at)
        self.status.publish(self.rank, "idle")
        atexit.register(self.leave)

    def comm(
        self,
        run: int,
        ranks: Iterable[int] | None = None,
        deadline: float = 10.0,
        on_row: OnRow | None = None,
        trace: bool = True,
        make: Make = RealComm,
    ) -> RealComm:
        """Return a communicator that no message of another run can reach. Collective over `ranks`.

        Args:    run: a number that no other run of these ranks has, the same everywhere.
                 ranks: of MPI_COMM_WORLD, which become 0, 1, ... in this order; None: all.
                 deadline, on_row, trace: see Comm. make: what kind of communicator, called as RealComm is.
        Raises:  CommTimeout, RankFailed, KeyboardInterrupt: not all ranks have come; ValueError for wrong ranks.
        """
        members = tuple(range(self.size)) if ranks is None else tuple(ranks)
        if len(set(members)) != len(members) or not all(0 <= r < self.size for r in members):
            raise ValueError(f"ranks {list(members)}: each of them once, from 0 to {self.size - 1}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not one of the ranks {list(members)} of this run")
        self.status.publish(self.rank, "running", run)
        self.status.begin_run(run)
        waiting = Waiting(self.status, self.rank, members, run, deadline, self.oversubscribed)
        with DeferredInterrupt() as interrupt:
            too_late = self._arrive(members, run, waiting, interrupt)
            # All are here and will go on: an interrupt must wait, or the next run would find the ranks out of step.
            duplicates = self.core.Duplicates(self.mpi, self._parent(members, waiting))
            self.cancelled.append(duplicates)
            waiting.finish(duplicates, "start", waiting.missing(members, "start"))
            self.cancelled.remove(duplicates)
            self._free_closed(members)
            handles = duplicates.first, duplicates.second
            transport = MpiTransport(self, handles, members.index(self.rank), len(members))
            comm = make(self, transport, members, waiting, on_row, trace)
            self.open.append(comm)
        if too_late is None and interrupt.came:
            too_late = KeyboardInterrupt()
        try:
            if too_late is not None:
                raise too_late
            comm.connect()
        except BaseException as error:
            comm.close(error)
            raise
        return comm

    def _arrive(
        self, members: tuple[int, ...], run: int, waiting: Waiting, interrupt: DeferredInterrupt
    ) -> BaseException | None:
        """Wait until all members are here. Return what ended the wait too late: the others go on, this rank has to."""
        rendezvous = self.core.Rendezvous(self.control, list(members), run % ARRIVALS)

        def stop() -> None:
            if interrupt.came:
                raise KeyboardInterrupt

        try:
            waiting.finish(rendezvous, "start", waiting.missing(members, "start"), stop=stop)
        except (CommError, KeyboardInterrupt) as error:
            if not rendezvous.give_up(LAST_LOOK):
                raise
            return error
        return None

    def _parent(self, members: tuple[int, ...], waiting: Waiting) -> int:
        if members not in self.parents:
            world = self.MPI.Comm.fromhandle(self.control.comm)
            group = world.Get_group().Incl(list(members))
            create = InThread(lambda: world.Create_group(group).handle)
            self.cancelled.append(create)
            waiting.finish(create, "start", waiting.missing(members, "start"))
            self.cancelled.remove(create)
            self.parents[members] = create.result
        return self.parents[members]

    def forget(self, comm: RealComm) -> None:
        """`comm` has been closed: it can be freed when all its ranks have left it."""
        self.open.remove(comm)
        transport = cast(MpiTransport, comm.transport)
        handles = transport.handles
        if transport.doubles == ():  # its double is being made, perhaps forever
            self.unfreed.append(handles)
        else:
            self.closed.setdefault(comm.members, []).append(handles)

    def keep(self, works: Sequence[Pending], seconds: float) -> None:
        """Keep the messages `works` of a communicator that is closed, but for works that end within `seconds`."""
        # All of them first: an interrupt may come now.
        earlier, self.pending_sends = (
            self.pending_sends,
            [*self.pending_sends, *works],
        )
        self.pending_sends = [*earlier, *still_pending(works, seconds)]

    def _free_closed(self, members: tuple[int, ...]) -> None:
        """Free the communicators that all `members` have left, which is known when all have come to a later run.

        MPI gives the number of a freed communicator to the next one, which would receive what the first has left
        unreceived. So that is dropped, and if it cannot be, the communicator is never freed. The last one waits for
        another turn, since a message may come later than the news that its sender has left.
        """
        self._discard_finished()
        owing = [cast(MpiTransport, work.transport).group.comm for work in self.pending_sends]
        closed = self.closed.get(members, [])
        for handles in closed[:-1]:
            comms = [self.MPI.Comm.fromhandle(handle) for handle in handles]
            if not set(handles) & set(owing) and all([_drop_stale(self.MPI, comm, self.cancelled) for comm in comms]):
                for comm in comms:
                    comm.Free()
            else:
                self.unfreed.append(handles)
        del closed[:-1]

    def _discard_finished(self, seconds: float = 0.0) -> None:
        """Forget the messages that MPI has done with after all; wait up to `seconds` for all of them."""
        self.pending_sends = still_pending(self.pending_sends, seconds)

    def _tell(self, note: str) -> list[str]:
        """Return the notes of all ranks of the job, in rank order; before there is a status table."""
        consensus = self.core.Consensus(self.control, self.core.Call("start", 0, 0, -1), note.encode())
        finish_blindly(consensus, "MPI_Iallgather")
        return [note.decode() for note in consensus.notes()]

    def _board_at(self, path: str) -> StatusTable:
        """Return the status table of this host, which receives the slots of other hosts if there are some."""
        if len(set(self.hosts)) == 1:
            return StatusTable(path)
        return RemoteStatus(path, self.MPI, self.MPI.Comm.fromhandle(self.control.comm), self.hosts)

    def leave(self) -> None:
        """End MPI together with the others, or without it if a rank cannot: MPI_Finalize would wait forever."""
        if self.MPI.Is_finalized():
            return
        for comm in list(self.open):
            comm.close(getattr(sys, "last_value", None))  # set where Python ends because of an exception
        with contextlib.suppress(CommError, RuntimeError, KeyboardInterrupt):
            self._meet_to_leave(b"")
            # All are here and help: messages that are left can be received now.
            for handles in [*self.unfreed, *(handles for closed in self.closed.values() for handles in closed)]:
                for handle in handles:
                    _drop_stale(self.MPI, self.MPI.Comm.fromhandle(handle), self.cancelled, whatever=True)
            self._discard_finished(LAST_HELP)
            sent = self.status.flush()
            through_mpi = (self.core.Consensus, self.core.Duplicates, self.core.Ring, self.core.Progress, InThread)
            stuck = self.pending_sends or not sent or any(isinstance(op, through_mpi) for op in self.cancelled)
            if not any(self._meet_to_leave(b"stuck" if stuck else b"")):
                self.MPI.Finalize()

    def _meet_to_leave(self, note: bytes) -> list[bytes]:
        """Wait for all ranks, for hours if they work that long, but not for dead ones; returns their notes.

        Nothing is published meanwhile: whether this rank has finished or failed is what others want to read.
        """
        consensus = self.core.Consensus(self.control, self.core.Call("leave", 0, 0, -1), note)
        self.cancelled.append(consensus)
        pace = SLICE, NAP
        while not consensus.wait(*pace, self.oversubscribed):
            pace = RARELY
            gone = [r for r in range(self.size) if self.status.is_dead(r)]
            if gone and not consensus.wait(SLICE, NAP, self.oversubscribed):
                raise CommError(f"{name_ranks(gone)} cannot leave together with the others")
        self.cancelled.remove(consensus)
        return consensus.notes()


WORTH_DROPPING = 1 << 20  # bytes
PATIENCE = 0.1  # s


def _drop_stale(MPI: ModuleType, comm: Comm, cancelled: list[object], whatever: bool = False) -> bool:
    """Receive and forget what has arrived in `comm`; return True if nothing is left there.

    False if a message cannot be received: a large one needs the help of its sender, which has left.
    Args:    cancelled: list that keeps alive what MPI may still write to. whatever: try also the large ones.
    """
    status = MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        nbytes = status.Get_count(MPI.BYTE)
        if nbytes > WORTH_DROPPING and not whatever:
            return False
        request = comm.Irecv([bytearray(nbytes), MPI.BYTE], status.Get_source(), status.Get_tag())
        end = time.monotonic() + PATIENCE
        while not request.Test():
            if time.monotonic() > end:
                cancelled.append(request)
                return False
    return True
