"""Answers to reduce_scatter of notebook 04 that a check must reject or accept; CI proves both.

Each wrong one is a mistake that people make.
"""

import numpy as np
import torch

from hpdl_lab.collectives import ring
from hpdl_lab.collectives.chunks import chunk
from hpdl_lab.comm.buffers import copy_of, new_like

from . import WrongAnswer

# -- reduce_scatter: wrong ---------------------------------------------------------------------------------------------


def off_by_one_chunk(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r - i - 1)
        theirs += comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    return chunk(x, p, r)


def divides_by_p(comm, x):
    mine = ring.reduce_scatter(comm, x)
    mine /= comm.size
    return mine


def only_divisible_sizes(comm, x):
    p, r = comm.size, comm.rank
    n = len(x) // p
    for i in range(p - 1):
        mine, theirs = (r - i - 1) % p, (r - i - 2) % p
        arriving = torch.empty_like(x[:n])
        comm.sendrecv(x[mine * n : (mine + 1) * n], (r + 1) % p, arriving, (r - 1) % p)
        x[theirs * n : (theirs + 1) * n] += arriving
    return x[r * n : (r + 1) * n]


def whole_vector_every_hop(comm, x):
    return chunk(ring.all_reduce_naive(comm, x), comm.size, comm.rank)


def data_of_rank_0(comm, x):
    return chunk(comm.broadcast(x), comm.size, comm.rank)


def sends_first(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r - i - 2)
        arriving = torch.empty_like(theirs)
        comm.send(chunk(x, p, r - i - 1), (r + 1) % p)
        comm.recv(arriving, (r - 1) % p)
        theirs += arriving
    return chunk(x, p, r)


def forgets_the_last_step(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 2):
        theirs = chunk(x, p, r - i - 2)
        theirs += comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    return chunk(x, p, r)


def one_step_too_many(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p):
        theirs = chunk(x, p, r - i - 2)
        theirs += comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    return chunk(x, p, r)


def one_step_too_many_of_several(comm, x):
    return chunk(x, 1, 0) if comm.size == 1 else one_step_too_many(comm, x)


def needs_a_neighbor(comm, x):
    mine = ring.reduce_scatter(comm, x)
    if comm.size < 2:
        comm.recv(mine, comm.rank + 1)
    return mine


def returns_nothing(comm, x):
    ring.reduce_scatter(comm, x)


def returns_all_of_x(comm, x):
    ring.reduce_scatter(comm, x)
    return x


def raises_an_error(comm, x):
    chunks = [chunk(x, comm.size, c) for c in range(comm.size)]
    return chunks[comm.rank + 1]


def never_ends(comm, x):
    p, r = comm.size, comm.rank
    i = 0
    while i < p - 1:
        comm.sendrecv(chunk(x, p, 0), (r + 1) % p, new_like(x, chunk(x, p, 0).shape), (r - 1) % p)
    return chunk(x, p, r)


def writes_past_the_end(comm, x):
    """Every chunk as long as the longest: the last one ends behind x."""
    p, r = comm.size, comm.rank
    n = -(-len(x) // p)

    def padded(c):
        return x.as_strided((n,), (1,), x.storage_offset() + c % p * n)

    for i in range(p - 1):
        theirs = padded(r - i - 2)
        theirs += comm.sendrecv(padded(r - i - 1).clone(), (r + 1) % p, torch.empty_like(theirs), (r - 1) % p)
    return chunk(x, p, r)


def rank_0_sends_first(comm, x):
    """No deadlock any more, but each rank waits until the wave has come around to it."""
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        mine, theirs = chunk(x, p, r - i - 1), chunk(x, p, r - i - 2)
        arriving = torch.empty_like(theirs)
        if r == 0:
            comm.send(mine, (r + 1) % p)
            comm.recv(arriving, (r - 1) % p)
        elif p > 1:
            comm.recv(arriving, (r - 1) % p)
            comm.send(mine, (r + 1) % p)
        theirs += arriving
    return chunk(x, p, r)


def waits_for_all_in_every_step(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r - i - 2)
        theirs += comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
        comm.barrier()
    return chunk(x, p, r)


def never_waits_for_its_sends(comm, x):
    """Passes whole vectors, and no send leaves an event."""
    p, r = comm.size, comm.rank
    passing = copy_of(x)
    for _ in range(p - 1):
        comm.isend(passing, (r + 1) % p)
        passing = comm.recv(new_like(x, x.shape), (r - 1) % p)
        x += passing
    return chunk(x, p, r)


def buffer_is_always_float32(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r - i - 2)
        arriving = torch.empty(len(theirs))
        comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, arriving, (r - 1) % p)
        theirs += arriving
    return chunk(x, p, r)


