"""Tensors of a GPU by way of the host, for ranks that NCCL does not serve: ranks that share a GPU, before NCCL 2.30.

    GPU   x --copy--> pinned memory --message, or collective in shared memory--> pinned memory --copy--> y   GPU

Ref: Wang et al. 2011, MVAPICH2-GPU, which notebook 05 measures. Registered tensors do not go this way: ranks that share
a GPU open each other's memory there (CUDA IPC).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import CommError
from ..status.waiting import NAP

if TYPE_CHECKING:
    from ..real import RealComm
    from ..transport import PendingMessage, Transport


class HostWork:
    """Do what DeviceComm asks of a Work of torch.distributed: is_completed() never blocks, wait() ends what came."""

    def __init__(self, advance: Callable[[], bool], land: Callable[[], object]) -> None:
        """advance(): True if the host has done its part. land(): copy what has come to the device."""
        self._advance, self._land, self._done = advance, land, False

    def is_completed(self) -> bool:
        self._done = self._done or self._advance()
        return self._done

    def wait(self) -> None:
        self._land()


class _HostMessage:
    """A message of the host that is under way, as Session.keep takes it.

    comm: whose transport carries it, and sets `message` before it begins.
    """

    message: PendingMessage | None = None

    def __init__(self, memory: Tensor, comm: HostGroup, sends: bool) -> None:
        self.memory, self.comm, self.sends = memory, comm, sends

    def let_go(self, seconds: float) -> bool:
        """See RealWork.let_go."""
        if self.message is None:
            return True
        return self.message.wait(seconds, NAP, False) if self.sends else self.message.cancel()

    @property
    def transport(self) -> Transport:
        return self.comm.transport

    def advance(self) -> bool:
        return self.message is None or self.message.wait(0.0, 0.0, False)


class HostGroup:
    """The methods of a process group that DeviceComm calls, done by the host. Collective over the ranks of `comm`.

    Raises: CommError if the ranks are on several hosts, or cannot share memory.
    """

    def __init__(self, comm: RealComm) -> None:
        shared = comm.shared("gpus") if comm.node_size == comm.size else None
        if shared is None:
            raise CommError(
                "ranks share a GPU, which NCCL of this torch refuses; copies through the host would need all ranks on "
                "one host. Start one rank for each GPU"
            )
        self._memory, self._collectives, self._oversubscribed = shared.group, shared.collectives, comm.oversubscribed
        # A transport of their own: on the host's, each message is announced by another.
        self.transport = comm.transport.double(comm, comm.waiting)
        self._pinned = torch.device(comm.device).type == "cuda"
        self._batch: list[HostWork] | None = None
        self._messages: list[_HostMessage] = []  # that may be under way
        self._session = comm.session

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> HostWork:
        return self._message(True, self._from(tensors[0]), dst, lambda: None)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> HostWork:
        memory = self._like(tensors[0])
        return self._message(False, memory, src, lambda: tensors[0].copy_(memory))

    def _message(self, sends: bool, memory: Tensor, peer: int, land: Callable[[], object]) -> HostWork:
        message = _HostMessage(memory, self, sends)
        (self.transport.send if sends else self.transport.receive)(message, memory, peer)
        self._messages = [m for m in self._messages if not m.advance()] + [message]
        work = HostWork(message.advance, land)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> HostWork:
        batch, self._batch = self._batch or [], None

        def advance() -> bool:
            return all([work.is_completed() for work in batch])

        def land() -> None:
            for work in batch:
                work.wait()

        return HostWork(advance, land)

    def abort(self) -> None:
        """Keep the memory of what is under way: MPI may still write to it."""
        self._session.keep(self._messages, 0.0)
        self._messages = []

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor]) -> HostWork:
        memory = self._from(tensors[0])
        return self._begin("all_reduce", (memory,), lambda: tensors[0].copy_(memory))

    def broadcast(self, x: Tensor, root: int) -> HostWork:
        memory = self._from(x)
        return self._begin("broadcast", (memory, root), lambda: x.copy_(memory))

    def reduce(self, x: Tensor, root: int) -> HostWork:
        total = self._like(x)
        return self._begin("reduce", (self._from(x), total, root), lambda: x.copy_(total))

    def _allgather_base(self, out: Tensor, x: Tensor) -> HostWork:
        return self._between("all_gather", out, x)

    def _reduce_scatter_base(self, out: Tensor, x: Tensor) -> HostWork:
        return self._between("reduce_scatter", out, x)

    def alltoall_base(self, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int]) -> HostWork:
        return self._between("all_to_all", out, x)

    def gather(self, rows: list[Tensor], x: Tensor, root: int) -> HostWork:
        if not rows:
            return self._begin("gather", (self._from(x), None, root), lambda: None)
        memory = self._like(x, len(rows))

        def land() -> None:
            for row, here in zip(rows, memory, strict=True):
                row.copy_(here)

        return self._begin("gather", (self._from(x), memory, root), land)

    def scatter(self, out: Tensor, rows: list[Tensor], root: int) -> HostWork:
        mine = self._like(out)
        memory = self._from(torch.stack(rows)) if rows else None
        return self._begin("scatter", (memory, mine, root), lambda: out.copy_(mine))

    def _between(self, name: str, out: Tensor, x: Tensor) -> HostWork:
        result = self._like(out)
        return self._begin(name, (self._from(x), result), lambda: out.copy_(result))

    def _begin(self, name: str, arguments: tuple[object, ...], land: Callable[[], object]) -> HostWork:
        begun = self._collectives[name](*arguments, 0.0, self._oversubscribed)

        def advance(memory: tuple[object, ...] = arguments) -> bool:  # which stays as long as this
            return begun or self._memory.wait(0.0, 0.0, self._oversubscribed)

        return HostWork(advance, land)

    def _like(self, x: Tensor, *rows: int) -> Tensor:
        """Return memory of the host for `x`, or for rows of it."""
        return torch.empty((*rows, *x.shape), dtype=x.dtype, pin_memory=self._pinned)

    def _from(self, x: Tensor) -> Tensor:
        """Return a copy of `x` in the host's memory."""
        return self._like(x).copy_(x)
