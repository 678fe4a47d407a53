"""Answers to exercise 2.2 that the check must reject or accept; CI proves both."""

import numpy as np


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


def with_step(comm, w, g, step):
    """As the server does, with step(gradients) to take off w; gradients: (workers, d)."""
    if comm.rank > 0:
        return worker(comm, w, g)
    w -= step(np.array([comm.recv(np.empty_like(w), source) for source in range(1, comm.size)]))
    for to in range(1, comm.size):
        comm.send(w, to)
    return w


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


def one_or_the_other(comm, w, g, rate):
    return server(comm, w, g, rate) if comm.rank == 0 else worker(comm, w, g)


WRONG = {
    "2.2": """
mean @one_or_the_other: the sum of 3 gradients: divide by 3
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, workers=1) if comm.rank == 0
workers @one_or_the_other: You divided by 4, the number of ranks
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, workers=comm.size) if comm.rank == 0
workers @one_or_the_other: The gradient of rank 0 is in it
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, total=g.copy()) if comm.rank == 0
sign @one_or_the_other: a step uphill
    (comm, w, g, rate) if comm.rank = => (comm, w, g, -rate) if comm.rank =
rate @one_or_the_other: was not used
    (comm, w, g, rate) if comm.rank == => (comm, w, g, 1.0) if comm.rank ==
sum: Only the gradient of rank 3 is in it
    if comm.rank == 0:
        arriving = np.empty_like(w)
        for source in range(1, comm.size):
            comm.recv(arriving, source)
        w -= rate * arriving
        for to in range(1, comm.size):
            comm.send(w, to)
        return w
    return worker(comm, w, g)
order: before it had all gradients
    if comm.rank == 0:
        arriving = np.empty_like(w)
        for source in range(1, comm.size):
            w -= rate * comm.recv(arriving, source) / (comm.size - 1)
            comm.send(w, source)
        return w
    return worker(comm, w, g)
send back: the server's weights never arrived
    if comm.rank == 0:
        for source in range(1, comm.size):
            w -= rate * comm.recv(np.empty_like(w), source) / (comm.size - 1)
    else:
        comm.send(g, 0)
    return w
deadlock: receive first
    if comm.rank == 0:
        return server(comm, w, g, rate)
    comm.recv(w, 0)
    comm.send(g, 0)
    return w
bytes: bytes went out of the server
    if comm.rank == 0:
        server(comm, w, g, rate)
        for to in range(1, comm.size):
            comm.send(w, to)
        return w
    worker(comm, w, g)
    return comm.recv(w, 0)
bytes: bytes went into the server
    if comm.rank == 0:
        for source in range(1, comm.size):
            comm.recv(np.empty_like(w), source)
        return server(comm, w, g, rate)
    comm.send(w, 0)
    return worker(comm, w, g)
bytes: bytes went out of the server
    if comm.rank == 0:
        g[...] = 0
    comm.broadcast(w)
    gradients = comm.all_gather(g)
    w -= rate * gradients[1:].sum(axis=0) / (comm.size - 1)
    return w
peers: the workers talk to rank 0 only
    if comm.rank == 0:
        for source in range(1, comm.size):
            w -= rate * comm.recv(np.empty_like(w), source) / (comm.size - 1)
    else:
        comm.send(g, 0)
        comm.recv(w, comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(w, comm.rank + 1)
    return w
in place: w was not overwritten
    return server(comm, w.copy(), g, rate) if comm.rank == 0 else worker(comm, w.copy(), g)
returns: the server returned nothing
    if comm.rank == 0:
        server(comm, w, g, rate)
    else:
        worker(comm, w, g)
input: changed its gradient g
    if comm.rank == 0:
        return server(comm, w, g, rate)
    comm.send(g, 0)
    g[...] = comm.recv(w, 0)
    return w
size @one_or_the_other: here there is 1 worker: comm.size - 1
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, workers=3) if comm.rank == 0
rate @one_or_the_other: The rate was used twice
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate ** 2) if comm.rank == 0
sum: on the server should be
    return with_step(comm, w, g, lambda gradients: rate * gradients.sum(axis=0) // (comm.size - 1))
precision: The first digits are right
    return with_step(comm, w, g, lambda gradients: rate * gradients.astype("f4").mean(axis=0))
send back: a step from the weights of a worker
    if comm.rank > 0:
        return worker(comm, w, w - rate * g)
    w[...] = 0
    for source in range(1, comm.size):
        w += comm.recv(np.empty_like(w), source) / (comm.size - 1)
    for to in range(1, comm.size):
        comm.send(w, to)
    return w
send back: a step from the weights of a worker
    mean = np.zeros_like(w)
    if comm.rank == 0:
        server(comm, mean, g, -1.0)
    else:
        worker(comm, mean, g)
    w -= rate * mean
    return w
deadlock @one_or_the_other: leave out rank 3?
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, collect=range(1, comm.size - 1)) if comm.rank == 0
deadlock @one_or_the_other: leave out rank 1?
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, collect=range(2, comm.size)) if comm.rank == 0
raises @one_or_the_other: The workers are ranks 1 to 3
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, collect=range(1, comm.size + 1)) if comm.rank == 0
raises @one_or_the_other: The workers are ranks 1 to 3
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, collect=range(comm.size)) if comm.rank == 0
deadlock @one_or_the_other: rank 0 never sent to rank 3
    (comm, w, g, rate) if comm.rank == 0 => (comm, w, g, rate, answer=range(1, comm.size - 1)) if comm.rank == 0
loop: The gradient of rank 3 is missing: is a loop
    return with_step(comm, w, g, lambda gradients: rate * gradients[:-1].sum(axis=0) / (comm.size - 1))
order: before it had all gradients
    if comm.rank > 0:
        return worker(comm, w, g)
    before = w.copy()
    total = sum(comm.recv(np.empty_like(w), source) for source in range(1, comm.size))
    for to in range(1, comm.size):
        comm.send(before, to)
    w -= rate * total / (comm.size - 1)
    return w
sum: Only the gradient of rank 3 is in it
    arriving = np.empty_like(w)
    if comm.rank > 0:
        return worker(comm, w, g)
    parts = [comm.recv(arriving, source) for source in range(1, comm.size)]
    w -= rate * sum(parts) / (comm.size - 1)
    for to in range(1, comm.size):
        comm.send(w, to)
    return w
returns: something of type list
    return list(all_at_once(comm, w, g, rate))
returns: something of dtype float32
    return all_at_once(comm, w, g, rate).astype("f4")
wait: did not wait for 1 of its sends
    if comm.rank > 0:
        return worker(comm, w, g)
    w -= rate * sum(comm.recv(np.empty_like(w), source) for source in range(1, comm.size)) / (comm.size - 1)
    for to in range(1, comm.size):
        comm.isend(w, to)
    return w
""",
}
RIGHT = {
    "2.2": (one_or_the_other, with_collectives, all_at_once, from_the_last_worker),
}
COMPLETED = {
    "2.2": ["w -= rate * total / (comm.size - 1)\nfor worker in range(1, comm.size):\n    comm.send(w, worker)"],
}
