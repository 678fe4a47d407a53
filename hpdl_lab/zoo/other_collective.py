"""One rank skips a barrier, so that its next collective meets the barrier of the others."""

import torch

from .specimen import Specimen


def count_samples_apart(comm):
    """Meet, then add up 10 * rank samples; every rank returns the sum."""
    seen = torch.tensor([10.0 * comm.rank])
    if comm.rank != 2:
        comm.barrier()
    comm.all_reduce(seen)
    return seen.item()


def count_samples(comm):
    """Meet, then add up 10 * rank samples: all ranks call the same collectives in the same order."""
    seen = torch.tensor([10.0 * comm.rank])
    comm.barrier()
    comm.all_reduce(seen)
    return seen.item()


SPECIMEN = Specimen(
    name="other_collective",
    title="all ranks meet, then add up how many samples they have seen",
    ranks=4,
    broken=count_samples_apart,
    repaired=count_samples,
    reason="rank 2 calls all_reduce where ranks 0, 1, 3 call barrier",
    returns=[60.0, 60.0, 60.0, 60.0],
)
