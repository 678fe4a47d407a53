"""Answers to expert_layer of notebook 12 that a check must reject or accept; CI proves both."""

import torch

from hpdl_lab.collectives.pairwise import all_to_all_v
from hpdl_lab.parallel.experts import combine, dispatch
from hpdl_lab.parallel.tensor.linear import conjugate


def by_rank(comm, x, chosen, weights, mine):
    """Rank by rank: which tokens, and as which of their choices; sizes from an all-gather."""
    where = [(chosen == r).nonzero(as_tuple=True) for r in range(comm.size)]
    sent = [len(token) for token, _ in where]
    received = comm.all_gather(torch.tensor(sent))[:, comm.rank].tolist()
    token, choice = (torch.cat(parts) for parts in zip(*where, strict=True))
    back = combine(comm, mine(dispatch(comm, x[token], sent, received)), sent, received)
    y = torch.zeros(*chosen.shape, x.shape[1], dtype=x.dtype).index_put((token, choice), back)
    return (y * weights[..., None]).sum(1)


def with_all_to_all_v(comm, x, chosen, weights, mine):
    """Without dispatch and combine; what comes back is put into the order of copies first."""
    order = chosen.flatten().sort(stable=True).indices
    sent = torch.tensor([int((chosen == r).sum()) for r in range(comm.size)])
    received = comm.all_to_all(sent).tolist()
    sent = sent.tolist()
    there, here = (lambda t: all_to_all_v(comm, t, sent, received)), (lambda t: all_to_all_v(comm, t, received, sent))
    back = conjugate(mine(conjugate(x.repeat_interleave(chosen.shape[1], 0)[order], there, here)), here, there)
    return torch.einsum("nkd,nk->nd", back[order.argsort()].view(*chosen.shape, -1), weights)


def all_tokens_everywhere(comm, x, chosen, weights, mine):
    """Right, but every token goes to every rank."""
    n = len(x)
    sizes = [n] * comm.size, comm.all_gather(torch.tensor([n])).flatten().tolist()
    made = combine(comm, mine(dispatch(comm, x.repeat(comm.size, 1), *sizes)), *sizes).view(comm.size, n, -1)
    y = made.gather(0, chosen.T[..., None].expand(-1, -1, x.shape[1]))  # (k, n, d)
    return (y * weights.T[..., None]).sum(0)


def padded(comm, x, chosen, weights, mine):
    """Right, but every rank sends as many rows to each other as the longest of all messages has."""
    p, k = comm.size, chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    sent = chosen.flatten().bincount(minlength=p)
    most = int(comm.all_gather(sent).max())
    place = torch.cat([torch.arange(m) + most * r for r, m in enumerate(sent.tolist())])
    rows = torch.zeros(p * most, x.shape[1], dtype=x.dtype).index_put((place,), x[order // k])
    sizes = [most] * p, [most] * p
    back = combine(comm, mine(dispatch(comm, rows, *sizes)), *sizes)[place]
    return torch.zeros_like(x).index_add(0, order // k, back * weights.flatten()[order, None])


def without_way_back(comm, copies, sent, received):
    """dispatch in which only copies that stay on their rank get a gradient."""

    def stayed(grad):
        here = grad.split(received)[comm.rank]
        return torch.cat([here if r == comm.rank else grad.new_zeros(n, grad.shape[1]) for r, n in enumerate(sent)])

    return conjugate(copies, lambda t: all_to_all_v(comm, t, sent, received), stayed)


WRONG = {
    "12.2": """
messages @all_tokens_everywhere: A token goes only to the ranks that it has chosen
messages @padded: without padding
order: by expert: each copy belongs to the token
    index_add(0, order // k, => index_add(0, torch.arange(len(order)) // k,
order: in the order in which copies were sent
    torch.zeros_like(x).index_add(0, order // k, back * weights.flatten()[order, None]) => \
(back.view(len(x), k, -1) * weights[..., None]).sum(1)
weights: the weights are in the order of tokens
    weights.flatten()[order, None] => weights.flatten()[:, None]
weights: Results are added without weights
    back * weights.flatten()[order, None] => back
weights: Tokens were multiplied by their weights before the expert
    x[order // k] => x[order // k] * weights.flatten()[order, None]
    back * weights.flatten()[order, None] => back
sum: written over each other
    torch.zeros_like(x).index_add(0, order // k, back => torch.zeros_like(x).index_put((order // k,), back
sum: choice 0 alone
    k = chosen.shape[1] => chosen, weights, k = chosen[:, :1], weights[:, :1], 1
dispatch: through its own expert
    return mine(x) * weights.sum(1, keepdim=True)
dispatch: Only tokens that chose rank 0's own expert
    return mine(x) * (weights * (chosen == comm.rank)).sum(1, keepdim=True)
raises: sends
    back = combine => back = dispatch
deadlock: rank 1 never sent to rank 0
    received = comm.all_to_all(sent) => received = sent
gradient: invisible to autograd
    back = combine(comm, mine(there), *sizes) => back = combine(comm, mine(there), *sizes).detach()
gradient: x of rank 0 has no gradient
    x[order // k] => x.detach()[order // k]
transposed: gradients come back the way that copies went
    there = dispatch(comm, x[order // k], *sizes) => there = without_way_back(comm, x[order // k], *sizes)
messages: waits in 1 barrier
    received = comm.all_to_all(sent) => comm.barrier(); received = comm.all_to_all(sent)
raises: mine was called 2 times
    mine(there) => mine(there) + 0 * mine(there)
returns: rank 0 returned nothing
    return torch => torch
shape: the weighted sum for each token
    return torch.zeros_like(x).index_add(0, order // k, back * weights.flatten()[order, None]) => return there
""",
}
RIGHT = {
    "12.2": (by_rank, with_all_to_all_v),
}
COMPLETED = {
    "12.2": ["x[order // k]", "mine(there)", "back * weights.flatten()[order, None]"],
}
