"""Two ranks send before they receive. MPI sends small messages away at once; a large one waits for its receive."""

import torch

from .specimen import Specimen


def swap_sending_first(comm):
    """Swap a million numbers with the other rank; returns the first."""
    mine, theirs = torch.full((1_000_000,), float(comm.rank)), torch.zeros(1_000_000)
    other = 1 - comm.rank
    comm.send(mine, other)
    comm.recv(theirs, other)
    return theirs[0].item()


def swap_large(comm):
    """Swap a million numbers with the other rank: one sends first, the other receives first."""
    mine, theirs = torch.full((1_000_000,), float(comm.rank)), torch.zeros(1_000_000)
    other = 1 - comm.rank
    if comm.rank == 0:
        comm.send(mine, other)
        comm.recv(theirs, other)
    else:
        comm.recv(theirs, other)
        comm.send(mine, other)
    return theirs[0].item()


SPECIMEN = Specimen(
    name="head_to_head_sends",
    title="two ranks swap four megabytes",
    ranks=2,
    broken=swap_sending_first,
    repaired=swap_large,
    reason="ranks 0 and 1 both send first",
    returns=[1.0, 0.0],
)
