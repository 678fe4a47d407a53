"""Answers to gpipe, one_f_one_b and zero_bubble_h1 of notebook 10 that a check must reject or accept."""

from hpdl_lab.schedules import Action
from hpdl_lab.schedules.gpipe import gpipe
from hpdl_lab.schedules.one_f_one_b import one_f_one_b, zero_bubble_h1


def last_micro_batch_first(rank, ranks, micro_batches):
    """Backward in the opposite order, as in the picture of GPipe's paper."""
    forwards = [Action(rank, "F", i) for i in range(micro_batches)]
    return forwards + [Action(rank, "B", i) for i in reversed(range(micro_batches))]


def gpipe_by_loops(rank, ranks, micro_batches):
    row = []
    for kind in "FB":
        for i in range(micro_batches):
            row.append(Action(rank, kind, i))
    return tuple(row)


def plain_tuples(rank, ranks, micro_batches):
    return [(rank, kind, i) for kind in "FB" for i in range(micro_batches)]


def warmed_up(rank, micro_batches, warm_up):
    """1F1B with so many forwards before its pairs."""
    warm_up = max(0, min(warm_up, micro_batches))
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "F", warm_up + i), Action(rank, "B", i)]
    return row + [Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]


def counts_what_is_live(rank, ranks, micro_batches):
    """Forward while there is room for p - rank micro-batches, else backward."""
    row, begun, ended = [], 0, 0
    while ended < micro_batches:
        if begun < micro_batches and begun - ended < ranks - rank:
            row.append(Action(rank, "F", begun))
            begun += 1
        else:
            row.append(Action(rank, "B", ended))
            ended += 1
    return row


def as_torch_has_it(rank, ranks, micro_batches):
    """One forward more in the warm-up, then backward first."""
    warm_up = min(ranks - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        row += [Action(rank, "B", i - warm_up), Action(rank, "F", i)]
    return tuple(row + [Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)])


def kept_back(rank, ranks, micro_batches, kept, warm_up=None):
    """ZB-H1 that keeps so many Ws back."""
    warm_up = ranks - 1 - rank if warm_up is None else warm_up
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches):
        row += [Action(rank, "F", warm_up + i)] if warm_up + i < micro_batches else []
        row += [Action(rank, "I", i)] + ([Action(rank, "W", i - kept)] if i >= kept else [])
    return row + [Action(rank, "W", i) for i in range(max(0, micro_batches - kept), micro_batches)]


def from_a_queue(rank, ranks, micro_batches):
    """Ws wait in a queue, which has room for `rank` of them."""
    row, queue = [], []
    for _, kind, i in one_f_one_b(rank, ranks, micro_batches):
        if kind == "F":
            row.append(Action(rank, "F", i))
            continue
        row.append(Action(rank, "I", i))
        queue.append(Action(rank, "W", i))
        if len(queue) > rank:
            row.append(queue.pop(0))
    return row + queue


def by_slots(rank, ranks, micro_batches):
    """The same from three counters."""
    row, forward, back, weight = [], 0, 0, 0
    while weight < micro_batches:
        if forward < micro_batches and forward - back < ranks - rank and forward - weight < ranks:
            row.append(Action(rank, "F", forward))
            forward += 1
        elif back < micro_batches and back < forward and back - weight <= rank:
            row.append(Action(rank, "I", back))
            back += 1
        else:
            row.append(Action(rank, "W", weight))
            weight += 1
    return row


