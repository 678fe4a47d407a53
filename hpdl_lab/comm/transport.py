"""What a communicator of real ranks asks of whatever carries its messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = 1 << 29  # of communicators: a transport may need four tags for each, below 2^31


class Transport(ABC):
    """What carries the messages of one communicator: MPI, or a process group of torch.distributed.

    polled: whether a receive advances only while this rank waits, and so has to be advanced during other waits.
    can_double: whether two threads can communicate at the same time, by a second transport of the same ranks.
    """

    polled = True
    can_double = True

    @abstractmethod
    def send(self, work: Any, x: Tensor, dst: int) -> Any:
        """Begin to send `x`: an Operation with `nbytes` and `cancel()`, set as `work.message` before it begins."""

    @abstractmethod
    def receive(self, work: Any, x: Tensor, src: int) -> Any:
        """Begin to receive into `x`, likewise; `sent` is then (count, index of the dtype) if something else came."""

    def announces(self, peer: int, wanted: Any) -> Any:
        """Is the next message from `peer` one of `wanted`, (count, dtype)? False where nobody knows."""
        return False

    def unreceived(self) -> tuple:
        """The ranks whose messages have arrived and are not received, as far as somebody knows."""
        return ()

    @abstractmethod
    def consensus(self, rank: int, call: Any, note: Any) -> Any:
        """An Operation with the `notes()` and `calls()` of all ranks. call: (op, count, index of the dtype, root)."""

    @abstractmethod
    def part(self, comm: Any, chosen: Any, number: Any) -> Any:
        """The transport of the ranks `chosen` of `comm`. number: the same for them, different for others."""

    @abstractmethod
    def double(self, comm: Any, waiting: Any) -> Any:
        """A second transport of the same ranks, made in a thread of each, by the waits `waiting`."""

    def begin_all_reduce(self, progress: Any, x: Tensor, traced: Any) -> None:
        """Append the all-reduce of `x` by messages to `progress`: its core.Task; None where only Python can do it."""
        return None

    @abstractmethod
    def all_reduce(self, comm: Any, op: str, x: Tensor) -> Any:
        """Add `x` over ranks by messages; `op` is how reports call it."""

    @abstractmethod
    def mpi_all_reduce(self, comm: Any, x: Tensor) -> Any:
        """Add `x` over ranks by the MPI library's own all-reduce."""
