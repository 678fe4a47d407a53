"""One rank raises an exception before the collective in which the others wait for it."""

import torch

from .specimen import Specimen


def sum_of_means_of_some(comm):
    """Add up the means of all batches; that of rank 2 is empty."""
    batch = torch.full((0 if comm.rank == 2 else 5,), float(comm.rank))
    if len(batch) == 0:
        raise ValueError("the batch is empty")
    mean = batch.mean().reshape(1)
    comm.all_reduce(mean)
    return mean.item()


def sum_of_means(comm):
    """Add up the means of all batches; an empty one counts as 0, and its rank takes part."""
    batch = torch.full((0 if comm.rank == 2 else 5,), float(comm.rank))
    mean = batch.mean().reshape(1) if len(batch) > 0 else torch.zeros(1)
    comm.all_reduce(mean)
    return mean.item()


SPECIMEN = Specimen(
    name="a_rank_raises",
    title="the sum over ranks of the mean of their batches",
    ranks=4,
    broken=sum_of_means_of_some,
    repaired=sum_of_means,
    reason="rank 2 raised ValueError at ",
    returns=[4.0, 4.0, 4.0, 4.0],
)
