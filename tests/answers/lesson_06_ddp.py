"""Answers to ddp_hook of notebook 06 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.parallel.ddp import ddp_hook_async


def promise(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def total(state, bucket):
    return state.all_reduce(state.comm, bucket.buffer())


def during_backward(state, bucket):
    return ddp_hook_async(state, bucket)


def divides_before(state, bucket):
    flat = bucket.buffer().div_(state.comm.size)
    state.all_reduce(state.comm, flat)
    return promise(flat)


def all_at_the_last(state, bucket, kept={}):  # noqa: B006
    """Right, and without any overlap: every bucket is reduced when the last one is there."""
    mine = kept.setdefault(state.comm.rank, [])
    if bucket.index() == 0:
        mine.clear()
    mine.append((bucket, torch.futures.Future()))
    if bucket.is_last():
        for kept_bucket, future in mine:
            future.set_result(total(state, kept_bucket) / state.comm.size)
    return mine[-1][1]


WRONG = {
    "6.5": """
future: returned something of type Tensor
    return total(state, bucket) / state.comm.size
future: returned nothing
    flat = total(state, bucket)
    flat /= state.comm.size
future @divides_before: a future without a value
    bucket.buffer().div_(state.comm.size) => total(state, bucket)
    state.all_reduce(state.comm, flat) => flat /= state.comm.size
    promise(flat) => torch.futures.Future()
mean: DDP divides nothing when it has a hook
    return promise(total(state, bucket))
mean: It was divided by 3 twice
    bucket.set_buffer(bucket.buffer() / state.comm.size)
    return promise(total(state, bucket) / state.comm.size)
size: there are 3 ranks: state.comm.size
    return promise(total(state, bucket) / 2)
mean @during_backward: That is 9 times the mean
    ddp_hook_async(state, bucket) => promise(state.all_reduce(state.comm, bucket.buffer()) * state.comm.size)
dtype: right to the 7 digits of float32
    return promise(state.all_reduce(state.comm, bucket.buffer().float()) / state.comm.size)
raises: never waited for all_reduce in the background
    flat = bucket.buffer() / state.comm.size
    state.comm.background(state.all_reduce, flat)
    return promise(flat)
buffer: is it the sum that you give to the future
    flat = bucket.buffer().clone()
    state.all_reduce(state.comm, flat)
    flat /= state.comm.size
    return promise(bucket.buffer())
buffer: the others are not in it
    state.all_reduce(state.comm, bucket.buffer().clone())
    return promise(bucket.buffer() / state.comm.size)
all_reduce @during_backward: called state.all_reduce 0 times
    ddp_hook_async(state, bucket) => promise(state.comm.all_reduce(bucket.buffer()) / state.comm.size)
all_reduce: called state.all_reduce 6 times
    for grad in bucket.gradients():
        state.all_reduce(state.comm, grad.view(-1))
        grad /= state.comm.size
    return promise(bucket.buffer())
shape: promised something of type list
    return promise([total(state, bucket) / state.comm.size])
order @all_at_the_last: DDP calls the hook in the same order
    -     mine.append((bucket, torch.futures.Future()))
    +     future = torch.futures.Future()
    +     mine.append((bucket, future))
    -         for kept_bucket, future in mine:
    -             future.set_result(total(state, kept_bucket) / state.comm.size)
    -     return mine[-1][1]
    +         for kept_bucket, kept_future in mine if state.comm.rank % 2 == 0 else mine[::-1]:
    +             kept_future.set_result(total(state, kept_bucket) / state.comm.size)
    +     return future
deadlock: there is a deadlock
    flat = total(state, bucket) if state.comm.rank == 0 else bucket.buffer()
    return promise(flat / state.comm.size)
""",
}
RIGHT = {
    "6.5": (during_backward, divides_before, all_at_the_last),
}
