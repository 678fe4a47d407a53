"""Answers to exercise 2.2 that the check must reject or accept; CI proves both."""

import numpy as np

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
