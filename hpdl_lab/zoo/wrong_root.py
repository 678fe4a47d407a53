"""One rank takes itself for the root of a broadcast."""

import torch

from .specimen import Specimen


def share_seed_from_two(comm):
    """Give every rank the seed of rank 0, which is 7."""
    seed = torch.tensor([7.0 if comm.rank == 0 else 0.0])
    comm.broadcast(seed, root=1 if comm.rank == 1 else 0)
    return seed.item()


def share_seed(comm):
    """Give every rank the seed of rank 0, which is 7: all name the same root."""
    seed = torch.tensor([7.0 if comm.rank == 0 else 0.0])
    comm.broadcast(seed, root=0)
    return seed.item()


SPECIMEN = Specimen(
    name="wrong_root",
    title="every rank gets the seed of rank 0",
    ranks=4,
    broken=share_seed_from_two,
    repaired=share_seed,
    reason="rank 1 calls broadcast with root 1, ranks 0, 2, 3 with root 0",
    returns=[7.0, 7.0, 7.0, 7.0],
)
