"""Some of the ranks, numbered anew: a collective among them is the same function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Part:
    """The messages of `comm` among `members`, of which members[i] is rank i here.

    Unlike comm.split it costs no message, and has nothing but messages. Ranks of several parts may talk in each of
    them, in the same order on both ends.
    """

    def __init__(self, comm: Any, members: Any) -> None:
        self.comm, self.members = comm, members
        self.rank, self.size = members.index(comm.rank), len(members)

    def isend(self, x: Tensor, dst: int) -> Any:
        return self.comm.isend(x, self.members[dst])

    def irecv(self, x: Tensor, src: int) -> Any:
        return self.comm.irecv(x, self.members[src])

    def send(self, x: Tensor, dst: int) -> None:
        self.comm.send(x, self.members[dst])

    def recv(self, x: Tensor, src: int) -> Tensor:
        return self.comm.recv(x, self.members[src])

    def sendrecv(self, x: Tensor, dst: int, y: Tensor, src: int) -> Tensor:
        return self.comm.sendrecv(x, self.members[dst], y, self.members[src])
