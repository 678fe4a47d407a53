"""Answers to sequence_parallel of notebook 09 that a check must reject or accept; CI proves both."""

from functools import partial

import torch

from hpdl_lab.parallel.tensor.linear import conjugate, copy_to, reduce_from
from hpdl_lab.parallel.tensor.sequence import gather_sequence, scatter_sequence

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


def pair(comm):
    return partial(gather_sequence, comm), partial(scatter_sequence, comm)


def mine(comm, x):
    """This rank's positions of x."""
    return x.tensor_split(comm.size, 1)[comm.rank].contiguous()


def gather_keeps_its_own_in_backward(comm, x, layer):
    gather, scatter = pair(comm)
    part = layer(conjugate(x, gather, lambda grad: mine(comm, grad)))
    return conjugate(part, scatter, gather)


def scatter_fills_with_zeros_in_backward(comm, x, layer):
    gather, scatter = pair(comm)

    def padded(grad):
        whole = grad.new_zeros(grad.shape[0], comm.size, *grad.shape[1:])
        whole[:, comm.rank] = grad
        return whole.flatten(1, 2)

    return conjugate(layer(conjugate(x, gather, scatter)), scatter, padded)


def the_same_in_both_directions(comm, x, layer):
    gather, scatter = pair(comm)
    return conjugate(layer(conjugate(x, gather, gather)), scatter, scatter)


def never_gathers(comm, x, layer):
    return reduce_from(comm, layer(copy_to(comm, x)))


def returns_all_positions(comm, x, layer):
    gather, scatter = pair(comm)
    return reduce_from(comm, layer(conjugate(x, gather, scatter)))


def forgets_the_sum(comm, x, layer):
    gather, scatter = pair(comm)
    return mine(comm, layer(conjugate(x, gather, scatter)))


def takes_the_mean(comm, x, layer):
    gather, scatter = pair(comm)
    return conjugate(layer(conjugate(x, gather, scatter)), scatter, gather) / comm.size


def takes_the_mean_in_backward(comm, x, layer):
    gather, scatter = pair(comm)
    whole = conjugate(x, gather, lambda grad: scatter(grad) / comm.size)
    return conjugate(layer(whole), scatter, gather)


def adds_everything_and_cuts(comm, x, layer):
    gather, scatter = pair(comm)
    whole = reduce_from(comm, layer(conjugate(x, gather, scatter)))
    return conjugate(whole, lambda whole: mine(comm, whole), gather)


def waits_for_all_in_backward(comm, x, layer):
    """So that all begin at once: nothing is gained, and everybody waits for the slowest."""
    gather, scatter = pair(comm)

    def scatter_together(x):
        comm.barrier()
        return scatter(x)

    return conjugate(layer(conjugate(x, gather, scatter_together)), scatter, gather)


def waits_for_all(comm, x, layer):
    comm.barrier()
    gather, scatter = pair(comm)
    return conjugate(layer(conjugate(x, gather, scatter)), scatter, gather)


def mixes_up_positions(comm, x, layer):
    """Puts first positions of all ranks first, then second ones."""
    gather, scatter = pair(comm)

    def dealt(x):
        return torch.stack(list(comm.all_gather(x)), 2).flatten(1, 2) if comm.size > 1 else x

    return conjugate(layer(conjugate(x, dealt, scatter)), scatter, gather)


def gathers_outside_autograd(comm, x, layer):
    gather, scatter = pair(comm)
    return conjugate(layer(gather(x)), scatter, gather)


def only_rank_0_scatters(comm, x, layer):
    gather, scatter = pair(comm)
    part = layer(conjugate(x, gather, scatter))
    return conjugate(part, scatter, gather) if comm.rank == 0 else mine(comm, part)


def calls_the_layer_twice(comm, x, layer):
    gather, scatter = pair(comm)
    whole = conjugate(x, gather, scatter)
    layer(whole.detach())
    return conjugate(layer(whole), scatter, gather)


def forgets_the_layer(comm, x, layer):
    gather, scatter = pair(comm)
    return conjugate(conjugate(x, gather, scatter), scatter, gather)


# -- right -------------------------------------------------------------------------------------------------------------


def with_lambdas(comm, x, layer):
    whole = conjugate(x, lambda x: gather_sequence(comm, x), lambda grad: scatter_sequence(comm, grad))
    return conjugate(layer(whole), lambda y: scatter_sequence(comm, y), lambda grad: gather_sequence(comm, grad))


class Gathered(torch.autograd.Function):
    """Without conjugate, as Megatron writes it."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return gather_sequence(comm, x)

    @staticmethod
    def backward(ctx, grad):
        return scatter_sequence(ctx.comm, grad), None


def with_a_function_of_its_own(comm, x, layer):
    gather, scatter = pair(comm)
    return conjugate(layer(Gathered.apply(x, comm)), scatter, gather)


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "9.5": (
        WrongAnswer(gather_keeps_its_own_in_backward, "transposed", "is added and scattered in backward"),
        WrongAnswer(scatter_fills_with_zeros_in_backward, "transposed", "as if the others had no gradient"),
        WrongAnswer(the_same_in_both_directions, "transposed", "undo the shape that forward made"),
        WrongAnswer(never_gathers, "gather", "saw only the positions of each rank"),
        WrongAnswer(returns_all_positions, "whole", "Those are all positions"),
        WrongAnswer(forgets_the_sum, "sum", "only what the layer of rank 0 says"),
        WrongAnswer(takes_the_mean, "mean", "the mean over 2 ranks"),
        WrongAnswer(takes_the_mean_in_backward, "gradient", "That is 0.5 times as much"),
        WrongAnswer(adds_everything_and_cuts, "messages", "An all-reduce is both"),
        WrongAnswer(waits_for_all, "messages", "in forward rank 0 waits in 1 barrier, where none is"),
        WrongAnswer(waits_for_all_in_backward, "messages", "in backward rank 0 waits in 1 barrier"),
        WrongAnswer(mixes_up_positions, "order", "put together in another order"),
        WrongAnswer(gathers_outside_autograd, "gradient", "x of rank 0 has no gradient"),
        WrongAnswer(only_rank_0_scatters, "deadlock", "there is a deadlock"),
        WrongAnswer(calls_the_layer_twice, "raises", "layer was called 2 times"),
        WrongAnswer(forgets_the_layer, "layer", "The layer had no part in it"),
    ),
}
RIGHT = {
    "9.5": (with_lambdas, with_a_function_of_its_own),
}
