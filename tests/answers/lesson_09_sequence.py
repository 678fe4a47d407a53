"""Answers to sequence_parallel of notebook 09 that a check must reject or accept; CI proves both."""

from functools import partial

import torch

from hpdl_lab.parallel.tensor.linear import conjugate, copy_to, gather_sequence, reduce_from, scatter_sequence


def pair(comm):
    return partial(gather_sequence, comm), partial(scatter_sequence, comm)


def mine(comm, x):
    """This rank's positions of x."""
    return x.tensor_split(comm.size, 1)[comm.rank].contiguous()


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


WRONG = {
    "9.4": """
transposed: what forward gathers, backward adds and scatters
    gather, scatter = pair(comm)
    part = layer(conjugate(x, gather, lambda grad: mine(comm, grad)))
    return conjugate(part, scatter, gather)
transposed: as if the other positions had none
    gather, scatter = pair(comm)
    def padded(grad):
        whole = grad.new_zeros(grad.shape[0], comm.size, *grad.shape[1:])
        whole[:, comm.rank] = grad
        return whole.flatten(1, 2)
    return conjugate(layer(conjugate(x, gather, scatter)), scatter, padded)
transposed: undo the shape that forward made
    gather, scatter = pair(comm)
    return conjugate(layer(conjugate(x, gather, gather)), scatter, scatter)
gather: saw only the positions of each rank
    return reduce_from(comm, layer(copy_to(comm, x)))
whole: Those are all positions
    gather, scatter = pair(comm)
    return reduce_from(comm, layer(conjugate(x, gather, scatter)))
sum @with_a_function_of_its_own: only the part of the layer on rank 0
    conjugate(layer(Gathered.apply(x, comm)), scatter, gather) => mine(comm, layer(conjugate(x, gather, scatter)))
mean: the mean over 2 ranks
    gather, scatter = pair(comm)
    return conjugate(layer(conjugate(x, gather, scatter)), scatter, gather) / comm.size
gradient: That is 0.5 times as much
    gather, scatter = pair(comm)
    whole = conjugate(x, gather, lambda grad: scatter(grad) / comm.size)
    return conjugate(layer(whole), scatter, gather)
messages: An all-reduce is both
    gather, scatter = pair(comm)
    whole = reduce_from(comm, layer(conjugate(x, gather, scatter)))
    return conjugate(whole, lambda whole: mine(comm, whole), gather)
messages: in forward rank 0 waits in 1 barrier, where none is
    comm.barrier()
    gather, scatter = pair(comm)
    return conjugate(layer(conjugate(x, gather, scatter)), scatter, gather)
messages: in backward rank 0 waits in 1 barrier
    gather, scatter = pair(comm)
    def scatter_together(x):
        comm.barrier()
        return scatter(x)
    return conjugate(layer(conjugate(x, gather, scatter_together)), scatter, gather)
order: positions are in the wrong order
    gather, scatter = pair(comm)
    def dealt(x):
        return torch.stack(list(comm.all_gather(x)), 2).flatten(1, 2) if comm.size > 1 else x
    return conjugate(layer(conjugate(x, dealt, scatter)), scatter, gather)
gradient @with_a_function_of_its_own: x of rank 0 has no gradient
    Gathered.apply(x, comm) => gather(x)
deadlock: there is a deadlock
    gather, scatter = pair(comm)
    part = layer(conjugate(x, gather, scatter))
    return conjugate(part, scatter, gather) if comm.rank == 0 else mine(comm, part)
raises: layer was called 2 times
    (partial(gather_sequence, comm), partial(scatter_sequence, comm)) => pair(comm)
    forward=gather, backward=scatter => gather, scatter
    part = layer(whole) => layer(whole.detach())
    part, forward=scatter, backward=gather => layer(whole), scatter, gather
layer @with_a_function_of_its_own: The layer had no part in it
    layer(Gathered.apply(x, comm)) => conjugate(x, gather, scatter)
""",
}
RIGHT = {
    "9.4": (with_lambdas, with_a_function_of_its_own),
}
COMPLETED = {
    "9.4": ["scatter", "scatter"],
}
