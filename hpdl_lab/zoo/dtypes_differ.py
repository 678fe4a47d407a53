"""The receiver takes integers for floats: as many elements, but not the same bytes."""

import torch

from .specimen import Specimen


def hand_over_labels_as_floats(comm):
    """Rank 0 hands 1,000 labels to rank 1, which returns their sum."""
    if comm.rank == 0:
        comm.send(torch.arange(1000), 1)
        return 0.0
    labels = torch.zeros(1000)
    comm.recv(labels, 0)
    return float(labels.sum())


def hand_over_labels(comm):
    """Rank 0 hands 1,000 labels to rank 1, which returns their sum: both ends mean integers."""
    if comm.rank == 0:
        comm.send(torch.arange(1000), 1)
        return 0.0
    labels = torch.zeros(1000, dtype=torch.int64)
    comm.recv(labels, 0)
    return float(labels.sum())


SPECIMEN = Specimen(
    name="dtypes_differ",
    title="rank 0 hands its labels to rank 1",
    ranks=2,
    broken=hand_over_labels_as_floats,
    repaired=hand_over_labels,
    reason="dtypes differ: rank 0 sends int64, rank 1 expects float32",
    returns=[0.0, 499500.0],
)
