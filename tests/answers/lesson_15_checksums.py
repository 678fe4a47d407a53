"""Answers to exercise 15.5 that the check must reject or accept; CI proves both."""

import numpy as np
import torch

from hpdl_lab.collectives.chunks import bounds, chunk
from hpdl_lab.resilience.checksums import checksums, differ


def in_blocks(comm, x):
    """Chunk and checksums are one tensor from the start, and one addition adds both."""
    p, r = comm.size, comm.rank
    blocks = [torch.cat([c, checksums(c)]) for c in (chunk(x, p, i) for i in range(p))]
    found = []
    for hop in range(2 * (p - 1)):
        block = blocks[(r - hop - 2) % p]
        arrived = comm.sendrecv(blocks[(r - hop - 1) % p], (r + 1) % p, torch.empty_like(block), (r - 1) % p)
        old = block.clone() if hop < p - 1 else torch.zeros_like(block)
        block.copy_(old + arrived)
        c = block[:-2]
        tolerance = 2 * x.numel() * 2.0**-52 * checksums(arrived[:-2].abs() + old[:-2].abs())
        now = checksums(c)
        if differ(block[-2:], now, tolerance):
            found += [(r - 1 if r else p - 1, hop)]
        block[-2:] = now
    x.copy_(torch.cat([block[:-2] for block in blocks]))
    return found


def in_two_loops(comm, x):
    """Reduce-scatter and all-gather one after the other, with isend and irecv; the checksums come first."""
    p, r = comm.size, comm.rank
    sums, found = {i: checksums(chunk(x, p, i)) for i in range(p)}, []

    def exchange(out, into):
        message = x.new_empty(2 + len(chunk(x, p, into)))
        work = comm.irecv(message, (r - 1) % p)
        comm.isend(torch.cat([sums[out % p], chunk(x, p, out)]), (r + 1) % p).wait()
        work.wait()
        return message[2:], message[:2]

    def compare(i, expected, parts, hop):
        sums[i % p] = checksums(chunk(x, p, i))
        tolerance = len(parts[0]) * 2.0**-52 * sum(checksums(part.abs()) for part in parts)
        if differ(sums[i % p], expected, tolerance):
            found.append(((r - 1) % p, hop))

    for i in range(p - 1):
        own = chunk(x, p, r - i - 2)
        arrived, expected = exchange(r - i - 1, r - i - 2)
        parts = own.clone(), arrived
        own += arrived
        compare(r - i - 2, expected + sums[(r - i - 2) % p], parts, i)
    for i in range(p - 1):
        arrived, expected = exchange(r - i, r - i - 1)
        chunk(x, p, r - i - 1).copy_(arrived)
        compare(r - i - 1, expected, [arrived], p - 1 + i)
    return found


