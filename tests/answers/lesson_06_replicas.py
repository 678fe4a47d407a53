"""Answers to broadcast_parameters of notebook 06 that a check must reject or accept; CI proves both."""

import torch
from torch import nn

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


def forgets_the_buffers(comm, model):
    for p in model.parameters():
        comm.broadcast(p.data)


def sends_only_the_first(comm, model):
    comm.broadcast(next(model.parameters()).data)


def forgets_the_last(comm, model):
    for tensor in [*model.parameters(), *model.buffers()][:-1]:
        comm.broadcast(tensor.data)


def forgets_the_last_two(comm, model):
    for tensor in [*model.parameters(), *model.buffers()][:-2]:
        comm.broadcast(tensor.data)


def leaves_out_the_frozen(comm, model):
    for tensor in (*(p for p in model.parameters() if p.requires_grad), *model.buffers()):
        comm.broadcast(tensor.data)


def makes_new_parameters(comm, model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(comm.broadcast(p.data.clone()), requires_grad=p.requires_grad))
    for buffer in model.buffers():
        comm.broadcast(buffer)


def broadcasts_from_itself(comm, model):
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.data, comm.rank)


def only_rank_0_calls(comm, model):
    if comm.rank == 0:
        for tensor in (*model.parameters(), *model.buffers()):
            comm.broadcast(tensor.data)


def the_last_rank_is_the_root(comm, model):
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.data, comm.size - 1)


def broadcasts_copies(comm, model):
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.detach().clone())


def averages_the_parameters(comm, model):
    for p in model.parameters():
        comm.all_reduce(p.data)
        p.data /= comm.size
    for buffer in model.buffers():
        comm.broadcast(buffer)


def trusts_a_seed(comm, model):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        for layer in model:
            layer.reset_parameters()


def copies_under_autograd(comm, model):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.copy_(comm.broadcast(tensor.detach().clone()))


def sends_without_wait(comm, model):
    for tensor in (*model.parameters(), *model.buffers()):
        if comm.rank > 0:
            comm.recv(tensor.data, 0)
        else:
            for rank in range(1, comm.size):
                comm.isend(tensor.data, rank)


def gathers_all_models(comm, model):
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.copy_(comm.all_gather(tensor.data)[0])


# -- right -------------------------------------------------------------------------------------------------------------


def by_state_dict(comm, model):
    for tensor in model.state_dict().values():
        comm.broadcast(tensor)


def by_messages(comm, model):
    """Along a chain, from each rank to the next."""
    for tensor in (*model.parameters(), *model.buffers()):
        if comm.rank > 0:
            comm.recv(tensor.data, comm.rank - 1)
        if comm.rank < comm.size - 1:
            comm.send(tensor.data, comm.rank + 1)


@torch.no_grad()
def packed_by_dtype(comm, model):
    """One broadcast per dtype, and another tensor behind every parameter, which stays the same object."""
    tensors = [*model.parameters(), *model.buffers()]
    for dtype in (torch.float64, torch.int64):
        group = [t for t in tensors if t.dtype == dtype]
        flat = comm.broadcast(torch.cat([t.reshape(-1) for t in group]))
        for t, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.data = part.view(t.shape).clone()


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "6.1": (
        WrongAnswer(forgets_the_buffers, "buffers", "model.buffers() does"),
        WrongAnswer(sends_only_the_first, "some", "although 0.weight has arrived"),
        WrongAnswer(forgets_the_last, "some", "8 of 9 tensors are those of rank 0"),
        WrongAnswer(forgets_the_last_two, "some", "7 of 9 tensors are those of rank 0"),
        WrongAnswer(leaves_out_the_frozen, "frozen", "2.bias is frozen"),
        WrongAnswer(makes_new_parameters, "object", "an optimizer made before still holds the old one"),
        WrongAnswer(broadcasts_from_itself, "deadlock", "rank 1 with root 1"),
        WrongAnswer(only_rank_0_calls, "deadlock", "never called broadcast"),
        WrongAnswer(the_last_rank_is_the_root, "root", "That is what rank 2 had: rank 0 is the root"),
        WrongAnswer(broadcasts_copies, "copy", "did what arrived go into a copy?"),
        WrongAnswer(averages_the_parameters, "value", "That is the mean over ranks"),
        WrongAnswer(trusts_a_seed, "value", "another seed is another model"),
        WrongAnswer(copies_under_autograd, "raises", "a leaf Variable that requires grad"),
        WrongAnswer(sends_without_wait, "wait", "did not wait for 9 of its sends to rank 1"),
        WrongAnswer(gathers_all_models, "bytes", "What the others have, nobody needs"),
    ),
}
RIGHT = {
    "6.1": (by_state_dict, by_messages, packed_by_dtype),
}
