"""Answers to exercise 4.4 that the check must reject or accept; CI proves both."""

import torch

from hpdl_lab.collectives import chain
from hpdl_lab.collectives.chunks import chunk


def one_segment_short(comm, x, root=0, segments=4):
    p, v = comm.size, (comm.rank - root) % comm.size
    for k in range(max(1, segments - 1)):
        if v > 0:
            comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
        if v < p - 1:
            comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    return x


def waits_at_the_end(comm, x, root=0, segments=4):
    p, r = comm.size, comm.rank
    behind, leaving = (r - root) % p, []
    for k in range(segments):
        piece = chunk(x, segments, k)
        if behind > 0:
            comm.recv(piece, (r - 1) % p)
        if behind < p - 1:
            leaving.append(comm.isend(piece, (r + 1) % p))
    for work in leaving:
        work.wait()
    return x


def receives_ahead(comm, x, root=0, segments=4):
    """All receives are posted before the first is waited for; torch cuts where chunk cuts otherwise."""
    p, r = comm.size, comm.rank
    behind = (r - root) % p
    pieces = torch.tensor_split(x, segments)
    arriving = [comm.irecv(piece, (r - 1) % p) for piece in pieces] if behind > 0 else []
    leaving = []
    for k, piece in enumerate(pieces):
        if arriving:
            arriving[k].wait()
        if behind < p - 1:
            leaving.append(comm.isend(piece, (r + 1) % p))
    for work in leaving:
        work.wait()
    return x


WRONG = {
    "4.4": """
steps: every rank receives all of x before it passes anything on
    p, v = comm.size, (comm.rank - root) % comm.size
    for k in range(segments if v > 0 else 0):
        comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
    for k in range(segments if v < p - 1 else 0):
        comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    return x
steps @one_segment_short: while a rank passes a segment on, it receives nothing
    max(1, segments - 1) => segments
steps: a rank waits in 16 barriers
    for k in range(segments):
        chain.broadcast(comm, chunk(x, segments, k), root, 1)
        comm.barrier()
    return x
bytes @one_segment_short: send each segment once
    -     for k in range(max(1, segments - 1)):
    +     for _ in range(segments):
    -             comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
    +             comm.recv(x, (comm.rank - 1) % p)
    -             comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    +             comm.send(x, (comm.rank + 1) % p)
peers: on a chain it passes on to the next
    if comm.rank == root:
        for to in range(comm.size):
            if to != root:
                comm.send(x, to)
    else:
        comm.recv(x, root)
    return x
root: The data come from rank 2
    return chain.broadcast(comm, x, 0, segments)
root: The data come from rank 2
    return chain.broadcast(comm, x, -root % comm.size, segments)
order: did a rank send a segment on before it had arrived
    p, v = comm.size, (comm.rank - root) % comm.size
    works = []
    for k in range(segments):
        if v < p - 1:
            works.append(comm.isend(chunk(x, segments, k).clone(), (comm.rank + 1) % p))
        if v > 0:
            works.append(comm.irecv(chunk(x, segments, k), (comm.rank - 1) % p))
    for work in works:
        work.wait()
    return x
deadlock @one_segment_short: there is a deadlock
    -     for k in range(max(1, segments - 1)):
    +     works = []
    +     for k in range(segments):
    -         if v < p - 1:
    -             comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    +         works.append(comm.isend(chunk(x, segments, k), (comm.rank + 1) % p))
    +     for work in works:
    +         work.wait()
segment @one_segment_short: received 2 messages, and there are 3 segments: one message too
segment @one_segment_short: sent 17 messages, and there are 16 segments
    (max(1, segments - 1)): => (segments + 1):
wait @one_segment_short: did not wait for
    max(1, segments - 1) => segments
    send => isend
returns: returned nothing: return x
    chain.broadcast(comm, x, root, segments)
segment: The segment with the last 1 element never arrived
    size = len(x) // segments
    chain.broadcast(comm, x[: size * segments], root, segments)
    return x
in place: x was not overwritten
    return chain.broadcast(comm, x.clone(), root, segments)
""",
}
RIGHT = {
    "4.4": (waits_at_the_end, receives_ahead, chain.broadcast_by_steps),
}
COMPLETED = {
    "4.4": ["(comm.rank - 1) % comm.size", "(comm.rank + 1) % comm.size", "for work in leaving:\n    work.wait()"],
}
