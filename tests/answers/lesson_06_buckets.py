"""Answers to assign_buckets of notebook 06 that a check must reject or accept; CI proves both."""

from itertools import accumulate

from hpdl_lab.parallel.reducer import assign_buckets


def begins_with_an_empty_one(nbytes, limit, first):
    buckets, room = [[]], first
    for index in reversed(range(len(nbytes))):
        if nbytes[index] > room:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= nbytes[index]
    return buckets


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


def as_pytorch(nbytes, limit, first):
    """Closes a bucket after the gradient with which it reaches its limit, as DDP's reducer does."""
    buckets, held = [], limit
    for index in reversed(range(len(nbytes))):
        if not buckets or held >= (first if len(buckets) == 1 else limit):
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += nbytes[index]
    return buckets


WRONG = {
    "6.3": """
order: they are in the order of registration
    last = len(nbytes) - 1
    return [[last - i for i in bucket] for bucket in assign_buckets(nbytes[::-1], limit, first)]
limit: Look whether a gradient fits before
    buckets, held = [], 0
    for index in reversed(range(len(nbytes))):
        over_first = len(buckets) == 1 and held + nbytes[index] > first
        if not buckets or over_first or held >= limit:
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += nbytes[index]
    return buckets
first: the first bucket holds
    buckets, held = [[]], 0
    for index in reversed(range(len(nbytes))):
        buckets[-1].append(index)
        held += nbytes[index]
        if held > (first if len(buckets) == 1 else limit) and index:
            buckets.append([])
            held = 0
    return buckets
cover: the last bucket was never put into the list
    buckets, => buckets, bucket,
    0 => [], first
    not buckets or => bucket and
    room = limit if buckets else first => buckets.append(bucket)
    buckets.append([]) => bucket, room = ([], limit)
    buckets[-1] => bucket
cover: gradient 0 is in none of them, 5 of 6 are: the loop ends
    return [[i + 1 for i in bucket] for bucket in assign_buckets(nbytes[1:], limit, first)]
cover: gradient 5 is in none of them, 5 of 6 are: the loop begins
    return assign_buckets(nbytes[:-1], limit, first)
first: the first bucket holds
    return assign_buckets(nbytes, limit, limit)
small: would have fitted: the limit is 450
    return assign_buckets(nbytes, first, first)
split @begins_with_an_empty_one: is in more than one place
    -         if nbytes[index] > room:
    +         left = nbytes[index]
    +         while left > room:
    +             buckets[-1].append(index)
    +             left -= room
    -         room -= nbytes[index]
    +         room -= left
order: Only neighbors share a bucket
    order = sorted(range(len(nbytes)), key=lambda i: nbytes[i])
    return [[order[i] for i in bucket] for bucket in assign_buckets([nbytes[i] for i in order], limit, first)]
order: Only neighbors share a bucket
    buckets, rooms = [], []
    for index in reversed(range(len(nbytes))):
        b = next((b for b, room in enumerate(rooms) if nbytes[index] <= room), len(buckets))
        if b == len(buckets):
            rooms.append(limit if buckets else first)
            buckets.append([])
        buckets[b].append(index)
        rooms[b] -= nbytes[index]
    return buckets
empty @begins_with_an_empty_one: would be an empty message
small: gradient 1, of 50, would have fitted: the limit is 100
    return assign_buckets(nbytes, limit - 1, first - 1)
small: Each further bucket costs another latency
    return [[index] for index in reversed(range(len(nbytes)))]
raises @begins_with_an_empty_one: IndexError
    ([[]], first) => ([[len(nbytes) - 1]], first - nbytes[-1])
    (range(len(nbytes))): => (range(len(nbytes) - 1)):
cover: there is no gradient 10
    return [[nbytes[i] for i in bucket] for bucket in assign_buckets(nbytes, limit, first)]
returns: buckets are a list of lists
    return tuple(map(tuple, assign_buckets(nbytes, limit, first)))
""",
}
RIGHT = {
    "6.3": (by_sums, bucket_by_bucket, as_pytorch),
}
COMPLETED = {
    "6.3": ["room = limit if buckets else first\nbuckets.append([])"],
}
