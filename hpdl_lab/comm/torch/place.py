"""A rank's place in a process group of torch.distributed, as Session of comm/mpi is its place in an MPI job."""

import atexit
import secrets
import weakref
from typing import Any

import torch
import torch.distributed as dist

from ...features import compiled_module
from ..errors import CommError
from ..hosts import core_mask, host_id, oversubscribed
from ..status.table import StatusTable, open_together
from ..status.waiting import Waiting, finish_blindly
from ..transport import NUMBERS
from ..work import unsettled
from .messages import ConsensusByMessages, Messages

BIRTH = 0  # the number of the messages by which places are made: all ranks make theirs in the same order
RUN = 1  # a place serves one communicator and what is made from it
CUT = 0.5  # s: for the threads of messages to end


class TorchPlace:
    """What communicators of the process group `group` need besides it. Collective over its ranks.

    owned: a process group that ends with the place, or None.
    """

    def __init__(self, group: Any, owned: Any = None) -> None:
        self.core = compiled_module()
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.owned = owned
        self.cancelled = []  # collectives that did not complete: another rank may still write to their memory
        self.made = []  # Messages
        self._birth = self.messages(BIRTH, tuple(range(self.size)))
        notes = self._tell(f"{1 + secrets.randbelow(NUMBERS - 2)} {host_id()}")
        self.number = int(notes[0].split(" ", 1)[0])  # of the communicator: messages of others have other numbers
        self.hosts = [note.split(" ", 1)[1] for note in notes]
        self.oversubscribed = oversubscribed(self.hosts, self._tell(core_mask()), self.rank)
        self.status = open_together(self.rank, self.hosts, self._tell, StatusTable)
        self.status.publish(self.rank, "running", RUN)
        atexit.register(close_at_exit, weakref.ref(self))

    def waiting(self, deadline: float) -> Waiting:
        """How the ranks of the communicator wait; deadline in s."""
        everybody = tuple(range(self.size))
        return Waiting(self.status, self.rank, everybody, RUN, deadline, self.oversubscribed)

    def messages(self, number: int, members: tuple[int, ...], background: bool = False) -> Messages:
        """The Messages of the communicator with that number."""
        self.made.append(Messages(self.group, number, members, background))
        return self.made[-1]

    def keep(self, works: list[Any], seconds: float) -> None:
        """Wait for the messages of a communicator that is closed, up to `seconds` for all of them."""
        unsettled(works, seconds)

    def forget(self, comm: Any) -> None:
        """`comm` is closed: so is what was made for it. What is still under way ends, and with it the process group."""
        for messages in self.made:
            messages.cut(CUT)
        self.made = []
        self.status.close()
        if self.owned is not None and dist.is_initialized():
            dist.destroy_process_group(self.owned)
        self.owned = None

    def _tell(self, note: str) -> list[str]:
        """What every rank has to tell, in rank order; before there is a status table."""
        consensus = ConsensusByMessages(self._birth, self.rank, ("start", 0, 0, -1), note.encode())
        finish_blindly(consensus, "the process group")
        return [note.decode() for note in consensus.notes()]


def group_of(group: Any = None) -> Any:
    """`group`, or the default one. Raises RuntimeError where there is none, or this rank is not in it."""
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError('torch.distributed has no process group yet: dist.init_process_group("gloo")')
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup | dist.ProcessGroupGloo):
        raise RuntimeError(f"this rank is in no such process group: {group!r}")
    return group


def gloo_in(group: Any) -> Any:
    """The part of `group` that moves CPU tensors, or None."""
    gloo = group if isinstance(group, dist.ProcessGroupGloo) else backend_for("cpu", group)
    return gloo if isinstance(gloo, dist.ProcessGroupGloo) else None


def backend_for(device: str, group: Any) -> Any:
    """The part of `group` that moves tensors of this device, or None."""
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:
        return None


def cuda_of(group: Any) -> Any:
    """The CUDA device of this rank in `group`. Raises ValueError where the group moves none of its tensors."""
    if backend_for("cuda", group) is None:
        raise ValueError(
            f'a process group of {group.name()} moves neither tensors of the CPU nor of GPUs: make it with "gloo", '
            '"nccl" or "cpu:gloo,cuda:nccl"'
        )
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())


def gloo_for(group: Any) -> tuple[Any, Any]:
    """(gloo part, group) of a new group of the same ranks, as monitored_barrier wants one next to nccl. Collective."""
    group = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    return gloo_in(group), group


def initialize() -> None:
    """torch.distributed with gloo, which ends when Python does; nothing where it is initialized already."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())


def close_at_exit(place: Any) -> None:
    """Close what Python's end would find open: threads in the middle of a wait would end it with an error."""
    place = place()
    if place is not None and place.made:
        try:
            place.forget(None)
        except CommError:
            pass  # it ends anyway
