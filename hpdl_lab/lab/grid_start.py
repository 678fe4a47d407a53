"""Where the picker starts: a grid that can be."""

from ..parallel.grid.model import predict
from ..parallel.grid.search import grids
from .grid_setting import Setting

FEW = (4, 2, 1)  # micro-batches of a replica, the first number that its share of the batch allows
NODE = 8  # GPUs that share fast links


def first(subject):
    """Replicas only of a model that runs here; of a mere spec tp inside a node, and as few stages as memory allows."""
    possible = None
    for dp, pp, tp in starts(subject):
        share = subject.batch // dp
        few = FEW if subject.model is not None else (share,)
        setting = Setting(dp, pp, tp, next((m for m in few if share and share % m == 0), 1))
        told = {**setting.options, "machine": subject.machine, "batch": subject.batch, "limit": subject.limit}
        try:
            fits = predict(subject.spec, setting.grid, **told).fits
        except ValueError:
            continue
        if fits or subject.model is not None:
            return setting
        possible = possible or setting
    return possible or Setting(subject.ranks, 1, 1, 1)


def starts(subject):
    """(dp, pp, tp) in the order in which they are tried."""
    every = grids(subject.ranks)
    return every if subject.model is not None else sorted(every, key=lambda grid: (grid[2] != NODE, grid[1]))
