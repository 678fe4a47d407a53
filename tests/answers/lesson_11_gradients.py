"""Answers to reduce_gradients of notebook 11 that a check must reject or accept; CI proves both."""

import torch


def gradient_of(placed):
    p = placed.parameter
    return torch.zeros_like(p) if p.grad is None else p.grad.contiguous()


def added(mesh, placed, tp=True, shared=True, dp=True):
    """One gradient, added over what is not left out."""
    grad = gradient_of(placed)
    if tp and placed.over_tp:
        mesh["tp"].all_reduce(grad)
    if shared and placed.shared is not None:
        placed.shared.all_reduce(grad)
    placed.parameter.grad = mesh["dp"].all_reduce(grad) if dp else grad


def never_over_tp(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, tp=False)


def replicas_first(mesh, parameters):
    """In another order, into the gradient that is there."""
    for placed in parameters:
        p = placed.parameter
        p.grad = gradient_of(placed).clone()
        for comm in (mesh["dp"], placed.shared, mesh["tp"] if placed.over_tp else None):
            if comm is not None and comm.size > 1:
                comm.all_reduce(p.grad)


def one_message_per_axis(mesh, parameters):
    """Everything that is added over an axis packed into one flat tensor."""
    tp = [p for p in parameters if p.over_tp]
    shared = [p for p in parameters if p.shared is not None]
    for comm, group in (
        (mesh["tp"], tp),
        (shared[0].shared if shared else None, shared),
        (mesh["dp"], parameters),
    ):
        if group:
            flat = comm.all_reduce(torch.cat([gradient_of(placed).flatten() for placed in group]))
            parts = flat.split([placed.parameter.numel() for placed in group])
            for placed, part in zip(group, parts, strict=True):
                placed.parameter.grad = part.view_as(placed.parameter)


WRONG = {
    "11.2": """
mean: That is divided by the 3 replicas of dp
    for placed in parameters:
        added(mesh, placed)
        placed.parameter.grad /= mesh["dp"].size
mean of parts: divided by 2, a mean over tp: each
    for placed in parameters:
        added(mesh, placed)
        if placed.over_tp:
            placed.parameter.grad /= mesh["tp"].size
mean of parts: divided by 2, a mean over pp: each
    for placed in parameters:
        added(mesh, placed)
        if placed.shared is not None:
            placed.parameter.grad /= placed.shared.size
axis @never_over_tp: the sum over dp and pp and tp: pp and tp too much
    added(mesh, placed, tp=False) => placed.parameter.grad = mesh.comm.all_reduce(gradient_of(placed))
axis @never_over_tp: the sum over dp and tp: tp too much
    (mesh, placed, tp=False) => (mesh, placed._replace(over_tp=True))
axis @never_over_tp: the sum over dp only: tp is missing
axis @never_over_tp: the sum over dp only: pp is missing
    tp= => shared=
deadlock @never_over_tp: only the stages that hold
    (mesh, placed, tp=False) => (mesh, placed if placed.shared is None else placed._replace(shared=mesh['pp']))
axis @never_over_tp: the sum over tp only: dp is missing
    tp=False => dp=not placed.over_tp and placed.shared is None
axis @never_over_tp: the sum over dp and pp only: tp is missing
    False => placed.shared is None
axis @never_over_tp: should be
    (mesh, placed, tp=False) => (mesh, placed._replace(over_tp='norm' in placed.name or 'scale' in placed.name))
shared: if one stage alone holds the parameter
    for placed in parameters:
        grad = gradient_of(placed)
        placed.shared.all_reduce(grad)
        placed.parameter.grad = mesh["dp"].all_reduce(grad)
twice: it was added over dp twice
    for placed in parameters:
        added(mesh, placed)
        if placed.over_tp:
            mesh["dp"].all_reduce(placed.parameter.grad)
twice @never_over_tp: it was added over each of them twice
    parameters: => [*parameters, parameters[-1]]:
    (mesh, placed, tp=False) => (mesh, placed)
axis: That is the sum over pp: pp too much, and dp is missing
    for placed in parameters:
        added(mesh, placed, dp=False)
        placed.parameter.grad = (
            mesh["pp"].all_reduce(placed.parameter.grad) if mesh["pp"].size < 3 else gradient_of(placed)
        )
deadlock: also a replica whose gradient
    for placed in parameters:
        if placed.parameter.grad is not None:
            added(mesh, placed)
hand back: still has no gradient
    for placed in parameters:
        p, had = placed.parameter, placed.parameter.grad
        added(mesh, placed)
        if had is None:
            p.grad = None
parameters: the step is the optimizer's
    for placed in parameters:
        added(mesh, placed)
        mesh["dp"].all_reduce(placed.parameter.data)
wait: did not wait for 6 of its sends
    for placed in parameters:
        added(mesh, placed, dp=False)
        comm, part = mesh["dp"], placed.parameter.grad.clone()
        for peer in set(range(comm.size)) - {comm.rank}:
            comm.isend(part, peer)
        for peer in set(range(comm.size)) - {comm.rank}:
            placed.parameter.grad += comm.recv(torch.empty_like(part), peer)
messages: one all_reduce of a gradient for each axis
    for placed in parameters:
        added(mesh, placed, dp=False)
        placed.parameter.grad = mesh["dp"].all_gather(placed.parameter.grad).sum(0)
deadlock @never_over_tp: there is a deadlock
    tp=False => dp=mesh.coordinates['dp'] == 0
""",
}
RIGHT = {
    "11.2": (replicas_first, one_message_per_axis),
}
COMPLETED = {
    "11.2": ['if placed.shared is not None:\n    placed.shared.all_reduce(grad)\nmesh["dp"].all_reduce(grad)'],
}
