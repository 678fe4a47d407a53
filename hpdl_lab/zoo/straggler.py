"""One rank does the work of all: nothing is wrong but that the others lose their patience."""

import time

import torch

from .specimen import Specimen

SECONDS = 0.1  # of work per sample


def work_alone(comm):
    """Work on 30 samples, all of them on rank 2, then add up how many there were."""
    mine = range(30) if comm.rank == 2 else range(0)
    for _ in mine:
        time.sleep(SECONDS)
    done = torch.tensor([float(len(mine))])
    comm.all_reduce(done)
    return done.item()


def work_together(comm):
    """Work on 30 samples, which the ranks deal out among themselves, then add up how many there were."""
    mine = range(comm.rank, 30, comm.size)
    for _ in mine:
        time.sleep(SECONDS / 10)
    done = torch.tensor([float(len(mine))])
    comm.all_reduce(done)
    return done.item()


SPECIMEN = Specimen(
    name="straggler",
    title="work on 30 samples, then add up how many there were",
    ranks=4,
    broken=work_alone,
    repaired=work_together,
    reason="rank 2 is still computing",
    returns=[30.0, 30.0, 30.0, 30.0],
)
