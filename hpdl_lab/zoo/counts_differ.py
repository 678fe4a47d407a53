"""The receiver has made room for one element more than the sender sends."""

import torch

from .specimen import Specimen


def hand_over_with_bias(comm):
    """Rank 0 hands 1,000 weights to rank 1, which returns their sum."""
    if comm.rank == 0:
        comm.send(torch.ones(1000), 1)
        return 0.0
    weights = torch.zeros(1001)
    comm.recv(weights, 0)
    return weights.sum().item()


def hand_over(comm):
    """Rank 0 hands 1,000 weights to rank 1, which returns their sum: both ends count alike."""
    if comm.rank == 0:
        comm.send(torch.ones(1000), 1)
        return 0.0
    weights = torch.zeros(1000)
    comm.recv(weights, 0)
    return weights.sum().item()


SPECIMEN = Specimen(
    name="counts_differ",
    title="rank 0 hands its 1,000 weights to rank 1",
    ranks=2,
    broken=hand_over_with_bias,
    repaired=hand_over,
    reason="counts differ: rank 0 sends 1,000 elements, rank 1 expects 1,001",
    returns=[0.0, 1000.0],
)
