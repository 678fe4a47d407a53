"""What ranks of several hosts are doing: a status table on each host, and messages from one to the other.

     host A   table  0 1 2 3          table  4 5 6 7   host B
                     |                       |
                     `--- slots of 0-3 --->  `--- whoever waits for long hears them
              the lowest rank that waits for long sends them, when they have changed

A rank that waits for long looks for such messages too. Who ends a run tells its own slot, as nobody may be waiting on
its host. A rank of which nobody tells works, or its host is gone: it is "silent". That it has died, the notebook tells:
nothing is sent to it from then on.
"""

import json
from typing import Any

from .table import Slot, StatusTable
from .waiting import DeferredInterrupt

NEWS = 32_767  # a tag of the session's own communicator that a rendezvous does not use (csrc/consensus.cpp)
SILENT = Slot(0, -1, "silent", "", (), 0, 0, 0, "", {})


class RemoteStatus(StatusTable):
    """The status table of this host's ranks, and what has been heard of the others.

    comm: mpi4py's communicator of all ranks, on which nothing else uses the tag NEWS. hosts: that of each rank.
    """

    def __init__(self, path: Any, MPI: Any, comm: Any, hosts: Any) -> None:
        super().__init__(path)
        self._MPI, self._comm, self._rank = MPI, comm, comm.rank
        self._far = [host != hosts[self._rank] for host in hosts]
        self._heard = {}  # rank -> {run: (time of its host's clock, Slot)}
        self._dead = set()  # ranks elsewhere whose processes have ended
        self._last: Any = None  # what was sent last
        self._sent = []  # (request, bytes) of messages that MPI may still read
        self._run = 0

    # -- as in a table ------------------------------------------------------------------------------------------------

    def slot(self, rank: int) -> Any:
        if not self._far[rank]:
            return super().slot(rank)
        heard = self._heard.get(rank, {})
        last = max(heard, default=-1)
        # News of an earlier run that come late do not say that the rank has left this one.
        slot = heard[self._run if self._run in heard else last][1] if last >= self._run else SILENT
        return slot.died() if rank in self._dead else slot

    def mark_dead(self, rank: int) -> None:
        if self._far[rank]:
            self._dead.add(rank)

    def is_unreachable(self, rank: int) -> Any:
        return rank in self._dead

    def is_dead(self, rank: int) -> Any:
        return self.slot(rank).state == "dead" if self._far[rank] else super().is_dead(rank)

    def died(self, rank: int) -> Any:
        return self.is_dead(rank) if self._far[rank] else super().died(rank)

    # -- news ---------------------------------------------------------------------------------------------------------

    def begin_run(self, run: Any) -> None:
        self._run, self._last = run, None
        self._hear()
        for heard in self._heard.values():
            for earlier in [number for number in heard if number < run]:
                del heard[earlier]

    def exchange(self, members: Any) -> None:
        with DeferredInterrupt() as interrupt:
            self._hear()
            here = [rank for rank in members if not self._far[rank]]
            waiting = [rank for rank in here if (self.slot(rank).run, self.slot(rank).state) == (self._run, "waiting")]
            if waiting and waiting[0] == self._rank:
                slots = {rank: self.slot(rank).died() if self.died(rank) else self.slot(rank) for rank in here}
                if slots != self._last:
                    self._last = slots
                    self._send(slots, members)
        if interrupt.came:
            raise KeyboardInterrupt

    def leave(self, members: Any) -> None:
        with DeferredInterrupt() as interrupt:
            self._send({self._rank: self.slot(self._rank)}, members)
        if interrupt.came:
            raise KeyboardInterrupt

    def flush(self) -> Any:
        self._hear()
        self._sent = [(request, raw) for request, raw in self._sent if not request.Test()]
        return not self._sent

    def _send(self, slots: Any, members: Any) -> None:
        """Send the slots, one in each message, which is then short enough to leave at once, to `members` elsewhere."""
        self.flush()
        for rank, slot in slots.items():
            raw = json.dumps([rank, self.now(), slot]).encode()
            for to in members:
                if self._far[to] and not self.is_unreachable(to):
                    self._sent.append((self._comm.Isend([raw, self._MPI.BYTE], to, NEWS), raw))

    def _hear(self) -> None:
        """Take in what has come."""
        status = self._MPI.Status()
        while message := self._comm.Improbe(self._MPI.ANY_SOURCE, NEWS, status):
            raw = bytearray(status.Get_count(self._MPI.BYTE))
            message.Recv([raw, self._MPI.BYTE])
            rank, then, fields = json.loads(raw)
            slot = Slot(*fields)._replace(peers=tuple(fields[Slot._fields.index("peers")]))
            heard = self._heard.setdefault(rank, {})
            if then >= heard.get(slot.run, (0, None))[0]:  # two ranks of a host may tell of the same one
                heard[slot.run] = then, slot.moved(self.now() - then)
