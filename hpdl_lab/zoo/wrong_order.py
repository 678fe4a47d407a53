"""Two messages are received in another order than they are sent. Messages have no tags here: they have an order."""

import torch

from .specimen import Specimen


def hand_over_layer_backwards(comm):
    """Rank 0 hands 30 weights and 5 biases to rank 1, which returns the sum of all."""
    weights, bias = torch.zeros(30), torch.zeros(5)
    if comm.rank == 0:
        works = [comm.isend(weights + 1, 1), comm.isend(bias + 1, 1)]
    else:
        works = [comm.irecv(bias, 0), comm.irecv(weights, 0)]
    for work in works:
        work.wait()
    return (weights.sum() + bias.sum()).item()


def hand_over_layer(comm):
    """Rank 0 hands 30 weights and 5 biases to rank 1, which returns the sum of all, in the order of sending."""
    weights, bias = torch.zeros(30), torch.zeros(5)
    if comm.rank == 0:
        works = [comm.isend(weights + 1, 1), comm.isend(bias + 1, 1)]
    else:
        works = [comm.irecv(weights, 0), comm.irecv(bias, 0)]
    for work in works:
        work.wait()
    return (weights.sum() + bias.sum()).item()


SPECIMEN = Specimen(
    name="wrong_order",
    title="rank 0 hands a layer, weights and bias, to rank 1",
    ranks=2,
    broken=hand_over_layer_backwards,
    repaired=hand_over_layer,
    reason="are they received in the order in which they are sent?",
    returns=[0.0, 35.0],
)
