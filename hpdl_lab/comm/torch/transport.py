"""A process group of torch.distributed as a communicator: what runs on MPI ranks runs under torchrun too.

    torchrun --nproc-per-node 2 script.py          comm = hpdl_lab.comm.world()
    dist.init_process_group("gloo")                comm = from_process_group()

Collectives go through shared memory if all ranks are on one machine, as with MPI ranks; messages, and
collectives between machines, go through the process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..buffers import buffer_of, is_tensor
from ..real import RealComm
from ..transport import Transport
from .group import TorchrunGroups
from .messages import ConsensusByMessages, GroupWork, as_tensor
from .session import TorchSession, cuda_of, gloo_for, gloo_in, group_of, initialize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..base import OnRow
    from ..buffers import Array
    from ..status.waiting import Waiting
    from ..transport import Carried, Meant, Ranks


def from_process_group(
    group: ProcessGroup | None = None,
    deadline: float = 10.0,
    on_row: OnRow | None = None,
    trace: bool = True,
    device: str | torch.device | None = None,
) -> RealComm:
    """Return the communicator of the ranks of `group`, a process group of torch.distributed. Collective over its ranks.

    A group that moves no CPU tensors, such as nccl alone, gets one of gloo as well, for what is said on the host, and
    the communicator is a device.DeviceComm.

    Args:    group: None is the default one. deadline: the longest that one wait may last, s.
             on_row, trace: as of Comm. device: of the tensors that a group without gloo moves, by default the
             current CUDA device.
    Raises:  ValueError for a group that moves neither; RuntimeError if there is no group, or this rank is not in it.
    """
    group = group_of(group)
    gloo = gloo_in(group)
    gpu = None if gloo is not None else torch.device(device or cuda_of(group))
    session = TorchSession(*(gloo_for(group) if gloo is None else (gloo,)))
    members = tuple(range(session.size))
    transport = _TorchTransport(session, session.number, members)
    how = session, transport, members, session.waiting(deadline), on_row, trace
    if gpu is None:
        return RealComm(*how)
    from ..device.comm import DeviceComm

    comm = DeviceComm(TorchrunGroups(group, gpu), *how)
    comm.connect()
    return comm


def world(deadline: float = 10.0) -> RealComm:
    """Return the communicator of all ranks of this torchrun job; initialize torch.distributed, with gloo, if needed."""
    initialize()
    return from_process_group(deadline=deadline)


class _TorchTransport(Transport):
    """Threads carry the messages, whatever their rank does meanwhile.

    session: TorchSession. number: tells the messages from others. members: ranks in the group.
    """

    polled = False

    def __init__(self, session: TorchSession, number: int, members: tuple[int, ...], background: bool = False) -> None:
        self.session, self.number, self.members, self.group = session, number, members, session.group
        self.messages = session.messages(number, members, background)

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, work: Carried, x: Array, dst: int) -> None:
        buffer_of(x, "send")
        work.message = self.messages.send(x, dst)

    def receive(self, work: Carried, x: Array, src: int) -> None:
        buffer_of(x, "receive into")
        if not is_tensor(x) and not x.flags.writeable:
            raise ValueError("cannot receive into a read-only array: use x.copy()")
        work.message = self.messages.receive(x, src)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def consensus(self, rank: int, call: Meant, note: bytes) -> ConsensusByMessages:
        return ConsensusByMessages(self.messages, rank, call, note)

    def part(self, comm: Ranks, chosen: Sequence[int], number: int) -> _TorchTransport:
        return _TorchTransport(self.session, number, tuple(self.members[r] for r in chosen))

    def double(self, comm: Ranks, waiting: Waiting) -> _TorchTransport:
        return _TorchTransport(self.session, self.number, self.members, background=True)

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, comm: Ranks, op: str, x: Array) -> None:
        """Let the process group add, if all its ranks take part; else, or if gloo adds this badly, add by messages."""
        if comm.size < self.group.size() or buffer_of(x, op).dtype in ("float16", "bfloat16", "int16"):
            with comm.agreed(op, x):
                comm.all_reduce_by_gather(x)
            return
        with comm.together(op, x):
            work = GroupWork([self.group.allreduce([as_tensor(x)])])
            comm.complete(work, op, comm.others, buffer_of(x, op).nbytes)

    def mpi_all_reduce(self, comm: Ranks, x: Array) -> None:
        raise ValueError("these ranks have no MPI, since torchrun has started them: use mpiexec")