def straight_to_the_owner(comm, x):
    """The bytes of a ring, without the ring: every chunk goes to the rank that owns it."""
    p, r = comm.size, comm.rank
    mine = chunk(x, p, r)
    for d in range(1, p):
        arriving = torch.empty_like(mine)
        comm.sendrecv(chunk(x, p, r + d), (r + d) % p, arriving, (r - d) % p)
        mine += arriving
    return mine


# -- reduce_scatter: right, each in another way ------------------------------------------------------------------------


def other_direction(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r + i + 2)
        theirs += comm.sendrecv(chunk(x, p, r + i + 1), (r - 1) % p, new_like(x, theirs.shape), (r + 1) % p)
    return chunk(x, p, r)


def numpy_style(comm, x):
    p, r = comm.size, comm.rank
    parts = np.array_split(x.numpy(), p)
    for i in range(p - 1):
        arriving = np.empty_like(parts[(r - i - 2) % p])
        comm.sendrecv(parts[(r - i - 1) % p], (r + 1) % p, arriving, (r - 1) % p)
        parts[(r - i - 2) % p] += arriving
    return parts[r]


def non_blocking(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r - i - 2)
        arriving = torch.empty_like(theirs)
        works = [comm.isend(chunk(x, p, r - i - 1), (r + 1) % p), comm.irecv(arriving, (r - 1) % p)]
        for work in works:
            work.wait()
        theirs += arriving
    return chunk(x, p, r).clone()


def skips_empty_chunks_and_prints(comm, x):
    p, r = comm.size, comm.rank
    parts = x.tensor_split(p)
    for i in range(p - 1):
        mine, theirs = parts[(r - i - 1) % p], parts[(r - i - 2) % p]
        print("step", i)
        works = [comm.isend(mine, (r + 1) % p)] if len(mine) else []
        if len(theirs):
            theirs += comm.recv(torch.empty_like(theirs), (r - 1) % p)
        for work in works:
            work.wait()
    return parts[r]


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "4.1": (
        WrongAnswer(off_by_one_chunk, "chunk", "you are off by one chunk"),
        WrongAnswer(divides_by_p, "sum", "It is the average: the sum divided by 3"),
        WrongAnswer(
            only_divisible_sizes,
            "sizes",
            "Every size that the number of ranks divides is right",
        ),
        WrongAnswer(whole_vector_every_hop, "bytes", "you pass the whole vector at every hop"),
        WrongAnswer(data_of_rank_0, "sum", "the data of rank 0, not the sum over ranks"),
        WrongAnswer(sends_first, "deadlock", "all send first"),
        WrongAnswer(forgets_the_last_step, "steps", "where 4 are needed: one step too few"),
        WrongAnswer(one_step_too_many, "steps", "sent 8 messages, where 7 are needed"),
        WrongAnswer(one_step_too_many_of_several, "steps", "7 are needed: one step too many"),
        WrongAnswer(needs_a_neighbor, "one rank", "1 rank, which has no neighbor"),
        WrongAnswer(returns_nothing, "returns", "returned nothing: return chunk 0 of x"),
        WrongAnswer(
            returns_all_of_x,
            "returns",
            "returned 999 elements: return chunk 0 of x, 333 elements",
        ),
        WrongAnswer(raises_an_error, "raises", "raised IndexError: list index out of range"),
        WrongAnswer(never_ends, "timeout", "Is there a loop that never ends?"),
        WrongAnswer(writes_past_the_end, "bounds", "wrote outside x, at x[1001]"),
        WrongAnswer(rank_0_sends_first, "steps", "the ranks wait for each other in a row"),
        WrongAnswer(waits_for_all_in_every_step, "steps", "a rank waits in 7 barriers"),
        WrongAnswer(never_waits_for_its_sends, "wait", "did not wait for 7 of its sends to rank 1"),
        WrongAnswer(
            buffer_is_always_float32,
            "dtype",
            "a buffer of your own must have the dtype of x",
        ),
        WrongAnswer(straight_to_the_owner, "peers", "it knows only its neighbors"),
    ),
}
RIGHT = {
    "4.1": (
        other_direction,
        numpy_style,
        non_blocking,
        skips_empty_chunks_and_prints,
    ),
}
