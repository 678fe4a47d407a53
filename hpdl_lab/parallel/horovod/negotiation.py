"""Horovod's negotiation: rank 0 finds out which gradients are ready on every rank, and says what is added next.

Autograd may finish gradients in another order on another rank. If each rank added what it has first, rank 1 would add
w1 to rank 0's w2. So in every cycle each rank tells rank 0 what it has, and rank 0 answers with one order for all:

    rank 0  ready: w3, w2        --+                          +--> w3, w2
    rank 1  ready: w2, w3        --+--> rank 0: ready on all --+--> w3, w2
    rank 2  ready: w3, w2, w1    --+    are w3 and w2          +--> w3, w2      w1 is asked for again in the next cycle
"""

import time
import zlib

import torch

from ...comm.waits import name_ranks

NOT_READY, LACKING = -1, -2  # in an answer: not on all ranks yet; no rank has this gradient at all
NONE = -1  # no rank differs


def negotiate(comm, ready, lacking, n, values=None, names=()):
    """One cycle: which of n gradients are ready on every rank, in one order for all ranks.

    Args:    ready: indices of what this rank has and has not been answered, in the order in which it became ready;
             lacking: those among them of which it has no gradient and will give zeros. Different per rank.
             values: checksums of the n parameters, to be compared besides, or None: on all ranks alike. names: theirs.
    Returns: (order, absent): indices that are ready on all ranks, in rank 0's order; those that no rank has a gradient
             of. Both lists are the same on every rank.
    Raises:  ValueError on every rank where `values` differ: averaged gradients keep equal replicas equal, no more.
    Steps: one gather, one broadcast.   Bytes: 4n out of every rank but rank 0, 4n(p - 1) into rank 0 and out of it;
    with values 4n more from each rank to rank 0, and 8 more back.
    Ref: Sergeev & Del Balso 2018, section 3; Horovod's controller.
    """
    request = torch.full((n,), NOT_READY, dtype=torch.int32)
    for place, index in enumerate(ready):
        request[index] = place + n * (index in lacking)  # n and above: ready, with zeros
    compares = values is not None
    requests = comm.gather(torch.cat([request, values]) if compares else request)
    answer = torch.full((n + 2 * compares,), NOT_READY, dtype=torch.int32)
    if requests is not None:
        if compares:
            requests, values = requests.split(n, dim=1)
            answer[n:] = torch.tensor(first_difference(values))
        everywhere = (requests >= 0).all(0)
        nowhere = (requests >= n).all(0)
        order = sorted(torch.nonzero(everywhere & ~nowhere).flatten().tolist(), key=lambda i: int(requests[0, i]) % n)
        answer[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order), dtype=torch.int32)
        answer[:n][nowhere] = LACKING
    answer = comm.broadcast(answer).tolist()
    if compares and answer[n] != NONE:
        raise ValueError(not_the_same(answer[n], names[answer[n + 1]]))
    order = sorted((i for i in range(n) if answer[i] >= 0), key=answer.__getitem__)
    return order, [i for i in range(n) if answer[i] == LACKING]


def checksums(params):
    """(n,) int32: a CRC-32 of the bytes of each parameter."""
    flat = [p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for p in params]
    return torch.tensor([zlib.crc32(data) - (1 << 31) for data in flat], dtype=torch.int32)


def first_difference(values):
    """(rank, index): the first rank whose checksums are not rank 0's, and where; (NONE, NONE). values: (p, n)."""
    differs = values != values[0]
    ranks = torch.nonzero(differs.any(1)).flatten().tolist()
    return (ranks[0], int(differs[ranks[0]].nonzero()[0])) if ranks else (NONE, NONE)


def not_the_same(rank, name):
    return (
        f"{name_ranks([rank])} began with other parameters than rank 0, first in {name}: they would stay apart, "
        "because only gradients are averaged. broadcast_parameters(comm, model) on every rank, before the first step"
    )


def pause(comm, seconds):
    """Let `seconds` pass: of virtual time on simulated ranks, where `compute` spends it, else of real time."""
    end = comm.trace.clock() + round(seconds * 1e9)
    comm.compute(seconds)
    time.sleep(max(0, end - comm.trace.clock()) / 1e9)
