"""Answers to gradient_ready of notebook 06 that a check must reject or accept; CI proves both."""

from hpdl_lab.collectives.ring import all_reduce_naive


def start(comm, reducer, b):
    reducer.works.append(comm.background(reducer.all_reduce, reducer.buckets[b].packed()))


def started_with(comm, reducer, index, all_reduce):
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        reducer.works.append(comm.background(all_reduce, reducer.buckets[len(reducer.works)].packed()))


def never_the_last_bucket(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) - 1 and reducer.missing[len(reducer.works)] == 0:
        start(comm, reducer, len(reducer.works))


def with_a_for_loop(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    for b in range(len(reducer.works), len(reducer.buckets)):
        if reducer.missing[b]:
            return
        start(comm, reducer, b)


def through_a_function(comm, reducer, index):
    """Packs during backward, too, and counts from what is there."""
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1

    def pack_and_reduce(comm, bucket):
        return reducer.all_reduce(comm, bucket.packed())

    while len(reducer.works) < len(reducer.buckets):
        bucket = reducer.buckets[len(reducer.works)]
        if not all(reducer.collected[i] for i in bucket.indices):
            break
        reducer.works.append(comm.background(pack_and_reduce, bucket))


WRONG = {
    "6.4": """
order: rank 1 in the order 3, 2, 1, 0
    reducer.collect(index)
    b = reducer.bucket_of[index]
    reducer.missing[b] -= 1
    if reducer.missing[b] == 0:
        start(comm, reducer, b)
waits: it waits for other ranks, and backward stands still
    -         bucket = reducer.buckets[len(reducer.works)]
    -         reducer.works.append(comm.background(reducer.all_reduce, bucket.packed()))
    +         start(comm, reducer, len(reducer.works))
    +         reducer.works[-1].wait()
waits: comm.background returns at once
    -         bucket = reducer.buckets[len(reducer.works)]
    -         reducer.works.append(comm.background(reducer.all_reduce, bucket.packed()))
    +         reducer.all_reduce(comm, reducer.buckets[len(reducer.works)].packed())
    +         reducer.works.append(comm.background(lambda comm: None))
last @never_the_last_bucket: has started
    while => if
    (reducer.buckets) - 1 and reducer. => (reducer.buckets) and reducer.
last @never_the_last_bucket: has started 3 of 4 buckets
late: no bucket had been started on rank 0
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    if not any(reducer.missing):
        for b in range(len(reducer.buckets)):
            start(comm, reducer, b)
late @never_the_last_bucket: could be under way
    -     while len(reducer.works) < len(reducer.buckets) - 1 and reducer.missing[len(reducer.works)] == 0:
    +     while len(reducer.works) < len(reducer.buckets) and (not any(reducer.missing[:len(reducer.works) + 2])):
early @never_the_last_bucket: not all of a bucket of
    -     while len(reducer.works) < len(reducer.buckets) - 1 and reducer.missing[len(reducer.works)] == 0:
    +     sizes = [len(bucket.indices) for bucket in reducer.buckets]
    +     while len(reducer.works) < len(sizes) and reducer.missing[len(reducer.works)] < sizes[len(reducer.works)]:
twice: rank 0 starts bucket 0
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    for b in range(len(reducer.buckets)):
        if any(reducer.missing[: b + 1]):
            break
        start(comm, reducer, b)
count: is [2, 2, 1, 1] when all gradients are there
    reducer.collect(index)
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        start(comm, reducer, len(reducer.works))
flag: rank 1 has no gradient for parameter 3
    -         bucket = reducer.buckets[len(reducer.works)]
    -         reducer.works.append(comm.background(reducer.all_reduce, bucket.packed()))
    +         flat = reducer.buckets[len(reducer.works)].flat
    +         reducer.works.append(comm.background(reducer.all_reduce, flat))
all_reduce: called reducer.all_reduce 0 times for 4 buckets
    reducer.collect(index)
    started_with(comm, reducer, index, all_reduce_naive)
sum: It holds the mean
    def averaged(comm, x):
        reducer.all_reduce(comm, x)
        x /= comm.size
    reducer.collect(index)
    started_with(comm, reducer, index, averaged)
sum: It holds zeros
    started_with(comm, reducer, index, reducer.all_reduce)
waits @never_the_last_bucket: backward stands still
    -     while len(reducer.works) < len(reducer.buckets) - 1 and reducer.missing[len(reducer.works)] == 0:
    +     while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
    +         if reducer.works:
    +             reducer.works[-1].wait()
twice: len(reducer.works) is the number of the next bucket
    reducer.collect(index)
    b = reducer.bucket_of[index]
    reducer.missing[b] -= 1
    if not any(reducer.missing[: b + 1]):
        comm.background(reducer.all_reduce, reducer.buckets[len(reducer.works)].packed())
""",
}
RIGHT = {
    "6.4": (with_a_for_loop, through_a_function),
}
COMPLETED = {
    "6.4": ["len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0"],
}
