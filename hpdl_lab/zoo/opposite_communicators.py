"""Two ranks are in the same two communicators, and use them in opposite order."""

import torch

from .specimen import Specimen


def add_in_both_groups_crosswise(comm):
    """Add up a one over two groups, one after the other; both groups have both ranks."""
    data, model = comm.split("data"), comm.split("model")
    x = torch.ones(1)
    if comm.rank == 0:
        data.all_reduce(x)
        model.all_reduce(x)
    else:
        model.all_reduce(x)
        data.all_reduce(x)
    return x.item()


def add_in_both_groups(comm):
    """Add up a one over two groups, in the same order on both ranks."""
    data, model = comm.split("data"), comm.split("model")
    x = torch.ones(1)
    data.all_reduce(x)
    model.all_reduce(x)
    return x.item()


SPECIMEN = Specimen(
    name="opposite_communicators",
    title="add up over the data group, then over the model group",
    ranks=2,
    broken=add_in_both_groups_crosswise,
    repaired=add_in_both_groups,
    reason="two communicators in opposite order",
    returns=[4.0, 4.0],
)
