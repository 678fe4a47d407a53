"""Before the first step: does the all_reduce add up? A sum that is wrong, and the same on every rank, leaves no trace.

The ranks would agree on every loss and every parameter, and train another model than was meant.
"""

import numpy as np
import torch

from ..comm.buffers import to_numpy
from .data import best_all_reduce, name_of, result_of
from .packing import allocate


def require_sums(comm, strategy):
    """Raise ValueError on every rank unless the all_reduce of a strategy that was started adds what it should."""
    require_sums_of(comm, strategy.all_reduce, [bucket.flat.dtype for bucket in strategy.buckets])


def require_sums_of(comm, all_reduce, dtypes):
    """Raise ValueError on every rank unless `all_reduce` adds what it should.

    Once for each dtype that travels; the communicator's own is trusted. Collective.
    Steps: one all_reduce of 2p + 1 elements, which no chunks divide equally, and an all_gather of 32 bytes.
    """
    if all_reduce is best_all_reduce:
        return
    recording, comm.trace.enabled = comm.trace.enabled, False
    try:
        for dtype in dict.fromkeys(dtypes):
            require_sum(comm, all_reduce, dtype)
    finally:
        comm.trace.enabled = recording


def require_sum(comm, all_reduce, dtype):
    """Raise ValueError on every rank unless `all_reduce` makes a known sum of a few numbers of this dtype."""
    n = 2 * comm.size + 1
    x, want = allocate(comm, n, dtype), sum(brought(rank, n) for rank in range(comm.size))
    x.copy_(torch.from_numpy(brought(comm.rank, n)))
    got = np.asarray(to_numpy(result_of(all_reduce, comm, x).double()))
    far = np.flatnonzero(~(np.abs(got - want) <= 4 * torch.finfo(dtype).eps * want))
    first = int(far[0]) if len(far) else 0
    mine = torch.tensor([len(far), first, want[first], got[first]], dtype=torch.float64, device=comm.device)
    for rank, (wrong, index, should, is_) in enumerate(comm.all_gather(mine).tolist()):
        if wrong:
            raise ValueError(
                f"{name_of(all_reduce)} does not add up: on rank {rank}, element {index:.0f} of {n} should be "
                f"{should:g}, the sum over {comm.size} ranks, and is {is_:g}: lab.check finds out why"
            )


def brought(rank, n):
    """(n,) small whole numbers, whose sums are exact: other numbers on other ranks, in another order."""
    return 1.0 + np.arange(n) * (rank + 1) % 5
