"""Answers to exercises 7.3 and 7.4 that the checks must reject or accept; CI proves both."""

import torch


def by_messages(comm, grad, error, k):
    """Sorted in place of topk, and values and places as messages to everybody."""
    error.add_(grad)
    places = torch.argsort(-error.abs())[:k].contiguous()
    values = error[places].clone()
    error[places] -= values
    grad.zero_()
    for source in range(comm.size):
        some, where = (values.clone(), places.clone()) if source == comm.rank else (values * 0, places * 0)
        comm.broadcast(some, source)
        comm.broadcast(where, source)
        grad[where] += some
    return grad


def with_a_mask(comm, grad, error, k):
    grad += error
    kept = torch.zeros_like(grad, dtype=torch.bool)
    kept[grad.abs().topk(k).indices] = True
    error.copy_(torch.where(kept, 0, grad))
    places = kept.nonzero().view(-1)
    all_values, all_places = comm.all_gather(grad[places]), comm.all_gather(places)
    grad.zero_()
    for values, where in zip(all_values, all_places, strict=True):
        grad[where] += values
    return grad


def block_by_block(comm, w, gradient, steps, lr, every):
    """The loop of a block inside the loop over blocks."""
    done = 0
    while done < steps:
        for _ in range(min(every, steps - done)):
            w.sub_(gradient(w), alpha=lr)
            done += 1
        w /= comm.size
        comm.all_reduce(w)
    return w


WRONG = {
    "7.3": """
feedback: a new tensor of that name is gone
    -     error += grad
    +     error = error + grad
feedback: What was held back in earlier steps is missing
    -     error += grad
    -     places = error.abs().topk(k).indices
    -     values = error[places]
    -     error[places] = 0
    +     both = grad + error
    +     places = both.abs().topk(k).indices
    +     values = both[places]
    +     error.copy_(grad)
    +     error[places] -= values
feedback: chosen from the gradients alone
    -     error += grad
    -     places = error.abs().topk(k).indices
    +     places = grad.abs().topk(k).indices
    +     error += grad
    -     values = error[places]
    +     values = grad[places]
feedback: what this rank has not sent is lost
    -     error[places] = 0
    +     error.zero_()
twice: What was held back is added twice
    -     error += grad
    +     error += grad + error
magnitude: Choose by the absolute value
    error.abs().topk(k) => error.topk(k)
sent: will be sent again
    -     error[places] = 0
sent: You subtracted numbers of other ranks
    -     error[places] = 0
    -     all_values, all_places = (comm.all_gather(values), comm.all_gather(places.int()))
    -     grad.zero_()
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     all_values, all_places = (comm.all_gather(values), comm.all_gather(places.int()))
    +     grad.zero_().index_add_(0, all_places.view(-1), all_values.view(-1))
    +     error -= grad
    +     return grad
places: the places have to travel, too
    -     grad.zero_()
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     grad.zero_()
    +     grad[places] = all_values.sum(0)
    +     return grad
places: Those are sums in the places of rank
    -     values = error[places]
    -     error[places] = 0
    -     all_values, all_places = (comm.all_gather(values), comm.all_gather(places.int()))
    -     grad.zero_()
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     total = comm.all_reduce(error.clone())
    +     error[places] = 0
    +     grad.zero_()
    +     grad[places] = total[places]
    +     return grad
collide: one value has overwritten the other
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     for values, where in zip(all_values, all_places):
    +         grad[where] = values
    +     return grad
sum: the k numbers of rank 0 alone
    -     grad.zero_()
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     grad.zero_()
    +     grad[places] = values
    +     return grad
mean: That is 0.333333 times the mean
    all_values.view(-1) => all_values.view(-1) / comm.size
clear: grad has to be zeros before you add
    grad.zero_() => pass
dense: That is the sum of all numbers
    -     grad.zero_()
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     grad.copy_(error)
    +     grad[places] = values
    +     return comm.all_reduce(grad)
bytes: 10 values of 8 bytes and their 10 places
    -     all_values, all_places = (comm.all_gather(values), comm.all_gather(places.int()))
    -     grad.zero_()
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     grad.zero_()
    +     grad[places] = values
    +     return comm.all_reduce(grad)
in place: grad was not overwritten
    -     grad.zero_()
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     return torch.zeros_like(grad).index_add_(0, all_places.view(-1), all_values.view(-1))
returns: returned nothing
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     grad.index_add_(0, all_places.view(-1), all_values.view(-1))
bitwise: hold different bits
    -     return grad.index_add_(0, all_places.view(-1), all_values.view(-1))
    +     order = [(comm.rank + i) % comm.size for i in range(comm.size)]
    +     for i in order:
    +         grad.index_add_(0, all_places[i], all_values[i])
    +     return grad
""",
    "7.4": """
last: the last block, of 1 step, has to be averaged
    step % every == 0 or step == steps => step % every == 0
average: after 3 steps all ranks average
    step % every == 0 or step == steps => step == steps
every: After 1 step all ranks have the same
    step % every == 0 or step == steps => True
every: After 2 steps all ranks have the same
    step % every == 0 or step == steps => step % every == every - 1 or step == steps
every: gradients or parameters were averaged
    for step in range(steps):
        w -= lr * comm.all_reduce(gradient(w)) / comm.size
    return w
gradients: was divided by the number of ranks
    lr * gradient(w) => lr * gradient(w) / comm.size
average: ranks would never quite agree
    -             comm.all_reduce(w)
    -             w /= comm.size
    +             mean = comm.all_reduce(w.clone()) / comm.size
    +             w += mean
    +             w /= 2
average: it has to replace it
    -             comm.all_reduce(w)
    -             w /= comm.size
    +             w += comm.all_reduce(w.clone()) / comm.size
mean: the sum over 3 ranks
    -             w /= comm.size
mean: divided by 3 twice
    w /= comm.size => w /= comm.size ** 2
sign: a step uphill
    w -= => w +=
rate: not multiplied by lr
    lr * gradient(w) => gradient(w)
steps: has taken 6 of 7 steps
    range(1, steps + 1) => range(1, steps)
steps: asked for 8 gradients
    -     return w
    +     gradient(w)
    +     return w
bytes: sends 960 bytes, and 3 all_reduces
    -         w -= lr * gradient(w)
    +         slope = gradient(w)
    +         comm.all_reduce(slope.clone())
    +         w -= lr * slope
bytes: sends 384 bytes, and 3 all_reduces
    -             comm.all_reduce(w)
    -             w /= comm.size
    +             w.copy_(comm.all_gather(w).mean(0))
in place: w was not overwritten
    -     for step
    +     w = w.clone()
    +     for step
""",
}
RIGHT = {
    "7.3": (by_messages, with_a_mask),
    "7.4": (block_by_block,),
}
