"""Notebook 04: reduce-scatter, all-gather, all-reduce on a ring."""

from functools import partial

import numpy as np

from ..collectives import cost, ring
from ..collectives.chunks import bounds
from . import answers_all_reduce, answers_reduce_scatter
from .collective import Collective, check_collective
from .hints_04 import ALL_GATHER_HINTS, ALL_REDUCE_HINTS, REDUCE_SCATTER_HINTS
from .ranks import SENTINEL
from .record import Exercise, WrongAnswer


def own_row(values, r):
    return values[r]


def sum_of_rows(values):
    return values.sum(axis=0)


def own_chunk_of(n, p, r):
    return bounds(n, p, r)


def everything(n, p, r):
    return 0, n


def only_own_chunk(values, r):
    """What rank r holds before an all-gather: its chunk, and nothing worth reading elsewhere."""
    p, n = values.shape
    start = np.full(n, SENTINEL)
    first, last = bounds(n, p, r)
    start[first:last] = values[r, first:last]
    return start


def chunks_of_owners(values):
    """(n,) chunk r of row r, one after the other."""
    p, n = values.shape
    return np.concatenate([values[r, slice(*bounds(n, p, r))] for r in range(p)])


REDUCE_SCATTER = Collective(
    "reduce_scatter", own_row, sum_of_rows, own_chunk_of, ring.reduce_scatter, cost.reduce_scatter, "(p-1)/p"
)
ALL_GATHER = Collective(
    "all_gather", only_own_chunk, chunks_of_owners, everything, ring.all_gather, cost.all_gather, "(p-1)/p", adds=False
)
ALL_REDUCE = Collective("all_reduce", own_row, sum_of_rows, everything, ring.all_reduce, cost.all_reduce, "2(p-1)/p")

