"""Answers to exercises 3.4 to 3.7 that a check must reject or accept; CI proves both."""

import numpy as np

from ..zoo.ward import diagnose

# -- diagnose: wrong ---------------------------------------------------------------------------------------------------


def says(**changed):
    """The right diagnoses but for these; None leaves a letter out."""

    def answer():
        return {letter: name for letter, name in (diagnose() | changed).items() if name is not None}

    answer.__name__ = "_".join(["says", *(f"{letter}_{name}" for letter, name in changed.items())])
    return answer


calls_a_circle_slow = says(A="slow")
calls_a_mismatch_a_circle = says(B="circle")
calls_another_way_an_order = says(C="order")
calls_an_order_absent = says(D="absent")
calls_unequal_loops_a_circle = says(E="circle")
calls_a_straggler_absent = says(F="absent")
calls_an_error_absent = says(G="absent")
forgets_the_straggler = says(F=None)
invents_a_diagnosis = says(A="deadlock")


def knows_another_patient():
    return diagnose() | {"X": "slow"}


def as_text():
    return ", ".join(diagnose().values())


def prints_the_diagnoses():
    print(diagnose())


# -- diagnose: right ---------------------------------------------------------------------------------------------------


def backwards():
    return dict(reversed(diagnose().items()))


# -- add_neighbors: wrong ----------------------------------------------------------------------------------------------


def neighbors(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def receives_from_both_first(comm):
    mine, theirs, total = np.full(1, float(comm.rank)), np.empty(1), 0.0
    for neighbor in neighbors(comm):
        total += comm.recv(theirs, neighbor)[0]
    for neighbor in neighbors(comm):
        comm.send(mine, neighbor)
    return float(total)


def asks_for_the_size(comm):
    """The condition is the same on every rank."""
    mine, theirs, total = np.full(1, float(comm.rank)), np.empty(1), 0.0
    for step in (1, -1) if comm.size % 2 == 0 else (-1, 1):
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor)[0]
    return float(total)


def only_one_neighbor(comm):
    right, left = neighbors(comm)
    return float(comm.sendrecv(np.full(1, float(comm.rank)), right, np.empty(1), left)[0])


def into_one_place(comm):
    """The second number overwrites the first before it has been added."""
    mine, theirs = np.full(1, float(comm.rank)), np.empty(1)
    works = [comm.irecv(theirs, neighbor) for neighbor in neighbors(comm)]
    works += [comm.isend(mine, neighbor) for neighbor in neighbors(comm)]
    for work in works:
        work.wait()
    return float(2 * theirs[0])


def adds_its_own_too(comm):
    return rightly(comm) + comm.rank


def knows_the_neighbors(comm):
    return float(sum(neighbors(comm)))


def adds_and_forgets(comm):
    rightly(comm)


# -- add_neighbors: right ----------------------------------------------------------------------------------------------


def rightly(comm):
    """All send to the right, then all to the left."""
    (right, left), mine, theirs = neighbors(comm), np.full(1, float(comm.rank)), np.empty(1)
    total = float(comm.sendrecv(mine, right, theirs, left)[0])
    return total + float(comm.sendrecv(mine, left, theirs, right)[0])


def one_is_different(comm):
    mine, theirs, total = np.full(1, float(comm.rank)), np.empty(1), 0.0
    for step in (-1, 1) if comm.rank == 0 else (1, -1):
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor)[0]
    return float(total)


# -- mean_loss: wrong --------------------------------------------------------------------------------------------------


def nobody_adds(comm):
    return float(comm.rank + 1.0)


def only_rank_0_knows(comm):
    loss = np.full(1, comm.rank + 1.0)
    total = comm.reduce(loss)
    return float(total[0] / comm.size) if comm.rank == 0 else float(loss[0])


def adds_and_does_not_divide(comm):
    return float(comm.all_reduce(np.full(1, comm.rank + 1.0))[0])


def the_others_call_something_else(comm):
    loss = np.full(1, comm.rank + 1.0)
    if comm.rank == 0:
        comm.all_reduce(loss)
    else:
        comm.barrier()
    return float(loss[0] / comm.size)


def knows_the_mean(comm):
    return (comm.size + 1) / 2


def logs_and_returns_nothing(comm):
    loss = comm.all_reduce(np.full(1, comm.rank + 1.0)) / comm.size
    if comm.rank == 0:
        print(f"mean loss {loss[0]:.2f}")


# -- mean_loss: right --------------------------------------------------------------------------------------------------


def by_gathering(comm):
    return float(comm.all_gather(np.full(1, comm.rank + 1.0)).mean())


# -- sum_of_steps: wrong -----------------------------------------------------------------------------------------------


def as_many_as_the_shortest(comm):
    total = 0.0
    for begin in range(0, 11 - comm.size + 1, comm.size):
        total += float(comm.all_reduce(np.full(1, float(begin + comm.rank)))[0])
    return total


def numbers_that_are_not_there(comm):
    total = 0.0
    for begin in range(0, 11, comm.size):
        total += float(comm.all_reduce(np.full(1, float(begin + comm.rank)))[0])
    return total


def three_steps_for_ever(comm):
    total = 0.0
    for step in range(3):
        number = step * comm.size + comm.rank
        total += float(comm.all_reduce(np.full(1, float(number) if number < 11 else 0.0))[0])
    return total


def one_more_for_the_last(comm):
    """Adds a step on the last rank only, where it was needed for 4 ranks."""
    total = 0.0
    mine = list(range(comm.rank, 11, comm.size)) + ([0] if comm.rank == comm.size - 1 else [])
    for number in mine:
        total += float(comm.all_reduce(np.full(1, float(number)))[0])
    return total


def adds_its_own_only(comm):
    return float(sum(range(comm.rank, 11, comm.size)))


def knows_55(comm):
    return 55.0


# -- sum_of_steps: right -----------------------------------------------------------------------------------------------


def adds_its_own_first(comm):
    """One step instead of three."""
    return float(comm.all_reduce(np.full(1, float(sum(range(comm.rank, 11, comm.size)))))[0])


def fills_up_with_zeros(comm):
    most = -(-11 // comm.size)
    mine = list(range(comm.rank, 11, comm.size))
    mine += [0] * (most - len(mine))
    return sum(float(comm.all_reduce(np.full(1, float(number)))[0]) for number in mine)
