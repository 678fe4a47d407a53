"""Some of the ranks, numbered anew: a collective among them is the same function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ..comm.base import Comm, Work
    from ..comm.buffers import Array, ArrayT


def ranks_of_part(comm: Comm, members: Sequence[int]) -> Comm:
    """Return the messages of `comm` among `members`, for collectives that are made of messages only."""
    return cast("Comm", _Part(comm, members))


class _Part:
    """The messages of `comm` among `members`; members[i] is rank i here.

    Unlike comm.split it costs no message, and has nothing but messages. Ranks of several parts may talk in each of
    them, in the same order on both ends.
    """

    def __init__(self, comm: Comm, members: Sequence[int]) -> None:
        self.comm, self.members = comm, members
        self.rank, self.size = members.index(comm.rank), len(members)

    def isend(self, x: Array, dst: int) -> Work:
        return self.comm.isend(x, self.members[dst])

    def irecv(self, x: Array, src: int) -> Work:
        return self.comm.irecv(x, self.members[src])

    def send(self, x: Array, dst: int) -> None:
        self.comm.send(x, self.members[dst])

    def recv(self, x: ArrayT, src: int) -> ArrayT:
        return self.comm.recv(x, self.members[src])

    def sendrecv(self, x: Array, dst: int, y: ArrayT, src: int) -> ArrayT:
        return self.comm.sendrecv(x, self.members[dst], y, self.members[src])