EXERCISES = (
    Exercise(
        id="4.1",
        title="reduce-scatter on a ring",
        reference=ring.reduce_scatter,
        stars=2,
        check=partial(check_collective, REDUCE_SCATTER),
        hints=REDUCE_SCATTER_HINTS,
        wrong_answers=(
            WrongAnswer(answers_reduce_scatter.off_by_one_chunk, "chunk", "you are off by one chunk"),
            WrongAnswer(answers_reduce_scatter.divides_by_p, "sum", "It is the average: the sum divided by 3"),
            WrongAnswer(
                answers_reduce_scatter.only_divisible_sizes,
                "sizes",
                "Every size that the number of ranks divides is right",
            ),
            WrongAnswer(
                answers_reduce_scatter.whole_vector_every_hop, "bytes", "you pass the whole vector at every hop"
            ),
            WrongAnswer(answers_reduce_scatter.data_of_rank_0, "sum", "the data of rank 0, not the sum over ranks"),
            WrongAnswer(answers_reduce_scatter.sends_first, "deadlock", "all send first"),
            WrongAnswer(answers_reduce_scatter.forgets_the_last_step, "steps", "where 4 are needed: one step too few"),
            WrongAnswer(answers_reduce_scatter.one_step_too_many, "steps", "sent 8 messages, where 7 are needed"),
            WrongAnswer(
                answers_reduce_scatter.one_step_too_many_of_several, "steps", "7 are needed: one step too many"
            ),
            WrongAnswer(answers_reduce_scatter.needs_a_neighbor, "one rank", "1 rank, which has no neighbor"),
            WrongAnswer(answers_reduce_scatter.returns_nothing, "returns", "returned nothing: return chunk 0 of x"),
            WrongAnswer(
                answers_reduce_scatter.returns_all_of_x,
                "returns",
                "returned 999 elements: return chunk 0 of x, 333 elements",
            ),
            WrongAnswer(answers_reduce_scatter.raises_an_error, "raises", "raised IndexError: list index out of range"),
            WrongAnswer(answers_reduce_scatter.never_ends, "timeout", "Is there a loop that never ends?"),
            WrongAnswer(answers_reduce_scatter.writes_past_the_end, "bounds", "wrote outside x, at x[1001]"),
            WrongAnswer(answers_reduce_scatter.rank_0_sends_first, "steps", "the ranks wait for each other in a row"),
            WrongAnswer(answers_reduce_scatter.waits_for_all_in_every_step, "steps", "a rank waits in 7 barriers"),
            WrongAnswer(
                answers_reduce_scatter.never_waits_for_its_sends, "wait", "did not wait for 7 of its sends to rank 1"
            ),
            WrongAnswer(
                answers_reduce_scatter.buffer_is_always_float32,
                "dtype",
                "a buffer of your own must have the dtype of x",
            ),
            WrongAnswer(answers_reduce_scatter.straight_to_the_owner, "peers", "it knows only its neighbors"),
        ),
        right_answers=(
            answers_reduce_scatter.other_direction,
            answers_reduce_scatter.numpy_style,
            answers_reduce_scatter.non_blocking,
            answers_reduce_scatter.skips_empty_chunks_and_prints,
        ),
        explanation=(
            "Follow chunk c. It leaves rank c+1 in step 0 with one contribution, picks up one more at every rank that "
            "it visits, and reaches rank c in step p-2 with all p of them. All p chunks travel at the same time, one "
            "behind the other, so every link carries one chunk in every step: each rank sends p-1 chunks of 1/p of "
            "the vector."
        ),
    ),
    Exercise(
        id="4.2",
        title="all-gather on a ring",
        reference=ring.all_gather,
        stars=2,
        check=partial(check_collective, ALL_GATHER),
        hints=ALL_GATHER_HINTS,
        wrong_answers=(
            WrongAnswer(answers_all_reduce.gathers_the_wrong_chunk, "chunk", "never arrived on rank 0"),
            WrongAnswer(answers_all_reduce.adds_what_arrives, "chunk", "all_gather replaces, it does not add"),
            WrongAnswer(answers_all_reduce.stores_in_the_wrong_place, "chunk", "got another chunk there"),
            WrongAnswer(
                answers_all_reduce.gathers_divisible_sizes_only,
                "sizes",
                "Every size that the number of ranks divides is right",
            ),
            WrongAnswer(answers_all_reduce.gathers_whole_vectors, "bytes", "you pass the whole vector at every hop"),
            WrongAnswer(answers_all_reduce.gathers_on_rank_0, "bytes", "everything passes through rank 0"),
            WrongAnswer(answers_all_reduce.gathers_receiving_first, "deadlock", "all receive first"),
            WrongAnswer(answers_all_reduce.gathers_one_step_short, "steps", "where 4 are needed: one step too few"),
            WrongAnswer(answers_all_reduce.gathers_one_step_too_many, "steps", "sent 8 messages, where 7 are needed"),
            WrongAnswer(
                answers_all_reduce.gathers_and_returns_its_chunk,
                "returns",
                "returned 333 elements: return x, 999 elements",
            ),
            WrongAnswer(answers_all_reduce.gathers_and_returns_nothing, "returns", "returned nothing: return x"),
        ),
        right_answers=(answers_all_reduce.gathers_the_other_way, answers_all_reduce.gathers_both_ways),
        explanation=(
            "The same walk, without the addition. In step i every rank passes on the chunk that it got in step i-1, "
            "first its own. After p-1 steps each chunk has visited every rank. What arrives goes straight into its "
            "place in x, so no buffer is needed."
        ),
    ),
    Exercise(
        id="4.3",
        title="all-reduce: the two together",
        reference=ring.all_reduce,
        stars=2,
        check=partial(check_collective, ALL_REDUCE),
        hints=ALL_REDUCE_HINTS,
        wrong_answers=(
            WrongAnswer(ring.all_reduce_naive, "bytes", "Cut x into chunks"),
            WrongAnswer(
                answers_all_reduce.adds_in_float64, "bytes", "each twice as large: is what you send of the dtype"
            ),
            WrongAnswer(answers_all_reduce.asks_the_communicator, "bytes", "everything passes through rank 0"),
            WrongAnswer(answers_all_reduce.takes_the_average, "sum", "It is the average"),
            WrongAnswer(answers_all_reduce.forgets_the_all_gather, "steps", "only one of the two halves is done"),
            WrongAnswer(answers_all_reduce.gathers_before_it_scatters, "sum", "is missing"),
            WrongAnswer(answers_all_reduce.leaves_x_as_it_was, "in place", "x was not overwritten"),
            WrongAnswer(answers_all_reduce.reduces_and_returns_nothing, "returns", "returned nothing: return x"),
            WrongAnswer(answers_all_reduce.reduces_twice, "steps", "all is done twice"),
            WrongAnswer(answers_all_reduce.one_loop_too_long, "steps", "sent 15 messages, where 14 are needed"),
            WrongAnswer(answers_all_reduce.one_loop_too_short, "steps", "where 8 are needed: one step too few"),
            WrongAnswer(answers_all_reduce.scatters_too_long, "steps", "14 are needed: one step too many"),
            WrongAnswer(answers_all_reduce.only_even_ranks_gather, "deadlock", "it finished"),
        ),
        right_answers=(
            answers_all_reduce.in_one_loop,
            answers_all_reduce.the_other_way_around,
            answers_all_reduce.one_half_after_the_other,
        ),
        explanation=(
            "After reduce_scatter every chunk of the sum exists once, on its own rank; all_gather hands the chunks "
            "round. Each of the two sends (p-1)/p of the vector per rank. Together 2(p-1)/p: less than two vectors "
            "for any number of ranks, which is why the ring scales. Its price is latency: 2(p-1) messages one after "
            "another."
        ),
    ),
)
