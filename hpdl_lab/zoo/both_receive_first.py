"""Two ranks receive before they send: each waits for what the other has not sent."""

import torch

from .specimen import Specimen


def swap_receiving_first(comm):
    """Swap a number with the other rank."""
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    other = 1 - comm.rank
    comm.recv(theirs, other)
    comm.send(mine, other)
    return theirs.item()


def swap(comm):
    """Swap a number with the other rank: sendrecv begins both before it waits for either."""
    mine, theirs = torch.tensor([float(comm.rank)]), torch.zeros(1)
    other = 1 - comm.rank
    comm.sendrecv(mine, other, theirs, other)
    return theirs.item()


SPECIMEN = Specimen(
    name="both_receive_first",
    title="two ranks swap a number",
    ranks=2,
    broken=swap_receiving_first,
    repaired=swap,
    reason="ranks 0 and 1 both receive first",
    returns=[1.0, 0.0],
)
