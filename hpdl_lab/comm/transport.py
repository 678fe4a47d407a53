"""The interface between a communicator of real ranks and what carries its messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from .calls import Caller, Facts
from .status.operation import Waitable

if TYPE_CHECKING:
    from .. import _core
    from ..trace import Trace
    from .buffers import Array, ArrayT
    from .status.waiting import Peers, Waiting

NUMBERS = 1 << 29  # of communicators: a transport may need four tags for each, below 2^31

Meant = tuple[str, int, int, int]  # what a rank calls: op, count, index of the dtype in buffers.DTYPES, root or -1


class PendingMessage(Waitable, Protocol):
    """An end of a message under way."""

    @property
    def nbytes(self) -> int: ...

    @property
    def sent(self) -> tuple[int, int]:
        """(count, index of the dtype) of the message that has come, if it is another than was expected."""
        ...

    def cancel(self) -> bool:
        """Give it up; return True if nothing will touch its tensor again."""
        ...


class Carried(Protocol):
    """The owner of a message: `message` is set before the transport begins."""

    message: PendingMessage | None


class Consensus(Waitable, Protocol):
    """The exchange of what all ranks call, each with a note."""

    def notes(self) -> list[bytes]: ...


class Pending(Protocol):
    """A message of a communicator that is closed, while its tensor may be touched."""

    @property
    def transport(self) -> Transport: ...

    def let_go(self, seconds: float) -> bool:
        """Return True if nothing will touch the tensor again, after `seconds` at most."""
        ...


class CommSession(Protocol):
    """A process's part in a job, where communicators are made: of MPI, or of a group of torch.distributed."""

    rank: int
    hosts: list[str]
    cancelled: list[object]  # kept, since MPI or another rank may write to its memory

    def keep(self, works: Sequence[Pending], seconds: float) -> None: ...


class Ranks(Caller, Protocol):
    """A communicator of real ranks (real.RealComm), as its transport, its messages and its background see it."""

    rank: int
    size: int
    node_size: int
    oversubscribed: bool
    broken: str  # the collective that did not complete
    names: list[int]  # of the ranks in reports and events
    members: tuple[int, ...]  # ranks of the session
    others: tuple[int, ...]
    pending: dict[int, Pending]
    waiting: Waiting

    @property
    def transport(self) -> Transport: ...

    @property
    def session(self) -> CommSession: ...

    @property
    def parts(self) -> Sequence[Caller]: ...

    @property
    def shares_memory(self) -> bool: ...

    def begun(self) -> tuple[int, int, str]: ...

    def agree(self, op: str, count: int = 0, dtype: int = 0, root: int = -1, note: bytes = b"") -> list[bytes]: ...

    def agreed(self, op: str, x: Array, root: int = -1) -> AbstractContextManager[object]: ...

    def together(self, op: str, x: Array) -> AbstractContextManager[str]: ...

    def complete(
        self, operation: Waitable, op: str, peers: Peers, nbytes: int = 0, facts: Callable[[], Facts] = dict
    ) -> None: ...

    def facts_of(self, op: str, args: tuple[object, ...]) -> Facts: ...

    def require_same(self, operation: Waitable) -> None: ...

    def all_reduce_by_gather(self, x: ArrayT) -> ArrayT: ...

    def double(self, waiting: Waiting, trace: Trace) -> Ranks: ...

    def begin_all_reduce(self, progress: _core.Progress, x: Array) -> _core.Task | None: ...

    def release(self) -> list[Pending]: ...


class Transport(ABC):
    """The transport of the messages of one communicator: MPI, or a process group of torch.distributed.

    polled: True if a receive advances only while this rank waits, and so has to be advanced during other waits.
    can_double: True if two threads can communicate at the same time, by a second transport of the same ranks.
    """

    polled = True
    can_double = True

    @abstractmethod
    def send(self, work: Carried, x: Array, dst: int) -> None:
        """Begin to send `x`: sets `work.message` before it begins."""

    @abstractmethod
    def receive(self, work: Carried, x: Array, src: int) -> None:
        """Begin to receive into `x`, likewise."""

    def announces(self, peer: int, wanted: tuple[int, str]) -> bool:
        """Return True if the next message from `peer` is `wanted`, (count, dtype), as far as that can be seen."""
        return False

    def unreceived(self) -> tuple[int, ...]:
        """Return the ranks whose messages have arrived and are not received, as far as that can be seen."""
        return ()

    @abstractmethod
    def consensus(self, rank: int, call: Meant, note: bytes) -> Consensus:
        """Begin the exchange of what all ranks call, and of a note of each."""

    @abstractmethod
    def part(self, comm: Ranks, chosen: Sequence[int], number: int) -> Transport:
        """Return the transport of the ranks `chosen` of `comm`. number: the same for them, different for others."""

    @abstractmethod
    def double(self, comm: Ranks, waiting: Waiting) -> Transport:
        """Return a second transport of the same ranks, made in a thread of each, by the waits `waiting`."""

    def begin_all_reduce(self, progress: _core.Progress, x: Array, traced: bool) -> _core.Task | None:
        """Append the all-reduce of `x` by messages to `progress`; None if only Python can do it."""
        return None

    @abstractmethod
    def all_reduce(self, comm: Ranks, op: str, x: Array) -> None:
        """Add `x` over ranks by messages; `op` is its name in reports."""

    @abstractmethod
    def mpi_all_reduce(self, comm: Ranks, x: Array) -> None:
        """Add `x` over ranks by the MPI library's own all-reduce."""
