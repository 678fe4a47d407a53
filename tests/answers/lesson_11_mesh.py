"""Answers to coordinates and groups of notebook 11 that a check must reject or accept; CI proves both."""

import itertools
import math

import numpy as np

from hpdl_lab.mesh import coordinates


def by_strides(rank, sizes):
    return tuple(rank // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def by_enumeration(rank, sizes):
    return list(itertools.product(*map(range, sizes)))[rank]


def by_numpy(rank, sizes):
    return np.unravel_index(rank, sizes)


def as_a_list(rank, sizes):
    return list(coordinates(rank, sizes))


def tuples_of_ranks(sizes, axis):
    return tuple(tuple(group) for group in right_groups(sizes, axis))


def grouped(ranks, sizes, axis):
    found = {}
    for rank in ranks:
        place = coordinates(rank, sizes)
        found.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return list(found.values())


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


WRONG = {
    "11.1": """
order: With you the first axis varies fastest
    reversed(sizes) => sizes
    (reversed(place)) => (place)
place: so it is 2 % 3 = 2 there
    place = []
    for size in sizes:
        place.insert(0, rank % size)
        rank //= size
    return tuple(place)
axes @by_enumeration: one coordinate per axis, 1 in all
    list(itertools.product(*map(range, sizes)))[rank] => (rank // sizes[-1], rank % sizes[-1])
twice: would both stand at
    return tuple(rank >> i & 1 for i in reversed(range(len(sizes))))
returns @by_enumeration: return a tuple of ints
    list(itertools.product(*map(range, sizes)))[rank] => dict(enumerate(coordinates(rank, sizes)))
range: Axis 1 has 3 coordinates, 0 to 2
    return tuple(rank // math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
returns @by_strides: coordinates are ints
    // => /
raises: 2 x 1 x 2 x 1 x 3
    a, b, c, d = (1,) * (4 - len(sizes)) + tuple(sizes)
    return (rank // (b * c * d), rank // (c * d) % b, rank // d % c, rank % d)[4 - len(sizes) :]
timeout: still running after
    while rank >= 0:
        pass
range @by_enumeration: count from 0
    list(itertools.product(*map(range, sizes)))[rank] => tuple((i + 1 for i in coordinates(rank, sizes)))
""",
    "11.2": """
axis: they differ elsewhere than along axis 0
    n = sizes[axis]
    return [list(range(first, first + n)) for first in range(0, math.prod(sizes), n)]
axis: A group is the opposite
    found = {}
    for rank in range(math.prod(sizes)):
        found.setdefault(coordinates(rank, sizes)[axis], []).append(rank)
    return list(found.values())
axis: Those are the groups along axis 2
    return right_groups(sizes, len(sizes) - 1 - axis)
twice: Rank 0 is in 2 groups
    found = right_groups(sizes, axis)
    return [group for rank in range(math.prod(sizes)) for group in found if rank in group]
returns: a group holds 12: ranks are ints from 0 to 11
    return grouped(range(math.prod(sizes) + 1), sizes, axis)
cover: Rank 11 is in no group
    return grouped(range(math.prod(sizes) - 1), sizes, axis)
cover: Rank 1 is in no group
    return right_groups(sizes, axis)[:1]
returns: ranks are ints from 0 to 11
    return [[coordinates(rank, sizes) for rank in group] for group in right_groups(sizes, axis)]
cover: Rank 6 is in no group
    stride, n = math.prod(sizes[axis + 1 :]), sizes[axis]
    return [[first + i * stride for i in range(n)] for first in range(stride)]
order: by their lowest rank
    return right_groups(sizes, axis)[::-1]
""",
}
RIGHT = {
    "11.1": (by_strides, by_enumeration, by_numpy, as_a_list),
    "11.2": (right_groups, by_comparing_places, tuples_of_ranks),
}
COMPLETED = {
    "11.1": ["tuple(reversed(place))"],
    "11.2": ["place[:axis] + place[axis + 1 :]"],
}
