"""Answers to average_all_gradients of notebook 06 that a check must reject or accept; CI proves both."""

import torch

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


def pack(params):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])


def hand_back(params, flat):
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = mean.view(p.shape)


def forgets_to_average(comm, params, all_reduce):
    hand_back(params, all_reduce(comm, pack(params)))


def averages_twice(comm, params, all_reduce):
    flat = pack(params) / comm.size
    hand_back(params, all_reduce(comm, flat) / comm.size)


def divides_by_two(comm, params, all_reduce):
    hand_back(params, all_reduce(comm, pack(params)) / 2)


def one_message_per_tensor(comm, params, all_reduce):
    for p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        all_reduce(comm, p.grad.view(-1))
        p.grad /= comm.size


def skips_what_is_missing(comm, params, all_reduce):
    params = [p for p in params if p.grad is not None]
    hand_back(params, all_reduce(comm, pack(params)) / comm.size)


def divides_by_those_who_have_one(comm, params, all_reduce):
    have = torch.cat([torch.full((p.numel(),), float(p.grad is not None), dtype=p.dtype) for p in params])
    total, have = all_reduce(comm, torch.stack([pack(params), have])[0].clone()), comm.all_reduce(have)
    hand_back(params, total / have.clamp(min=1))


def hands_back_only_where_there_was_one(comm, params, all_reduce):
    flat = all_reduce(comm, pack(params)) / comm.size
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        if p.grad is not None:
            p.grad.copy_(mean.view(p.shape))


def forgets_to_hand_back(comm, params, all_reduce):
    flat = all_reduce(comm, pack(params))
    flat /= comm.size


def hands_back_all_but_the_last(comm, params, all_reduce):
    flat, begin = all_reduce(comm, pack(params)) / comm.size, 0
    for p in params[:-1]:
        p.grad = flat[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()


def averages_in_float32(comm, params, all_reduce):
    hand_back(params, (all_reduce(comm, pack(params).float()) / comm.size).double())


def divides_by_parameters(comm, params, all_reduce):
    hand_back(params, all_reduce(comm, pack(params)) / len(params))


def adds_the_mean(comm, params, all_reduce):
    flat = all_reduce(comm, pack(params)) / comm.size
    for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = mean.view(p.shape) if p.grad is None else p.grad + mean.view(p.shape)


def unpacks_in_another_order(comm, params, all_reduce):
    flat = all_reduce(comm, pack(reversed(params))) / comm.size
    hand_back(params, flat)


def divides_its_own(comm, params, all_reduce):
    flat = pack(params)
    all_reduce(comm, flat.clone())
    hand_back(params, flat / comm.size)


def takes_another_all_reduce(comm, params, all_reduce):
    hand_back(params, comm.all_reduce(pack(params)) / comm.size)


def asks_first_who_has_what(comm, params, all_reduce):
    comm.all_gather(torch.tensor([float(p.grad is not None) for p in params]))
    hand_back(params, all_reduce(comm, pack(params)) / comm.size)


def averages_parameters_as_well(comm, params, all_reduce):
    hand_back(params, all_reduce(comm, pack(params)) / comm.size)
    for p in params:
        p.data = p.data - 0.1 * p.grad


def only_rank_0_averages(comm, params, all_reduce):
    if comm.rank == 0:
        hand_back(params, all_reduce(comm, pack(params)) / comm.size)


# -- right -------------------------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "6.2": (
        WrongAnswer(forgets_to_average, "mean", "That is the sum over 3 ranks"),
        WrongAnswer(averages_twice, "mean", "It was divided by 3 twice"),
        WrongAnswer(divides_by_two, "size", "there are 3 ranks: comm.size"),
        WrongAnswer(one_message_per_tensor, "messages", "called all_reduce 4 times, for 20, 4, 12, 3"),
        WrongAnswer(skips_what_is_missing, "sizes", "39 by rank 0, 36 by rank 1"),
        WrongAnswer(divides_by_those_who_have_one, "size", "You divided by the 3 ranks that have one"),
        WrongAnswer(hands_back_only_where_there_was_one, "hand back", "rank 1 still has no gradient"),
        WrongAnswer(forgets_to_hand_back, "hand back", "the mean has not come back into p.grad"),
        WrongAnswer(hands_back_all_but_the_last, "hand back", "into p.grad of 3 of 4 parameters"),
        WrongAnswer(averages_in_float32, "dtype", "right to the 7 digits of float32"),
        WrongAnswer(divides_by_parameters, "mean", "That is 0.75 times the mean"),
        WrongAnswer(adds_the_mean, "hand back", "it takes its place"),
        WrongAnswer(unpacks_in_another_order, "order", "That is the mean of another gradient"),
        WrongAnswer(divides_its_own, "sum", "add those of all ranks first"),
        WrongAnswer(takes_another_all_reduce, "messages", "never called the all_reduce"),
        WrongAnswer(asks_first_who_has_what, "messages", "ask nobody before it"),
        WrongAnswer(averages_parameters_as_well, "parameters", "the step is the optimizer's"),
        WrongAnswer(only_rank_0_averages, "deadlock", "there is a deadlock"),
    ),
}
RIGHT = {
    "6.2": (divides_before, writes_into_the_old_gradients),
}
