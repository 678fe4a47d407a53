"""Answers to coordinates and groups of notebook 11 that a check must reject or accept; CI proves both."""

import itertools
import math

from hpdl_lab.mesh import coordinates

from . import WrongAnswer

# -- coordinates: wrong ------------------------------------------------------------------------------------------------


def first_varies_fastest(rank, sizes):
    place = []
    for size in sizes:
        rank, coordinate = divmod(rank, size)
        place.append(coordinate)
    return tuple(place)


def divides_by_the_wrong_size(rank, sizes):
    """Takes the size of the first axis where that of the last one belongs."""
    place = []
    for size in sizes:
        place.insert(0, rank % size)
        rank //= size
    return tuple(place)


def knows_two_axes(rank, sizes):
    return rank // sizes[-1], rank % sizes[-1]


def counts_bits(rank, sizes):
    return tuple(rank >> i & 1 for i in reversed(range(len(sizes))))


def returns_a_list(rank, sizes):
    return list(coordinates(rank, sizes))


def forgets_the_remainder(rank, sizes):
    return tuple(rank // math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def divides_into_fractions(rank, sizes):
    return tuple((rank / math.prod(sizes[i + 1 :])) % size for i, size in enumerate(sizes))


def knows_four_axes(rank, sizes):
    a, b, c, d = (1,) * (4 - len(sizes)) + tuple(sizes)
    return (rank // (b * c * d), rank // (c * d) % b, rank // d % c, rank % d)[4 - len(sizes) :]


def never_ends(rank, sizes):
    while rank >= 0:
        pass


def counts_from_one(rank, sizes):
    return tuple(i + 1 for i in coordinates(rank, sizes))


# -- coordinates: right ------------------------------------------------------------------------------------------------


def by_strides(rank, sizes):
    return tuple(rank // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def by_enumeration(rank, sizes):
    return list(itertools.product(*map(range, sizes)))[rank]


# -- groups: wrong -----------------------------------------------------------------------------------------------------


def always_neighbors(sizes, axis):
    n = sizes[axis]
    return [list(range(first, first + n)) for first in range(0, math.prod(sizes), n)]


def everybody_but_the_axis(sizes, axis):
    """Puts together who has the same coordinate along the axis."""
    found = {}
    for rank in range(math.prod(sizes)):
        found.setdefault(coordinates(rank, sizes)[axis], []).append(rank)
    return list(found.values())


def counts_axes_from_the_end(sizes, axis):
    return right_groups(sizes, len(sizes) - 1 - axis)


def once_for_every_rank(sizes, axis):
    found = right_groups(sizes, axis)
    return [group for rank in range(math.prod(sizes)) for group in found if rank in group]


def grouped(ranks, sizes, axis):
    found = {}
    for rank in ranks:
        place = coordinates(rank, sizes)
        found.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return list(found.values())


def one_rank_too_many(sizes, axis):
    return grouped(range(math.prod(sizes) + 1), sizes, axis)


def one_rank_too_few(sizes, axis):
    return grouped(range(math.prod(sizes) - 1), sizes, axis)


def only_those_of_rank_0(sizes, axis):
    return right_groups(sizes, axis)[:1]


def holds_places(sizes, axis):
    return [[coordinates(rank, sizes) for rank in group] for group in right_groups(sizes, axis)]


def with_one_stride(sizes, axis):
    """Right for the first axis only: as if there were no axis before it."""
    stride, n = math.prod(sizes[axis + 1 :]), sizes[axis]
    return [[first + i * stride for i in range(n)] for first in range(stride)]


def from_last_to_first(sizes, axis):
    return right_groups(sizes, axis)[::-1]


# -- groups: right -----------------------------------------------------------------------------------------------------


def right_groups(sizes, axis):
    """By strides: a group begins at every rank whose coordinate along the axis is 0."""
    stride, n = math.prod(sizes[axis + 1 :]), sizes[axis]
    firsts = [rank for rank in range(math.prod(sizes)) if rank // stride % n == 0]
    return [[first + i * stride for i in range(n)] for first in firsts]


def by_comparing_places(sizes, axis):
    places, done = [list(coordinates(rank, sizes)) for rank in range(math.prod(sizes))], []
    for place in places:
        others = place[:axis] + place[axis + 1 :]
        group = [r for r, p in enumerate(places) if p[:axis] + p[axis + 1 :] == others]
        if group not in done:
            done.append(group)
    return done


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "11.1": (
        WrongAnswer(first_varies_fastest, "order", "With you the first axis varies fastest"),
        WrongAnswer(divides_by_the_wrong_size, "place", "so it is 2 % 3 = 2 there"),
        WrongAnswer(knows_two_axes, "axes", "one coordinate per axis, 1 in all"),
        WrongAnswer(counts_bits, "twice", "would both stand at"),
        WrongAnswer(returns_a_list, "returns", "return a tuple of ints"),
        WrongAnswer(forgets_the_remainder, "range", "Axis 1 has 3 coordinates, 0 to 2"),
        WrongAnswer(divides_into_fractions, "returns", "coordinates are ints"),
        WrongAnswer(knows_four_axes, "raises", "2 x 1 x 2 x 1 x 3"),
        WrongAnswer(never_ends, "timeout", "still running after"),
        WrongAnswer(counts_from_one, "range", "count from 0"),
    ),
    "11.2": (
        WrongAnswer(always_neighbors, "axis", "they differ elsewhere than along axis 0"),
        WrongAnswer(everybody_but_the_axis, "axis", "A group is the other way round"),
        WrongAnswer(counts_axes_from_the_end, "axis", "Those are the groups along axis 2"),
        WrongAnswer(once_for_every_rank, "twice", "Rank 0 is in 2 groups"),
        WrongAnswer(one_rank_too_many, "returns", "a group holds 12: ranks are ints from 0 to 11"),
        WrongAnswer(one_rank_too_few, "cover", "Rank 11 is in no group"),
        WrongAnswer(only_those_of_rank_0, "cover", "Rank 1 is in no group"),
        WrongAnswer(holds_places, "returns", "ranks are ints from 0 to 11"),
        WrongAnswer(with_one_stride, "cover", "Rank 6 is in no group"),
        WrongAnswer(from_last_to_first, "order", "by their lowest rank"),
    ),
}
RIGHT = {
    "11.1": (by_strides, by_enumeration),
    "11.2": (right_groups, by_comparing_places),
}
