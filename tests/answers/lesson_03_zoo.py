"""Answers to exercises 3.4 to 3.7 that a check must reject or accept; CI proves both."""

import numpy as np

from hpdl_lab import zoo
from hpdl_lab.zoo import diagnose

from . import WrongAnswer

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
calls_a_circle_an_order = says(A="order")
calls_a_mismatch_an_error = says(B="error")
calls_unequal_loops_a_straggler = says(E="slow")
calls_an_order_a_circle = says(D="circle")
forgets_the_straggler = says(F=None)
invents_a_diagnosis = says(A="deadlock")


def knows_another_patient():
    return diagnose() | {"X": "slow"}


def one_program_early():
    first, *rest = diagnose().values()
    return dict(zip("ABCDEFG", [*rest, first], strict=True))


def lists_of_diagnoses():
    return {letter: [said] for letter, said in diagnose().items()}


def as_text():
    return ", ".join(diagnose().values())


def prints_the_diagnoses():
    print(diagnose())


# -- diagnose: right ---------------------------------------------------------------------------------------------------


def backwards():
    return dict(reversed(diagnose().items()))


def diagnoses_in_capital_letters():
    return {letter.lower(): said.upper() for letter, said in diagnose().items()}


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


def exchanges(comm, steps):
    """The number of each of the ranks that are `steps` away, added up."""
    mine, theirs, total = np.full(1, float(comm.rank)), np.empty(1), 0.0
    for step in steps:
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor)[0]
    return float(total)


def right_or_left_first(comm):
    return (1, -1) if comm.rank % 2 == 0 else (-1, 1)


def one_step_too_few(comm):
    return exchanges(comm, right_or_left_first(comm)[:1])


def one_step_too_many(comm):
    first, second = right_or_left_first(comm)
    return exchanges(comm, (first, second, first))


def in_the_other_direction(comm):
    return exchanges(comm, (-1, 1))


def meets_in_a_barrier_first(comm):
    comm.barrier()
    return exchanges(comm, (1, -1))


def sums_all(comm):
    return float(comm.all_reduce(np.full(1, float(comm.rank)))[0])


def sums_all_but_itself(comm):
    """Right on three ranks."""
    return sums_all(comm) - comm.rank


def passes_on_what_arrived(comm):
    """What the left neighbor gets is no longer this rank's own number."""
    (right, left), mine, total = neighbors(comm), np.full(1, float(comm.rank)), 0.0
    for to, source in ((right, left), (left, right)):
        mine = comm.sendrecv(mine, to, np.empty(1), source)
        total += mine[0]
    return float(total)


def neighbors_as_a_pair(comm):
    return rightly(comm), 0.0


def neighbors_as_text(comm):
    return str(rightly(comm))


def never_waits_for_its_sends(comm):
    mine, total = np.full(1, float(comm.rank)), 0.0
    for to in neighbors(comm):
        comm.isend(mine, to)
    for source in neighbors(comm):
        total += comm.recv(np.empty(1), source)[0]
    return float(total)


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


def pairs_of_two(comm):
    """Somebody is different, and that is enough."""
    return exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1))


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


def all_write_the_log(comm):
    """The `if` is gone, with everything inside it."""
    mean = by_gathering(comm)
    print(f"mean loss {mean:.2f}")
    return mean


def all_but_rank_0_add(comm):
    loss = np.full(1, comm.rank + 1.0)
    if comm.rank != 0:
        comm.all_reduce(loss)
    return float(loss[0] / comm.size)


def only_rank_0_divides(comm):
    total = adds_and_does_not_divide(comm)
    return total / comm.size if comm.rank == 0 else total


def divides_by_four(comm):
    return adds_and_does_not_divide(comm) / 4


def divides_by_one_less(comm):
    return adds_and_does_not_divide(comm) / (comm.size - 1)


def the_largest_loss(comm):
    return float(comm.all_gather(np.full(1, comm.rank + 1.0)).max())


def adds_twice(comm):
    loss = np.full(1, comm.rank + 1.0)
    comm.all_reduce(loss)
    comm.all_reduce(loss)
    return float(loss[0] / comm.size)


def loss_of_rank_0(comm):
    return float(comm.broadcast(np.full(1, comm.rank + 1.0))[0])


def mean_as_text(comm):
    return str(by_gathering(comm))


def knows_the_mean(comm):
    return (comm.size + 1) / 2


def logs_and_returns_nothing(comm):
    loss = comm.all_reduce(np.full(1, comm.rank + 1.0)) / comm.size
    if comm.rank == 0:
        print(f"mean loss {loss[0]:.2f}")


# -- mean_loss: right --------------------------------------------------------------------------------------------------


