"""Training steps with an answer to exercise 6.4: are they those of one rank, and how much of the messages shows?"""

import numpy as np
import torch

from ..collectives import ring
from ..comm.network import Switch
from ..data.sharding import shard
from ..models.mlp import mlp
from ..parallel.data_parallel import DataParallelOverlapped, Strategy
from ..parallel.reducer import gradient_ready
from ..parallel.scaling.accounting import account
from ..parallel.scaling.virtual_time import spending
from ..parallel.training import train_step
from .ranks import capital, count, number, simulate
from .record import Broken

STEPS, BATCH = 3, 12
SIZES = (6, 5, 4, 3)
SMALL = {"bucket_nbytes": 300, "first_nbytes": 60}  # four buckets of the model above
P = 4  # ranks, where time is measured
LAYERS = (64,) * 9  # eight equal layers, each of them a bucket
LAYER = {"bucket_nbytes": 4 * 65 * 64, "first_nbytes": 4 * 65 * 64}
FORWARD, BACKWARD = 4e-3, 8e-3  # s of virtual time
NETWORK = Switch(alpha=1e-6, beta=2.7e-8)  # an all-reduce of a layer takes about 0.7 ms, its backward 1 ms


def load_optimizers():
    """Let torch import what its optimizers need, for seconds: not within the deadline of a run."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


class Alone(Strategy):
    """One rank: nothing to add."""

    def assign(self, params):
        return []

    def add_gradients(self, comm, model):
        pass


def batch_of(step, sizes=SIZES):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, sizes[0], generator=generator, dtype=torch.float64)
    return x, torch.randint(0, sizes[-1], (BATCH,), generator=generator)


def train(comm, fn):
    """(N,) parameters after each of STEPS steps, on shards of the same batches and in two micro-batches."""
    return steps_of(comm, DataParallelOverlapped(ring.all_reduce, **SMALL, gradient_ready=fn))


def steps_of(comm, strategy):
    model = mlp(SIZES, seed=1).double()
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    strategy.start(comm, model)
    for step in range(STEPS):
        x, y = (shard(part, comm.rank, comm.size) for part in batch_of(step))
        train_step(comm, model, strategy, optimizer, x, y, BATCH, micro_batches=2)
        kept.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy())
    strategy.stop()
    return kept


def check_equal_to_one_rank(fn):
    """The largest difference from one rank, on 1 to 4 simulated ranks, which may wait inside backward."""
    return max(
        check_parameters(
            simulate(p, train, fn, where=f"in a training step with {count(p, 'rank')}", threads=True),
            f"with {count(p, 'rank')}",
        )
        for p in (2, 3, 4, 1)
    )


def check_parameters(run, where):
    """Raise Broken where a rank leaves the course of one rank with the whole batch; returns the largest difference."""
    alone = simulate(1, steps_of, Alone(), evidence=False)[0]
    for step in range(STEPS):
        for r, kept in enumerate(run):
            off = float(np.abs(kept[step] - alone[step]).max())
            if not off < 1e-10:
                message = (
                    f"{capital(where)}, after step {step} a parameter of rank {r} is {number(off)} from where one rank "
                    "with the whole batch would be: is something left over from the step before?"
                )
                raise Broken("steps", message)
    return max(float(np.abs(kept[-1] - alone[-1]).max()) for kept in run)


def timed_step(comm, fn):
    """Two steps of a network of eight equal layers, whose arithmetic takes virtual time."""
    model = mlp(LAYERS, seed=1)
    strategy = DataParallelOverlapped(ring.all_reduce, **LAYER, gradient_ready=fn)
    x, y = batch_of(0, LAYERS)
    x, y = shard(x.float(), comm.rank, comm.size), shard(y, comm.rank, comm.size)
    with spending(comm, model, FORWARD, BACKWARD):
        strategy.start(comm, model)
        comm.barrier()
        begun = comm.trace.clock()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train_step(comm, model, strategy, optimizer, x, y, BATCH)
        strategy.stop()
    return begun


def exposure(fn=gradient_ready):
    """(share of the communication that shows, the events of a step), in virtual time."""
    run = simulate(P, timed_step, fn, network=NETWORK, where="in a training step", threads=True)
    events = [e for e in run.events if e.t0_ns >= max(run) and e.op != "compute"]  # forward and backward tell of it
    told = account(events)
    return 1 - told.overlap, events
