"""Answers to reduce_scatter of notebook 04 that a check must reject or accept; CI proves both.

Each wrong one is a mistake that people make.
"""

import numpy as np
import torch

from hpdl_lab.collectives import ring
from hpdl_lab.collectives.chunks import chunk
from hpdl_lab.comm.buffers import copy_of, new_like


def one_step_too_many(comm, x):
    p, r = comm.size, comm.rank
    for i in range(p):
        theirs = chunk(x, p, r - i - 2)
        theirs += comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    return chunk(x, p, r)


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


WRONG = {
    "4.1": """
chunk @other_direction: you are off by one chunk
    -         theirs = chunk(x, p, r + i + 2)
    -         theirs += comm.sendrecv(chunk(x, p, r + i + 1), (r - 1) % p, new_like(x, theirs.shape), (r + 1) % p)
    +         theirs = chunk(x, p, r - i - 1)
    +         theirs += comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
sum: It is the average: the sum divided by 3
    mine = ring.reduce_scatter(comm, x)
    mine /= comm.size
    return mine
sizes: Every size that the number of ranks divides is right
    p, r = comm.size, comm.rank
    n = len(x) // p
    for i in range(p - 1):
        mine, theirs = (r - i - 1) % p, (r - i - 2) % p
        arriving = torch.empty_like(x[:n])
        comm.sendrecv(x[mine * n : (mine + 1) * n], (r + 1) % p, arriving, (r - 1) % p)
        x[theirs * n : (theirs + 1) * n] += arriving
    return x[r * n : (r + 1) * n]
bytes: you pass the whole vector at every hop
    return chunk(ring.all_reduce_naive(comm, x), comm.size, comm.rank)
sum: the data of rank 0, not the sum over ranks
    return chunk(comm.broadcast(x), comm.size, comm.rank)
deadlock @non_blocking: all send first
    -         works = [comm.isend(chunk(x, p, r - i - 1), (r + 1) % p), comm.irecv(arriving, (r - 1) % p)]
    -         for work in works:
    -             work.wait()
    +         comm.send(chunk(x, p, r - i - 1), (r + 1) % p)
    +         comm.recv(arriving, (r - 1) % p)
    -     return chunk(x, p, r).clone()
    +     return chunk(x, p, r)
steps: where 4 are needed: one step too few
    p, r = comm.size, comm.rank
    for i in range(p - 2):
        theirs = chunk(x, p, r - i - 2)
        theirs += comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    return chunk(x, p, r)
steps: sent 8 messages, where 7 are needed
    p, r = comm.size, comm.rank
    for i in range(p):
        theirs = chunk(x, p, r - i - 2)
        theirs += comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    return chunk(x, p, r)
steps: 7 are needed: one step too many
    return chunk(x, 1, 0) if comm.size == 1 else one_step_too_many(comm, x)
one rank: 1 rank, which has no neighbor
    mine = ring.reduce_scatter(comm, x)
    if comm.size < 2:
        comm.recv(mine, comm.rank + 1)
    return mine
returns: returned nothing: return chunk 0 of x
    ring.reduce_scatter(comm, x)
returns: returned 999 elements, not 333: return chunk 0 of x
    ring.reduce_scatter(comm, x)
    return x
raises: raised IndexError: list index out of range
    chunks = [chunk(x, comm.size, c) for c in range(comm.size)]
    return chunks[comm.rank + 1]
timeout: Is there a loop that never ends?
    p, r = comm.size, comm.rank
    i = 0
    while i < p - 1:
        comm.sendrecv(chunk(x, p, 0), (r + 1) % p, new_like(x, chunk(x, p, 0).shape), (r - 1) % p)
    return chunk(x, p, r)
bounds: wrote outside x, at x[1001]
    p, r = comm.size, comm.rank
    n = -(-len(x) // p)
    def padded(c):
        return x.as_strided((n,), (1,), x.storage_offset() + c % p * n)
    for i in range(p - 1):
        theirs = padded(r - i - 2)
        theirs += comm.sendrecv(padded(r - i - 1).clone(), (r + 1) % p, torch.empty_like(theirs), (r - 1) % p)
    return chunk(x, p, r)
steps @other_direction: the ranks wait for each other in a row
    -         theirs = chunk(x, p, r + i + 2)
    -         theirs += comm.sendrecv(chunk(x, p, r + i + 1), (r - 1) % p, new_like(x, theirs.shape), (r + 1) % p)
    +         mine, theirs = (chunk(x, p, r - i - 1), chunk(x, p, r - i - 2))
    +         arriving = torch.empty_like(theirs)
    +         if r == 0:
    +             comm.send(mine, (r + 1) % p)
    +             comm.recv(arriving, (r - 1) % p)
    +         elif p > 1:
    +             comm.recv(arriving, (r - 1) % p)
    +             comm.send(mine, (r + 1) % p)
    +         theirs += arriving
steps @other_direction: a rank waits in 7 barriers
    -         theirs = chunk(x, p, r + i + 2)
    -         theirs += comm.sendrecv(chunk(x, p, r + i + 1), (r - 1) % p, new_like(x, theirs.shape), (r + 1) % p)
    +         theirs = chunk(x, p, r - i - 2)
    +         theirs += comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, new_like(x, theirs.shape), (r - 1) % p)
    +         comm.barrier()
wait: did not wait for 7 of its sends to rank 1
    p, r = comm.size, comm.rank
    passing = copy_of(x)
    for _ in range(p - 1):
        comm.isend(passing, (r + 1) % p)
        passing = comm.recv(new_like(x, x.shape), (r - 1) % p)
        x += passing
    return chunk(x, p, r)
dtype @other_direction: a buffer of your own must have the dtype of x
    -         theirs = chunk(x, p, r + i + 2)
    -         theirs += comm.sendrecv(chunk(x, p, r + i + 1), (r - 1) % p, new_like(x, theirs.shape), (r + 1) % p)
    +         theirs = chunk(x, p, r - i - 2)
    +         arriving = torch.empty(len(theirs))
    +         comm.sendrecv(chunk(x, p, r - i - 1), (r + 1) % p, arriving, (r - 1) % p)
    +         theirs += arriving
peers: it knows only its neighbors
    p, r = comm.size, comm.rank
    mine = chunk(x, p, r)
    for d in range(1, p):
        arriving = torch.empty_like(mine)
        comm.sendrecv(chunk(x, p, r + d), (r + d) % p, arriving, (r - d) % p)
        mine += arriving
    return mine
""",
}
RIGHT = {
    "4.1": (other_direction, numpy_style, non_blocking, skips_empty_chunks_and_prints),
}
COMPLETED = {
    "4.1": ["theirs += comm.sendrecv(mine, (r + 1) % p, arriving, (r - 1) % p)"],
}
