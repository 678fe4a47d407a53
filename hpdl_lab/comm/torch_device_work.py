"""Messages of tensors on a device through a process group, under way: see torch_device.py."""

import time
from contextlib import suppress

import torch.distributed as dist

from .errors import CommError
from .nccl_work import NcclWork
from .torch import TorchWork

NAP = 20e-6  # s: between two looks


class Batch:
    """Operations of the group that have been started together. An operation: see csrc/operation.h."""

    progress = 0

    def __init__(self, works):
        """works: [torch.distributed.Work]."""
        self.works, self.done = works, False

    def wait(self, seconds, nap_s, crowded):
        return polled(self.has_ended, seconds, nap_s)

    def wait_among(self, seconds, nap_s, crowded, others):
        return self.wait(seconds, nap_s, crowded)

    def has_ended(self):
        """Raises CommError where the group has failed."""
        if not self.done and all(work.is_completed() for work in self.works):
            try:
                for work in self.works:
                    work.wait()
            except RuntimeError as error:
                raise CommError(f"the process group has failed: {error}") from None
            self.done = True
        return self.done


class DeviceWork(TorchWork, NcclWork):
    """One end of a message of the group; its `message` is the note, which gloo carries. launch: its Batch, or None."""

    __slots__ = ()
    progress = 0

    def is_ready(self):
        """May it start? A receive may when its note has come. Raises Mismatch where that says something else."""
        return self.op == "send" or self.has_come()

    def start(self):
        """What the group is to do, as dist.batch_isend_irecv takes it."""
        act = dist.isend if self.op == "send" else dist.irecv
        return dist.P2POp(act, self.x.detach(), group=self.comm.device_group, group_peer=self.peer)

    def wait(self):
        if self.message is not None:
            comm = self.comm
            with comm.aborting(self.op):
                whom = (comm.members[self.peer],)
                comm.waiting.finish(Arrival(self), self.op, whom, self.buffer.nbytes, self.line, facts=self._facts)
            self._arrived()

    def test(self):
        if self.message is not None:
            with self.comm.aborting(self.op):
                arrived = Arrival(self).has_ended()
            if arrived:
                self._arrived()
        return self.message is None

    def let_go(self, seconds):
        """See MpiWork.let_go: what is still on the device after `seconds` is ended there."""
        if self.message is not None and self.launch is not None:
            with suppress(CommError):
                self.launch.wait(seconds, 1e-3, self.comm.crowded)
            if not self.launch.done:
                self.comm.abort(self.op)
        return super(NcclWork, self).let_go(0.0)


class Arrival:
    """The end of a DeviceWork, as an operation: whoever waits for it lets the messages start that have been posted."""

    progress = 0

    def __init__(self, work):
        self.work = work

    def wait(self, seconds, nap_s, crowded):
        return polled(self.has_ended, seconds, nap_s)

    def wait_among(self, seconds, nap_s, crowded, others):
        return self.wait(seconds, nap_s, crowded)

    def has_ended(self):
        self.work.comm.start_posted()
        return self.work.launch is not None and self.work.launch.has_ended()


def polled(has_ended, seconds, nap_s):
    """Ask again and again, up to `seconds`; true when it has."""
    end = time.monotonic() + seconds
    while not has_ended():
        if time.monotonic() >= end:
            return False
        time.sleep(max(nap_s, NAP))
    return True
