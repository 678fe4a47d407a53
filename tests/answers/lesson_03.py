"""Answers to exercises 3.1, 3.2 and 3.3 that a check must reject or accept; CI proves both."""

import numpy as np

from hpdl_lab.collectives.cost import fit_link
from hpdl_lab.collectives.jobs import which_collective


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


def weighted(sizes, seconds, weights):
    slope, start = np.polyfit(sizes, seconds, 1, w=weights)
    return start, slope


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


def as_nccl_spells_them():
    return {letter: f"nccl{name}" for letter, name in as_mpi4py_spells_them().items()}


def with_counts_or_in_the_background():
    names = "Ibcast Iallreduce Ireduce Scatterv Gatherv Allgatherv MPI_Ireduce_scatter_block MPI_Alltoallw"
    return dict(zip("ABCDEFGH", names.split(), strict=True))


WRONG = {
    "3.3": """
job @scatters_the_weights: Job A: scatter hands row r of what rank 0 has
too much @adds_for_everybody: Job C: all_reduce would do it
job @sums_the_mistakes: Job E: reduce adds what every rank has
missing @forgets_the_layers: Job F has no answer
name @invents_a_collective: no collective is called 'all_add'
name @in_capital_letters: no collective is called ('broadcast',)
    name.upper() => (name,)
missing: Job A has no answer
    return dict(zip("BCDEFGHI", which_collective().values(), strict=True))
job: Job A: all_reduce adds
    first, *names = which_collective().values()
    return dict(zip("ABCDEFGH", [*names, first], strict=True))
missing @one_job_too_many: There is no job 'I'
missing @in_capital_letters: Job A has no answer
    letter: name.upper() => name: letter
job @sums_on_one_rank: Job B: reduce adds
too much @gathers_on_all: Job E: all_gather would do it
too much @gathers_gradients: about p vectors for each, not two
too much @adds_every_row: the other rows of the sum
too much @gives_everybody_all_words: what is meant for others
too much @broadcasts_the_images: the rows of all the others
returns: returned a list: return a dict
    return list(which_collective().values())
returns @as_mpi_spells_them: returned nothing: return a dict
    return {letter: f'MPI_{name}' for letter, name in as_mpi4py_spells_them().items()} => print(which_collective())
""",
    "3.1": """
deadlock: both send first
    if comm.rank < 2:
        comm.send(x, 1 - comm.rank)
        comm.recv(x, 1 - comm.rank)
    return x
deadlock: both receive first
    if comm.rank < 2:
        comm.recv(x, 1 - comm.rank)
        comm.send(x, 1 - comm.rank)
    return x
round: rank 1 sent 0 messages back
    if comm.rank == 0:
        comm.send(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
    return x
round: both messages are under way at the same time
    if comm.rank < 2:
        arriving = np.empty_like(x)
        comm.sendrecv(x, 1 - comm.rank, arriving, 1 - comm.rank)
        x[...] = arriving if comm.rank == 1 else x
    return x
deadlock: finished
    elif comm.rank == 1 => else
ball: rank 1 sends back what it got
    .recv(x, 0) => .recv(np.empty_like(x), 0)
round: rank 0 sent 2 messages to rank 1
    for _ in range(2):
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)
            comm.send(x, 0)
    return x
returns: returned nothing: return x
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
        comm.send(x, 0)
ball: which only looks on
    recv(x, 1) => recv(x, comm.size - 1)
    elif comm.rank == 1 => else
    recv(x, 0) => recv(x, comm.rank - 1)
    send(x, 0) => send(x, (comm.rank + 1) % comm.size)
ball: receive into x itself
    send(x, 1) => send(x[:1], 1)
    recv(x, 1) => recv(x[:1], 1)
    recv(x, 0) => recv(x[:1], 0)
    send(x, 0) => send(x[:1], 0)
round: also calls barrier
    with_works(comm, x)
    comm.barrier()
    return x
round: also calls barrier
    comm.barrier()
    return with_works(comm, x)
round: rank 1 sent 2 messages back
    with_works(comm, x)
    if comm.rank == 0:
        comm.recv(x[:0], 1)
    elif comm.rank == 1:
        comm.send(x[:0], 0)
    return x
round: rank 0 sent 2 messages to rank 1
    for half in (x[: len(x) // 2], x[len(x) // 2 :]):
        with_works(comm, half)
    return x
deadlock: rank 1 never sent to rank 0
    with_works(comm, x)
    return comm.recv(x, 1) if comm.rank == 0 else x
deadlock @returns_what_arrived: rank 0 never received from rank 1
    -         return comm.recv(x, 1)
    -     if comm.rank == 1:
    +     elif comm.rank == 1:
ball: receive into x itself
    last = comm.size - 1
    if comm.rank == 0:
        comm.send(x, last)
        comm.recv(x, last)
    elif comm.rank == last:
        comm.send(comm.recv(x, 0), 0)
    return x
ball: receive into x itself
    if comm.rank == 1:
        comm.send(comm.recv(np.empty(len(x)), 0), 0)
        return x
    return returns_what_arrived(comm, x)
raises: in a uint8 tensor (lab.ping_pong sends those)
    if comm.rank == 1:
        x[...] = comm.recv(np.empty_like(x), 0)
        comm.send(x, 0)
        return x
    return returns_what_arrived(comm, x)
raises: rank 0 sends uint8, rank 1 expects float64
    if comm.rank == 1:
        arriving = comm.recv(np.empty(len(x)), 0)
        x[...] = arriving
        comm.send(arriving, 0)
        return x
    return returns_what_arrived(comm, x)
returns: something of dtype float32
    return with_works(comm, x).astype("f4")
returns: something of type list
    return list(with_works(comm, x))
returns: x is right on rank 2, but
    if comm.rank < 2:
        return with_works(comm, x)
""",
    "3.2": """
order @with_weights: alpha, beta is the order
    [start, slope] => (slope, start)
unit @with_weights: beta is 1 / bandwidth
    [start, slope] => (start, 1 / slope)
unit @with_weights: Those are microseconds
    [start, slope] => (1000000.0 * start, 1000000.0 * slope)
alpha: an empty message would cost nothing
    return 0.0, np.mean(np.asarray(seconds) / np.asarray(sizes))
weights: If all seconds count alike
    slope, start = np.polyfit(sizes, seconds, 1)
    return start, slope
alpha: the time of one message
    return min(seconds), max(seconds) / max(sizes)
alpha: the time of one message
    pairs = sorted(zip(sizes, seconds, strict=True))
    alpha = pairs[0][1]
    return alpha, (pairs[-1][1] - alpha) / pairs[-1][0]
ends: the line through two messages
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return seconds[0] - slope * sizes[0], slope
weights: polyfit squares its weights
    return weighted(sizes, seconds, 1 / np.square(seconds))
weights: polyfit squares its weights
    return weighted(sizes, seconds, 1 / np.sqrt(seconds))
weights: The weights are 1 / sizes
    return weighted(sizes, seconds, 1 / np.array(sizes))
loop: The first message is missing
    return weighted(sizes[1:], seconds[1:], 1 / np.array(seconds[1:]))
loop: The last message is missing
    return weighted(sizes[:-1], seconds[:-1], 1 / np.array(seconds[:-1]))
unit: seconds per bit
    return weighted(8 * np.array(sizes), seconds, 1 / np.array(seconds))
factor: Both are half as large
    return weighted(sizes, np.array(seconds) / 2, 1 / np.array(seconds))
returns: return two numbers
    return [f"{value:.6g}" for value in weighted(sizes, seconds, 1 / np.array(seconds))]
raises: for /: 'int' and 'list'
    return weighted(sizes, seconds, 1 / seconds)
factor: the time of one way already
    slope, start = np.polyfit(sizes, 2 * np.asarray(seconds), 1, w=1 / np.asarray(seconds))
    return start, slope
alpha @with_weights: The message of 8 bytes took 1 µs
    , start = => , _ =
    [start, slope] => (np.mean(seconds), slope)
returns: return two numbers
    return min(seconds)
beta: The large ones, because alpha hardly counts
    slope, start = np.polyfit(sizes[:3], seconds[:3], 1)
    return start, slope
""",
}
RIGHT = {
    "3.3": (sorted_by_name, in_capital_letters, as_mpi4py_spells_them, as_mpi_spells_them, as_torch_spells_them)
    + (as_nccl_spells_them, with_counts_or_in_the_background),
    "3.1": (with_works, returns_what_arrived),
    "3.2": (with_weights, by_linear_algebra, with_weights_of_the_line, fit_link),
}
COMPLETED = {
    "3.1": ["comm.recv(x, 0)\ncomm.send(x, 0)"],
}
