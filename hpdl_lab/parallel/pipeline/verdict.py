"""After a step of a pipeline, before the update: the loss of the batch, or which rank has NaN, on every rank alike."""

import math

import torch

from ..agreement import everybodys_items, require_same

WORST = 3  # names are told at most


def loss_of_all(comm, losses, params, checksum=None):
    """The sum over ranks of `losses`, the same float on every rank.

    Args:    losses: {micro_batch: scalar tensor} of this rank; params: {name: parameter} of this rank; checksum: of the
             batch, 16 bits, which must be the same on every rank; None: not looked at.
    Raises:  FloatingPointError on every rank where a loss, or a gradient, has NaN or infinity: which rank, what;
             ValueError on every rank where their checksums differ.
    Steps: one all_reduce.   Bytes per rank: those of all_reduce for 16 bytes, 32 with a checksum; only if it
    fails, ranks tell more.
    """
    total = torch.zeros((), dtype=torch.float64, device=comm.device)
    flag = total.clone()  # 0, or NaN where a gradient is not finite
    for loss in losses.values():
        total += loss
    for param in params.values():
        if param.grad is not None:
            flag += 0 * param.grad.sum(dtype=torch.float64 if param.dtype == torch.float64 else torch.float32)
    checked = [] if checksum is None else [checksum, checksum**2]  # of variance 0 where all ranks have the same
    total, flag, *sums = comm.all_reduce(torch.stack([total, flag, *map(total.new_tensor, checked)])).tolist()
    if sums and comm.size * sums[1] != sums[0] ** 2:
        require_same(comm, "batch", f"checksum {checksum:04x}: give every rank the same x and y, the whole batch")
    if not math.isfinite(total) or math.isnan(flag):
        raise FloatingPointError(not_finite(comm, losses, params))
    return total


def require_answers(output, y, classes):
    """Raise ValueError unless cross-entropy can compare `y` with what the model makes of the batch.

    Args:    output: the shape of its output for the whole batch; classes: the dimension of that which holds classes.
    """
    wanted = tuple(size for dim, size in enumerate(output) if dim != classes % len(output))
    if tuple(y.shape) != wanted or y.dtype != torch.int64:
        raise ValueError(
            f"cross-entropy of an output of shape {tuple(output)} needs y of shape {wanted} in torch.int64, and y has "
            f"shape {tuple(y.shape)} in {y.dtype}: another y, or another loss"
        )


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
