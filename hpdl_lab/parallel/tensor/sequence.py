"""Sequence parallel: where every rank would do the same to the whole sequence, each does it to its positions only.

Between the layers that are cut, a transformer adds and normalizes, position by position. With tensor parallel alone,
p ranks all do that for all positions, and keep p copies for backward. Here each has s/p positions of it:

    tensor parallel      norm -> [copy to | layer | all-reduce ] -> add          2 n (p-1)/p bytes for n = b s d numbers
    sequence parallel    norm -> [all-gather | layer | reduce-scatter] -> add    n (p-1)/p + n (p-1)/p: the same bytes

An all-reduce is a reduce-scatter and an all-gather, so the sum of bytes stays, and the memory between them is 1/p.
Ref: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from functools import partial

from .linear import conjugate, require_divisible

DIM = 1  # of positions, in (b, s, d)


def gather_sequence(comm, x):
    """All positions, from those of every rank: (b, s/p, d) -> (b, s, d), the same on every rank.

    A function of plain tensors; in a backward pass scatter_sequence is its transposed.
    Bytes per rank: of all_gather for the N/p elements of x.
    """
    if comm.size == 1:
        return x
    stack = comm.all_gather(x.detach().contiguous())  # (p, b, s/p, d)
    return stack.movedim(0, DIM).flatten(DIM, DIM + 1)  # (b, p, s/p, d) -> (b, s, d)


def scatter_sequence(comm, x):
    """This rank's positions of the sum of `x` over ranks: (b, s, d), different per rank -> (b, s/p, d).

    A function of plain tensors; in a backward pass gather_sequence is its transposed.
    Raises:  ValueError where the ranks do not divide s.
    Bytes per rank: of reduce_scatter for the N elements of x.
    """
    require_positions(comm, x.shape[DIM])
    if comm.size == 1:
        return x
    b, s, *d = x.shape
    rows = x.detach().reshape(b, comm.size, s // comm.size, *d).movedim(DIM, 0)  # (p, b, s/p, d)
    return comm.reduce_scatter(rows.contiguous())


def sequence_parallel(comm, x, layer):
    """Send `x` through a layer of which every rank has a part, and of x only its own positions.

        x (b, s/p, d) -> all-gather -> (b, s, d) -> layer -> part of the sum (b, s, d) -> reduce-scatter -> (b, s/p, d)

    Backward goes the other way: the gradient is gathered before the layer, and reduce-scattered behind it.

    Args:    x: (b, s/p, d), this rank's positions.
             layer: f((b, s, d), the same on every rank) -> (b, s, d), of which the sum over ranks is the result: a
             column linear without copy_to, then a row linear without reduce_from.
    Returns: (b, s/p, d), this rank's positions of the result. x.grad is complete after backward.
    Raises:  ValueError on every rank where the ranks do not divide the positions that layer returns.
    Steps: one all_gather, one reduce_scatter forward; the same backward.
    Bytes per rank: 2(p - 1)/p * b s d * itemsize in each direction: those of one all_reduce.
    Ref: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (g and its conjugate).
    """
    gather, scatter = partial(gather_sequence, comm), partial(scatter_sequence, comm)
    ### BEGIN SOLUTION
    whole = conjugate(x, forward=gather, backward=scatter)  # (b, s, d)
    part = layer(whole)  # (b, s, d)
    return conjugate(part, forward=scatter, backward=gather)  # (b, s/p, d)
    ### END SOLUTION


def all_gather_sequence(comm, x):
    """(b, s/p, d) -> (b, s, d) for a layer of which every rank has a part: all-gather, reduce-scatter in backward."""
    return conjugate(x, partial(gather_sequence, comm), partial(scatter_sequence, comm))


def reduce_scatter_sequence(comm, x):
    """(b, s, d), a part of the sum -> (b, s/p, d): reduce-scatter in forward, all-gather in backward."""
    return conjugate(x, partial(scatter_sequence, comm), partial(gather_sequence, comm))


def require_positions(comm, positions):
    """Raise ValueError, on every rank alike, unless the ranks divide the positions of a sequence."""
    require_divisible(comm, positions, f"a sequence of {positions} positions cannot be shared equally")