def in_numpy(comm, x):
    """Arrays that share the memory of x, and one length for all messages."""
    p, r, n = comm.size, comm.rank, len(x)
    v, w, found = x.cpu().numpy(), np.arange(1, n + 1), []
    cut = [slice(*bounds(n, p, i)) for i in range(p)]
    longest, eps = -(-n // p), np.finfo(float).eps

    def both(c):
        return np.array([c.sum(), c @ w[: len(c)]])

    own = [both(v[c]) for c in cut]
    with np.errstate(all="ignore"):
        for hop in range(2 * p - 2):
            mine, i = (r - hop - 1) % p, (r - hop - 2) % p
            message, arrived = np.zeros(longest + 2), np.empty(longest + 2)
            c = v[cut[i]]
            message[: len(v[cut[mine]])], message[longest:] = v[cut[mine]], own[mine]
            comm.sendrecv(torch.from_numpy(message), (r + 1) % p, torch.from_numpy(arrived), (r - 1) % p)
            add = hop < p - 1
            within = eps * len(c) * both(abs(arrived[: len(c)]) + add * abs(c))
            expected = arrived[longest:] + (own[i] if add else 0)
            c[:] = arrived[: len(c)] + c if add else arrived[: len(c)]
            own[i] = both(c)
            fine = (abs(own[i] - expected) <= within) & np.isfinite(own[i])
            if not (fine | (~np.isfinite(own[i]) & ~np.isfinite(expected))).all():
                found.append(((r - 1) % p, hop))
    return found


WRONG = {
    "15.5": """
places: Which checksum depends on the places
    differ(expected, sums[theirs], => differ(expected[:1], sums[theirs][:1],
scale: Does your tolerance grow as well
    len(held) * torch.finfo(x.dtype).eps * scale => torch.tensor([1e-6, 1e-6])
scale: Your tolerance is larger than these numbers
    len(held) * torch.finfo(x.dtype).eps * scale => torch.tensor([1.0, 1.0])
cancelation: and its rounding is not
    torch.finfo(x.dtype).eps * scale => torch.finfo(x.dtype).eps * expected.abs()
cancelation: that were added at this hop
    torch.finfo(x.dtype).eps * scale => torch.finfo(x.dtype).eps * checksums(held.abs())
carried: Which checksums does a rank send on
    -         sums[theirs] = checksums(held)
    -         if differ(expected, sums[theirs],
    +         sums[theirs] = expected
    +         if differ(expected, checksums(held),
missed: and which rank computes that
    elements, expected = (arrived[:-2], arrived[-2:]) => elements, expected = (arrived[:-2], checksums(arrived[:-2]))
hops: You note faults in reduce-scatter only
    if differ( => if hop < p - 1 and differ(
hops: You note faults in all-gather only
    if differ( => if hop >= p - 1 and differ(
hops: Do you check what arrives there
    if differ( => if hop < 2 * p - 3 and differ(
source: Which rank sent it
    found.append(((r - 1) % p, hop)) => found.append((r, hop))
source: From which rank do you receive
    found.append(((r - 1) % p, hop)) => found.append(((r + 1) % p, hop))
hop: Hops are counted from 0
    found.append(((r - 1) % p, hop)) => found.append(((r - 1) % p, hop + 1))
hop: All-gather goes on counting
    found.append(((r - 1) % p, hop)) => found.append(((r - 1) % p, hop % (p - 1)))
returns: the wrong order
    found.append(((r - 1) % p, hop)) => found.append((hop, (r - 1) % p))
order: Which pair should be first
    found.append(((r - 1) % p, hop)) => found.insert(0, ((r - 1) % p, hop))
second: Does the rank go on as before
    return found => return found[:1]
once: Which checksums does a rank send on
    -         sums[theirs] = checksums(held)
    -         if differ(expected, sums[theirs],
    +         sums[theirs], before = checksums(held), expected
    +         if differ(expected, sums[theirs],
    -             found.append(((r - 1) % p, hop))
    +             found.append(((r - 1) % p, hop))
    +             sums[theirs] = before
rounding: By how much may two checksums differ
    len(held) * torch.finfo(x.dtype).eps * scale => 0 * scale
zeros: Is a difference of 0 a fault
    -         if differ(expected, sums[theirs], len(held) * torch.finfo(x.dtype).eps * scale):
    +         gap = (expected - sums[theirs]).abs()
    +         if not (gap < len(held) * torch.finfo(x.dtype).eps * scale).all():
finite: What does a comparison with such numbers give
    -         if differ(expected, sums[theirs], len(held) * torch.finfo(x.dtype).eps * scale):
    +         gap = (expected - sums[theirs]).abs()
    +         if (gap > len(held) * torch.finfo(x.dtype).eps * scale).any():
tolerance: How large is rounding in float64
    torch.finfo(x.dtype) => torch.finfo(torch.float32)
dtype: computed or sent as float32
    sums[theirs] = checksums(held) => sums[theirs] = checksums(held).float().double()
checksums: Which checksums are right after elements are added
    expected += sums[theirs] => pass
checksums: and which after a copy
    -     sums, found = ([checksums(chunk(x, p, i)) for i in range(p)], [])
    +     sums, found = ([checksums(chunk(x, p, i)) for i in range(p)], [])
    +     start = list(sums)
    -         message = torch.cat([chunk(x, p, mine), sums[mine]])
    +         message = torch.cat([chunk(x, p, mine), start[mine]])
memory: And when is it made
    expected += sums[theirs] => expected += checksums(held)
addition: Do you compare before or after it
    -         scale = checksums(elements.abs())
    +         scale = checksums(elements.abs())
    +         if differ(expected, checksums(elements), len(held) * torch.finfo(x.dtype).eps * scale):
    +             found.append(((r - 1) % p, hop))
    +             expected = checksums(elements)
    -         sums[theirs] = checksums(held)
    -         if differ(expected, sums[theirs], len(held) * torch.finfo(x.dtype).eps * scale):
    -             found.append(((r - 1) % p, hop))
    +         sums[theirs] = checksums(held)
    +         if differ(expected, sums[theirs], len(held) * torch.finfo(x.dtype).eps * scale):
    +             sums[theirs] = expected
messages: without a message of its own
    -         message = torch.cat([chunk(x, p, mine), sums[mine]])
    -         arrived = comm.sendrecv(message, (r + 1) % p, x.new_empty(len(held) + 2), (r - 1) % p)
    +         arrived = x.new_empty(len(held) + 2)
    +         comm.sendrecv(chunk(x, p, mine), (r + 1) % p, arrived[:-2], (r - 1) % p)
    +         comm.sendrecv(sums[mine], (r + 1) % p, arrived[-2:], (r - 1) % p)
messages: a rank of the ring have to wait for
    held.copy_(elements) => comm.barrier(), held.copy_(elements)
bytes: How many are needed
    -         message = torch.cat([chunk(x, p, mine), sums[mine]])
    -         arrived = comm.sendrecv(message, (r + 1) % p, x.new_empty(len(held) + 2), (r - 1) % p)
    +         message = torch.cat([chunk(x, p, mine), chunk(x, p, mine), sums[mine]])
    +         arrived = comm.sendrecv(message, (r + 1) % p, x.new_empty(2 * len(held) + 2), (r - 1) % p)[len(held):]
bytes: What does the receiver compare its elements with
    from hpdl_lab.collectives import ring
    ring.all_reduce(comm, x)
    return []
hop: At which hop did the fault happen
    -         if differ(expected, sums[theirs], len(held) * torch.finfo(x.dtype).eps * scale):
    -             found.append(((r - 1) % p, hop))
    +         if differ(expected, sums[theirs], len(held) * torch.finfo(x.dtype).eps * scale):
    +             found = [((r - 1) % p, 2 * p - 3)]
in place: overwrite it with the sum
    p, r = (comm.size, comm.rank) => p, r, x = (comm.size, comm.rank, x.clone())
sum: added in reduce-scatter, and copied in all-gather
    if hop < p - 1: => if True:
bits: in which dtype
    held.copy_(elements) => held.copy_(elements.float())
returns: list of (source rank, hop)
    return found => return None
raises: ArithmeticError
    found.append(((r - 1) % p, hop)) => raise ArithmeticError(f'rank {(r - 1) % p}, hop {hop}')
""",
}
RIGHT = {"15.5": (in_blocks, in_two_loops, in_numpy)}
COMPLETED = {
    "15.5": [
        *("x.new_empty(len(held) + 2)", "checksums(held.abs())", "sums[theirs]"),
        *("len(held) * torch.finfo(x.dtype).eps * scale", "((r - 1) % p, hop)"),
    ],
}
