"""Answers to broadcast_parameters of notebook 06 that a check must reject or accept; CI proves both."""

import torch
from torch import nn

from hpdl_lab.parallel.data_parallel import replicate


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


WRONG = {
    "6.1": """
buffers @by_state_dict: model.buffers() does
    tensor in model.state_dict().values => p in model.parameters
    (tensor) => (p.data)
some: although 0.weight has arrived
    comm.broadcast(next(model.parameters()).data)
some @by_state_dict: 8 of 9 tensors equal rank 0's
    model.state_dict().values(): => [*model.parameters(), *model.buffers()][:-1]:
    (tensor) => (tensor.data)
some @by_state_dict: 7 of 9 tensors equal rank 0's
    model.state_dict().values(): => [*model.parameters(), *model.buffers()][:-2]:
    (tensor) => (tensor.data)
frozen @by_state_dict: 2.bias is frozen
    model.state_dict().values() => (*(p for p in model.parameters() if p.requires_grad), *model.buffers())
    (tensor) => (tensor.data)
object: an optimizer made before still holds the old one
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(comm.broadcast(p.data.clone()), requires_grad=p.requires_grad))
    for buffer in model.buffers():
        comm.broadcast(buffer)
deadlock @by_state_dict: rank 1 with root 1
    model.state_dict().values() => (*model.parameters(), *model.buffers())
    (tensor) => (tensor.data, comm.rank)
deadlock: never called broadcast
    if comm.rank == 0:
        for tensor in (*model.parameters(), *model.buffers()):
            comm.broadcast(tensor.data)
root @by_state_dict: That is what rank 2 had: rank 0 is the root
    model.state_dict().values() => (*model.parameters(), *model.buffers())
    (tensor) => (tensor.data, comm.size - 1)
copy @by_state_dict: did you write into a copy?
    model.state_dict().values() => (*model.parameters(), *model.buffers())
    (tensor) => (tensor.detach().clone())
value: That is the mean over ranks
    for p in model.parameters():
        comm.all_reduce(p.data)
        p.data /= comm.size
    for buffer in model.buffers():
        comm.broadcast(buffer)
value: another seed is another model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        for layer in model:
            layer.reset_parameters()
raises: a leaf Variable that requires grad
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.copy_(comm.broadcast(tensor.detach().clone()))
wait: did not wait for 9 of its sends to rank 1
    for tensor in (*model.parameters(), *model.buffers()):
        if comm.rank > 0:
            comm.recv(tensor.data, 0)
        else:
            for rank in range(1, comm.size):
                comm.isend(tensor.data, rank)
bytes @by_state_dict: No rank needs what the others have
    model.state_dict().values() => (*model.parameters(), *model.buffers())
    comm.broadcast(tensor) => tensor.data.copy_(comm.all_gather(tensor.data)[0])
""",
}
RIGHT = {
    "6.1": (by_state_dict, by_messages, packed_by_dtype, replicate),
}
