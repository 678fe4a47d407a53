"""The training of a GPT as people write it elsewhere: a script for Horovod, and one for PyTorch's DDP.

Both are functions of a communicator, so `lab.run` runs them on the engines; the first one runs on simulated ranks, too.
"""

from itertools import islice

import torch
from torch.nn.functional import cross_entropy

from ..data.sharding import batches, shard
from ..models import build_for
from .consensus import require_sums_of
from .data_parallel import broadcast_parameters
from .ddp import Communication, ddp_hook, guarded
from .horovod.fusion import DistributedOptimizer

BATCH, LR = 32, 3e-3


def horovod_script(comm, data, steps=10, timeline=False):
    """Train a tiny GPT by DistributedOptimizer; returns this rank's mean loss of every step.

    Three lines make many ranks of it, 1 to 3; and each rank reads its own share of the data.

    Args:    data: a data.dataset.Dataset of tokens. timeline: record Horovod's activities for every gradient.
    """
    # 1, which lab.run has done: comm = hpdl_lab.comm.world()
    model = build_for(data, "gpt", seed=comm.rank)
    broadcast_parameters(comm, model)  # 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    optimizer = DistributedOptimizer(optimizer, comm, model.named_parameters(), timeline=timeline)  # 3
    return [step(model, optimizer, x, y) for x, y in shares(comm, data, steps)]


def ddp_script(comm, data, steps=10, all_reduce=None, hook=ddp_hook):
    """Train a tiny GPT by PyTorch's DistributedDataParallel, which sends its gradients by `hook` and `all_reduce`.

    Args:    data, steps: as above; all_reduce: f(comm, x), default the communicator's own; hook: of parallel/ddp.py.
    Raises:  ValueError on simulated ranks, because PyTorch's process groups need processes; where all_reduce does not
             add up.
    """
    from torch.nn.parallel import DistributedDataParallel  # takes torch.distributed along

    from ..comm.torch_group import process_group

    with process_group(comm):
        model = DistributedDataParallel(build_for(data, "gpt", seed=comm.rank))
        state = Communication(comm) if all_reduce is None else Communication(comm, all_reduce)
        require_sums_of(comm, state.all_reduce, [torch.float32])
        model.register_comm_hook(state, guarded(hook))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        return [step(model, optimizer, x, y) for x, y in shares(comm, data, steps)]


def shares(comm, data, steps):
    """Yield this rank's (x, y) of each batch."""
    for indices in islice(batches(len(data.train_y), BATCH), steps):
        mine = shard(indices, comm.rank, comm.size)
        yield data.train_x[mine], data.train_y[mine]


def step(model, optimizer, x, y):
    """One step on the mean loss of this rank's share; returns that loss."""
    optimizer.zero_grad()
    loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()
