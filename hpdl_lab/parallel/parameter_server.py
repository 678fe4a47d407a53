"""Asynchronous training with bounded staleness: no rank waits for the others' latest gradients, only for old ones.

    staleness 1     clock 0      clock 1      clock 2      clock 3
    rank 0          [ step ]     [ step ]     [ step ]     . waits for clock 2 - 1 of rank 1 .
    rank 1, slow    [     s t e p      ]   [     s t e p      ]   ...

A rank that begins clock c has every gradient of clocks 0 to c - 1 - staleness of all ranks, and later ones that
happened to come. Jitter costs nothing; a rank that is always slower sets the pace in the end. The price is that
gradients are of older weights. In the paper servers hold the weights; here every rank has a replica, and sends its
gradients to all others.
"""

import torch
from torch import Tensor

from ..comm.base import Comm, Work
from ..comm.buffers import copy_of, new_like
from ..units import require_int
from .consensus import is_finite, overflowed
from .data_parallel import DataParallel, broadcast_buffers
from .reducer import Bucket

END = -1.0  # a flag: no more gradients come from this rank


class StaleSynchronous(DataParallel):
    """Steps along this rank's gradients and all that have come from others: a rank waits for too old ones only.

    staleness: how many steps a rank may be ahead of the gradients that it has; the same on every rank.
    Replicas differ while it runs; `finish` gives every rank their mean. The losses and the parameters depend on who was
    how fast, except for staleness 0, which equals the synchronous strategies. A learning rate that is just stable
    there may be too large here. A rank may make more steps than another.
    A parameter without a gradient counts as zeros.
    Steps: p - 1 messages per rank and step.   Bytes per rank: (p - 1) * (N + 1) * itemsize per step.
    Ref: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server".
    """

    synchronous = False

    def __init__(self, staleness: int = 1) -> None:
        super().__init__()
        self.staleness = require_int("staleness", staleness, 0)

    def start(self, comm: Comm, model: torch.nn.Module) -> None:
        super().start(comm, model)
        buckets = self.require_begun().buckets
        if len(buckets) != 1:
            raise ValueError(f"{self} sends one message per step: gradients of one dtype, not of {len(buckets)}")
        self.clock = 0
        comm = self.comm = comm.split(0)  # gradients lie there until somebody looks, and meet no other message
        self.sending: list[tuple[Work, Tensor]] = []  # (Work, the gradients that are under way)
        self.inboxes = {rank: _Inbox(comm, rank, buckets[0].flat) for rank in range(comm.size) if rank != comm.rank}

    def add_gradients(self, comm: Comm, model: torch.nn.Module) -> None:
        """Send this rank's gradients; replace them by their sum with what has come. See the class.

        Raises:  FloatingPointError on this rank only: before anything is sent, if a gradient has NaN or infinity;
                 and if the sum with what has come overflows float16.
        """
        (bucket,) = self.require_started(model).buckets
        for i in range(len(bucket.params)):
            bucket.put(i)
        mine = copy_of(bucket.packed())
        self.require_finite(comm, bucket)
        self.send(mine)
        total = torch.zeros_like(mine)
        for rank in range(comm.size):  # in the order of ranks, so that with staleness 0 all have the same sum
            if rank == comm.rank:
                total += mine
            else:
                self.inboxes[rank].add_to(total, self.clock - self.staleness, self.clock + self.staleness)
        too_large = overflowed([bucket], [total])
        if too_large is not None:
            raise FloatingPointError(
                f"rank {comm.rank}: the sum with the gradients of other ranks overflows float16 in the gradient of "
                f"{self.names[too_large]}, though each is finite: scale the loss down"
            )
        bucket.flat.copy_(total)
        bucket.set_grads(bucket.flat)
        self.clock += 1

    def send(self, flat: Tensor) -> None:
        """Begin to send `flat` to all other ranks, and let go of what has arrived."""
        self.sending += [(self.comm.isend(flat, rank), flat) for rank in self.inboxes]
        self.sending = [(work, flat) for work, flat in self.sending if not _has_ended(work)]

    def require_finite(self, comm: Comm, bucket: Bucket) -> None:
        if not bucket.finite:
            bad = [name for name, p in zip(self.names, self.params, strict=True) if not is_finite(p.grad)]
            raise FloatingPointError(
                f"rank {comm.rank} has NaN or infinity in the gradient of {bad[-1]} and of {len(bad) - 1} more"
            )

    def finish(self, comm: Comm, model: torch.nn.Module) -> None:
        """Take in what is under way, then give every rank the mean of all replicas, and rank 0's buffers."""
        last = torch.zeros_like(self.require_begun().buckets[0].flat)
        last[-1] = END
        self.send(last)
        for inbox in self.inboxes.values():
            inbox.drain()
        for work, _ in self.sending:
            work.wait()
        with torch.no_grad():
            for param in self.params:
                param.copy_(comm.all_reduce(copy_of(param).reshape(-1)).view(param.shape) / comm.size)
        broadcast_buffers(comm, model)


class _Inbox:
    """The gradients that one other rank sends, in the order of its clocks."""

    def __init__(self, comm: Comm, source: int, like: Tensor) -> None:
        self.comm, self.source = comm, source
        self.arriving = new_like(like, like.shape)
        self.known = 0  # clocks whose gradients have come
        self.ended = False
        self.work = comm.irecv(self.arriving, source)

    def add_to(self, total: Tensor, must: int, may: int) -> None:
        """Add to `total` what belongs to clocks up to `must`, waiting for it, and up to `may` what has come."""
        while not self.ended and (self.known <= must or (self.known <= may and self.work.test())):
            if self.take():
                total += self.arriving_then_next()

    def take(self) -> bool:
        """Wait for the next gradients; return False if there are none, because the other rank has ended."""
        self.work.wait()
        self.ended = float(self.arriving[-1]) == END
        return not self.ended

    def arriving_then_next(self) -> Tensor:
        """Return what has come; the next may come into other memory."""
        arrived, self.arriving = self.arriving, new_like(self.arriving, self.arriving.shape)
        self.known += 1
        self.work = self.comm.irecv(self.arriving, self.source)
        return arrived

    def drain(self) -> None:
        """Receive all that is left, for no use: the last step has been made."""
        while not self.ended:
            if self.take():
                self.arriving_then_next()


def _has_ended(work: Work) -> bool:
    """Return True if `work` would not have to be waited for; it is then over."""
    ended = work.test()
    if ended:
        work.wait()
    return ended
