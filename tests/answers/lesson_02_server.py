"""Answers to exercise 2.2 that the check must reject or accept; CI proves both."""

import numpy as np

from . import WrongAnswer

# -- server_step: wrong ------------------------------------------------------------------------------------------------


def server(comm, w, g, rate, workers=None, total=None, collect=None, answer=None):
    """What the server does in many of the answers below: collect, step, send out; the ranges are of ranks."""
    total = np.zeros_like(w) if total is None else total
    for worker in collect or range(1, comm.size):
        total += comm.recv(np.empty_like(w), worker)
    w -= rate * total / (workers or comm.size - 1)
    for worker in answer or range(1, comm.size):
        comm.send(w, worker)
    return w


def worker(comm, w, g):
    comm.send(g, 0)
    return comm.recv(w, 0)


def adds_and_forgets_to_divide(comm, w, g, rate):
    return server(comm, w, g, rate, workers=1) if comm.rank == 0 else worker(comm, w, g)


def counts_the_server_as_a_worker(comm, w, g, rate):
    return server(comm, w, g, rate, workers=comm.size) if comm.rank == 0 else worker(comm, w, g)


def adds_the_gradient_of_the_server(comm, w, g, rate):
    return server(comm, w, g, rate, total=g.copy()) if comm.rank == 0 else worker(comm, w, g)


def walks_uphill(comm, w, g, rate):
    return server(comm, w, g, -rate) if comm.rank == 0 else worker(comm, w, g)


def forgets_the_rate(comm, w, g, rate):
    return server(comm, w, g, 1.0) if comm.rank == 0 else worker(comm, w, g)


def keeps_the_last_gradient(comm, w, g, rate):
    if comm.rank == 0:
        arriving = np.empty_like(w)
        for source in range(1, comm.size):
            comm.recv(arriving, source)
        w -= rate * arriving
        for to in range(1, comm.size):
            comm.send(w, to)
        return w
    return worker(comm, w, g)


def steps_after_every_gradient(comm, w, g, rate):
    """Asynchronous, as some servers are: each worker gets the weights as they are when its own gradient is in."""
    if comm.rank == 0:
        arriving = np.empty_like(w)
        for source in range(1, comm.size):
            w -= rate * comm.recv(arriving, source) / (comm.size - 1)
            comm.send(w, source)
        return w
    return worker(comm, w, g)


def sends_no_weights_back(comm, w, g, rate):
    if comm.rank == 0:
        for source in range(1, comm.size):
            w -= rate * comm.recv(np.empty_like(w), source) / (comm.size - 1)
    else:
        comm.send(g, 0)
    return w


def waits_for_the_server_first(comm, w, g, rate):
    if comm.rank == 0:
        return server(comm, w, g, rate)
    comm.recv(w, 0)
    comm.send(g, 0)
    return w


def sends_everything_twice(comm, w, g, rate):
    if comm.rank == 0:
        server(comm, w, g, rate)
        for to in range(1, comm.size):
            comm.send(w, to)
        return w
    worker(comm, w, g)
    return comm.recv(w, 0)


def pushes_its_weights_too(comm, w, g, rate):
    if comm.rank == 0:
        for source in range(1, comm.size):
            comm.recv(np.empty_like(w), source)
        return server(comm, w, g, rate)
    comm.send(w, 0)
    return worker(comm, w, g)


def everybody_averages(comm, w, g, rate):
    """No server at all."""
    if comm.rank == 0:
        g[...] = 0
    comm.broadcast(w)
    gradients = comm.all_gather(g)
    w -= rate * gradients[1:].sum(axis=0) / (comm.size - 1)
    return w


