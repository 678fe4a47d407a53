"""Answers to reduce_gradients of notebook 11 that a check must reject or accept; CI proves both."""

import torch

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


def gradient_of(placed):
    p = placed.parameter
    return torch.zeros_like(p) if p.grad is None else p.grad.contiguous()


def takes_the_mean(mesh, parameters):
    for placed in parameters:
        added(mesh, placed)
        placed.parameter.grad /= mesh["dp"].size


def added(mesh, placed, tp=True, shared=True, dp=True):
    """One gradient, added over what is not left out."""
    grad = gradient_of(placed)
    if tp and placed.over_tp:
        mesh["tp"].all_reduce(grad)
    if shared and placed.shared is not None:
        placed.shared.all_reduce(grad)
    placed.parameter.grad = mesh["dp"].all_reduce(grad) if dp else grad


def takes_the_mean_over_tp(mesh, parameters):
    for placed in parameters:
        added(mesh, placed)
        if placed.over_tp:
            placed.parameter.grad /= mesh["tp"].size


def takes_the_mean_over_stages(mesh, parameters):
    for placed in parameters:
        added(mesh, placed)
        if placed.shared is not None:
            placed.parameter.grad /= placed.shared.size


def over_everybody(mesh, parameters):
    for placed in parameters:
        placed.parameter.grad = mesh.comm.all_reduce(gradient_of(placed))


def always_over_tp(mesh, parameters):
    for placed in parameters:
        added(mesh, placed._replace(over_tp=True))


def never_over_tp(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, tp=False)


def takes_the_last_twice(mesh, parameters):
    for placed in [*parameters, parameters[-1]]:
        added(mesh, placed)


def shared_by_all(mesh, parameters):
    for placed in parameters:
        grad = gradient_of(placed)
        placed.shared.all_reduce(grad)
        placed.parameter.grad = mesh["dp"].all_reduce(grad)


def forgets_tied_weights(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, shared=False)


def tied_weights_over_all_stages(mesh, parameters):
    for placed in parameters:
        added(mesh, placed if placed.shared is None else placed._replace(shared=mesh["pp"]))


def one_or_the_other(mesh, parameters):
    """Over tp, or over the stages, or over dp, and not over two of them."""
    for placed in parameters:
        added(mesh, placed, dp=not placed.over_tp and placed.shared is None)


def tied_or_over_tp(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, tp=placed.shared is None)


def goes_by_names(mesh, parameters):
    for placed in parameters:
        added(mesh, placed._replace(over_tp="norm" in placed.name or "scale" in placed.name))


def twice_over_replicas(mesh, parameters):
    for placed in parameters:
        added(mesh, placed)
        if placed.over_tp:
            mesh["dp"].all_reduce(placed.parameter.grad)


def pipelines_instead_of_replicas(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, dp=False)
        placed.parameter.grad = (
            mesh["pp"].all_reduce(placed.parameter.grad) if mesh["pp"].size < 3 else gradient_of(placed)
        )


def leaves_out_what_has_no_gradient(mesh, parameters):
    for placed in parameters:
        if placed.parameter.grad is not None:
            added(mesh, placed)


def zeros_are_not_handed_back(mesh, parameters):
    for placed in parameters:
        p, had = placed.parameter, placed.parameter.grad
        added(mesh, placed)
        if had is None:
            p.grad = None


def adds_parameters_too(mesh, parameters):
    for placed in parameters:
        added(mesh, placed)
        mesh["dp"].all_reduce(placed.parameter.data)


def sends_without_wait(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, dp=False)
        comm, part = mesh["dp"], placed.parameter.grad.clone()
        for peer in set(range(comm.size)) - {comm.rank}:
            comm.isend(part, peer)
        for peer in set(range(comm.size)) - {comm.rank}:
            placed.parameter.grad += comm.recv(torch.empty_like(part), peer)


def gathers_all_replicas(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, dp=False)
        placed.parameter.grad = mesh["dp"].all_gather(placed.parameter.grad).sum(0)


def only_replica_0_adds(mesh, parameters):
    for placed in parameters:
        added(mesh, placed, dp=mesh.coordinates["dp"] == 0)


# -- right -------------------------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "11.3": (
        WrongAnswer(takes_the_mean, "mean", "That is divided by the 3 replicas of dp"),
        WrongAnswer(takes_the_mean_over_tp, "mean of parts", "divided by 2, a mean over tp: each"),
        WrongAnswer(takes_the_mean_over_stages, "mean of parts", "divided by 2, a mean over pp: each"),
        WrongAnswer(over_everybody, "axis", "the sum over dp and pp and tp: pp and tp too much"),
        WrongAnswer(always_over_tp, "axis", "the sum over dp and tp: tp too much"),
        WrongAnswer(never_over_tp, "axis", "the sum over dp only: tp is missing"),
        WrongAnswer(forgets_tied_weights, "axis", "the sum over dp only: pp is missing"),
        WrongAnswer(tied_weights_over_all_stages, "deadlock", "not those between"),
        WrongAnswer(one_or_the_other, "axis", "the sum over tp only: dp is missing"),
        WrongAnswer(tied_or_over_tp, "axis", "the sum over dp and pp only: tp is missing"),
        WrongAnswer(goes_by_names, "axis", "should be"),
        WrongAnswer(shared_by_all, "shared", "where one stage alone holds the parameter"),
        WrongAnswer(twice_over_replicas, "twice", "it was added over dp twice"),
        WrongAnswer(takes_the_last_twice, "twice", "it was added over each of them twice"),
        WrongAnswer(pipelines_instead_of_replicas, "axis", "That is the sum over pp: pp too much, and dp is missing"),
        WrongAnswer(leaves_out_what_has_no_gradient, "deadlock", "also a replica whose gradient"),
        WrongAnswer(zeros_are_not_handed_back, "hand back", "still has no gradient"),
        WrongAnswer(adds_parameters_too, "parameters", "the step is the optimizer's"),
        WrongAnswer(sends_without_wait, "wait", "did not wait for 6 of its sends"),
        WrongAnswer(gathers_all_replicas, "messages", "one all_reduce of a gradient for each axis"),
        WrongAnswer(only_replica_0_adds, "deadlock", "there is a deadlock"),
    ),
}
RIGHT = {
    "11.3": (replicas_first, one_message_per_axis),
}
