"""Answers to gpipe, one_f_one_b and zero_bubble_h1 of notebook 10 that a check must reject or accept."""

from hpdl_lab.schedules import Action
from hpdl_lab.schedules.gpipe import gpipe
from hpdl_lab.schedules.one_f_one_b import one_f_one_b
from hpdl_lab.schedules.zero_bubble import zero_bubble_h1

from . import WrongAnswer

# -- gpipe, wrong ------------------------------------------------------------------------------------------------------


def drops_the_last_micro_batch(rank, ranks, micro_batches):
    return [Action(rank, kind, i) for kind in "FB" for i in range(max(1, micro_batches - 1))]


def forgets_backward(rank, ranks, micro_batches):
    return [Action(rank, "F", i) for i in range(micro_batches)]


def one_at_a_time(rank, ranks, micro_batches):
    return [Action(rank, kind, i) for i in range(micro_batches) for kind in "FB"]


def one_f_one_b_already(rank, ranks, micro_batches):
    return one_f_one_b(rank, ranks, micro_batches)


def stage_and_micro_batch_swapped(rank, ranks, micro_batches):
    return [Action(i, kind, rank) for kind in "FB" for i in range(micro_batches)]


def works_for_the_neighbor(rank, ranks, micro_batches):
    return gpipe((rank + 1) % ranks, ranks, micro_batches)


def counts_from_one(rank, ranks, micro_batches):
    return [Action(rank, kind, i) for kind in "FB" for i in range(1, micro_batches + 1)]


def one_micro_batch_too_many(rank, ranks, micro_batches):
    return [Action(rank, kind, i) for kind in "FB" for i in range(micro_batches + 1)]


def backwards_first(rank, ranks, micro_batches):
    return [Action(rank, kind, i) for kind in "BF" for i in range(micro_batches)]


def every_other_rank_the_other_way(rank, ranks, micro_batches):
    row = gpipe(rank, ranks, micro_batches)
    return row[:micro_batches] + row[micro_batches:][:: -1 if rank % 2 else 1]


def forward_twice(rank, ranks, micro_batches):
    return [Action(rank, "F", 0), *gpipe(rank, ranks, micro_batches)]


def halves(rank, ranks, micro_batches):
    return [Action(rank, kind, i) for kind in "FIW" for i in range(micro_batches)]


def strings(rank, ranks, micro_batches):
    return [str(action) for action in gpipe(rank, ranks, micro_batches)]


def only_two_ranks(rank, ranks, micro_batches):
    return {0: gpipe(0, ranks, micro_batches), 1: gpipe(1, ranks, micro_batches)}[rank]


# -- gpipe, right ------------------------------------------------------------------------------------------------------


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


# -- one_f_one_b, wrong ------------------------------------------------------------------------------------------------


def warmed_up(rank, micro_batches, warm_up):
    """1F1B with so many forwards before its pairs."""
    warm_up = max(0, min(warm_up, micro_batches))
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "F", warm_up + i), Action(rank, "B", i)]
    return row + [Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]


def warm_up_of_the_mirror_rank(rank, ranks, micro_batches):
    return warmed_up(rank, micro_batches, rank)


def one_forward_too_few(rank, ranks, micro_batches):
    return warmed_up(rank, micro_batches, ranks - 2 - rank)


def one_forward_too_many(rank, ranks, micro_batches):
    return warmed_up(rank, micro_batches, ranks - rank)


def gpipe_still(rank, ranks, micro_batches):
    return gpipe(rank, ranks, micro_batches)


def same_warm_up_everywhere(rank, ranks, micro_batches):
    return warmed_up(rank, micro_batches, ranks - 1)


def no_warm_up(rank, ranks, micro_batches):
    return warmed_up(rank, micro_batches, 0)


def forgets_the_cool_down(rank, ranks, micro_batches):
    row = one_f_one_b(rank, ranks, micro_batches)
    return row[: len(row) - min(ranks - 1 - rank, micro_batches)]


