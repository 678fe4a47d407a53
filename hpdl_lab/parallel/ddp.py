"""PyTorch's DistributedDataParallel on any all-reduce: its hook for communication, written twice.

DDP packs gradients into buckets, last layer first, and calls the hook with each bucket that is full, in the same order
on every rank, from the thread of backward. It divides nothing then, and uses what the hook's future brings:

    backward   grad 9 .. grad 6 [hook(bucket 0)] grad 5 .. grad 3 [hook(bucket 1)] .. grad 0 [hook(bucket 2)] | futures

    model = DistributedDataParallel(net)
    model.register_comm_hook(Communication(comm, ring.all_reduce), ddp_hook)

DDP itself needs a process group, for what it compares and copies at the start: comm/torch/group.py makes one of gloo
on the engines.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from ..comm.base import Comm, best_all_reduce
from ..comm.torch.backward import before_backward_ends
from ..units import require_int
from .compression import Compressor
from .reducer import AllReduce, checked, require_function, result_of


class Communication(NamedTuple):
    """The state that the hooks get: a communicator, and the all_reduce(comm, x) that adds the flat x."""

    comm: Comm
    all_reduce: AllReduce = best_all_reduce


# DDP reads these annotations, and takes none but its own types, as types: no `from __future__ import annotations`
def ddp_hook(state: Communication, bucket: GradBucket) -> Future[Tensor]:
    """Average one bucket of gradients over all ranks, with any all_reduce.

    Backward waits until this function returns.

    Args:    state: Communication, with state.comm and state.all_reduce.
             state.all_reduce(comm, x) replaces x by its sum over ranks, in place.
             bucket: dist.GradBucket. bucket.buffer() is (n,), this rank's gradients,
             flat.
    Returns: a torch.futures.Future, an object for a result that may come later. Make one
             with torch.futures.Future(), and put the (n,) average in with set_result.
             The average is the same on every rank.
    Steps: one all_reduce per bucket.
    Bytes per rank: one all_reduce of n elements.
    Ref: Li et al. 2020.
    """
    ### BEGIN SOLUTION
    flat = bucket.buffer()  # (n,)
    state.all_reduce(state.comm, flat)
    flat /= state.comm.size
    future = torch.futures.Future()
    future.set_result(flat)
    return future
    ### END SOLUTION


def ddp_hook_async(state: Communication, bucket: GradBucket) -> Future[Tensor]:
    """Average one bucket as `ddp_hook` does, but add it in the background while backward goes on.

        main thread   grad 9 .. grad 6 | grad 5 .. grad 3 | .. grad 0 | finish 0, 1, 2 | DDP takes the futures
        background                     [all_reduce 0 ..] [all_reduce 1 ..] [2]

    DDP waits for futures in C++, which no interrupt would reach. So the background is waited for in Python, at
    the end of backward and before DDP does, and the future is fulfilled (comm/torch/backward.py).
    """
    work = state.comm.background(state.all_reduce, bucket.buffer())
    future = torch.futures.Future()

    def finish() -> None:
        flat = checked(work.wait(), state.comm, bucket.buffer())
        flat /= state.comm.size
        future.set_result(flat)

    before_backward_ends(finish)
    return future


class Compression:
    """The state of `compressed_hook`: a communicator, and a compressor of parallel/compression.py, one per bucket.

    dense_steps: steps that travel uncompressed; at least 2, because DDP cuts its buckets anew after the first, and what
    is held back belongs to a bucket.
    """

    def __init__(
        self, comm: Comm, compressor: Compressor, dense_steps: int = 2, all_reduce: AllReduce = best_all_reduce
    ) -> None:
        self.comm, self.compressor, self.all_reduce = comm, compressor, all_reduce
        self.dense_steps, self.taken = require_int("dense_steps", dense_steps, 2), 0
        self.compressors: dict[int, Compressor] = {}


def compressed_hook(state: Compression, bucket: GradBucket) -> Future[Tensor]:
    """Average one bucket of gradients over all ranks in fewer bytes. As `ddp_hook`, but for the compressor."""
    flat = bucket.buffer()
    if state.taken < state.dense_steps:
        total = result_of(state.all_reduce, state.comm, flat)
    else:
        compressor = state.compressors.setdefault(bucket.index(), copy.deepcopy(state.compressor))
        total = compressor.add(state.comm, flat, [grad.shape for grad in bucket.gradients()], state.all_reduce)
    state.taken += bucket.is_last()
    future = torch.futures.Future()
    future.set_result(total / state.comm.size)
    return future


Hook: TypeAlias = Callable[[Any, Any], Future[Tensor]]  # f(state, bucket), as an attendee writes it


def guarded(hook: Hook) -> Hook:
    """Return `hook` with checks: what it returns DDP takes in C++, which crashes, or waits forever, at a mistake."""

    def guard(state: Communication | Compression, bucket: GradBucket) -> Future[Tensor]:
        future = require_function("hook(state, bucket)", hook)(state, bucket)
        if not isinstance(future, torch.futures.Future):
            kind = type(future).__name__
            raise TypeError(f"rank {state.comm.rank}: the hook returned {kind}: DDP needs a torch.futures.Future")
        before_backward_ends(lambda: _require_average(state.comm, future, bucket.buffer().shape))
        return future

    return guard


def _require_average(comm: Comm, future: Future[Tensor], shape: torch.Size) -> None:
    """Raise ValueError unless `future` has a tensor of this shape."""
    value = future.value() if future.done() else None
    if not isinstance(value, torch.Tensor) or value.shape != shape:
        got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        found = got if future.done() else "no value"
        raise ValueError(
            f"rank {comm.rank}: the hook's future has {found}: DDP needs the average of {tuple(shape)} numbers"
        )
