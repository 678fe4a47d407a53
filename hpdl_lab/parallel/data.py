"""Data parallelism: every rank holds the whole model, sees its shard of each batch, and gradients are added over ranks.

    rank 0: model, shard 0 -> gradient g0 --+                        +--> g --> the same update
    rank 1: model, shard 1 -> gradient g1 --+-- g = g0 + g1 + g2 ----+--> g --> the same update
    rank 2: model, shard 2 -> gradient g2 --+      (all_reduce)      +--> g --> the same update

The loss on a rank is the sum over its shard divided by the *global* batch. So gradients add up to the gradient of the
mean over the global batch, whatever the sizes of the shards; an average of ranks' means would be wrong for uneven ones.
"""

import torch


class DataParallelNaive:
    """One all-reduce per parameter: right, and slow where latency counts (a message per tensor, however small).

    `all_reduce(comm, x)` replaces the flat tensor x by its sum over ranks; by default it is the communicator's own.
    Steps: one all_reduce per parameter tensor.   Bytes per rank: those of all_reduce for N = number of parameters.
    """

    def __init__(self, all_reduce=None):
        self.all_reduce = all_reduce or best_all_reduce

    def __repr__(self):
        name = getattr(self.all_reduce, "__name__", repr(self.all_reduce))
        return f"{type(self).__name__}(all_reduce={name})"

    def start(self, comm, model):
        """Give every rank the parameters and buffers of rank 0."""
        for tensor in (*model.parameters(), *model.buffers()):
            flat = tensor.detach().clone().reshape(-1)
            tensor.data.copy_(comm.broadcast(flat).view_as(tensor))

    def add_gradients(self, comm, model):
        """Replace every parameter's gradient by its sum over ranks."""
        for param in model.parameters():
            flat = gradient_of(param).clone().reshape(-1)  # (N_param,)
            param.grad = result_of(self.all_reduce, comm, flat).view_as(param)


class DataParallel(DataParallelNaive):
    """One all-reduce for all gradients together, packed into one flat vector.

        [ w1 ........ | b1 | w2 .... | b2 ]  (N,)   one message per hop, so latency is paid once

    Steps: one all_reduce.   Bytes per rank: those of all_reduce for N = number of parameters, per dtype.
    Ref: Sergeev & Del Balso 2018 (tensor fusion); Li et al. 2020.
    """

    def add_gradients(self, comm, model):
        """Replace every parameter's gradient by its sum over ranks."""
        for dtype in dict.fromkeys(param.dtype for param in model.parameters()):
            params = [param for param in model.parameters() if param.dtype == dtype]
            flat = torch.cat([gradient_of(param).reshape(-1) for param in params])  # (N,)
            flat = result_of(self.all_reduce, comm, flat)
            for param, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
                param.grad = grad.view_as(param)


def best_all_reduce(comm, x):
    """The communicator's own all-reduce: the best that its back end has."""
    return comm.all_reduce(x)


def gradient_of(param):
    """The gradient of a parameter; zeros where it has none, because every rank must send the same sizes."""
    return torch.zeros_like(param.detach()) if param.grad is None else param.grad.detach()


def result_of(all_reduce, comm, flat):
    """`flat` after `all_reduce`: what it returned, or `flat` itself where it works in place and returns nothing."""
    out = all_reduce(comm, flat)
    if out is None:
        return flat
    if getattr(out, "shape", None) != flat.shape:
        got = f"shape {tuple(out.shape)}" if hasattr(out, "shape") else type(out).__name__
        raise ValueError(f"rank {comm.rank}: all_reduce was given shape {tuple(flat.shape)} and returned {got}")
    return out
