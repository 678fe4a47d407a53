"""On a ring everybody exchanges with its right neighbor first, who is busy with its own right neighbor."""

import torch

from .specimen import Specimen


def add_neighbors_all_alike(comm):
    """Exchange numbers with both neighbors on the ring: rank r has the number r."""
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    total = 0.0
    for step in (1, -1):
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor).item()
    return total


def add_neighbors(comm):
    """Exchange numbers with both neighbors on the ring: rank r has the number r.

    Returns: the number of the right neighbor plus that of the left one.
    """
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    total = 0.0
    for step in (1, -1) if comm.rank % 2 == 0 else (-1, 1):
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor).item()
    return total


SPECIMEN = Specimen(
    name="ring_even_odd",
    title="every rank adds up the numbers of its two neighbors on a ring",
    ranks=4,
    broken=add_neighbors_all_alike,
    repaired=add_neighbors,
    reason="ranks 0-3 all exchange with one who exchanges with another",
    returns=[4.0, 2.0, 4.0, 2.0],
)
