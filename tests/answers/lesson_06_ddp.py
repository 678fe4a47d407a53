"""Answers to ddp_hook of notebook 06 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.parallel.ddp import ddp_hook_beside

from . import WrongAnswer


def promise(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def total(state, bucket):
    return state.all_reduce(state.comm, bucket.buffer())


# -- wrong -------------------------------------------------------------------------------------------------------------


def returns_a_tensor(state, bucket):
    return total(state, bucket) / state.comm.size


def returns_nothing(state, bucket):
    flat = total(state, bucket)
    flat /= state.comm.size


def never_fulfills(state, bucket):
    flat = total(state, bucket)
    flat /= state.comm.size
    return torch.futures.Future()


def gives_the_sum(state, bucket):
    return promise(total(state, bucket))


def divides_twice(state, bucket):
    bucket.set_buffer(bucket.buffer() / state.comm.size)
    return promise(total(state, bucket) / state.comm.size)


def divides_by_two(state, bucket):
    return promise(total(state, bucket) / 2)


def multiplies(state, bucket):
    return promise(state.all_reduce(state.comm, bucket.buffer()) * state.comm.size)


def reduces_in_float32(state, bucket):
    return promise(state.all_reduce(state.comm, bucket.buffer().float()) / state.comm.size)


def fulfills_too_early(state, bucket):
    """The all_reduce goes on beside backward, and the future has its value before the sum is there."""
    flat = bucket.buffer() / state.comm.size
    state.comm.background(state.all_reduce, flat)
    return promise(flat)


def fulfills_with_the_old_buffer(state, bucket):
    flat = bucket.buffer().clone()
    state.all_reduce(state.comm, flat)
    flat /= state.comm.size
    return promise(bucket.buffer())


def divides_its_own(state, bucket):
    state.all_reduce(state.comm, bucket.buffer().clone())
    return promise(bucket.buffer() / state.comm.size)


def takes_another_all_reduce(state, bucket):
    return promise(state.comm.all_reduce(bucket.buffer()) / state.comm.size)


def one_all_reduce_per_gradient(state, bucket):
    for grad in bucket.gradients():
        state.all_reduce(state.comm, grad.view(-1))
        grad /= state.comm.size
    return promise(bucket.buffer())


def fulfills_with_a_list(state, bucket):
    return promise([total(state, bucket) / state.comm.size])


def keeps_buckets_in_two_orders(state, bucket, kept={}):  # noqa: B006
    """Reduces all buckets at the last one; on odd ranks from the last to the first."""
    mine = kept.setdefault(state.comm.rank, [])
    if bucket.index() == 0:
        mine.clear()
    future = torch.futures.Future()
    mine.append((bucket, future))
    if bucket.is_last():
        for kept_bucket, kept_future in mine if state.comm.rank % 2 == 0 else mine[::-1]:
            kept_future.set_result(total(state, kept_bucket) / state.comm.size)
    return future


def only_rank_0_reduces(state, bucket):
    flat = total(state, bucket) if state.comm.rank == 0 else bucket.buffer()
    return promise(flat / state.comm.size)


# -- right -------------------------------------------------------------------------------------------------------------


def beside_backward(state, bucket):
    return ddp_hook_beside(state, bucket)


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "6.5": (
        WrongAnswer(returns_a_tensor, "future", "returned something of type Tensor"),
        WrongAnswer(returns_nothing, "future", "returned nothing"),
        WrongAnswer(never_fulfills, "future", "a future without a value"),
        WrongAnswer(gives_the_sum, "mean", "DDP divides nothing when it has a hook"),
        WrongAnswer(divides_twice, "mean", "It was divided by 3 twice"),
        WrongAnswer(divides_by_two, "size", "there are 3 ranks: state.comm.size"),
        WrongAnswer(multiplies, "mean", "That is 9 times the mean"),
        WrongAnswer(reduces_in_float32, "dtype", "right to the 7 digits of float32"),
        WrongAnswer(fulfills_too_early, "raises", "never waited for all_reduce in the background"),
        WrongAnswer(fulfills_with_the_old_buffer, "buffer", "is it the sum that you give to the future"),
        WrongAnswer(divides_its_own, "buffer", "the others are not in it"),
        WrongAnswer(takes_another_all_reduce, "all_reduce", "called state.all_reduce 0 times"),
        WrongAnswer(one_all_reduce_per_gradient, "all_reduce", "called state.all_reduce 6 times"),
        WrongAnswer(fulfills_with_a_list, "shape", "promised something of type list"),
        WrongAnswer(keeps_buckets_in_two_orders, "order", "what meets there are different buckets"),
        WrongAnswer(only_rank_0_reduces, "deadlock", "there is a deadlock"),
    ),
}
RIGHT = {
    "6.5": (beside_backward, divides_before, all_at_the_last),
}
