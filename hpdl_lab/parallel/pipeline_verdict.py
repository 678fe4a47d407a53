"""After a step of a pipeline, before the update: the loss of the batch, or which rank has NaN, on every rank alike."""

import math

import torch

from .agreement import everybodys_items

WORST = 3  # names are told at most


def loss_of_all(comm, losses, params):
    """The sum over ranks of `losses`, the same float on every rank.

    Args:    losses: {micro_batch: scalar tensor} of this rank; params: {name: parameter} of this rank.
    Raises:  FloatingPointError on every rank where a loss, or a gradient, has NaN or infinity: which rank, what.
    Steps: one all_reduce.   Bytes per rank: those of all_reduce for 16 bytes; only if it fails, ranks tell names.
    """
    told = torch.zeros(2, dtype=torch.float64, device=comm.device)  # the loss; 0, or NaN where a gradient is not finite
    for loss in losses.values():
        told[0] += loss
    for param in params.values():
        if param.grad is not None:
            told[1] += 0 * param.grad.sum(dtype=torch.float64 if param.dtype == torch.float64 else torch.float32)
    total, flag = comm.all_reduce(told).tolist()
    if not math.isfinite(total) or math.isnan(flag):
        raise FloatingPointError(not_finite(comm, losses, params))
    return total


def not_finite(comm, losses, params):
    """One sentence about what is NaN or infinite, first where it must have come from. Collective."""
    found = [
        ("in the parameter", [name for name, p in params.items() if not finite(p)]),
        ("in the loss of micro-batch", [str(i) for i, loss in losses.items() if not finite(loss)]),
        ("in the gradient of", [name for name, p in params.items() if p.grad is not None and not finite(p.grad)]),
    ]
    mine = [(where, ", ".join(names[:WORST]) + more_than(names)) for where, names in found if names]
    tables = [dict(pair for pair in pairs if len(pair) == 2) for pairs in everybodys_items(comm, mine)]
    for where, _ in found:
        told = [f"rank {rank} {where} {table[where]}" for rank, table in enumerate(tables) if where in table]
        if told:
            return f"NaN or infinity on {', on '.join(told)}. Take no step: look at the input, and at the learning rate"
    raise AssertionError("something was not finite, and is now")


def more_than(names):
    return f" and {len(names) - WORST} more" if len(names) > WORST else ""


def finite(tensor):
    return bool(torch.isfinite(tensor).all())
