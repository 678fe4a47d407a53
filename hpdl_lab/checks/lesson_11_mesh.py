"""Notebook 11, the mesh: where a rank stands on a grid of named axes, and with whom it shares each axis."""

import math

from .. import mesh as reference
from .ranks import alone, capital, count
from .record import Broken, Exercise, Passed

SIZES = ((2, 3), (4,), (2, 2, 2), (3, 2, 1), (2, 3, 4), (1,), (3, 1, 2, 2), (2, 1, 2, 1, 3))
GROUPED = ((2, 2, 3), *SIZES)


def check_coordinates(fn, runner=None):
    for sizes in SIZES:
        places = [place_of(fn, rank, sizes) for rank in range(math.prod(sizes))]
        for rank, place in enumerate(places):
            right = true_place(rank, sizes)
            if place != right:
                where = f"On a grid of {drawn(sizes)} rank {rank} should be at {right}, and you say {place}."
                failed, why = why_place(places, rank, sizes)
                raise Broken(failed, f"{where} {why}".rstrip())
    return Passed(
        (
            f"right for every rank of {len(SIZES)} grids with one to five axes",
            "with sizes (dp 8, pp 16, tp 8) rank 1000 is replica 7, stage 13, shard 0; ranks 1000 to 1007 share a host",
        )
    )


def place_of(fn, rank, sizes):
    where = f"for rank {rank} on a grid of {drawn(sizes)}"
    place = alone(fn, rank, sizes, where=where)
    if not isinstance(place, tuple):
        raise Broken("returns", f"{capital(where)} your function returned {shown(place)}: return a tuple of ints.")
    if len(place) != len(sizes):
        message = f"{capital(where)} your function returned {place}: one coordinate per axis, {len(sizes)} in all."
        raise Broken("axes", message)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in place):
        message = f"{capital(where)} your function returned {place}: coordinates are ints. Python's // divides ints."
        raise Broken("returns", message)
    return place


