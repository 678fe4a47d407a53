"""Parameters that several ranks of a pipeline hold: their gradients are added, so that they stay one parameter.

tied weights    tokens.weight of the first stage, which embeds, and of the last, which asks what comes next
GEMS            every parameter, of the two replicas in opposite directions: ranks r and p - 1 - r hold the same
"""

from typing import NamedTuple

import torch

from ..packing import by_dtype


class Shared(NamedTuple):
    """Parameters of this rank, of one dtype, that exactly these ranks hold. ranks: ascending, with this one."""

    ranks: tuple
    params: list


def holders(schedule, names):
    """{name: ranks} of the parameters that more than one rank holds, ascending.

    Args:    names: names[s] of the trainable parameters of stage s of the model.
    """
    found = {}
    for stage in range(schedule.stages * schedule.replicas):
        for name in names[stage % schedule.stages]:
            found.setdefault(name, set()).add(schedule.rank_of(stage))
    return {name: tuple(sorted(ranks)) for name, ranks in found.items() if len(ranks) > 1}


def shared_by_rank(rank, holders, params):
    """The Shared of one rank. params: {name: parameter} of its stages; every rank packs in the order of `holders`."""
    groups = {}
    for name, ranks in holders.items():
        if rank in ranks:
            groups.setdefault(ranks, []).append(params[name])
    parts = [(ranks, [ours[i] for i in part]) for ranks, ours in groups.items() for part in by_dtype(ours).values()]
    return [Shared(ranks, ours) for ranks, ours in parts]


def add_shared_gradients(comm, shared):
    """Replace the gradients in `shared` by their sums over the ranks that hold them, bitwise the same on all of these.

    Everybody sends to everybody and adds in the order of ranks: those who share are two as a rule.

    Args:    shared: list of Shared. A parameter without a gradient counts as zeros.
    Steps: 1.   Bytes per rank: (k - 1) * N * itemsize for N elements that k ranks hold.
    """
    under_way = []
    for ranks, params in shared:
        flat = torch.cat([zeros(p) if p.grad is None else p.grad.reshape(-1) for p in params])  # (N,)
        parts = {rank: flat if rank == comm.rank else torch.empty_like(flat) for rank in ranks}
        others = [rank for rank in ranks if rank != comm.rank]
        works = [comm.irecv(parts[rank], rank) for rank in others] + [comm.isend(flat, rank) for rank in others]
        under_way.append((params, parts, works))
    for params, parts, works in under_way:
        for work in works:
            work.wait()
        total = sum(parts[rank] for rank in sorted(parts))
        for param, grad in zip(params, total.split([p.numel() for p in params]), strict=True):
            param.grad = grad.view(param.shape)


def set_aside(shared):
    """Take away the gradients that earlier steps have left, which are shared already: [(parameter, gradient)]."""
    earlier = [(p, p.grad) for _, params in shared for p in params if p.grad is not None]
    for param, _ in earlier:
        param.grad = None
    return earlier


def put_back(earlier):
    """Add what was set aside."""
    for param, grad in earlier:
        param.grad = grad + param.grad


def zeros(param):
    return torch.zeros(param.numel(), dtype=param.dtype, device=param.device)
