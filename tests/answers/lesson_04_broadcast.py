"""Answers to exercise 4.4 that the check must reject or accept; CI proves both."""

import torch

from hpdl_lab.collectives import chain
from hpdl_lab.collectives.chunks import chunk

from . import WrongAnswer

# -- broadcast: wrong --------------------------------------------------------------------------------------------------


def one_rank_after_the_other(comm, x, root=0, segments=4):
    """Everything is there before anything is passed on."""
    p, v = comm.size, (comm.rank - root) % comm.size
    for k in range(segments if v > 0 else 0):
        comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
    for k in range(segments if v < p - 1 else 0):
        comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    return x


def receives_or_sends(comm, x, root=0, segments=4):
    """While a segment is passed on, nothing comes in."""
    p, v = comm.size, (comm.rank - root) % comm.size
    for k in range(segments):
        if v > 0:
            comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
        if v < p - 1:
            comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    return x


def waits_for_all_in_every_step(comm, x, root=0, segments=4):
    for k in range(segments):
        chain.broadcast(comm, chunk(x, segments, k), root, 1)
        comm.barrier()
    return x


def whole_vector_per_segment(comm, x, root=0, segments=4):
    p, v = comm.size, (comm.rank - root) % comm.size
    for _ in range(segments):
        if v > 0:
            comm.recv(x, (comm.rank - 1) % p)
        if v < p - 1:
            comm.send(x, (comm.rank + 1) % p)
    return x


def root_sends_to_everybody(comm, x, root=0, segments=4):
    if comm.rank == root:
        for to in range(comm.size):
            if to != root:
                comm.send(x, to)
    else:
        comm.recv(x, root)
    return x


def root_is_always_0(comm, x, root=0, segments=4):
    return chain.broadcast(comm, x, 0, segments)


def counts_from_the_wrong_end(comm, x, root=0, segments=4):
    """Right for root 0, and for root 2 of four ranks."""
    return chain.broadcast(comm, x, -root % comm.size, segments)


def sends_what_has_not_come(comm, x, root=0, segments=4):
    """Starts its sends before the segments are there."""
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


def the_last_one_sends_too(comm, x, root=0, segments=4):
    p, v = comm.size, (comm.rank - root) % comm.size
    works = []
    for k in range(segments):
        if v > 0:
            comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
        works.append(comm.isend(chunk(x, segments, k), (comm.rank + 1) % p))
    for work in works:
        work.wait()
    return x


def one_segment_short(comm, x, root=0, segments=4):
    p, v = comm.size, (comm.rank - root) % comm.size
    for k in range(max(1, segments - 1)):
        if v > 0:
            comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
        if v < p - 1:
            comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    return x


def one_segment_too_many(comm, x, root=0, segments=4):
    p, v = comm.size, (comm.rank - root) % comm.size
    for k in range(segments + 1):
        if v > 0:
            comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
        if v < p - 1:
            comm.send(chunk(x, segments, k), (comm.rank + 1) % p)
    return x


def never_waits_for_its_segments(comm, x, root=0, segments=4):
    p, v = comm.size, (comm.rank - root) % comm.size
    for k in range(segments):
        if v > 0:
            comm.recv(chunk(x, segments, k), (comm.rank - 1) % p)
        if v < p - 1:
            comm.isend(chunk(x, segments, k), (comm.rank + 1) % p)
    return x


def broadcasts_and_forgets(comm, x, root=0, segments=4):
    chain.broadcast(comm, x, root, segments)


def cuts_without_the_rest(comm, x, root=0, segments=4):
    size = len(x) // segments
    chain.broadcast(comm, x[: size * segments], root, segments)
    return x


def into_a_new_tensor(comm, x, root=0, segments=4):
    return chain.broadcast(comm, x.clone(), root, segments)


# -- broadcast: right --------------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "4.4": (
        WrongAnswer(one_rank_after_the_other, "steps", "has all of x before it passes anything on"),
        WrongAnswer(receives_or_sends, "steps", "while a rank passes a segment on, nothing comes in"),
        WrongAnswer(waits_for_all_in_every_step, "steps", "a rank waits in 16 barriers"),
        WrongAnswer(whole_vector_per_segment, "bytes", "each segment is to be sent once"),
        WrongAnswer(root_sends_to_everybody, "peers", "on a chain it passes on to the next"),
        WrongAnswer(root_is_always_0, "root", "The data come from rank 2"),
        WrongAnswer(counts_from_the_wrong_end, "root", "The data come from rank 2"),
        WrongAnswer(sends_what_has_not_come, "order", "sent on before it had arrived"),
        WrongAnswer(the_last_one_sends_too, "deadlock", "there is a deadlock"),
        WrongAnswer(one_segment_short, "segment", "received 2 messages, and there are 3 segments: one message too"),
        WrongAnswer(one_segment_too_many, "segment", "sent 17 messages, and there are 16 segments"),
        WrongAnswer(never_waits_for_its_segments, "wait", "did not wait for"),
        WrongAnswer(broadcasts_and_forgets, "returns", "returned nothing: return x"),
        WrongAnswer(cuts_without_the_rest, "segment", "The segment with the last 1 element never arrived"),
        WrongAnswer(into_a_new_tensor, "in place", "x was not overwritten"),
    ),
}
RIGHT = {
    "4.4": (waits_at_the_end, receives_ahead),
}
