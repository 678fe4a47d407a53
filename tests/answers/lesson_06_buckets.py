"""Answers to assign_buckets of notebook 06 that a check must reject or accept; CI proves both."""

from itertools import accumulate

from hpdl_lab.parallel.reducer import assign_buckets

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


def in_the_order_of_registration(nbytes, limit, first):
    last = len(nbytes) - 1
    return [[last - i for i in bucket] for bucket in assign_buckets(nbytes[::-1], limit, first)]


def looks_too_late(nbytes, limit, first):
    buckets, held = [], 0
    for index in reversed(range(len(nbytes))):
        over_first = len(buckets) == 1 and held + nbytes[index] > first
        if not buckets or over_first or held >= limit:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += nbytes[index]
    return buckets


def forgets_the_last_bucket(nbytes, limit, first):
    buckets, bucket, room = [], [], first
    for index in reversed(range(len(nbytes))):
        if bucket and nbytes[index] > room:
            buckets.append(bucket)
            bucket, room = [], limit
        bucket.append(index)
        room -= nbytes[index]
    return buckets


def ends_one_too_early(nbytes, limit, first):
    return [[i + 1 for i in bucket] for bucket in assign_buckets(nbytes[1:], limit, first)]


def begins_one_too_late(nbytes, limit, first):
    return assign_buckets(nbytes[:-1], limit, first)


def first_is_like_the_others(nbytes, limit, first):
    return assign_buckets(nbytes, limit, limit)


def all_are_like_the_first(nbytes, limit, first):
    return assign_buckets(nbytes, first, first)


def splits_gradients(nbytes, limit, first):
    """Fills every bucket to the last byte."""
    buckets, room = [[]], first
    for index in reversed(range(len(nbytes))):
        left = nbytes[index]
        while left > room:
            buckets[-1].append(index)
            left -= room
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= left
    return buckets


def sorts_by_size(nbytes, limit, first):
    order = sorted(range(len(nbytes)), key=lambda i: nbytes[i])
    return [[order[i] for i in bucket] for bucket in assign_buckets([nbytes[i] for i in order], limit, first)]


def fills_the_gaps(nbytes, limit, first):
    """First fit: each gradient goes into the first bucket that has room for it."""
    buckets, rooms = [], []
    for index in reversed(range(len(nbytes))):
        b = next((b for b, room in enumerate(rooms) if nbytes[index] <= room), len(buckets))
        if b == len(buckets):
            rooms.append(limit if buckets else first)
            buckets.append([])
        buckets[b].append(index)
        rooms[b] -= nbytes[index]
    return buckets


def begins_with_an_empty_one(nbytes, limit, first):
    buckets, room = [[]], first
    for index in reversed(range(len(nbytes))):
        if nbytes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= nbytes[index]
    return buckets


def wants_more_room_than_needed(nbytes, limit, first):
    return assign_buckets(nbytes, limit - 1, first - 1)


def one_each(nbytes, limit, first):
    return [[index] for index in reversed(range(len(nbytes)))]


def stumbles_over_no_gradients(nbytes, limit, first):
    buckets, room = [[len(nbytes) - 1]], first - nbytes[-1]
    for index in reversed(range(len(nbytes) - 1)):
        if nbytes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= nbytes[index]
    return buckets


def returns_sizes(nbytes, limit, first):
    return [[nbytes[i] for i in bucket] for bucket in assign_buckets(nbytes, limit, first)]


def returns_tuples(nbytes, limit, first):
    return tuple(map(tuple, assign_buckets(nbytes, limit, first)))


# -- right -------------------------------------------------------------------------------------------------------------


def by_sums(nbytes, limit, first):
    """Looks at the sum of the bucket each time."""
    buckets = []
    for index in range(len(nbytes) - 1, -1, -1):
        most = first if len(buckets) <= 1 else limit
        if not buckets or sum(nbytes[i] for i in buckets[-1]) + nbytes[index] > most:
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def bucket_by_bucket(nbytes, limit, first):
    """Takes as many as fit, at least one, then goes on with the rest."""
    left, buckets = list(reversed(range(len(nbytes)))), []
    while left:
        sums = accumulate(nbytes[i] for i in left)
        n = max(1, sum(total <= (limit if buckets else first) for total in sums))
        buckets.append(left[:n])
        left = left[n:]
    return buckets


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "6.3": (
        WrongAnswer(in_the_order_of_registration, "order", "they are in the order of registration"),
        WrongAnswer(looks_too_late, "limit", "Look whether a gradient fits before"),
        WrongAnswer(forgets_the_last_bucket, "cover", "the last bucket was never put into the list"),
        WrongAnswer(ends_one_too_early, "cover", "gradient 0 is in none of them, 5 of 6 are: the loop ends"),
        WrongAnswer(begins_one_too_late, "cover", "gradient 5 is in none of them, 5 of 6 are: the loop begins"),
        WrongAnswer(first_is_like_the_others, "first", "the first bucket holds"),
        WrongAnswer(all_are_like_the_first, "small", "would have fitted: the limit is 450"),
        WrongAnswer(splits_gradients, "split", "is in more than one place"),
        WrongAnswer(sorts_by_size, "order", "Only neighbors share a bucket"),
        WrongAnswer(fills_the_gaps, "order", "Only neighbors share a bucket"),
        WrongAnswer(begins_with_an_empty_one, "empty", "a message about nothing"),
        WrongAnswer(wants_more_room_than_needed, "small", "gradient 1, of 50, would have fitted: the limit is 100"),
        WrongAnswer(one_each, "small", "Every bucket more is a latency more"),
        WrongAnswer(stumbles_over_no_gradients, "raises", "IndexError"),
        WrongAnswer(returns_sizes, "cover", "there is no gradient 10"),
        WrongAnswer(returns_tuples, "returns", "buckets are a list of lists"),
    ),
}
RIGHT = {
    "6.3": (by_sums, bucket_by_bucket),
}
