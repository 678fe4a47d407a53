"""Answers to exercises 3.1, 3.2 and 3.3 that a check must reject or accept; CI proves both."""

import numpy as np

from hpdl_lab.collectives.jobs import which_collective

from . import WrongAnswer

# -- ping_pong: wrong --------------------------------------------------------------------------------------------------


def both_serve(comm, x):
    if comm.rank < 2:
        comm.send(x, 1 - comm.rank)
        comm.recv(x, 1 - comm.rank)
    return x


def both_wait(comm, x):
    if comm.rank < 2:
        comm.recv(x, 1 - comm.rank)
        comm.send(x, 1 - comm.rank)
    return x


def never_comes_back(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
    return x


def two_balls(comm, x):
    if comm.rank < 2:
        arriving = np.empty_like(x)
        comm.sendrecv(x, 1 - comm.rank, arriving, 1 - comm.rank)
        x[...] = arriving if comm.rank == 1 else x
    return x


def everybody_plays_with_rank_0(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    else:
        comm.recv(x, 0)
        comm.send(x, 0)
    return x


def sends_its_own_ball_back(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    elif comm.rank == 1:
        comm.recv(np.empty_like(x), 0)
        comm.send(x, 0)
    return x


def two_rounds(comm, x):
    for _ in range(2):
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)
            comm.send(x, 0)
    return x


def plays_and_returns_nothing(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
        comm.send(x, 0)


def around_the_ring(comm, x):
    """Every rank plays: a ball that visits all of them."""
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, comm.size - 1)
    else:
        comm.recv(x, comm.rank - 1)
        comm.send(x, (comm.rank + 1) % comm.size)
    return x


def one_element(comm, x):
    if comm.rank == 0:
        comm.send(x[:1], 1)
        comm.recv(x[:1], 1)
    elif comm.rank == 1:
        comm.recv(x[:1], 0)
        comm.send(x[:1], 0)
    return x


def ends_with_a_barrier(comm, x):
    with_works(comm, x)
    comm.barrier()
    return x


def begins_with_a_barrier(comm, x):
    comm.barrier()
    return with_works(comm, x)


def tells_that_it_is_done(comm, x):
    with_works(comm, x)
    if comm.rank == 0:
        comm.recv(x[:0], 1)
    elif comm.rank == 1:
        comm.send(x[:0], 0)
    return x


def in_two_halves(comm, x):
    for half in (x[: len(x) // 2], x[len(x) // 2 :]):
        with_works(comm, half)
    return x


def receives_once_too_often(comm, x):
    with_works(comm, x)
    return comm.recv(x, 1) if comm.rank == 0 else x


def does_not_take_it_back(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
    elif comm.rank == 1:
        comm.send(comm.recv(x, 0), 0)
    return x


def plays_with_the_last_rank(comm, x):
    """Right on two ranks."""
    last = comm.size - 1
    if comm.rank == 0:
        comm.send(x, last)
        comm.recv(x, last)
    elif comm.rank == last:
        comm.send(comm.recv(x, 0), 0)
    return x


def receives_beside_x(comm, x):
    if comm.rank == 1:
        comm.send(comm.recv(np.empty(len(x)), 0), 0)
        return x
    return returns_what_arrived(comm, x)


def array_for_a_tensor(comm, x):
    if comm.rank == 1:
        x[...] = comm.recv(np.empty_like(x), 0)
        comm.send(x, 0)
        return x
    return returns_what_arrived(comm, x)


def float64_for_bytes(comm, x):
    if comm.rank == 1:
        arriving = comm.recv(np.empty(len(x)), 0)
        x[...] = arriving
        comm.send(arriving, 0)
        return x
    return returns_what_arrived(comm, x)


def returns_float32(comm, x):
    return with_works(comm, x).astype("f4")


def returns_a_list(comm, x):
    return list(with_works(comm, x))


def returns_inside_the_if(comm, x):
    if comm.rank < 2:
        return with_works(comm, x)


# -- ping_pong: right --------------------------------------------------------------------------------------------------


def with_works(comm, x):
    if comm.rank == 0:
        comm.isend(x, 1).wait()
        comm.irecv(x, 1).wait()
    if comm.rank == 1:
        comm.irecv(x, 0).wait()
        comm.isend(x, 0).wait()
    return x


def returns_what_arrived(comm, x):
    if comm.rank == 0:
        comm.send(x, 1)
        return comm.recv(x, 1)
    if comm.rank == 1:
        comm.send(comm.recv(x, 0), 0)
    return x


# -- fit_alpha_beta: wrong ---------------------------------------------------------------------------------------------


def other_order(sizes, seconds):
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return slope, start


def bandwidth_for_beta(sizes, seconds):
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return start, 1 / slope


def in_microseconds(sizes, seconds):
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return 1e6 * start, 1e6 * slope


def line_through_the_origin(sizes, seconds):
    return 0.0, np.mean(np.asarray(seconds) / np.asarray(sizes))


def all_seconds_count_alike(sizes, seconds):
    slope, start = np.polyfit(sizes, seconds, 1)
    return start, slope


def round_trip_for_one_way(sizes, seconds):
    slope, start = np.polyfit(sizes, 2 * np.asarray(seconds), 1, w=1 / np.asarray(seconds))
    return start, slope


def mean_time_for_alpha(sizes, seconds):
    slope, _ = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return np.mean(seconds), slope


def only_alpha(sizes, seconds):
    return min(seconds)


def by_the_small_ones(sizes, seconds):
    slope, start = np.polyfit(sizes[:3], seconds[:3], 1)
    return start, slope


def smallest_and_largest(sizes, seconds):
    return min(seconds), max(seconds) / max(sizes)


def by_two_ends(sizes, seconds):
    """No line at all: the smallest message shows alpha, the largest shows beta."""
    pairs = sorted(zip(sizes, seconds, strict=True))
    alpha = pairs[0][1]
    return alpha, (pairs[-1][1] - alpha) / pairs[-1][0]


def line_through_two_ends(sizes, seconds):
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - slope * sizes[0], slope


def weighted(sizes, seconds, weights):
    slope, start = np.polyfit(sizes, seconds, 1, w=weights)
    return start, slope


def squares_the_weights(sizes, seconds):
    return weighted(sizes, seconds, 1 / np.square(seconds))


def roots_of_the_weights(sizes, seconds):
    return weighted(sizes, seconds, 1 / np.sqrt(seconds))


def weights_by_size(sizes, seconds):
    return weighted(sizes, seconds, 1 / np.array(sizes))


def without_the_first(sizes, seconds):
    return weighted(sizes[1:], seconds[1:], 1 / np.array(seconds[1:]))


def without_the_last(sizes, seconds):
    return weighted(sizes[:-1], seconds[:-1], 1 / np.array(seconds[:-1]))


def seconds_per_bit(sizes, seconds):
    return weighted(8 * np.array(sizes), seconds, 1 / np.array(seconds))


def halves_the_times(sizes, seconds):
    return weighted(sizes, np.array(seconds) / 2, 1 / np.array(seconds))


def line_as_text(sizes, seconds):
    return [f"{value:.6g}" for value in weighted(sizes, seconds, 1 / np.array(seconds))]


def divides_by_a_list(sizes, seconds):
    return weighted(sizes, seconds, 1 / seconds)


# -- fit_alpha_beta: right ---------------------------------------------------------------------------------------------


def with_weights(sizes, seconds):
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return [start, slope]


def by_linear_algebra(sizes, seconds):
    sizes, seconds = np.array(sizes), np.array(seconds)
    rows = np.stack([np.ones(len(sizes)), sizes], axis=1) / seconds[:, None]
    return tuple(np.linalg.lstsq(rows, np.ones(len(sizes)), rcond=None)[0])


def with_weights_of_the_line(sizes, seconds):
    """Relative to what the line says, not to what was measured; found in a few rounds."""
    predicted = np.array(seconds)
    for _ in range(5):
        start, slope = weighted(sizes, seconds, 1 / predicted)
        predicted = start + slope * np.array(sizes)
    return start, slope


# -- which_collective: wrong -------------------------------------------------------------------------------------------


def says(**changed):
    """The right answers but for these; None leaves a letter out."""

    def answer():
        named = which_collective() | changed
        return {letter: name for letter, name in named.items() if name is not None}

    answer.__name__ = "_".join(["says", *(f"{letter}_{name}" for letter, name in changed.items())])
    return answer


scatters_the_weights = says(A="scatter")
adds_for_everybody = says(C="all_reduce")
sums_the_mistakes = says(E="reduce")
forgets_the_layers = says(F=None)
invents_a_collective = says(B="all_add")
sums_on_one_rank = says(B="reduce")
gathers_on_all = says(E="all_gather")
one_job_too_many = says(I="reduce")
gathers_gradients = says(B="all_gather")
adds_every_row = says(G="all_reduce")
gives_everybody_all_words = says(H="all_gather")
broadcasts_the_images = says(D="broadcast")


def as_a_list():
    return list(which_collective().values())


def tuples_of_names():
    return {letter: (name,) for letter, name in which_collective().items()}


def one_letter_late():
    return dict(zip("BCDEFGHI", which_collective().values(), strict=True))


def one_job_early():
    first, *names = which_collective().values()
    return dict(zip("ABCDEFGH", [*names, first], strict=True))


def names_to_letters():
    return {name: letter for letter, name in which_collective().items()}


def prints_the_names():
    print(which_collective())


# -- which_collective: right -------------------------------------------------------------------------------------------


def sorted_by_name():
    return dict(sorted(which_collective().items(), key=lambda item: item[1]))


def in_capital_letters():
    return {letter: name.upper() for letter, name in which_collective().items()}


def as_mpi4py_spells_them():
    names = "Bcast Allreduce Reduce Scatter Gather Allgather Reduce_scatter_block Alltoall"
    return dict(zip("ABCDEFGH", names.split(), strict=True))


def as_mpi_spells_them():
    return {letter: f"MPI_{name}" for letter, name in as_mpi4py_spells_them().items()}


def as_torch_spells_them():
    names = "broadcast all_reduce reduce scatter gather all_gather_into_tensor reduce_scatter_tensor all_to_all_single"
    return {letter: f"dist.{name}" for letter, name in zip("ABCDEFGH", names.split(), strict=True)}


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "3.3": (
        WrongAnswer(scatters_the_weights, "job", "Job A: scatter hands row r of what rank 0 has"),
        WrongAnswer(adds_for_everybody, "too much", "Job C: all_reduce would do it"),
        WrongAnswer(sums_the_mistakes, "job", "Job E: reduce adds what every rank has"),
        WrongAnswer(forgets_the_layers, "missing", "Job F has no answer"),
        WrongAnswer(invents_a_collective, "name", "no collective is called 'all_add'"),
        WrongAnswer(tuples_of_names, "name", "no collective is called ('broadcast',)"),
        WrongAnswer(one_letter_late, "missing", "Job A has no answer"),
        WrongAnswer(one_job_early, "job", "Job A: all_reduce adds"),
        WrongAnswer(one_job_too_many, "missing", "There is no job 'I'"),
        WrongAnswer(names_to_letters, "missing", "Job A has no answer"),
        WrongAnswer(sums_on_one_rank, "job", "Job B: reduce adds"),
        WrongAnswer(gathers_on_all, "too much", "Job E: all_gather would do it"),
        WrongAnswer(gathers_gradients, "too much", "p vectors to receive, not two"),
        WrongAnswer(adds_every_row, "too much", "the other rows of the sum"),
        WrongAnswer(gives_everybody_all_words, "too much", "what is meant for others"),
        WrongAnswer(broadcasts_the_images, "too much", "the rows of all the others"),
        WrongAnswer(as_a_list, "returns", "returned a list: return a dict"),
        WrongAnswer(prints_the_names, "returns", "returned nothing: return a dict"),
    ),
    "3.1": (
        WrongAnswer(both_serve, "deadlock", "both send first"),
        WrongAnswer(both_wait, "deadlock", "both receive first"),
        WrongAnswer(never_comes_back, "round", "rank 1 sent 0 messages back"),
        WrongAnswer(two_balls, "round", "both messages are under way at the same time"),
        WrongAnswer(everybody_plays_with_rank_0, "deadlock", "finished"),
        WrongAnswer(sends_its_own_ball_back, "ball", "rank 1 sends back what it got"),
        WrongAnswer(two_rounds, "round", "rank 0 sent 2 messages to rank 1"),
        WrongAnswer(plays_and_returns_nothing, "returns", "returned nothing: return x"),
        WrongAnswer(around_the_ring, "ball", "which only looks on"),
        WrongAnswer(one_element, "ball", "receive into x itself"),
        WrongAnswer(ends_with_a_barrier, "round", "also calls barrier"),
        WrongAnswer(begins_with_a_barrier, "round", "also calls barrier"),
        WrongAnswer(tells_that_it_is_done, "round", "rank 1 sent 2 messages back"),
        WrongAnswer(in_two_halves, "round", "rank 0 sent 2 messages to rank 1"),
        WrongAnswer(receives_once_too_often, "deadlock", "rank 1 never sent to rank 0"),
        WrongAnswer(does_not_take_it_back, "deadlock", "rank 0 never received from rank 1"),
        WrongAnswer(plays_with_the_last_rank, "ball", "receive into x itself"),
        WrongAnswer(receives_beside_x, "ball", "receive into x itself"),
        WrongAnswer(array_for_a_tensor, "raises", "in a uint8 tensor (lab.ping_pong sends those)"),
        WrongAnswer(float64_for_bytes, "raises", "rank 0 sends uint8, rank 1 expects float64"),
        WrongAnswer(returns_float32, "returns", "something of dtype float32"),
        WrongAnswer(returns_a_list, "returns", "something of type list"),
        WrongAnswer(returns_inside_the_if, "returns", "x is right on rank 2, but"),
    ),
    "3.2": (
        WrongAnswer(other_order, "order", "alpha, beta is the order"),
        WrongAnswer(bandwidth_for_beta, "unit", "beta is 1 / bandwidth"),
        WrongAnswer(in_microseconds, "unit", "Those are microseconds"),
        WrongAnswer(line_through_the_origin, "alpha", "an empty message would cost nothing"),
        WrongAnswer(all_seconds_count_alike, "weights", "Where all seconds count alike"),
        WrongAnswer(smallest_and_largest, "alpha", "the time of one message"),
        WrongAnswer(by_two_ends, "alpha", "the time of one message"),
        WrongAnswer(line_through_two_ends, "ends", "the line through two messages"),
        WrongAnswer(squares_the_weights, "weights", "polyfit squares its weights"),
        WrongAnswer(roots_of_the_weights, "weights", "polyfit squares its weights"),
        WrongAnswer(weights_by_size, "weights", "The weights are 1 / sizes"),
        WrongAnswer(without_the_first, "loop", "The first message is not in it"),
        WrongAnswer(without_the_last, "loop", "The last message is not in it"),
        WrongAnswer(seconds_per_bit, "unit", "seconds per bit"),
        WrongAnswer(halves_the_times, "factor", "Both are half as large"),
        WrongAnswer(line_as_text, "returns", "return two numbers"),
        WrongAnswer(divides_by_a_list, "raises", "for /: 'int' and 'list'"),
        WrongAnswer(round_trip_for_one_way, "factor", "those of one way already"),
        WrongAnswer(mean_time_for_alpha, "alpha", "The message of 8 bytes took 1 µs"),
        WrongAnswer(only_alpha, "returns", "return two numbers"),
        WrongAnswer(by_the_small_ones, "beta", "The large ones, where alpha hardly counts"),
    ),
}
RIGHT = {
    "3.3": (
        sorted_by_name,
        in_capital_letters,
        as_mpi4py_spells_them,
        as_mpi_spells_them,
        as_torch_spells_them,
    ),
    "3.1": (with_works, returns_what_arrived),
    "3.2": (with_weights, by_linear_algebra, with_weights_of_the_line),
}
