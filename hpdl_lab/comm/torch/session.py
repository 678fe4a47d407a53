"""A rank's session in a process group of torch.distributed, as Session of comm/mpi is its session in an MPI job."""

from __future__ import annotations

import atexit
import secrets
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from ..errors import CommError
from ..hosts import core_mask, host_id, oversubscribed
from ..status.table import StatusTable, open_together
from ..status.waiting import Waiting, finish_blindly
from ..transport import NUMBERS
from ..work import still_pending
from .messages import ConsensusByMessages, Messages

if TYPE_CHECKING:
    from ..transport import Pending

BIRTH = 0  # the number of the messages by which sessions are made: all ranks make theirs in the same order
RUN = 1  # a session serves one communicator and what is made from it
CUT = 0.5  # s: for the threads of messages to end


class TorchSession:
    """The session of a rank in `group`, from which a communicator is made. Collective over its ranks.

    owned: a process group that ends with the session, or None.
    """

    def __init__(self, group: dist.ProcessGroup, owned: dist.ProcessGroup | None = None) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.owned = owned
        # collectives that did not complete: another rank may still write to their memory
        self.cancelled: list[object] = []
        self.made: list[Messages] = []
        self._birth = self.messages(BIRTH, tuple(range(self.size)))
        notes = self._tell(f"{1 + secrets.randbelow(NUMBERS - 2)} {host_id()}")
        self.number = int(notes[0].split(" ", 1)[0])  # of the communicator: messages of others have other numbers
        self.hosts = [note.split(" ", 1)[1] for note in notes]
        self.oversubscribed = oversubscribed(self.hosts, self._tell(core_mask()), self.rank)
        self.status = open_together(self.rank, self.hosts, self._tell, StatusTable)
        self.status.publish(self.rank, "running", RUN)
        atexit.register(_close_at_exit, weakref.ref(self))

    def waiting(self, deadline: float) -> Waiting:
        """Return the waits of this rank; deadline in s."""
        everybody = tuple(range(self.size))
        return Waiting(self.status, self.rank, everybody, RUN, deadline, self.oversubscribed)

    def messages(self, number: int, members: tuple[int, ...], background: bool = False) -> Messages:
        """Return the Messages of the communicator with that number."""
        self.made.append(Messages(self.group, number, members, background))
        return self.made[-1]

    def keep(self, works: Sequence[Pending], seconds: float) -> None:
        """Wait for the messages of a communicator that is closed, up to `seconds` for all of them."""
        still_pending(works, seconds)

    def forget(self, comm: object) -> None:
        """`comm` is closed: so is what was made for it. What is still under way ends, and with it the process group."""
        for messages in self.made:
            messages.cut(CUT)
        self.made = []
        self.status.close()
        if self.owned is not None and dist.is_initialized():
            dist.destroy_process_group(self.owned)
        self.owned = None

    def _tell(self, note: str) -> list[str]:
        """Return the notes of all ranks, in rank order; before there is a status table."""
        consensus = ConsensusByMessages(self._birth, self.rank, ("start", 0, 0, -1), note.encode())
        finish_blindly(consensus, "the process group")
        return [note.decode() for note in consensus.notes()]


def group_of(group: dist.ProcessGroup | int | None = None) -> dist.ProcessGroup:
    """Return `group`, or the default one. Raises RuntimeError if there is none, or this rank is not in it."""
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError('torch.distributed has no process group yet: dist.init_process_group("gloo")')
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup | dist.ProcessGroupGloo):
        raise RuntimeError(f"this rank is in no such process group: {group!r}")
    return group


def gloo_in(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return the part of `group` that moves CPU tensors, or None."""
    gloo = group if isinstance(group, dist.ProcessGroupGloo) else _backend_for("cpu", group)
    return cast("dist.ProcessGroup", gloo) if isinstance(gloo, dist.ProcessGroupGloo) else None


def _backend_for(device: str, group: dist.ProcessGroup) -> object:
    """Return the part of `group` that moves tensors of this device, or None."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def cuda_of(group: dist.ProcessGroup) -> torch.device:
    """Return the CUDA device of this rank in `group`. Raises ValueError if the group moves none of its tensors."""
    if _backend_for("cuda", group) is None:
        raise ValueError(
            f'a process group of {group.name()} moves neither tensors of the CPU nor of GPUs: make it with "gloo", '
            '"nccl" or "cpu:gloo,cuda:nccl"'
        )
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def gloo_for(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return (gloo part, group) of a new group of the same ranks, as monitored_barrier wants one. Collective."""
    ranks = dist.get_process_group_ranks(group)
    new = group_of(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
    return gloo_in(new) or new, new


def initialize() -> None:
    """Initialize torch.distributed with gloo, which ends when Python does, unless it is initialized already."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def _close_at_exit(reference: weakref.ref[TorchSession]) -> None:
    """Close what Python's end would find open: threads in the middle of a wait would end it with an error."""
    session = reference()
    if session is not None and session.made:
        try:
            session.forget(None)
        except CommError:
            pass  # it ends anyway