def true_place(rank, sizes):
    return tuple(rank // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def why_place(places, rank, sizes):
    place = places[rank]
    if all(p == true_place(r, sizes[::-1])[::-1] for r, p in enumerate(places)):
        return "order", (
            "With you the first axis varies fastest. It is the last one: tp, which sends most, is put last, and its "
            "ranks are to be neighbors on one host."
        )
    if all(p == tuple(i + 1 for i in true_place(r, sizes)) for r, p in enumerate(places)):
        return "range", "Coordinates count from 0, as ranks do."
    outside = next((a for a, (i, n) in enumerate(zip(place, sizes, strict=True)) if not 0 <= i < n), None)
    if outside is not None:
        return "range", (
            f"Axis {outside} has {count(sizes[outside], 'coordinate')}, 0 to {sizes[outside] - 1}: what is left over "
            "is the business of the axes before it."
        )
    twice = next((p for i, p in enumerate(places) if p in places[:i]), None)
    if twice is not None:
        both = [r for r, p in enumerate(places) if p == twice][:2]
        return "twice", f"Ranks {both[0]} and {both[1]} would both stand at {twice}."
    n = sizes[-1]
    return "place", (
        f"The last axis has {count(n, 'coordinate')}, so it is {rank} % {n} = {rank % n} there; {rank} // {n} = "
        f"{rank // n} is left for the axes before it."
    )


def drawn(sizes):
    return " x ".join(map(str, sizes))


def shown(value):
    text = repr(value)
    return "nothing" if value is None else f"{text[:60]}{'...' if len(text) > 60 else ''}"


def check_groups(fn, runner=None):
    for sizes in GROUPED:
        for axis in range(len(sizes)):
            check_groups_of(fn, sizes, axis)
    tp = fn((8, 16, 8), 2)
    return Passed(
        (
            f"right along every axis of {len(GROUPED)} grids with one to five axes",
            f"with sizes (dp 8, pp 16, tp 8) there are {len(tp)} groups along tp, the first of ranks {tp[0][0]} to "
            f"{tp[0][-1]}, on one host; along dp the first is [0, 128, 256, ...], a rank of every replica",
        )
    )


def check_groups_of(fn, sizes, axis):
    where = f"along axis {axis} of a grid of {drawn(sizes)}"
    got = alone(fn, sizes, axis, where=where)
    n, where = math.prod(sizes), capital(where)
    if not isinstance(got, list) or not all(isinstance(group, list) for group in got):
        raise Broken("returns", f"{where} your function returned {shown(got)}: groups are a list of lists of ranks.")
    odd = next((r for group in got for r in group if not isinstance(r, int) or not 0 <= r < n), None)
    if odd is not None:
        raise Broken("returns", f"{where} a group holds {shown(odd)}: ranks are ints from 0 to {n - 1}.")
    right = true_groups(sizes, axis)
    if got == right:
        return
    told = f"{where} you say {shown(got)}, and it should be {shown(right)}."
    raise Broken(*why_groups(got, right, sizes, axis, told))


def true_groups(sizes, axis):
    found = {}
    for rank in range(math.prod(sizes)):
        place = true_place(rank, sizes)
        found.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return list(found.values())


def why_groups(got, right, sizes, axis, told):
    """(invariant, message) for groups that are not right."""
    flat = [r for group in got for r in group]
    others = {}
    for rank in range(math.prod(sizes)):
        others.setdefault(true_place(rank, sizes)[axis], []).append(rank)
    if got == list(others.values()):
        return "axis", (
            f"{told} Those have the same coordinate along axis {axis}, and differ in the others. A group is the other "
            "way round: it differs along this axis, and only there."
        )
    twice = next((r for r in flat if flat.count(r) > 1), None)
    if twice is not None:
        return "twice", f"{told} Rank {twice} is in {flat.count(twice)} groups: along one axis it belongs to one."
    lost = [r for r in range(math.prod(sizes)) if r not in flat]
    if lost:
        return "cover", f"{told} Rank {lost[0]} is in no group: every rank has a group along every axis, even of one."
    if sorted(got) == sorted(right):
        return "order", f"{told} The right groups in another order: by their lowest rank."
    for a in range(len(sizes)):
        if a != axis and got == true_groups(sizes, a):
            return "axis", f"{told} Those are the groups along axis {a}: axes are counted from the first, as in sizes."
    apart = [(g[0], r) for g in got for r in g[1:] if not together(g[0], r, right)]
    if not apart:
        a, b = next((g[0], r) for g in right for r in g[1:] if not together(g[0], r, got))
        return "split", f"{told} Ranks {a} and {b} differ along axis {axis} only: they belong together."
    a, b = apart[0]
    places = f"{a} stands at {true_place(a, sizes)} and rank {b} at {true_place(b, sizes)}"
    return "axis", f"{told} Rank {places}: they differ elsewhere than along axis {axis}."


def together(a, b, groups):
    return any(a in group and b in group for group in groups)


EXERCISES = (
    Exercise(
        id="11.1",
        title="where a rank stands",
        reference=reference.coordinates,
        stars=2,
        check=check_coordinates,
        explanation=(
            "Digits of a number, with a base of its own for each place. The order of the axes is a decision about "
            "hardware: what varies fastest are neighbors, so the axis that sends most comes last. Megatron and torch's "
            "init_device_mesh count the same way."
        ),
        parallel=False,
    ),
    Exercise(
        id="11.2",
        title="who is in whose group",
        reference=reference.groups,
        stars=2,
        check=check_groups,
        explanation=(
            "comm.split does the rest: ranks that name the same color, here what they have in common, get a "
            "communicator of their own. R replicas of P partitions are P groups of R ranks along dp: so many "
            "all-reduces go on at once, each about 1/P of the model."
        ),
        parallel=False,
    ),
)
