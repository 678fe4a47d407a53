"""Only one rank writes the log, and so only one rank calls the collective that the log needs."""

import torch

from .specimen import Specimen


def mean_loss_for_the_log(comm):
    """Write the mean loss into the log: rank r has the loss r + 1, and rank 0 alone prints."""
    loss = torch.tensor([comm.rank + 1.0])
    if comm.rank == 0:
        comm.all_reduce(loss)
        loss /= comm.size
        print(f"mean loss {loss.item():.2f}")
    return loss.item()


def mean_loss(comm):
    """Write the mean loss into the log: rank r has the loss r + 1, and rank 0 alone prints.

    Returns: the mean of the losses of all ranks, on every rank.
    """
    loss = torch.tensor([comm.rank + 1.0])
    comm.all_reduce(loss)
    loss /= comm.size
    if comm.rank == 0:
        print(f"mean loss {loss.item():.2f}")
    return loss.item()


SPECIMEN = Specimen(
    name="branch_around_collective",
    title="write the mean loss into the log, which rank 0 prints",
    ranks=4,
    broken=mean_loss_for_the_log,
    repaired=mean_loss,
    reason="ranks 1-3 never called all_reduce",
    returns=[2.5, 2.5, 2.5, 2.5],
)