def by_gathering(comm):
    return float(comm.all_gather(np.full(1, comm.rank + 1.0)).mean())


def prints_while_it_searches(comm):
    print("rank", comm.rank, "is here")
    return by_gathering(comm)


def reduces_and_broadcasts(comm):
    loss = np.full(1, comm.rank + 1.0)
    total = comm.reduce(loss)
    return float(comm.broadcast(total if comm.rank == 0 else loss)[0] / comm.size)


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


def steps(comm, firsts, last=10, collective="all_reduce"):
    """What the repaired program does, with these first numbers of the steps."""
    total = 0.0
    for first in firsts:
        number = first + comm.rank
        x = np.full(1, float(number) if number <= last else 0.0)
        getattr(comm, collective)(x)
        total += x[0]
    return float(total)


def one_step_too_few_for_all(comm):
    return steps(comm, range(0, 11 - comm.size, comm.size))


def one_step_too_many_for_all(comm):
    return steps(comm, range(0, 11 + comm.size, comm.size))


def one_number_too_few(comm):
    return steps(comm, range(0, 11, comm.size), last=9)


def one_number_too_many(comm):
    return steps(comm, range(0, 12, comm.size), last=11)


def a_step_for_every_number(comm):
    return steps(comm, range(0, 11 * comm.size, comm.size))


def begins_one_step_late(comm):
    return steps(comm, range(comm.size, 11, comm.size))


def the_last_number_again(comm):
    """Who has no number left adds 10 once more."""
    firsts = range(0, 11, comm.size)
    return sum(float(comm.all_reduce(np.full(1, float(min(first + comm.rank, 10))))[0]) for first in firsts)


def skips_what_is_not_there(comm):
    total = 0.0
    for first in range(0, 11, comm.size):
        if first + comm.rank < 11:
            total += float(comm.all_reduce(np.full(1, float(first + comm.rank)))[0])
    return total


