"""The loop around a strategy: micro-batches that add up before anything travels, and ranks that have less to do.

    rank 0   | m0  m1  m2 | add | m0  m1 | add | m0 | add |
    rank 1   | m0  m1     | add | m0     | add |    | add |      no batch left, and yet it takes part
    rank 2   |            | add |        | add |    | add |      an empty shard from the start

training.train_step is the same for one step of shards that every rank has, with a trace of where the time goes.
"""

from contextlib import nullcontext

import torch


def train_steps(comm, model, strategy, optimizer, steps, loss_of):
    """Train on this rank's micro-batches, in as many steps as the rank with most: the same steps on every rank.

    Adding gradients is collective: a rank that leaves its loop early leaves the others waiting. One that has no batch
    for a step has no gradients, which count as zeros, and takes the step of the others.

    Args:    strategy: of parallel/data.py, started. It may send gradients while the last backward of a step goes on,
             and only then: all backwards before that one belong into `with strategy.accumulating():`.
             steps: of this rank, a list of steps, each a list of micro-batches (x, y). Ranks have different numbers of
             steps and of micro-batches, or none.
             loss_of: loss_of(model, x, y), a part of the loss: all parts of a step, of all ranks, add up to the loss.
             optimizer: of the parameters of `model`; zero_grad before, step after.
    Returns: None. `model` is what one rank that has all micro-batches would make of it, on every rank.
    Steps: one all_gather of a number; strategy.add_gradients(comm, model) once per step.
    """
    counts = comm.all_gather(torch.tensor([len(steps)]))  # (p, 1): how many steps each rank has
    ### BEGIN SOLUTION
    for i in range(int(counts.max())):
        parts = steps[i] if i < len(steps) else []
        optimizer.zero_grad()
        for k, (x, y) in enumerate(parts):
            last = k == len(parts) - 1
            with nullcontext() if last else strategy.accumulating():
                loss_of(model, x, y).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()
    ### END SOLUTION