def drops_the_last_pair(rank, ranks, micro_batches):
    return one_f_one_b(rank, ranks, max(1, micro_batches - 1))


def needs_many_micro_batches(rank, ranks, micro_batches):
    warm_up = ranks - 1 - rank  # also where there are fewer micro-batches
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "F", warm_up + i), Action(rank, "B", i)]
    return row + [Action(rank, "B", i) for i in range(max(0, micro_batches - warm_up), micro_batches)]


def backward_before_forward(rank, ranks, micro_batches):
    warm_up = min(ranks - 1 - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "B", i), Action(rank, "F", warm_up + i)]
    return row + [Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]


def newest_first(rank, ranks, micro_batches):
    warm_up = min(ranks - 1 - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        row += [Action(rank, "F", i), Action(rank, "B", i)]
    return row + [Action(rank, "B", i) for i in reversed(range(warm_up))]


def waits_for_a_gradient(rank, ranks, micro_batches):
    row, begun, ended = [], 0, 0
    while ended < micro_batches:
        if begun < micro_batches and begun - ended < ranks - rank:
            row.append(Action(rank, "F", begun))
            begun += 1
        elif begun - ended == ranks - rank:  # never true again when all have begun
            row.append(Action(rank, "B", ended))
            ended += 1
    return row


# -- one_f_one_b, right ------------------------------------------------------------------------------------------------


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


# -- zero_bubble_h1, wrong ---------------------------------------------------------------------------------------------


def kept_back(rank, ranks, micro_batches, kept, warm_up=None):
    """ZB-H1 that keeps so many Ws back."""
    warm_up = ranks - 1 - rank if warm_up is None else warm_up
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches):
        row += [Action(rank, "F", warm_up + i)] if warm_up + i < micro_batches else []
        row += [Action(rank, "I", i)] + ([Action(rank, "W", i - kept)] if i >= kept else [])
    return row + [Action(rank, "W", i) for i in range(max(0, micro_batches - kept), micro_batches)]


def weights_at_once(rank, ranks, micro_batches):
    return kept_back(rank, ranks, micro_batches, 0)


def all_weights_at_the_end(rank, ranks, micro_batches):
    return kept_back(rank, ranks, micro_batches, micro_batches)


def keeps_back_on_the_wrong_ranks(rank, ranks, micro_batches):
    return kept_back(rank, ranks, micro_batches, ranks - 1 - rank)


def keeps_one_too_few(rank, ranks, micro_batches):
    return kept_back(rank, ranks, micro_batches, max(0, rank - 1))


def keeps_one_too_many(rank, ranks, micro_batches):
    return kept_back(rank, ranks, micro_batches, rank + 1)


def loses_what_was_kept_back(rank, ranks, micro_batches):
    row = zero_bubble_h1(rank, ranks, micro_batches)
    return row[: len(row) - rank]


def one_pair_too_many(rank, ranks, micro_batches):
    row = zero_bubble_h1(rank, ranks, micro_batches)
    return [*row, Action(rank, "I", micro_batches), Action(rank, "W", micro_batches)]


def weights_before_input(rank, ranks, micro_batches):
    row = kept_back(rank, ranks, micro_batches, 0)
    return [Action(rank, {"I": "W", "W": "I"}.get(kind, kind), i) for _, kind, i in row]


def whole_backward(rank, ranks, micro_batches):
    return one_f_one_b(rank, ranks, micro_batches)


def drops_the_last_input_gradient(rank, ranks, micro_batches):
    return [a for a in zero_bubble_h1(rank, ranks, micro_batches) if a != (rank, "I", micro_batches - 1)]


def mirrored_warm_up(rank, ranks, micro_batches):
    return kept_back(rank, ranks, micro_batches, ranks - 1 - rank, warm_up=rank)