def waits_in_a_barrier(comm):
    mine = range(comm.rank, 11, comm.size)
    total = sum(float(comm.all_reduce(np.full(1, float(number)))[0]) for number in mine)
    for _ in range(-(-11 // comm.size) - len(mine)):
        comm.barrier()
    return total


def sums_on_rank_0(comm):
    return steps(comm, range(0, 11, comm.size), collective="reduce")


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "3.4": (
        WrongAnswer(calls_a_circle_slow, "diagnosis", "Program A: you say 'slow'. However long you wait"),
        WrongAnswer(calls_a_mismatch_a_circle, "diagnosis", "Program B: you say 'circle'"),
        WrongAnswer(calls_another_way_an_order, "diagnosis", "Program C: you say 'order'"),
        WrongAnswer(calls_an_order_absent, "diagnosis", "look in which order"),
        WrongAnswer(calls_unequal_loops_a_circle, "diagnosis", "ranks that wait, but no circle"),
        WrongAnswer(calls_a_straggler_absent, "diagnosis", "It does come to the call, only late"),
        WrongAnswer(calls_an_error_absent, "diagnosis", "A rank is absent, that is true: but why?"),
        WrongAnswer(calls_a_circle_an_order, "diagnosis", "With these calls no other order helps"),
        WrongAnswer(calls_a_mismatch_an_error, "diagnosis", "two ranks contradict each other"),
        WrongAnswer(calls_unequal_loops_a_straggler, "diagnosis", "who is missing has finished"),
        WrongAnswer(calls_an_order_a_circle, "diagnosis", "but not in the same call"),
        WrongAnswer(one_program_early, "diagnosis", "Program A: you say 'mismatch'"),
        WrongAnswer(lists_of_diagnoses, "name", "there is no diagnosis ['circle']"),
        WrongAnswer(forgets_the_straggler, "missing", "Program F has no diagnosis"),
        WrongAnswer(invents_a_diagnosis, "name", "there is no diagnosis 'deadlock'"),
        WrongAnswer(knows_another_patient, "missing", "There is no program 'X'"),
        WrongAnswer(as_text, "returns", "returned a str: return a dict"),
        WrongAnswer(prints_the_diagnoses, "returns", "returned nothing: return a dict"),
    ),
    "3.5": (
        WrongAnswer(zoo.find("ring_even_odd").broken, "deadlock", "all exchange with one who exchanges"),
        WrongAnswer(receives_from_both_first, "deadlock", "all receive first"),
        WrongAnswer(asks_for_the_size, "deadlock", "all exchange with one who exchanges"),
        WrongAnswer(only_one_neighbor, "value", "rank 0 returned 3 and should return 4"),
        WrongAnswer(one_step_too_few, "value", "Every rank sent 1 message: one step too few"),
        WrongAnswer(one_step_too_many, "value", "Every rank sent 3 messages: one step too many"),
        WrongAnswer(in_the_other_direction, "deadlock", "all exchange with one who exchanges"),
        WrongAnswer(meets_in_a_barrier_first, "deadlock", "all exchange with one who exchanges"),
        WrongAnswer(sums_all, "value", "rank 0 returned 6 and should return 4"),
        WrongAnswer(sums_all_but_itself, "value", "rank 0 returned 6 and should return 4"),
        WrongAnswer(passes_on_what_arrived, "value", "should return 4"),
        WrongAnswer(neighbors_as_a_pair, "returns", "every rank returns a float, here 4"),
        WrongAnswer(neighbors_as_text, "returns", "rank 0 returned '4.0'"),
        WrongAnswer(never_waits_for_its_sends, "wait", "did not wait for 1 of its sends"),
        WrongAnswer(into_one_place, "value", "rank 0 returned 6 and should return 4"),
        WrongAnswer(adds_its_own_too, "value", "rank 1 returned 3 and should return 2"),
        WrongAnswer(knows_the_neighbors, "messages", "not out of a formula"),
        WrongAnswer(adds_and_forgets, "returns", "rank 0 returned nothing"),
    ),
    "3.6": (
        WrongAnswer(zoo.find("branch_around_collective").broken, "deadlock", "there is a deadlock"),
        WrongAnswer(nobody_adds, "value", "should return 2.5"),
        WrongAnswer(only_rank_0_knows, "value", "rank 1 returned 2"),
        WrongAnswer(adds_and_does_not_divide, "value", "returned 10 and should return 2.5"),
        WrongAnswer(the_others_call_something_else, "deadlock", "barrier"),
        WrongAnswer(all_write_the_log, "log", "it is printed 4 times"),
        WrongAnswer(all_but_rank_0_add, "deadlock", "rank 0 never called all_reduce"),
        WrongAnswer(only_rank_0_divides, "value", "rank 1 returned 10 and should return 2.5"),
        WrongAnswer(divides_by_four, "value", "With 2 ranks"),
        WrongAnswer(divides_by_one_less, "value", "rank 0 returned 3.33333"),
        WrongAnswer(the_largest_loss, "value", "rank 0 returned 4"),
        WrongAnswer(adds_twice, "value", "rank 0 returned 10 and should return 2.5"),
        WrongAnswer(loss_of_rank_0, "value", "rank 0 returned 1"),
        WrongAnswer(mean_as_text, "returns", "rank 0 returned '2.5'"),
        WrongAnswer(knows_the_mean, "messages", "not out of a formula"),
        WrongAnswer(logs_and_returns_nothing, "returns", "rank 0 returned nothing"),
    ),
    "3.7": (
        WrongAnswer(zoo.find("unequal_loops").broken, "deadlock", "there is a deadlock"),
        WrongAnswer(as_many_as_the_shortest, "value", "returned 28 and should return 55"),
        WrongAnswer(numbers_that_are_not_there, "value", "returned 66 and should return 55"),
        WrongAnswer(three_steps_for_ever, "value", "With 2 ranks"),
        WrongAnswer(one_more_for_the_last, "deadlock", "With 5 ranks there is a deadlock"),
        WrongAnswer(adds_its_own_only, "value", "The ranks do not even agree"),
        WrongAnswer(one_step_too_few_for_all, "value", "the sum of 0 to 7: the last step is missing"),
        WrongAnswer(one_number_too_few, "value", "the sum of 0 to 9: the last step is missing, or"),
        WrongAnswer(one_number_too_many, "value", "the sum of 0 to 11: one step too many, or"),
        WrongAnswer(one_step_too_many_for_all, "steps", "one step too many"),
        WrongAnswer(a_step_for_every_number, "steps", "8 steps too many"),
        WrongAnswer(begins_one_step_late, "value", "returned 49 and should return 55"),
        WrongAnswer(the_last_number_again, "value", "returned 65 and should return 55"),
        WrongAnswer(skips_what_is_not_there, "deadlock", "rank 3 left the loop one step early"),
        WrongAnswer(waits_in_a_barrier, "deadlock", "calls barrier where"),
        WrongAnswer(sums_on_rank_0, "value", "The ranks do not even agree"),
        WrongAnswer(knows_55, "messages", "not out of a formula"),
    ),
}
RIGHT = {
    "3.4": (backwards, diagnoses_in_capital_letters),
    "3.5": (rightly, one_is_different, pairs_of_two),
    "3.6": (by_gathering, prints_while_it_searches, reduces_and_broadcasts),
    "3.7": (adds_its_own_first, fills_up_with_zeros),
}