def passes_the_weights_along(comm, w, g, rate):
    """Saves the server's way out: a chain."""
    if comm.rank == 0:
        for source in range(1, comm.size):
            w -= rate * comm.recv(np.empty_like(w), source) / (comm.size - 1)
    else:
        comm.send(g, 0)
        comm.recv(w, comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(w, comm.rank + 1)
    return w


def makes_new_weights(comm, w, g, rate):
    return server(comm, w.copy(), g, rate) if comm.rank == 0 else worker(comm, w.copy(), g)


def steps_without_return(comm, w, g, rate):
    if comm.rank == 0:
        server(comm, w, g, rate)
    else:
        worker(comm, w, g)


def adds_into_its_gradient(comm, w, g, rate):
    if comm.rank == 0:
        return server(comm, w, g, rate)
    comm.send(g, 0)
    g[...] = comm.recv(w, 0)
    return w


def for_three_workers(comm, w, g, rate):
    return server(comm, w, g, rate, workers=3) if comm.rank == 0 else worker(comm, w, g)


def uses_the_rate_twice(comm, w, g, rate):
    return server(comm, w, g, rate**2) if comm.rank == 0 else worker(comm, w, g)


def with_step(comm, w, g, step):
    """As the server does, with step(gradients) to take off w; gradients: (workers, d)."""
    if comm.rank > 0:
        return worker(comm, w, g)
    w -= step(np.array([comm.recv(np.empty_like(w), source) for source in range(1, comm.size)]))
    for to in range(1, comm.size):
        comm.send(w, to)
    return w


def rounds_its_step_down(comm, w, g, rate):
    return with_step(comm, w, g, lambda gradients: rate * gradients.sum(axis=0) // (comm.size - 1))


def adds_in_float32(comm, w, g, rate):
    return with_step(comm, w, g, lambda gradients: rate * gradients.astype("f4").mean(axis=0))


def adds_one_too_few(comm, w, g, rate):
    return with_step(comm, w, g, lambda gradients: rate * gradients[:-1].sum(axis=0) / (comm.size - 1))


def averages_weights(comm, w, g, rate):
    """Every worker takes a step of its own, and the server averages where they have arrived."""
    if comm.rank > 0:
        return worker(comm, w, w - rate * g)
    w[...] = 0
    for source in range(1, comm.size):
        w += comm.recv(np.empty_like(w), source) / (comm.size - 1)
    for to in range(1, comm.size):
        comm.send(w, to)
    return w


def workers_step_themselves(comm, w, g, rate):
    """The server sends the mean gradient back."""
    mean = np.zeros_like(w)
    if comm.rank == 0:
        server(comm, mean, g, -1.0)
    else:
        worker(comm, mean, g)
    w -= rate * mean
    return w


def leaves_out_the_last_worker(comm, w, g, rate):
    return server(comm, w, g, rate, collect=range(1, comm.size - 1)) if comm.rank == 0 else worker(comm, w, g)


def leaves_out_the_first_worker(comm, w, g, rate):
    return server(comm, w, g, rate, collect=range(2, comm.size)) if comm.rank == 0 else worker(comm, w, g)


def one_worker_too_many(comm, w, g, rate):
    return server(comm, w, g, rate, collect=range(1, comm.size + 1)) if comm.rank == 0 else worker(comm, w, g)


def counts_from_rank_0(comm, w, g, rate):
    return server(comm, w, g, rate, collect=range(comm.size)) if comm.rank == 0 else worker(comm, w, g)


def answers_one_worker_too_few(comm, w, g, rate):
    return server(comm, w, g, rate, answer=range(1, comm.size - 1)) if comm.rank == 0 else worker(comm, w, g)


def sends_before_the_step(comm, w, g, rate):
    if comm.rank > 0:
        return worker(comm, w, g)
    before = w.copy()
    total = sum(comm.recv(np.empty_like(w), source) for source in range(1, comm.size))
    for to in range(1, comm.size):
        comm.send(before, to)
    w -= rate * total / (comm.size - 1)
    return w


def one_place_for_all(comm, w, g, rate):
    """Every gradient is received into the same array, and looked at only then."""
    arriving = np.empty_like(w)

    if comm.rank > 0:
        return worker(comm, w, g)
    parts = [comm.recv(arriving, source) for source in range(1, comm.size)]
    w -= rate * sum(parts) / (comm.size - 1)
    for to in range(1, comm.size):
        comm.send(w, to)
    return w


def returns_a_list(comm, w, g, rate):
    return list(all_at_once(comm, w, g, rate))


def returns_float32(comm, w, g, rate):
    return all_at_once(comm, w, g, rate).astype("f4")


def never_waits_for_its_sends(comm, w, g, rate):
    if comm.rank > 0:
        return worker(comm, w, g)
    w -= rate * sum(comm.recv(np.empty_like(w), source) for source in range(1, comm.size)) / (comm.size - 1)
    for to in range(1, comm.size):
        comm.isend(w, to)
    return w


# -- server_step: right ------------------------------------------------------------------------------------------------


def with_collectives(comm, w, g, rate):
    """gather on the server, one step, broadcast: the same messages."""
    gradients = comm.gather(g)
    if comm.rank == 0:
        w -= rate * gradients[1:].mean(axis=0)
    return comm.broadcast(w)


def all_at_once(comm, w, g, rate):
    """The server posts all its receives, then all its sends, before it waits for any."""
    if comm.rank > 0:
        return worker(comm, w, g)
    stack = np.empty((comm.size - 1, *w.shape))
    for work in [comm.irecv(stack[r - 1], r) for r in range(1, comm.size)]:
        work.wait()
    w -= rate * stack.mean(axis=0)
    for work in [comm.isend(w, r) for r in range(1, comm.size)]:
        work.wait()
    return w


def from_the_last_worker(comm, w, g, rate):
    workers = range(comm.size - 1, 0, -1)
    return server(comm, w, g, rate, collect=workers, answer=workers) if comm.rank == 0 else worker(comm, w, g)


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "2.2": (
        WrongAnswer(adds_and_forgets_to_divide, "mean", "the sum of 3 gradients: divide by 3"),
        WrongAnswer(counts_the_server_as_a_worker, "workers", "You divided by 4, the number of ranks"),
        WrongAnswer(adds_the_gradient_of_the_server, "workers", "The gradient of rank 0 is in it"),
        WrongAnswer(walks_uphill, "sign", "a step uphill"),
        WrongAnswer(forgets_the_rate, "rate", "was not used"),
        WrongAnswer(keeps_the_last_gradient, "sum", "Only the gradient of rank 3 is in it"),
        WrongAnswer(steps_after_every_gradient, "order", "before it had all gradients"),
        WrongAnswer(sends_no_weights_back, "send back", "the server's never arrived"),
        WrongAnswer(waits_for_the_server_first, "deadlock", "receive first"),
        WrongAnswer(sends_everything_twice, "bytes", "bytes went out of the server"),
        WrongAnswer(pushes_its_weights_too, "bytes", "bytes went into the server"),
        WrongAnswer(everybody_averages, "bytes", "bytes went out of the server"),
        WrongAnswer(passes_the_weights_along, "peers", "the workers talk to rank 0 only"),
        WrongAnswer(makes_new_weights, "in place", "w was not overwritten"),
        WrongAnswer(steps_without_return, "returns", "the server returned nothing"),
        WrongAnswer(adds_into_its_gradient, "input", "changed its gradient g"),
        WrongAnswer(for_three_workers, "size", "here there is 1 worker: comm.size - 1"),
        WrongAnswer(uses_the_rate_twice, "rate", "The rate was used twice"),
        WrongAnswer(rounds_its_step_down, "sum", "on the server should be"),
        WrongAnswer(adds_in_float32, "precision", "The first digits are right"),
        WrongAnswer(averages_weights, "send back", "a step from the weights of a worker"),
        WrongAnswer(workers_step_themselves, "send back", "a step from the weights of a worker"),
        WrongAnswer(leaves_out_the_last_worker, "deadlock", "leave out rank 3?"),
        WrongAnswer(leaves_out_the_first_worker, "deadlock", "leave out rank 1?"),
        WrongAnswer(one_worker_too_many, "raises", "The workers are ranks 1 to 3"),
        WrongAnswer(counts_from_rank_0, "raises", "The workers are ranks 1 to 3"),
        WrongAnswer(answers_one_worker_too_few, "deadlock", "rank 0 never sent to rank 3"),
        WrongAnswer(adds_one_too_few, "loop", "The gradient of rank 3 is missing in it"),
        WrongAnswer(sends_before_the_step, "order", "before it had all gradients"),
        WrongAnswer(one_place_for_all, "sum", "Only the gradient of rank 3 is in it"),
        WrongAnswer(returns_a_list, "returns", "something of type list"),
        WrongAnswer(returns_float32, "returns", "something of dtype float32"),
        WrongAnswer(never_waits_for_its_sends, "wait", "did not wait for 1 of its sends"),
    ),
}
RIGHT = {
    "2.2": (with_collectives, all_at_once, from_the_last_worker),
}
