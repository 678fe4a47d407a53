"""Every rank goes through its own numbers, and one rank has fewer: it leaves the loop one step early."""

import torch

from .specimen import Specimen


def sum_of_own_steps(comm):
    """Add up the numbers 0 to 10, dealt out to the ranks like cards: in each step every rank adds one of its own."""
    total = 0.0
    for number in range(comm.rank, 11, comm.size):
        x = torch.tensor([float(number)])
        comm.all_reduce(x)
        total += x.item()
    return total


def sum_of_steps(comm):
    """Add up the numbers 0 to 10, dealt out to the ranks like cards: in each step every rank adds one of its own.

    With 4 ranks, rank 0 has 0, 4 and 8; rank 3 has 3 and 7.

    Returns: the sum of all eleven, 55, on every rank.
    """
    total = 0.0
    for first in range(0, 11, comm.size):
        number = first + comm.rank
        x = torch.tensor([float(number) if number < 11 else 0.0])
        comm.all_reduce(x)
        total += x.item()
    return total


SPECIMEN = Specimen(
    name="unequal_loops",
    title="add up the numbers 0 to 10, dealt out to the ranks like cards",
    ranks=4,
    broken=sum_of_own_steps,
    repaired=sum_of_steps,
    reason="rank 3 left the loop one step early",
    returns=[55.0, 55.0, 55.0, 55.0],
)
