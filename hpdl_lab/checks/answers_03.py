"""Answers to exercises 3.1, 3.2 and 3.3 that a check must reject or accept; CI proves both."""

import numpy as np

from ..collectives.jobs import which_collective

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


# -- fit_alpha_beta: right ---------------------------------------------------------------------------------------------


def with_weights(sizes, seconds):
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    return [start, slope]


def by_two_ends(sizes, seconds):
    """No line at all: the smallest message shows alpha, the largest shows beta."""
    pairs = sorted(zip(sizes, seconds, strict=True))
    alpha = pairs[0][1]
    return alpha, (pairs[-1][1] - alpha) / pairs[-1][0]


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
spells_as_mpi_does = says(B="MPI_Allreduce")
gathers_gradients = says(B="all_gather")
adds_every_row = says(G="all_reduce")
gives_everybody_all_words = says(H="all_gather")
broadcasts_the_images = says(D="broadcast")


def as_a_list():
    return list(which_collective().values())


def prints_the_names():
    print(which_collective())


# -- which_collective: right -------------------------------------------------------------------------------------------


def sorted_by_name():
    return dict(sorted(which_collective().items(), key=lambda item: item[1]))


def in_capital_letters():
    return {letter: name.upper() for letter, name in which_collective().items()}
