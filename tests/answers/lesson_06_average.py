"""Answers to average_all_gradients of notebook 06 that a check must reject or accept; CI proves both."""

import torch


def pack(params):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])


def hand_back(params, flat):
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = mean.view(p.shape)


def divides_before(comm, params, all_reduce):
    flat = pack(params).div_(comm.size)
    all_reduce(comm, flat)
    hand_back(params, flat)


def writes_into_the_old_gradients(comm, params, all_reduce):
    """From the last parameter to the first, packed and taken apart alike."""
    backwards = params[::-1]
    flat, begin = all_reduce(comm, pack(backwards)) / comm.size, 0
    for p in backwards:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        p.grad.copy_(flat[begin : begin + p.numel()].view(p.shape))
        begin += p.numel()


WRONG = {
    "6.2": """
mean: That is the sum over 3 ranks
    hand_back(params, all_reduce(comm, pack(params)))
mean: It was divided by 3 twice
    flat = pack(params) / comm.size
    hand_back(params, all_reduce(comm, flat) / comm.size)
size: there are 3 ranks: comm.size
    hand_back(params, all_reduce(comm, pack(params)) / 2)
messages: called all_reduce 4 times, for 20, 4, 12, 3
    for p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        all_reduce(comm, p.grad)
        p.grad /= comm.size
sizes: 39 by rank 0, 36 by rank 1
    params = [p for p in params if p.grad is not None]
    hand_back(params, all_reduce(comm, pack(params)) / comm.size)
size: You divided by the 3 ranks that have one
    have = torch.cat([torch.full((p.numel(),), float(p.grad is not None), dtype=p.dtype) for p in params])
    total, have = all_reduce(comm, torch.stack([pack(params), have])[0].clone()), comm.all_reduce(have)
    hand_back(params, total / have.clamp(min=1))
hand back: rank 1 still has no gradient
    flat = all_reduce(comm, pack(params)) / comm.size
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        if p.grad is not None:
            p.grad.copy_(mean.view(p.shape))
hand back: the mean has not come back into p.grad
    flat = all_reduce(comm, pack(params))
    flat /= comm.size
hand back: into p.grad of 3 of 4 parameters
    flat, begin = all_reduce(comm, pack(params)) / comm.size, 0
    for p in params[:-1]:
        p.grad = flat[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()
dtype: right to the 7 digits of float32
    hand_back(params, (all_reduce(comm, pack(params).float()) / comm.size).double())
mean: That is 0.75 times the mean
    hand_back(params, all_reduce(comm, pack(params)) / len(params))
hand back: it has to replace it
    flat = all_reduce(comm, pack(params)) / comm.size
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = mean.view(p.shape) if p.grad is None else p.grad + mean.view(p.shape)
order: That is the mean of another gradient
    flat = all_reduce(comm, pack(reversed(params))) / comm.size
    hand_back(params, flat)
sum @divides_before: add the gradients of all ranks first
    (params).div_(comm.size) => (params)
    (comm, flat) => (comm, flat.clone())
    (params, flat) => (params, flat / comm.size)
messages: never called the all_reduce
    hand_back(params, comm.all_reduce(pack(params)) / comm.size)
messages: no question is needed before it
    comm.all_gather(torch.tensor([float(p.grad is not None) for p in params]))
    hand_back(params, all_reduce(comm, pack(params)) / comm.size)
parameters: the step is the optimizer's
    hand_back(params, all_reduce(comm, pack(params)) / comm.size)
    for p in params:
        p.data = p.data - 0.1 * p.grad
deadlock: there is a deadlock
    if comm.rank == 0:
        hand_back(params, all_reduce(comm, pack(params)) / comm.size)
""",
}
RIGHT = {
    "6.2": (divides_before, writes_into_the_old_gradients),
}
