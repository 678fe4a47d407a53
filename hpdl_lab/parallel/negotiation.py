"""Horovod's negotiation: rank 0 finds out which gradients are ready on every rank, and says what is added next.

Autograd may finish gradients in another order on another rank. If each rank added what it has first, rank 1 would add
w1 to rank 0's w2. So in every cycle each rank tells rank 0 what it has, and rank 0 answers with one order for all:

    rank 0  ready: w3, w2        --+                          +--> w3, w2
    rank 1  ready: w2, w3        --+--> rank 0: ready on all --+--> w3, w2
    rank 2  ready: w3, w2, w1    --+    are w3 and w2          +--> w3, w2      w1 is asked for again in the next cycle
"""

import time

import torch

NOT_READY, LACKING = -1, -2  # in an answer: not on all ranks yet; no rank has this gradient at all


def negotiate(comm, ready, lacking, n):
    """One cycle: which of n gradients are ready on every rank, in one order for all ranks.

    Args:    ready: indices of what this rank has and has not been answered, in the order in which it became ready;
             lacking: those among them of which it has no gradient and will give zeros. Different per rank.
    Returns: (order, absent): indices that are ready on all ranks, in rank 0's order; those that no rank has a gradient
             of. Both lists are the same on every rank.
    Steps: one gather, one broadcast.   Bytes: 4n out of every rank but rank 0, 4n(p - 1) into rank 0 and out of it.
    Ref: Sergeev & Del Balso 2018, section 3; Horovod's controller.
    """
    request = torch.full((n,), NOT_READY, dtype=torch.int32)
    for place, index in enumerate(ready):
        request[index] = place + n * (index in lacking)  # n and above: ready, with zeros
    requests = comm.gather(request)
    answer = torch.full((n,), NOT_READY, dtype=torch.int32)
    if requests is not None:
        everywhere = (requests >= 0).all(0)
        nowhere = (requests >= n).all(0)
        order = sorted(torch.nonzero(everywhere & ~nowhere).flatten().tolist(), key=lambda i: int(requests[0, i]) % n)
        answer[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order), dtype=torch.int32)
        answer[nowhere] = LACKING
    answer = comm.broadcast(answer).tolist()
    order = sorted((i for i in range(n) if answer[i] >= 0), key=answer.__getitem__)
    return order, [i for i in range(n) if answer[i] == LACKING]


def pause(comm, seconds):
    """Let `seconds` pass: of virtual time on simulated ranks, where `compute` spends it, else of real time."""
    end = comm.trace.clock() + round(seconds * 1e9)
    comm.compute(seconds)
    time.sleep(max(0, end - comm.trace.clock()) / 1e9)
