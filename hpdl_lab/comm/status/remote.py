"""The states of ranks on several hosts: a status table on each host, and messages from one to the other.

     host A   table  0 1 2 3          table  4 5 6 7   host B
                     |                       |
                     `--- slots of 0-3 --->  `--- received by ranks that wait for long
              the lowest rank that waits for long sends them, when they have changed

A rank that waits for long looks for such messages too. A rank that ends a run sends its own slot: perhaps no other
rank waits on its host. A rank whose slot does not come works, or its host is gone: it is "silent". The notebook says
when it has died: nothing is sent to it from then on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .table import Slot, StatusTable
from .waiting import DeferredInterrupt

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py.MPI import Comm, Request

NEWS = 32_767  # a tag of the session's own communicator that a rendezvous does not use (csrc/consensus.cpp)
SILENT = Slot(0, -1, "silent", "", (), 0, 0, 0, "", {})


class RemoteStatus(StatusTable):
    """The status table of this host's ranks, and the slots that have come from others.

    comm: mpi4py's communicator of all ranks, on which nothing else uses the tag NEWS. hosts: of each rank.
    """

    def __init__(self, path: str, MPI: ModuleType, comm: Comm, hosts: Sequence[str]) -> None:
        super().__init__(path)
        self._MPI, self._comm, self._rank = MPI, comm, comm.rank
        self._far = [host != hosts[self._rank] for host in hosts]
        self._received: dict[int, dict[int, tuple[int, Slot]]] = {}  # rank -> {run: (time of its host's clock, Slot)}
        self._dead: set[int] = set()  # ranks elsewhere whose processes have ended
        self._last: dict[int, Slot] | None = None  # what was sent last
        self._sent: list[tuple[Request, bytes]] = []  # (request, bytes) of messages that MPI may still read
        self._run = 0

    # -- as in a table ------------------------------------------------------------------------------------------------

    def slot(self, rank: int) -> Slot:
        if not self._far[rank]:
            return super().slot(rank)
        received = self._received.get(rank, {})
        last = max(received, default=-1)
        # News of an earlier run that come late do not say that the rank has left this one.
        slot = received[self._run if self._run in received else last][1] if last >= self._run else SILENT
        return slot.died() if rank in self._dead else slot

    def mark_dead(self, rank: int) -> None:
        if self._far[rank]:
            self._dead.add(rank)

    def is_unreachable(self, rank: int) -> bool:
        return rank in self._dead

    def is_dead(self, rank: int) -> bool:
        return self.slot(rank).state == "dead" if self._far[rank] else super().is_dead(rank)

    def died(self, rank: int) -> bool:
        return self.is_dead(rank) if self._far[rank] else super().died(rank)

    # -- news ---------------------------------------------------------------------------------------------------------

    def begin_run(self, run: int) -> None:
        self._run, self._last = run, None
        self._receive()
        for received in self._received.values():
            for earlier in [number for number in received if number < run]:
                del received[earlier]

    def exchange(self, members: tuple[int, ...]) -> None:
        with DeferredInterrupt() as interrupt:
            self._receive()
            here = [rank for rank in members if not self._far[rank]]
            waiting = [rank for rank in here if (self.slot(rank).run, self.slot(rank).state) == (self._run, "waiting")]
            if waiting and waiting[0] == self._rank:
                slots = {rank: self.slot(rank).died() if self.died(rank) else self.slot(rank) for rank in here}
                if slots != self._last:
                    self._last = slots
                    self._send(slots, members)
        if interrupt.came:
            raise KeyboardInterrupt

    def leave(self, members: tuple[int, ...]) -> None:
        with DeferredInterrupt() as interrupt:
            self._send({self._rank: self.slot(self._rank)}, members)
        if interrupt.came:
            raise KeyboardInterrupt

    def flush(self) -> bool:
        self._receive()
        self._sent = [(request, raw) for request, raw in self._sent if not request.Test()]
        return not self._sent

    def _send(self, slots: dict[int, Slot], members: tuple[int, ...]) -> None:
        """Send the slots, one in each message, which is then short enough to leave at once, to `members` elsewhere."""
        self.flush()
        for rank, slot in slots.items():
            raw = json.dumps([rank, self.now(), slot]).encode()
            for to in members:
                if self._far[to] and not self.is_unreachable(to):
                    self._sent.append((self._comm.Isend([raw, self._MPI.BYTE], to, NEWS), raw))

    def _receive(self) -> None:
        """Take in what has come."""
        status = self._MPI.Status()
        while message := self._comm.Improbe(self._MPI.ANY_SOURCE, NEWS, status):
            raw = bytearray(status.Get_count(self._MPI.BYTE))
            message.Recv([raw, self._MPI.BYTE])
            rank, then, fields = json.loads(raw)
            slot = Slot(*fields)._replace(peers=tuple(fields[Slot._fields.index("peers")]))
            received = self._received.setdefault(rank, {})
            # two ranks of a host may tell of the same one
            if slot.run not in received or then >= received[slot.run][0]:
                received[slot.run] = then, slot.moved(self.now() - then)