# -- zero_bubble_h1, right ---------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "10.1": (
        WrongAnswer(drops_the_last_micro_batch, "lost", "never does the forward of the last micro-batch, 3"),
        WrongAnswer(forgets_backward, "lost", "has no backward at all"),
        WrongAnswer(one_at_a_time, "forwards first", "only one of 3 ranks works at a time: no pipeline"),
        WrongAnswer(one_f_one_b_already, "forwards first", "while forwards are still to come"),
        WrongAnswer(stage_and_micro_batch_swapped, "stage", "An Action is (stage, kind, micro-batch)"),
        WrongAnswer(works_for_the_neighbor, "stage", "rank 0 holds stage 0 and no other"),
        WrongAnswer(counts_from_one, "micro-batch", "there is no micro-batch 4, they go from 0 to 3"),
        WrongAnswer(
            one_micro_batch_too_many,
            "micro-batch",
            "It does 5 forwards, where 4 are needed: one forward too",
        ),
        WrongAnswer(backwards_first, "order", "rank 0 does 0B0 before 0F0"),
        WrongAnswer(every_other_rank_the_other_way, "bubble", "Do all ranks take the micro-batches in the"),
        WrongAnswer(forward_twice, "twice", "does 0F0 2 times"),
        WrongAnswer(halves, "kind", "one each of F and B"),
        WrongAnswer(strings, "returns", "each item is an Action"),
        WrongAnswer(only_two_ranks, "raises", "KeyError: 2"),
    ),
    "10.2": (
        WrongAnswer(warm_up_of_the_mirror_rank, "deadlock", "rank 0 waits at 0B0 for 1B0 of rank 1, which"),
        WrongAnswer(one_forward_too_few, "bubble", "Warm-up: how many forwards"),
        WrongAnswer(one_forward_too_many, "memory", "Backward should come 1 forward sooner"),
        WrongAnswer(gpipe_still, "memory", "That is GPipe"),
        WrongAnswer(same_warm_up_everywhere, "memory", "A later rank has its first backward sooner"),
        WrongAnswer(no_warm_up, "bubble", "not 33%"),
        WrongAnswer(forgets_the_cool_down, "lost", "never does the backward of micro-batches 2, 3"),
        WrongAnswer(drops_the_last_pair, "lost", "the last micro-batch, 3"),
        WrongAnswer(needs_many_micro_batches, "micro-batch", "there is no micro-batch 2"),
        WrongAnswer(backward_before_forward, "order", "rank 2 does 2B0 before 2F0"),
        WrongAnswer(newest_first, "bubble", "would do"),
        WrongAnswer(waits_for_a_gradient, "timeout", "Is there a loop that never ends?"),
    ),
    "10.4": (
        WrongAnswer(weights_at_once, "bubble", "Every W follows its I at once"),
        WrongAnswer(all_weights_at_the_end, "memory", "rank 0 holds the activations of 4 micro-batches"),
        WrongAnswer(keeps_back_on_the_wrong_ranks, "memory", "How many Ws do you keep back?"),
        WrongAnswer(keeps_one_too_few, "bubble", "which W is left by then?"),
        WrongAnswer(keeps_one_too_many, "memory", "How many Ws do you keep back?"),
        WrongAnswer(loses_what_was_kept_back, "lost", "the weights of that stage would miss its examples"),
        WrongAnswer(one_pair_too_many, "micro-batch", "does 5 input gradients, where 4 are needed"),
        WrongAnswer(weights_before_input, "order", "before"),
        WrongAnswer(whole_backward, "kind", "one each of F, I and W"),
        WrongAnswer(drops_the_last_input_gradient, "lost", "the stage before would wait for ever"),
        WrongAnswer(mirrored_warm_up, "deadlock", "there is a deadlock: rank 0 waits at 0I0"),
    ),
}
RIGHT = {
    "10.1": (last_micro_batch_first, gpipe_by_loops, plain_tuples),
    "10.2": (counts_what_is_live, as_torch_has_it),
    "10.4": (from_a_queue, by_slots),
}
