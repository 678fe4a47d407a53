"""Answers to exercise 14.5 that the check must reject or accept; CI proves both."""

import math
from bisect import bisect_left
from statistics import mean

import numpy as np

from hpdl_lab.performance.reading import play, workers_and_prefetch


def waits_added(reads, step, cores, room):
    pairs = [(w, p) for w in range(1, cores + 1) for p in range(1, room + 1) if w * p <= room]
    for workers, prefetch in sorted(pairs):
        free, places, now, waited = [0.0] * workers, [0.0] * (workers * prefetch), 0.0, 0.0
        for i, seconds in enumerate(reads):
            ready = free[i % workers] = max(free[i % workers], places.pop(0)) + seconds
            waited += max(0.0, ready - now) if i else 0.0
            places.append(max(now, ready))
            now = places[-1] + step
        if waited <= 0.01 * step * (len(reads) - 1):
            return [workers, prefetch]


def with_floats(*given):
    return (pair := workers_and_prefetch(*given)) and [*map(float, pair)]


def by_bisection(reads, step, cores, room):
    for workers in np.arange(1, cores + 1):
        places = np.arange(1, room // workers + 1)  # with more of them, no read begins later
        at = bisect_left(places, True, key=lambda p: play(reads, step, workers, p).waiting(step) <= 0.01)
        if at < len(places):
            return np.array([workers, places[at]])


WRONG = {
    "14.5": """
average: What happens after a slow one
    return (min(cores, math.ceil(mean(reads) / step)), max(1, math.ceil(max(reads) / step)))
average: How long do others take
    return (math.ceil(min(reads) / step), 1)
tail: Could batches that are ready bridge it
    return (math.ceil(max(reads) / step), 1)
start: The wait for the first batch does not count
    taken[-1] - taken[0] => taken[-1]
place: not a step later
    place = taken[i - workers * prefetch] => place = taken[i - workers * prefetch] + step
total: you count all places
    return (workers, prefetch) => return (workers, workers * prefetch)
returns: in the wrong order
    return (workers, prefetch) => return (prefetch, workers)
ahead: When may a read begin
    max(free, place) + seconds => free + seconds
busy: Worker 0 was reading batch 160
    max(free, place) + seconds => place + seconds
busy: Which worker reads which batch
    free = ends[i - workers] => free = sorted(ends)[-workers]
cost: more prefetch than needed
    taken[i - workers * prefetch] if i >= workers * prefetch => taken[i - prefetch] if i >= prefetch
cost: more prefetch than needed
    1.01 => 1.0001
cost: more workers than needed
    range(1, cores + 1) => range(cores, 0, -1)
limits: takes a core from a rank
    range(1, cores + 1) => range(1, 100)
limits: there is memory for
    range(1, room // workers + 1) => range(1, room + 1)
none: does that time count
    pass
returns: two whole numbers from 1 on
    return (math.nan, 2)
""",
}
RIGHT = {"14.5": (waits_added, with_floats, by_bisection)}
COMPLETED = {
    "14.5": ["taken[i - workers * prefetch] if i >= workers * prefetch else 0", "taken[i - 1] + step"],
}
