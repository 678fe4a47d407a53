"""Answers to groups of notebook 11 that a check must reject or accept; CI proves both."""

import math

from hpdl_lab.mesh import coordinates


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
axis: they differ along another axis than 0
    n = sizes[axis]
    return [list(range(first, first + n)) for first in range(0, math.prod(sizes), n)]
axis: A group is the opposite
    found = {}
    for rank in range(math.prod(sizes)):
        found.setdefault(coordinates(rank, sizes)[axis], []).append(rank)
    return list(found.values())
axis: These are the groups along axis 2
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
    "11.1": (right_groups, by_comparing_places, tuples_of_ranks),
}
COMPLETED = {
    "11.1": ["place[:axis] + place[axis + 1 :]"],
}
