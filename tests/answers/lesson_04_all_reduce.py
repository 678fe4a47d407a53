"""Answers to all_gather and all_reduce of notebook 04 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.collectives import ring
from hpdl_lab.collectives.chunks import chunk
from hpdl_lab.comm.buffers import copy_of, new_like

from .lesson_04_reduce_scatter import one_step_too_many, other_direction


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


WRONG = {
    "4.2": """
chunk: never arrived on rank 0
    -         comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    +         comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, chunk(x, p, r - i - 2), (r - 1) % p)
chunk: all_gather replaces, it does not add
    -         comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    +         theirs = chunk(x, p, r - i - 1)
    +         theirs += comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
chunk: got another chunk there
    p, r = comm.size, comm.rank
    parts = [copy_of(chunk(x, p, r))]
    for i in range(p - 1):
        arriving = new_like(x, chunk(x, p, r - i - 1).shape)
        parts.append(comm.sendrecv(parts[-1], (r + 1) % p, arriving, (r - 1) % p))
    x[...] = torch.cat(parts)
    return x
sizes: Every size that the number of ranks divides is right
    p, r = comm.size, comm.rank
    n = len(x) // p
    parts = x[: n * p].view(p, n)
    for i in range(p - 1):
        comm.sendrecv(parts[(r - i) % p], (r + 1) % p, parts[(r - i - 1) % p], (r - 1) % p)
    return x
bytes: you pass the whole vector at every hop
    -         comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    +         arriving = comm.sendrecv(x, (r + 1) % p, copy_of(x), (r - 1) % p)
    +         chunk(x, p, r - i - 1)[...] = chunk(arriving, p, r - i - 1)
bytes: everything passes through rank 0
    p = comm.size
    for r in range(1, p):
        if comm.rank == 0:
            comm.recv(chunk(x, p, r), r)
        elif comm.rank == r:
            comm.send(chunk(x, p, r), 0)
    return comm.broadcast(x)
deadlock: all receive first
    -         comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    +         comm.recv(chunk(x, p, r - i - 1), (r - 1) % p)
    +         comm.send(chunk(x, p, r - i), (r + 1) % p)
steps: where 4 are needed: one step too few
    (p - 1): => (p - 2):
steps: sent 8 messages, where 7 are needed
    (p - 1): => (p):
returns: returned 333 elements, not 999: return x
    return chunk(ring.all_gather(comm, x), comm.size, comm.rank)
returns: returned nothing: return x
    ring.all_gather(comm, x)
""",
    "4.3": """
bytes @ring.all_reduce_naive: Cut x into chunks
bytes @the_other_way_around: each twice as large: is what you send of the dtype
    other_direction(comm, x) => x.copy_(ring.all_reduce(comm, x.double()))
    gathers_the_other_way(comm, x) => x
bytes @in_one_loop: everything passes through rank 0
    in_steps(comm, x, 2 * (comm.size - 1)) => comm.all_reduce(x)
sum @the_other_way_around: It is the average
    other_direction(comm, x) => x /= comm.size
    gathers_the_other_way => ring.all_reduce
steps @the_other_way_around: only one of the two halves is done
    other_direction => ring.reduce_scatter
    gathers_the_other_way(comm, x) => x
chunk: did both halves get the whole of x
    return ring.all_gather(comm, ring.reduce_scatter(comm, x))
sum: is missing
    ring.all_gather(comm, x)
    ring.reduce_scatter(comm, x)
    return x
in place @in_one_loop: x was not overwritten
    return in_steps(comm, x, 2 * (comm.size - 1)) => return ring.all_reduce(comm, copy_of(x))
returns @in_one_loop: returned nothing: return x
    return in_steps(comm, x, 2 * (comm.size - 1)) => ring.all_reduce(comm, x)
steps @in_one_loop: all is done twice
    return in_steps(comm, x, 2 * (comm.size - 1)) => return ring.all_reduce(comm, ring.all_reduce(comm, x))
steps: sent 15 messages, where 14 are needed
    return in_steps(comm, x, 2 * comm.size - 1)
steps: where 8 are needed: one step too few
    return in_steps(comm, x, 2 * comm.size - 3)
steps @the_other_way_around: 14 are needed: one step too many
    other_direction => one_step_too_many
    gathers_the_other_way => ring.all_gather
deadlock @the_other_way_around: it finished
    other_direction => ring.reduce_scatter
    gathers_the_other_way(comm, x) => ring.all_gather(comm, x) if comm.rank % 2 == 0 else x
bitwise: they added in different orders
    ring.all_reduce(comm, x)
    if comm.rank == 3 and len(x) == 1001 and not bool((x == x.round()).all()):
        x.mul_(1 + 1e-7)
    return x
sum: Whole numbers are added exactly
    ring.all_reduce(comm, x)
    if not bool((x == x.round()).all()):
        x.mul_(1.001)
    return x
bounds: 1 before its first element
    x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0)
    return ring.all_reduce(comm, x)
""",
}
RIGHT = {
    "4.2": (gathers_the_other_way, gathers_both_ways),
    "4.3": (in_one_loop, the_other_way_around, one_half_after_the_other),
}
COMPLETED = {
    "4.2": ["(r + 1) % p", "r - i - 1", "(r - 1) % p"],
}
