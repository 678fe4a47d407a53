"""Answers to exercises 3.4 to 3.6 that a check must reject or accept; CI proves both."""

import numpy as np

from hpdl_lab import zoo
from hpdl_lab.zoo import diagnose


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


def backwards():
    return dict(reversed(diagnose().items()))


def diagnoses_in_capital_letters():
    return {letter.lower(): said.upper() for letter, said in diagnose().items()}


def neighbors(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def exchanges(comm, steps):
    """The number of each of the ranks that are `steps` away, added up."""
    mine, theirs, total = np.full(1, float(comm.rank)), np.empty(1), 0.0
    for step in steps:
        neighbor = (comm.rank + step) % comm.size
        total += comm.sendrecv(mine, neighbor, theirs, neighbor)[0]
    return float(total)


def right_or_left_first(comm):
    return (1, -1) if comm.rank % 2 == 0 else (-1, 1)


def sums_all(comm):
    return float(comm.all_reduce(np.full(1, float(comm.rank)))[0])


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


def steps(comm, firsts, last=10, collective="all_reduce"):
    """What the repaired program does, with these first numbers of the steps."""
    total = 0.0
    for first in firsts:
        number = first + comm.rank
        x = np.full(1, float(number) if number <= last else 0.0)
        getattr(comm, collective)(x)
        total += x[0]
    return float(total)


def adds_its_own_first(comm):
    """One step instead of three."""
    return float(comm.all_reduce(np.full(1, float(sum(range(comm.rank, 11, comm.size)))))[0])


def fills_up_with_zeros(comm):
    most = -(-11 // comm.size)
    mine = list(range(comm.rank, 11, comm.size))
    mine += [0] * (most - len(mine))
    return sum(float(comm.all_reduce(np.full(1, float(number)))[0]) for number in mine)


WRONG = {
    "3.4": """
diagnosis @calls_a_circle_slow: Program A: you say 'slow'. However long you wait
diagnosis @calls_a_mismatch_a_circle: Program B: you say 'circle'
diagnosis @calls_another_way_an_order: Program C: you say 'order'
diagnosis @calls_an_order_absent: look in which order
diagnosis @calls_unequal_loops_a_circle: ranks that wait, but no circle
diagnosis @calls_a_straggler_absent: The rank does make the call, only late
diagnosis @calls_an_error_absent: It is true that a rank is absent, but why?
diagnosis @calls_a_circle_an_order: Both ranks make the same calls, and in the same order
diagnosis @calls_a_mismatch_an_error: two ranks contradict each other
diagnosis @calls_unequal_loops_a_straggler: the missing rank has finished
diagnosis @calls_an_order_a_circle: but not in the same call
diagnosis: Program A: you say 'mismatch'
    first, *rest = diagnose().values()
    return dict(zip("ABCDEFG", [*rest, first], strict=True))
name @diagnoses_in_capital_letters: there is no diagnosis ['circle']
    .lower(): said.upper() => : [said]
missing @forgets_the_straggler: Program F has no diagnosis
name @invents_a_diagnosis: there is no diagnosis 'deadlock'
missing @backwards: There is no program 'X'
    dict(reversed(diagnose().items())) => diagnose() | {'X': 'slow'}
returns @diagnoses_in_capital_letters: returned a str: return a dict
    {letter.lower(): said.upper() for letter, said in diagnose().items()} => ', '.join(diagnose().values())
returns @backwards: returned nothing: return a dict
    return dict(reversed(diagnose().items())) => print(diagnose())
""",
    "3.5": """
deadlock @zoo.find('ring_even_odd').broken: all exchange with one who exchanges
deadlock: all receive first
    mine, theirs, total = np.full(1, float(comm.rank)), np.empty(1), 0.0
    for neighbor in neighbors(comm):
        total += comm.recv(theirs, neighbor)[0]
    for neighbor in neighbors(comm):
        comm.send(mine, neighbor)
    return float(total)
deadlock @one_is_different: all exchange with one who exchanges
    -     for step in (-1, 1) if comm.rank == 0 else (1, -1):
    +     for step in (1, -1) if comm.size % 2 == 0 else (-1, 1):
value: rank 0 returned 3 and should return 4
    right, left = neighbors(comm)
    return float(comm.sendrecv(np.full(1, float(comm.rank)), right, np.empty(1), left)[0])
value @pairs_of_two: Every rank sent 1 message: one step too few
    (comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => (comm, right_or_left_first(comm)[:1])
value: Every rank sent 3 messages: one step too many
    first, second = right_or_left_first(comm)
    return exchanges(comm, (first, second, first))
deadlock @pairs_of_two: all exchange with one who exchanges
    exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => exchanges(comm, (-1, 1))
deadlock: all exchange with one who exchanges
    comm.barrier()
    return exchanges(comm, (1, -1))
value: rank 0 returned 6 and should return 4
    return float(comm.all_reduce(np.full(1, float(comm.rank)))[0])
value @pairs_of_two: rank 0 returned 6 and should return 4
    exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => sums_all(comm) - comm.rank
value: should return 4
    (right, left), mine, total = neighbors(comm), np.full(1, float(comm.rank)), 0.0
    for to, source in ((right, left), (left, right)):
        mine = comm.sendrecv(mine, to, np.empty(1), source)
        total += mine[0]
    return float(total)
returns @pairs_of_two: every rank returns a float, here 4
    exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => (rightly(comm), 0.0)
returns @pairs_of_two: rank 0 returned '4.0'
    return exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => return str(rightly(comm))
wait: did not wait for 1 of its sends
    mine, total = np.full(1, float(comm.rank)), 0.0
    for to in neighbors(comm):
        comm.isend(mine, to)
    for source in neighbors(comm):
        total += comm.recv(np.empty(1), source)[0]
    return float(total)
value: rank 0 returned 6 and should return 4
    mine, theirs = np.full(1, float(comm.rank)), np.empty(1)
    works = [comm.irecv(theirs, neighbor) for neighbor in neighbors(comm)]
    works += [comm.isend(mine, neighbor) for neighbor in neighbors(comm)]
    for work in works:
        work.wait()
    return float(2 * theirs[0])
value @pairs_of_two: rank 1 returned 3 and should return 2
    exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => rightly(comm) + comm.rank
messages @pairs_of_two: not from a formula
    exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => float(sum(neighbors(comm)))
returns @pairs_of_two: rank 0 returned nothing
    return exchanges(comm, (1, -1) if comm.rank // 2 % 2 == 0 else (-1, 1)) => rightly(comm)
""",
    "3.6": """
deadlock @zoo.find('unequal_loops').broken: there is a deadlock
value: returned 28 and should return 55
    total = 0.0
    for begin in range(0, 11 - comm.size + 1, comm.size):
        total += float(comm.all_reduce(np.full(1, float(begin + comm.rank)))[0])
    return total
value: returned 66 and should return 55
    total = 0.0
    for begin in range(0, 11, comm.size):
        total += float(comm.all_reduce(np.full(1, float(begin + comm.rank)))[0])
    return total
value: With 2 ranks
    total = 0.0
    for step in range(3):
        number = step * comm.size + comm.rank
        total += float(comm.all_reduce(np.full(1, float(number) if number < 11 else 0.0))[0])
    return total
deadlock: With 5 ranks there is a deadlock
    total = 0.0
    mine = list(range(comm.rank, 11, comm.size)) + ([0] if comm.rank == comm.size - 1 else [])
    for number in mine:
        total += float(comm.all_reduce(np.full(1, float(number)))[0])
    return total
value: The ranks do not even agree
    return float(sum(range(comm.rank, 11, comm.size)))
value: the sum of 0 to 7: the last step is missing
    return steps(comm, range(0, 11 - comm.size, comm.size))
value: the sum of 0 to 9: the last step is missing, or
    return steps(comm, range(0, 11, comm.size), last=9)
value: the sum of 0 to 11: one step too many, or
    return steps(comm, range(0, 12, comm.size), last=11)
steps: one step too many
    return steps(comm, range(0, 11 + comm.size, comm.size))
steps: 8 steps too many
    return steps(comm, range(0, 11 * comm.size, comm.size))
value: returned 49 and should return 55
    return steps(comm, range(comm.size, 11, comm.size))
value: returned 65 and should return 55
    firsts = range(0, 11, comm.size)
    return sum(float(comm.all_reduce(np.full(1, float(min(first + comm.rank, 10))))[0]) for first in firsts)
deadlock: rank 3 left the loop one step early
    total = 0.0
    for first in range(0, 11, comm.size):
        if first + comm.rank < 11:
            total += float(comm.all_reduce(np.full(1, float(first + comm.rank)))[0])
    return total
deadlock: calls barrier where
    mine = range(comm.rank, 11, comm.size)
    total = sum(float(comm.all_reduce(np.full(1, float(number)))[0]) for number in mine)
    for _ in range(-(-11 // comm.size) - len(mine)):
        comm.barrier()
    return total
value: The ranks do not even agree
    return steps(comm, range(0, 11, comm.size), collective="reduce")
messages @adds_its_own_first: not from a formula
    float(comm.all_reduce(np.full(1, float(sum(range(comm.rank, 11, comm.size)))))[0]) => 55.0
""",
}
RIGHT = {
    "3.4": (backwards, diagnoses_in_capital_letters),
    "3.5": (rightly, one_is_different, pairs_of_two),
    "3.6": (adds_its_own_first, fills_up_with_zeros),
}
