"""A receive is begun and never waited for: what is read may be what was in the tensor before."""

import torch

from .specimen import Specimen


def read_before_it_has_come(comm):
    """Rank 0 hands the number 42 to rank 1; both return it."""
    x = torch.zeros(1)
    if comm.rank == 0:
        x += 42
        comm.send(x, 1)
    else:
        comm.irecv(x, 0)
    return x.item()


def read_when_it_has_come(comm):
    """Rank 0 hands the number 42 to rank 1; both return it, rank 1 when it has waited."""
    x = torch.zeros(1)
    if comm.rank == 0:
        x += 42
        comm.send(x, 1)
    else:
        comm.irecv(x, 0).wait()
    return x.item()


SPECIMEN = Specimen(
    name="forgotten_wait",
    title="rank 0 hands a number to rank 1, which works meanwhile",
    ranks=2,
    broken=read_before_it_has_come,
    repaired=read_when_it_has_come,
    reason="rank 1 never waited for its receive from rank 0",
    returns=[42.0, 42.0],
)