WRONG = {
    "10.1": """
lost: never does the forward of the last micro-batch, 3
    return [Action(rank, kind, i) for kind in "FB" for i in range(max(1, micro_batches - 1))]
lost @plain_tuples: has no backward at all
    (rank, kind, i) for kind in 'FB' => Action(rank, 'F', i)
forwards first: only one of 3 ranks works at a time: no pipeline
    return [Action(rank, kind, i) for i in range(micro_batches) for kind in "FB"]
forwards first: while forwards are still to come
    return one_f_one_b(rank, ranks, micro_batches)
stage @plain_tuples: An Action is (stage, kind, micro-batch)
    (rank, kind, i) => Action(i, kind, rank)
stage: rank 0 holds stage 0 and no other
    return gpipe((rank + 1) % ranks, ranks, micro_batches)
micro-batch: there is no micro-batch 4, they go from 0 to 3
    return [Action(rank, kind, i) for kind in "FB" for i in range(1, micro_batches + 1)]
micro-batch: It does 5 forwards, and 4 are needed: one forward too
    return [Action(rank, kind, i) for kind in "FB" for i in range(micro_batches + 1)]
order: rank 0 does 0B0 before 0F0
    return [Action(rank, kind, i) for kind in "BF" for i in range(micro_batches)]
bubble: Do all ranks take the micro-batches in the
    row = gpipe(rank, ranks, micro_batches)
    return row[:micro_batches] + row[micro_batches:][:: -1 if rank % 2 else 1]
twice: does 0F0 2 times
    return [Action(rank, "F", 0), *gpipe(rank, ranks, micro_batches)]
kind: one each of F and B
    return [Action(rank, kind, i) for kind in "FIW" for i in range(micro_batches)]
returns: each item is an Action
    return [str(action) for action in gpipe(rank, ranks, micro_batches)]
raises: KeyError: 2
    return {0: gpipe(0, ranks, micro_batches), 1: gpipe(1, ranks, micro_batches)}[rank]
""",
    "10.2": """
deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, which
    return warmed_up(rank, micro_batches, rank)
bubble: Warm-up: how many forwards
    return warmed_up(rank, micro_batches, ranks - 2 - rank)
memory: Backward should come 1 forward sooner
    return warmed_up(rank, micro_batches, ranks - rank)
memory: That is GPipe
    return gpipe(rank, ranks, micro_batches)
memory: A later rank gets its first backward sooner
    return warmed_up(rank, micro_batches, ranks - 1)
bubble: not 33%
    return warmed_up(rank, micro_batches, 0)
lost: never does the backward of micro-batches 2, 3
    row = one_f_one_b(rank, ranks, micro_batches)
    return row[: len(row) - min(ranks - 1 - rank, micro_batches)]
lost: the last micro-batch, 3
    return one_f_one_b(rank, ranks, max(1, micro_batches - 1))
micro-batch: there is no micro-batch 2
    warm_up = ranks - 1 - rank  # also where there are fewer micro-batches
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "F", warm_up + i), Action(rank, "B", i)]
    return row + [Action(rank, "B", i) for i in range(max(0, micro_batches - warm_up), micro_batches)]
order: rank 2 does 2B0 before 2F0
    warm_up = min(ranks - 1 - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "B", i), Action(rank, "F", warm_up + i)]
    return row + [Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]
bubble: is enough
    warm_up = min(ranks - 1 - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        row += [Action(rank, "F", i), Action(rank, "B", i)]
    return row + [Action(rank, "B", i) for i in reversed(range(warm_up))]
timeout @counts_what_is_live: Is there a loop that never ends?
    else => elif begun - ended == ranks - rank
""",
    "10.3": """
bubble: Every W follows its I at once
    return kept_back(rank, ranks, micro_batches, 0)
memory: rank 0 holds the activations of 4 micro-batches
    return kept_back(rank, ranks, micro_batches, micro_batches)
memory: How many Ws do you keep back?
    return kept_back(rank, ranks, micro_batches, ranks - 1 - rank)
bubble: which W is left by then?
    return kept_back(rank, ranks, micro_batches, max(0, rank - 1))
memory: How many Ws do you keep back?
    return kept_back(rank, ranks, micro_batches, rank + 1)
lost: the weights of that stage would miss its examples
    row = zero_bubble_h1(rank, ranks, micro_batches)
    return row[: len(row) - rank]
micro-batch: does 5 input gradients, and 4 are needed
    row = zero_bubble_h1(rank, ranks, micro_batches)
    return [*row, Action(rank, "I", micro_batches), Action(rank, "W", micro_batches)]
order: before
    row = kept_back(rank, ranks, micro_batches, 0)
    return [Action(rank, {"I": "W", "W": "I"}.get(kind, kind), i) for _, kind, i in row]
kind: one each of F, I and W
    return one_f_one_b(rank, ranks, micro_batches)
lost: the previous stage would wait forever
    return [a for a in zero_bubble_h1(rank, ranks, micro_batches) if a != (rank, "I", micro_batches - 1)]
deadlock: there is a deadlock: rank 0 waits at 0I0
    return kept_back(rank, ranks, micro_batches, ranks - 1 - rank, warm_up=rank)
""",
}
RIGHT = {
    "10.1": (last_micro_batch_first, gpipe_by_loops, plain_tuples),
    "10.2": (counts_what_is_live, as_torch_has_it),
    "10.3": (from_a_queue, by_slots),
}
COMPLETED = {
    "10.1": ['[Action(rank, "B", i) for i in range(micro_batches)]'],
    "10.2": [
        'Action(rank, "F", warm_up + i)',
        'Action(rank, "B", i)',
        '[Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]',
    ],
    "10.3": [
        'if warm_up + i < micro_batches:\n    row.append(Action(rank, "F", warm_up + i))',
        "rank",
        "rank",
        '[Action(rank, "W", i) for i in range(max(0, micro_batches - rank), micro_batches)]',
    ],
}
