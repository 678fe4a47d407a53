"""Answers to all_gather and all_reduce of notebook 04 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.collectives import ring
from hpdl_lab.collectives.chunks import chunk
from hpdl_lab.comm.buffers import copy_of, new_like

from . import WrongAnswer
from .lesson_04_reduce_scatter import one_step_too_many, other_direction

# -- all_gather: wrong -------------------------------------------------------------------------------------------------


def gathers_the_wrong_chunk(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, chunk(x, p, r - i - 2), (r - 1) % p)
    return x


def adds_what_arrives(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        theirs = chunk(x, p, r - i - 1)
        theirs += comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    return x


def stores_in_the_wrong_place(comm, x):
    p, r = comm.size, comm.rank
    parts = [copy_of(chunk(x, p, r))]
    for i in range(p - 1):
        arriving = new_like(x, chunk(x, p, r - i - 1).shape)
        parts.append(comm.sendrecv(parts[-1], (r + 1) % p, arriving, (r - 1) % p))
    x[...] = torch.cat(parts)
    return x


def gathers_divisible_sizes_only(comm, x):
    p, r = comm.size, comm.rank
    n = len(x) // p
    parts = x[: n * p].view(p, n)
    for i in range(p - 1):
        comm.sendrecv(parts[(r - i) % p], (r + 1) % p, parts[(r - i - 1) % p], (r - 1) % p)
    return x


def gathers_whole_vectors(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        arriving = comm.sendrecv(x, (r + 1) % p, copy_of(x), (r - 1) % p)
        chunk(x, p, r - i - 1)[...] = chunk(arriving, p, r - i - 1)
    return x


def gathers_on_rank_0(comm, x):
    p = comm.size
    for r in range(1, p):
        if comm.rank == 0:
            comm.recv(chunk(x, p, r), r)
        elif comm.rank == r:
            comm.send(chunk(x, p, r), 0)
    return comm.broadcast(x)


def gathers_receiving_first(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        comm.recv(chunk(x, p, r - i - 1), (r - 1) % p)
        comm.send(chunk(x, p, r - i), (r + 1) % p)
    return x


def gathers_one_step_short(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 2):
        comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    return x


def gathers_one_step_too_many(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p):
        comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    return x


def gathers_and_returns_its_chunk(comm, x):
    return chunk(ring.all_gather(comm, x), comm.size, comm.rank)


def gathers_and_returns_nothing(comm, x):
    ring.all_gather(comm, x)


# -- all_gather: right -------------------------------------------------------------------------------------------------


def gathers_the_other_way(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        comm.sendrecv(chunk(x, p, r + i), (r - 1) % p, chunk(x, p, r + i + 1), (r + 1) % p)
    return x


def gathers_both_ways(comm, x):
    """Half of the chunks come from the left, the other half from the right."""
    p, r = comm.size, comm.rank
    for i in range(p // 2):
        comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    for i in range(p - 1 - p // 2):
        comm.sendrecv(chunk(x, p, r + i), (r - 1) % p, chunk(x, p, r + i + 1), (r + 1) % p)
    return x


# -- all_reduce: wrong -------------------------------------------------------------------------------------------------


def asks_the_communicator(comm, x):
    return comm.all_reduce(x)


def adds_in_float64(comm, x):
    x.copy_(ring.all_reduce(comm, x.double()))
    return x


def takes_the_average(comm, x):
    x /= comm.size
    return ring.all_reduce(comm, x)


def forgets_the_all_gather(comm, x):
    ring.reduce_scatter(comm, x)
    return x


def gathers_before_it_scatters(comm, x):
    ring.all_gather(comm, x)
    ring.reduce_scatter(comm, x)
    return x


def leaves_x_as_it_was(comm, x):
    return ring.all_reduce(comm, copy_of(x))


def reduces_and_returns_nothing(comm, x):
    ring.all_reduce(comm, x)


def reduces_twice(comm, x):
    return ring.all_reduce(comm, ring.all_reduce(comm, x))


def in_steps(comm, x, steps):
    """Both halves in one loop, which goes round so many times."""
    p, r = comm.size, comm.rank
    for i in range(steps):
        mine, theirs = chunk(x, p, r - i), chunk(x, p, r - i - 1)
        arriving = comm.sendrecv(mine, (r + 1) % p, torch.empty_like(theirs), (r - 1) % p)
        if i < p - 1:
            theirs += arriving
        else:
            theirs.copy_(arriving)
    return x


def one_loop_too_long(comm, x):
    return in_steps(comm, x, 2 * comm.size - 1)


def one_loop_too_short(comm, x):
    return in_steps(comm, x, 2 * comm.size - 3)


def scatters_too_long(comm, x):
    """With a reduce_scatter of which the result is right, but not the number of steps."""
    one_step_too_many(comm, x)
    return ring.all_gather(comm, x)


def only_even_ranks_gather(comm, x):
    ring.reduce_scatter(comm, x)
    return ring.all_gather(comm, x) if comm.rank % 2 == 0 else x


# -- all_reduce: right -------------------------------------------------------------------------------------------------


def in_one_loop(comm, x):
    return in_steps(comm, x, 2 * (comm.size - 1))


def the_other_way_around(comm, x):
    other_direction(comm, x)
    return gathers_the_other_way(comm, x)


def one_half_after_the_other(comm, x):
    """Twice the messages, of half the size."""
    for part in (x[: len(x) // 2], x[len(x) // 2 :]):
        ring.all_reduce(comm, part)
    return x


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "4.2": (
        WrongAnswer(gathers_the_wrong_chunk, "chunk", "never arrived on rank 0"),
        WrongAnswer(adds_what_arrives, "chunk", "all_gather replaces, it does not add"),
        WrongAnswer(stores_in_the_wrong_place, "chunk", "got another chunk there"),
        WrongAnswer(
            gathers_divisible_sizes_only,
            "sizes",
            "Every size that the number of ranks divides is right",
        ),
        WrongAnswer(gathers_whole_vectors, "bytes", "you pass the whole vector at every hop"),
        WrongAnswer(gathers_on_rank_0, "bytes", "everything passes through rank 0"),
        WrongAnswer(gathers_receiving_first, "deadlock", "all receive first"),
        WrongAnswer(gathers_one_step_short, "steps", "where 4 are needed: one step too few"),
        WrongAnswer(gathers_one_step_too_many, "steps", "sent 8 messages, where 7 are needed"),
        WrongAnswer(
            gathers_and_returns_its_chunk,
            "returns",
            "returned 333 elements: return x, 999 elements",
        ),
        WrongAnswer(gathers_and_returns_nothing, "returns", "returned nothing: return x"),
    ),
    "4.3": (
        WrongAnswer(ring.all_reduce_naive, "bytes", "Cut x into chunks"),
        WrongAnswer(adds_in_float64, "bytes", "each twice as large: is what you send of the dtype"),
        WrongAnswer(asks_the_communicator, "bytes", "everything passes through rank 0"),
        WrongAnswer(takes_the_average, "sum", "It is the average"),
        WrongAnswer(forgets_the_all_gather, "steps", "only one of the two halves is done"),
        WrongAnswer(gathers_before_it_scatters, "sum", "is missing"),
        WrongAnswer(leaves_x_as_it_was, "in place", "x was not overwritten"),
        WrongAnswer(reduces_and_returns_nothing, "returns", "returned nothing: return x"),
        WrongAnswer(reduces_twice, "steps", "all is done twice"),
        WrongAnswer(one_loop_too_long, "steps", "sent 15 messages, where 14 are needed"),
        WrongAnswer(one_loop_too_short, "steps", "where 8 are needed: one step too few"),
        WrongAnswer(scatters_too_long, "steps", "14 are needed: one step too many"),
        WrongAnswer(only_even_ranks_gather, "deadlock", "it finished"),
    ),
}
RIGHT = {
    "4.2": (gathers_the_other_way, gathers_both_ways),
    "4.3": (
        in_one_loop,
        the_other_way_around,
        one_half_after_the_other,
    ),
}
