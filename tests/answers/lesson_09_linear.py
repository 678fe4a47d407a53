"""Answers to column_linear and row_linear of notebook 09 that a check must reject or accept; CI proves both."""

import torch
from torch.nn.functional import linear

from hpdl_lab.parallel.tensor.linear import conjugate, copy_to, reduce_from


def column_by_a_hook(comm, x, weight, bias):
    """The gradient of a view of x is added over ranks by a hook of autograd."""
    x = x.view_as(x)
    if comm.size > 1:
        x.register_hook(lambda g: comm.all_reduce(g.clone()))
    y = (x.flatten(0, -2) @ weight.T).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def column_by_hand(comm, x, weight, bias):
    x = copy_to(comm, x)
    y = torch.stack([(x * row).sum(-1) for row in weight], -1)
    return y if bias is None else y + bias


def row_adds_in_place(comm, x, weight, bias):
    """The sum is put where the part was; it has the gradient of the part, so autograd need not know."""
    y = linear(x, weight)
    comm.all_reduce(y)
    return y if bias is None else y + bias


def row_with_columns_of_x_first(comm, x, weight, bias):
    y = reduce_from(comm, (weight @ x.transpose(-1, -2)).transpose(-1, -2).contiguous())
    return y if bias is None else y.add_(bias)


WRONG = {
    "9.1": """
transposed: only the gradient of x from the columns of rank 0
    return linear(x, weight, bias)
gathered: Those are the columns of all ranks
    y = linear(copy_to(comm, x), weight, bias)
    return torch.cat(list(comm.all_gather(y.detach())), -1)
sum: every rank has other columns
    return reduce_from(comm, linear(copy_to(comm, x), weight, bias))
sum: x has been added over 2 ranks
    return linear(reduce_from(comm, x), weight, bias)
bias: The bias is missing: 6 numbers
    return linear(copy_to(comm, x), weight)
twice: added over ranks twice
    return linear(copy_to(comm, copy_to(comm, x)), weight, bias)
mean: That is the mean over 2 ranks
    x.register_hook(lambda g: comm.all_reduce(g.clone()) / comm.size)
    return linear(x, weight, bias)
input: as by a residual connection
    require_fit(x, weight, bias, 'column_linear') => x.register_hook(lambda g: comm.all_reduce(g.clone()))
    copy_to(comm, x) => x
gradient: x of rank 0 has no gradient
    return linear(x.detach(), weight, bias)
shard: every rank has other rows
    return linear(copy_to(comm, x), copy_to(comm, weight), bias)
memory: keeps a tensor of 60 numbers
    rows = list(comm.all_gather(weight.detach()))
    rows[comm.rank] = weight
    y = linear(copy_to(comm, x), torch.cat(rows))
    n = len(weight)
    return y[..., comm.rank * n : (comm.rank + 1) * n] + bias
messages: in forward the ranks send 144 bytes
    require_fit(x, weight, bias, 'column_linear') => comm.all_gather(bias.detach())
deadlock: there is a deadlock
    return linear(copy_to(comm, x) if comm.rank == 0 else x, weight, bias)
messages: in forward rank 0 waits in 1 barrier
    y = linear(copy_to(comm, x), weight, bias)
    comm.barrier()
    return y
raises: With 2 ranks and bias None
    return copy_to(comm, x) @ weight.T + bias
dtype: y[0, 0, 0] should be
    require_fit(x, weight, bias, 'column_linear') => bias = None if bias is None else bias.float()
    (copy_to(comm, x), weight, bias) => (copy_to(comm, x.float()), weight.float(), bias).double()
dtype: the gradient of x[0, 0, 0]
    whole = conjugate(x, lambda x: x.view_as(x), lambda grad: comm.all_reduce(grad.float().contiguous()).double())
    return linear(whole, weight, bias)
raises: not enough values to unpack
    b, s, d = x.shape
    return linear(copy_to(comm, x.view(b * s, d)), weight, bias).view(b, s, -1)
returns: rank 0 returned nothing
    linear(copy_to(comm, x), weight, bias)
""",
    "9.2": """
sum: That is rank 0's own part
    return linear(x, weight, bias)
bias: The bias was added 2 times
    return reduce_from(comm, linear(x, weight, bias))
bias: the bias is missing
    return reduce_from(comm, linear(x, weight))
bias: Only some ranks add it
    return reduce_from(comm, linear(x, weight, bias if comm.rank == 0 else None))
bias: learns 2 times too slowly
    return reduce_from(comm, linear(x, weight, bias / comm.size))
mean: parts of a product add up
    return reduce_from(comm, linear(x, weight)) / comm.size + bias
sum: added, not put in a row
    return torch.cat(list(comm.all_gather(linear(x, weight, bias).detach())), -1)
transposed: all-reduce in forward, and in backward nothing
    return copy_to(comm, reduce_from(comm, linear(x, weight))) + bias
transposed: every rank has other columns of x
    y = reduce_from(comm, linear(copy_to(comm, x), weight))
    return y if bias is None else y + bias
memory: that is a whole layer
    xs, columns = list(comm.all_gather(x.detach())), list(comm.all_gather(weight.detach()))
    xs[comm.rank], columns[comm.rank] = x, weight
    return linear(torch.cat(xs, -1), torch.cat(columns, 1), bias)
messages: all_reduce of 30 numbers, all_gather of 30 numbers
    y = reduce_from(comm, linear(x, weight)) + bias
    assert (comm.all_gather(y.detach()) == y.detach()).all()
    return y
gradient: is invisible to autograd
    return comm.all_reduce(linear(x, weight).detach()) + bias
raises: With 2 ranks and bias None
    return reduce_from(comm, linear(x, weight)) + bias
wait: did not wait for 1 of its sends
    def added(part):
        total = part.clone()
        for peer in range(comm.size):
            if peer != comm.rank:
                comm.isend(part.contiguous(), peer)
        for peer in range(comm.size):
            if peer != comm.rank:
                total += comm.recv(torch.empty_like(total), peer)
        return total
    y = conjugate(linear(x, weight), added, lambda grad: grad)
    return y if bias is None else y + bias
deadlock @row_with_columns_of_x_first: there is a deadlock
    reduce_from(comm, (weight @ x.transpose(-1, -2)).transpose(-1, -2).contiguous()) => linear(x, weight)
    y if bias is None else y.add_(bias) => (reduce_from(comm, y) if comm.rank == 0 else y) + bias
""",
}
RIGHT = {
    "9.1": (column_by_a_hook, column_by_hand),
    "9.2": (row_adds_in_place, row_with_columns_of_x_first),
}
COMPLETED = {
    "9.1": ["bias"],
    "9.2": ["y + bias"],
}
