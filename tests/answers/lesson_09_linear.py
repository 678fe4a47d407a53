"""Answers to column_linear and row_linear of notebook 09 that a check must reject or accept; CI proves both."""

import torch
from torch.nn.functional import linear

from hpdl_lab.parallel.tensor.linear import conjugate, copy_to, reduce_from

from . import WrongAnswer

# -- column_linear: wrong ----------------------------------------------------------------------------------------------


def column_forgets_the_transposed(comm, x, weight, bias):
    return linear(x, weight, bias)


def column_gathers_the_output(comm, x, weight, bias):
    y = linear(copy_to(comm, x), weight, bias)
    return torch.cat(list(comm.all_gather(y.detach())), -1)


def column_adds_the_output(comm, x, weight, bias):
    return reduce_from(comm, linear(copy_to(comm, x), weight, bias))


def column_adds_x(comm, x, weight, bias):
    return linear(reduce_from(comm, x), weight, bias)


def column_without_bias(comm, x, weight, bias):
    return linear(copy_to(comm, x), weight)


def column_adds_twice(comm, x, weight, bias):
    return linear(copy_to(comm, copy_to(comm, x)), weight, bias)


def column_takes_the_mean(comm, x, weight, bias):
    x.register_hook(lambda g: comm.all_reduce(g.clone()) / comm.size)
    return linear(x, weight, bias)


def column_hooks_the_callers_x(comm, x, weight, bias):
    x.register_hook(lambda g: comm.all_reduce(g.clone()))
    return linear(x, weight, bias)


def column_detaches_x(comm, x, weight, bias):
    return linear(x.detach(), weight, bias)


def column_adds_gradients_of_weights(comm, x, weight, bias):
    return linear(copy_to(comm, x), copy_to(comm, weight), bias)


def column_gathers_the_weight(comm, x, weight, bias):
    rows = list(comm.all_gather(weight.detach()))
    rows[comm.rank] = weight
    y = linear(copy_to(comm, x), torch.cat(rows))
    n = len(weight)
    return y[..., comm.rank * n : (comm.rank + 1) * n] + bias


def column_asks_for_every_bias(comm, x, weight, bias):
    comm.all_gather(bias.detach())
    return linear(copy_to(comm, x), weight, bias)


def column_only_rank_0_adds(comm, x, weight, bias):
    return linear(copy_to(comm, x) if comm.rank == 0 else x, weight, bias)


def column_waits_for_all(comm, x, weight, bias):
    y = linear(copy_to(comm, x), weight, bias)
    comm.barrier()
    return y


def column_needs_a_bias(comm, x, weight, bias):
    return copy_to(comm, x) @ weight.T + bias


def column_in_float32(comm, x, weight, bias):
    bias = None if bias is None else bias.float()
    return linear(copy_to(comm, x.float()), weight.float(), bias).double()


def column_adds_in_float32(comm, x, weight, bias):
    whole = conjugate(x, lambda x: x.view_as(x), lambda grad: comm.all_reduce(grad.float().contiguous()).double())
    return linear(whole, weight, bias)


def column_for_three_dims(comm, x, weight, bias):
    b, s, d = x.shape
    return linear(copy_to(comm, x.view(b * s, d)), weight, bias).view(b, s, -1)


def column_returns_nothing(comm, x, weight, bias):
    linear(copy_to(comm, x), weight, bias)


# -- column_linear: right ----------------------------------------------------------------------------------------------


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


# -- row_linear: wrong -------------------------------------------------------------------------------------------------


def row_forgets_the_sum(comm, x, weight, bias):
    return linear(x, weight, bias)


def row_adds_the_bias_everywhere(comm, x, weight, bias):
    return reduce_from(comm, linear(x, weight, bias))


def row_without_bias(comm, x, weight, bias):
    return reduce_from(comm, linear(x, weight))


def row_adds_the_bias_on_rank_0(comm, x, weight, bias):
    return reduce_from(comm, linear(x, weight, bias if comm.rank == 0 else None))


def row_adds_a_share_of_the_bias(comm, x, weight, bias):
    return reduce_from(comm, linear(x, weight, bias / comm.size))


def row_takes_the_mean(comm, x, weight, bias):
    return reduce_from(comm, linear(x, weight)) / comm.size + bias


def row_puts_parts_in_a_row(comm, x, weight, bias):
    return torch.cat(list(comm.all_gather(linear(x, weight, bias).detach())), -1)


def row_adds_in_backward_too(comm, x, weight, bias):
    return copy_to(comm, reduce_from(comm, linear(x, weight))) + bias


def row_copies_x(comm, x, weight, bias):
    y = reduce_from(comm, linear(copy_to(comm, x), weight))
    return y if bias is None else y + bias


def row_gathers_x_and_weight(comm, x, weight, bias):
    xs, columns = list(comm.all_gather(x.detach())), list(comm.all_gather(weight.detach()))
    xs[comm.rank], columns[comm.rank] = x, weight
    return linear(torch.cat(xs, -1), torch.cat(columns, 1), bias)


