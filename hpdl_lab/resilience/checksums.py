"""Checksums that are added with the data, faults on purpose, and a sum whose bits do not depend on the number of ranks.

A flipped bit that no hardware reports is silent data corruption: Dixit et al. 2021, arXiv:2102.11245.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import torch

from ..collectives import ring
from ..collectives.chunks import bounds, chunk
from ..comm.base import Comm, Work

if TYPE_CHECKING:
    from torch import Tensor

ResultT = TypeVar("ResultT")


class _Summand(Protocol):
    """A tensor, or a number."""

    def __add__(self, other: Self, /) -> Self: ...


NumberT = TypeVar("NumberT", bound=_Summand)
Node = tuple[int, int]  # (level, index): the sum of examples index * 2**level to (index + 1) * 2**level - 1


def checksums(c: Tensor) -> Tensor:
    """Return (2,): the sum of the elements of c, (n,), and their sum weighted by position: 1 * c[0] + 2 * c[1] + ..."""
    weights = torch.arange(1, len(c) + 1, dtype=c.dtype, device=c.device)
    return torch.stack([c.sum(), (weights * c).sum()])


def differ(a: Tensor, b: Tensor, tolerance: Tensor) -> bool:
    """Return True if a and b, (k,), differ anywhere by more than tolerance, (k,), or only one of them is finite."""
    return bool((((a - b).abs() > tolerance) | (a.isfinite() != b.isfinite())).any())


def checked_all_reduce(comm: Comm, x: Tensor) -> list[tuple[int, int]]:
    """Add every rank's `x` around the ring, and note at which hops data went wrong.

        message     [elements of the chunk | sum | weighted sum]     chunk + 2 numbers
        hop 0 to p-2, reduce-scatter       the message is added: elements and checksums
        hop p-1 to 2p-3, all-gather        the message is copied: elements and checksums

    The checksum of a sum is the sum of the checksums. So a rank needs no correct copy
    to compare with. At the start, it computes the checksums of its own chunks. At each
    hop, elements and checksums arrive. The rank adds (or copies) the elements. It also
    adds (or copies) the checksums, which gives the expected checksums. Then the rank
    computes the checksums of the new elements, and compares both pairs of checksums.

    Rounding alone makes two sums of a chunk of n elements differ by up to
    n * eps * sum|a|. Two weighted sums differ by up to n * eps * sum(weight * |a|).
    Here a runs over all elements of the message. In the reduce-scatter, a also runs
    over the elements of the rank's own chunk. eps is 2**-52, the distance from 1 to the
    next larger float64. Numbers of both signs cancel, so the sum of a may be much
    smaller than the sum of |a|.

    After each comparison, keep the checksums of the new elements, also if they differ
    from the expected ones. So later ranks do not note the same fault, and rounding does
    not grow from hop to hop.

    Args:    x: (N,) float64 tensor, finite, different per rank; the sum overwrites it.
    Returns: [(source rank of the message, hop)] that this rank noted, earliest first.
             The fault was in the message, or on this rank (in its memory or addition).
    Raises:  CommTimeout if a neighbor does not answer.
    Steps: 2(p - 1).   Bytes per rank: 2(p - 1)/p * N * 8, and 16 for each message.
    Ref: Huang & Abraham 1984, doi:10.1109/TC.1984.1676475.
    """
    p, r = comm.size, comm.rank
    sums, found = [checksums(chunk(x, p, i)) for i in range(p)], []
    for hop in range(2 * (p - 1)):
        mine, theirs = (r - hop - 1) % p, (r - hop - 2) % p
        held = chunk(x, p, theirs)
        message = torch.cat([chunk(x, p, mine), sums[mine]])
        arrived = comm.sendrecv(message, (r + 1) % p, x.new_empty(len(held) + 2), (r - 1) % p)
        elements, expected = arrived[:-2], arrived[-2:]
        scale = checksums(elements.abs())
        if hop < p - 1:
            scale += checksums(held.abs())
            elements += held
            expected += sums[theirs]
        held.copy_(elements)
        sums[theirs] = checksums(held)
        if differ(expected, sums[theirs], len(held) * torch.finfo(x.dtype).eps * scale):
            found.append(((r - 1) % p, hop))
    return found


class Flips:
    """A communicator with messages that go wrong on the way: a copy of the data is changed, and sent.

    faults: {(rank, hop): change}: change(message) is called for the message number `hop`, from 0, of this rank.
    memory: a tensor: change(memory) is called instead, while the rank sends, and the message is left alone.
    """

    def __init__(
        self, comm: Comm, faults: Mapping[tuple[int, int], Callable[[Tensor], object]], memory: Tensor | None = None
    ) -> None:
        self.comm, self.faults, self.memory, self.hops = comm, faults, memory, count()

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def isend(self, x: Tensor, dst: int) -> Work:
        return self.comm.isend(self.changed(x), dst)

    def send(self, x: Tensor, dst: int) -> None:
        self.comm.send(self.changed(x), dst)

    def sendrecv(self, x: Tensor, dst: int, y: Tensor, src: int) -> Tensor:
        return self.comm.sendrecv(self.changed(x), dst, y, src)

    def changed(self, x: Tensor) -> Tensor:
        """Return the message that leaves this rank in place of x."""
        if change := self.faults.get((self.comm.rank, next(self.hops))):
            x = x.clone() if self.memory is None else x
            change(x if self.memory is None else self.memory)
        return x


def flip(x: Tensor, i: int, bit: int) -> None:
    """Flip one bit of x[i]: 0 is the lowest of the mantissa; of float64, 52 to 62 are the exponent and 63 the sign."""
    x.view(torch.uint8)[i * x.element_size() + bit // 8] ^= 1 << bit % 8


def swap(x: Tensor, i: int, j: int) -> None:
    """Exchange x[i] and x[j]."""
    x[[i, j]] = x[[j, i]]


def with_flips(
    comm: Comm,
    x: Tensor,
    all_reduce: Callable[..., ResultT],
    faults: Mapping[tuple[int, int], Callable[[Tensor], object]],
) -> tuple[ResultT, Tensor]:
    """Run all_reduce(comm, x) on Flips of `comm`, and return its result, and x."""
    return all_reduce(Flips(comm, faults), x), x


def ring_of_shares(comm: Comm, examples: Tensor) -> Tensor:
    """Add the rows of `examples`: each rank adds its share, and a ring adds the sums of ranks. Returns (d,)."""
    return ring.all_reduce(comm, chunk(examples, comm.size, comm.rank).sum(0))


def _tree_sum(nodes: Mapping[Node, NumberT]) -> dict[Node, NumberT]:
    """Add neighbors in a binary tree, as far as both are there, and return the nodes that are left.

        level 2            0           (1, 0) is examples 0 and 1, (2, 0) is 0 to 3
        level 1      0           1     examples 1, 2, 3 leave (0, 1) and (1, 1)
        level 0   0     1     2     3

    The pairs that are added depend on the indices only, and not on the examples of each rank.
    Args: nodes: {(level, index): tensor}; an example is {(0, index): tensor}.
    """
    left, level = dict(nodes), 0
    while any(at >= level for at, _ in left):
        for i in sorted(i for at, i in left if at == level and i % 2 == 0 and (level, i + 1) in left):
            left[level + 1, i // 2] = left.pop((level, i)) + left.pop((level, i + 1))
        level += 1
    return left


def tree_all_reduce(comm: Comm, examples: Tensor) -> Tensor:
    """Add the rows of `examples` in the tree of tree_sum; each rank adds its share, and all ranks add the rest.

    Args:    examples: (n, d), n a power of 2; rank r reads the rows bounds(n, p, r), and no others.
    Returns: (d,), bitwise the same for each number of ranks.
    Bytes per rank: more than a ring; a rank has up to 2 * log2(n) nodes, and sends each to all others.
    """
    shares = [range(*bounds(len(examples), comm.size, r)) for r in range(comm.size)]
    nodes = _tree_sum({(0, i): examples[i].clone() for i in shares[comm.rank]})
    for r, share in enumerate(shares):
        for key in _tree_sum({(0, i): 0 for i in share}):
            nodes[key] = comm.broadcast(nodes.get(key, torch.empty_like(examples[0])), r)
    return _tree_sum(nodes)[len(examples).bit_length() - 1, 0]
