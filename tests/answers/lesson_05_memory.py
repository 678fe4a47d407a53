"""Answers to exercises 5.1 and 5.2 that the checks must reject or accept; CI proves both."""

import torch

from hpdl_lab.collectives.chunks import bounds, chunk


def as_a_table(algorithm, p, n):
    hop = n / p
    copies = {"one pass": (0, 0), "staged": (2 * p, 2 * p), "ring, one copy": (2 * p - 2, 2 * p - 2)}
    copies["ring, two copies"] = (4 * p - 4, 4 * p - 4)
    sums = {"one pass": (p, p), "staged": (p, 1)}
    return [hop * (a + b) for a, b in zip(copies[algorithm], sums.get(algorithm, (2 * p - 2, p - 1)), strict=True)]


def with_a_loop(comm, x):
    first, last = bounds(len(x), comm.size, comm.rank)
    views = [view[first:last] for view in comm.views(x)]
    comm.barrier()
    total = views[0].clone()
    for view in views[1:]:
        total += view
    for view in views:
        view.copy_(total)
    comm.barrier()
    return x


def in_blocks(comm, x):
    """The sum of a block stays in the cache; slices are rounded up to whole blocks."""
    views, block = comm.views(x), 16
    each = -(-len(x) // (comm.size * block)) * block
    comm.barrier()
    for at in range(each * comm.rank, min(len(x), each * (comm.rank + 1)), block):
        place = slice(at, min(at + block, each * (comm.rank + 1)))
        total = torch.zeros(len(x[place]), dtype=x.dtype)
        for view in views:
            total += view[place]
        for view in views:
            view[place] = total
    comm.barrier()
    return x


def everybody_adds_everything(comm, x):
    views = comm.views(x)
    comm.barrier()
    total = sum(views)
    comm.barrier()
    x[:] = total
    return x


WRONG = {
    "5.1": """
slice: A rank adds one slice of every tensor
    return (n, n) => return (p * n, n)
stores: The sum of a slice goes to every rank's tensor
    return (n, n) => return (n, n / p)
slice: how many slices are these
    return (n, n) => return (n / p, n)
ranks: That is what all 2 ranks move
    return (n, n) => return (p * n, p * n)
copies: One of the two copies is missing
    return (n + n + n, n + n / p + n) => return (n + n, n + n / p)
copies: The copies are missing
    return (n + n + n, n + n / p + n) => return (n, n / p)
stores: Where does the sum of a slice go
    n + n / p + n => n + n
stores: A rank stores one slice of the result
    n + n / p + n => n + n + n
slice: A rank adds one slice of every copy
    return (n + n + n, => return (n + p * n + n,
additions: The additions are missing
    return (n + n + n, n + n / p + n) => return (n + n, n + n)
order: First what is read
    return (n + n + n, n + n / p + n) => return (n + n / p + n, n + n + n)
additions: x += y reads x as well as y
    2 * added => added
additions: The messages are counted, the additions are not
    2 * added, copies * passed + added => 0, copies * passed
copies: The additions are counted, but no message
    copies * passed + 2 * added, copies * passed + added => 2 * added, added
copies: Half of the messages
    passed = 2 * => passed =
copies: A message is copied twice
    2 if algorithm == 'ring, two copies' else 1 => 1
copies: That is twice as many copies
    2 if algorithm == 'ring, two copies' else 1 => 2
bytes: the lab counted
    added = (p - 1) * n / p => added = n
returns: return two numbers
    return ("n", "n")
returns: (bytes read, bytes written)
    return 2 * n
""",
    "5.2": """
barrier: What has to come before the first read
    -     comm.barrier()
    -     total
    +     total
barrier: What has to come before the return
    -     comm.barrier()
    -     return x
    +     return x
barrier @everybody_adds_everything: between the same two barriers
    -     total = sum(views)
    -     comm.barrier()
    +     total = sum(views)
traffic @everybody_adds_everything: Every rank adds everything
traffic @with_a_loop: A sum that grows in a tensor
    views[0].clone() => views[0]
order: if rank 0 comes first
    for view in views)) => for view in sorted(views, key=lambda view: view is not views[comm.rank])))
slices: every rank adds a slice
    views = comm.views(x)
    comm.barrier()
    if comm.rank == 0:
        total = sum(views)
        for view in views:
            view[:] = total
    comm.barrier()
    return x
sizes: No rank adds
    views, each = comm.views(x), len(x) // comm.size
    comm.barrier()
    total = sum(view[each * comm.rank : each * (comm.rank + 1)] for view in views)
    for view in views:
        view[each * comm.rank : each * (comm.rank + 1)] = total
    comm.barrier()
    return x
stores: does rank 1 store to every rank
    -     for view in views:
    +     for view in [x]:
sum: That is the mean
    = total => = total / comm.size
messages: the ranks send each other
    return comm.all_reduce(x)
deadlock: there is a deadlock
    -     comm.barrier()
    -     return x
    +     if comm.rank == 0:
    +         comm.barrier()
    +     return x
returns: returned nothing
    -     comm.barrier()
    -     return x
    +     comm.barrier()
in place: What it returns is something else
    views = comm.views(x)
    comm.barrier()
    total = sum(views)
    comm.barrier()
    return total
traffic: The check counts only what torch reads and writes
    views = [view.numpy() for view in comm.views(x)]
    comm.barrier()
    total = sum(chunk(view, comm.size, comm.rank) for view in views)
    for view in views:
        chunk(view, comm.size, comm.rank)[:] = total
    comm.barrier()
    return x
bounds: a rank wrote outside x
    one_pass(comm, x)
    store = torch.as_strided(x, (len(x) + 1,), (1,))
    store[-1] = 0
    return x
""",
}
RIGHT = {
    "5.1": (as_a_table,),
    "5.2": (with_a_loop, in_blocks),
}
COMPLETED = {
    "5.1": ["n / p"],
    "5.2": ["chunk(view, comm.size, comm.rank)[:] = total"],
}