def row_compares_the_sums(comm, x, weight, bias):
    y = reduce_from(comm, linear(x, weight)) + bias
    assert (comm.all_gather(y.detach()) == y.detach()).all()
    return y


def row_adds_outside_autograd(comm, x, weight, bias):
    return comm.all_reduce(linear(x, weight).detach()) + bias


def row_needs_a_bias(comm, x, weight, bias):
    return reduce_from(comm, linear(x, weight)) + bias


def row_sends_without_wait(comm, x, weight, bias):
    """The sum over ranks by messages, none of which is waited for where it leaves."""

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


def row_only_rank_0_adds(comm, x, weight, bias):
    y = linear(x, weight)
    return (reduce_from(comm, y) if comm.rank == 0 else y) + bias


# -- row_linear: right -------------------------------------------------------------------------------------------------


def row_adds_in_place(comm, x, weight, bias):
    """The sum is put where the part was; its gradient is that of the part, so autograd need not know."""
    y = linear(x, weight)
    comm.all_reduce(y)
    return y if bias is None else y + bias


def row_with_columns_of_x_first(comm, x, weight, bias):
    y = reduce_from(comm, (weight @ x.transpose(-1, -2)).transpose(-1, -2).contiguous())
    return y if bias is None else y.add_(bias)


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "9.1": (
        WrongAnswer(column_forgets_the_transposed, "transposed", "only what the columns of rank 0 say"),
        WrongAnswer(column_gathers_the_output, "gathered", "Those are the columns of all ranks"),
        WrongAnswer(column_adds_the_output, "sum", "every rank has other columns"),
        WrongAnswer(column_adds_x, "sum", "x has been added over 2 ranks"),
        WrongAnswer(column_without_bias, "bias", "The bias is missing: 6 numbers"),
        WrongAnswer(column_adds_twice, "twice", "added over ranks twice"),
        WrongAnswer(column_takes_the_mean, "mean", "That is the mean over 2 ranks"),
        WrongAnswer(column_hooks_the_callers_x, "input", "as by a residual connection"),
        WrongAnswer(column_detaches_x, "gradient", "x of rank 0 has no gradient"),
        WrongAnswer(column_adds_gradients_of_weights, "shard", "every rank has other rows"),
        WrongAnswer(column_gathers_the_weight, "memory", "keeps a tensor of 60 numbers"),
        WrongAnswer(column_asks_for_every_bias, "messages", "in forward the ranks send 144 bytes"),
        WrongAnswer(column_only_rank_0_adds, "deadlock", "there is a deadlock"),
        WrongAnswer(column_waits_for_all, "messages", "in forward rank 0 waits in 1 barrier"),
        WrongAnswer(column_needs_a_bias, "raises", "With 2 ranks and bias None"),
        WrongAnswer(column_in_float32, "dtype", "y[0, 0, 0] should be"),
        WrongAnswer(column_adds_in_float32, "dtype", "the gradient of x[0, 0, 0]"),
        WrongAnswer(column_for_three_dims, "raises", "not enough values to unpack"),
        WrongAnswer(column_returns_nothing, "returns", "rank 0 returned nothing"),
    ),
    "9.2": (
        WrongAnswer(row_forgets_the_sum, "sum", "That is rank 0's own part"),
        WrongAnswer(row_adds_the_bias_everywhere, "bias", "The bias was added 2 times"),
        WrongAnswer(row_without_bias, "bias", "the bias is missing"),
        WrongAnswer(row_adds_the_bias_on_rank_0, "bias", "Only some ranks add it"),
        WrongAnswer(row_adds_a_share_of_the_bias, "bias", "learns 2 times too slowly"),
        WrongAnswer(row_takes_the_mean, "mean", "parts of a product add up"),
        WrongAnswer(row_puts_parts_in_a_row, "sum", "added, not put in a row"),
        WrongAnswer(row_adds_in_backward_too, "transposed", "all-reduce in forward, and in backward nothing"),
        WrongAnswer(row_copies_x, "transposed", "every rank has other columns of x"),
        WrongAnswer(row_gathers_x_and_weight, "memory", "that is a whole layer"),
        WrongAnswer(row_compares_the_sums, "messages", "all_reduce of 30 numbers, all_gather of 30 numbers"),
        WrongAnswer(row_adds_outside_autograd, "gradient", "has left the sight of autograd"),
        WrongAnswer(row_needs_a_bias, "raises", "With 2 ranks and bias None"),
        WrongAnswer(row_sends_without_wait, "wait", "did not wait for 1 of its sends"),
        WrongAnswer(row_only_rank_0_adds, "deadlock", "there is a deadlock"),
    ),
}
RIGHT = {
    "9.1": (column_by_a_hook, column_by_hand),
    "9.2": (row_adds_in_place, row_with_columns_of_x_first),
}
