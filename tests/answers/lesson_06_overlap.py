"""Answers to gradient_ready of notebook 06 that a check must reject or accept; CI proves both."""

from hpdl_lab.collectives.ring import all_reduce_naive

from . import WrongAnswer

# -- wrong -------------------------------------------------------------------------------------------------------------


def start(comm, reducer, b):
    reducer.works.append(comm.background(reducer.all_reduce, reducer.buckets[b].packed()))


def in_order_of_completion(comm, reducer, index):
    reducer.collect(index)
    b = reducer.bucket_of[index]
    reducer.missing[b] -= 1
    if reducer.missing[b] == 0:
        start(comm, reducer, b)


def waits_inside_the_hook(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        start(comm, reducer, len(reducer.works))
        reducer.works[-1].wait()


def reduces_in_the_foreground(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        reducer.all_reduce(comm, reducer.buckets[len(reducer.works)].packed())
        reducer.works.append(comm.background(lambda comm: None))


def one_bucket_per_gradient(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    if len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        start(comm, reducer, len(reducer.works))


def started_with(comm, reducer, index, all_reduce):
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        reducer.works.append(comm.background(all_reduce, reducer.buckets[len(reducer.works)].packed()))


def takes_another_all_reduce(comm, reducer, index):
    reducer.collect(index)
    started_with(comm, reducer, index, all_reduce_naive)


def takes_the_mean(comm, reducer, index):
    def averaged(comm, x):
        reducer.all_reduce(comm, x)
        x /= comm.size

    reducer.collect(index)
    started_with(comm, reducer, index, averaged)


def collects_nothing(comm, reducer, index):
    started_with(comm, reducer, index, reducer.all_reduce)


def waits_for_the_one_before(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        if reducer.works:
            reducer.works[-1].wait()
        start(comm, reducer, len(reducer.works))


def never_the_last_bucket(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) - 1 and reducer.missing[len(reducer.works)] == 0:
        start(comm, reducer, len(reducer.works))


def everything_at_the_end(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    if not any(reducer.missing):
        for b in range(len(reducer.buckets)):
            start(comm, reducer, b)


def waits_for_the_bucket_behind(comm, reducer, index):
    """A bucket leaves only when the next one is complete as well."""
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and not any(reducer.missing[: len(reducer.works) + 2]):
        start(comm, reducer, len(reducer.works))


def starts_at_the_first_gradient(comm, reducer, index):
    """Begins a bucket with its first gradient instead of its last."""
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    sizes = [len(bucket.indices) for bucket in reducer.buckets]
    while len(reducer.works) < len(sizes) and reducer.missing[len(reducer.works)] < sizes[len(reducer.works)]:
        start(comm, reducer, len(reducer.works))


def starts_again_and_again(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    for b in range(len(reducer.buckets)):
        if any(reducer.missing[: b + 1]):
            break
        start(comm, reducer, b)


def forgets_to_count(comm, reducer, index):
    reducer.collect(index)
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        start(comm, reducer, len(reducer.works))


def sends_the_bare_tensor(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        flat = reducer.buckets[len(reducer.works)].flat
        reducer.works.append(comm.background(reducer.all_reduce, flat))


def keeps_no_works(comm, reducer, index):
    reducer.collect(index)
    b = reducer.bucket_of[index]
    reducer.missing[b] -= 1
    if not any(reducer.missing[: b + 1]):
        comm.background(reducer.all_reduce, reducer.buckets[len(reducer.works)].packed())


# -- right -------------------------------------------------------------------------------------------------------------


def with_a_for_loop(comm, reducer, index):
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1
    for b in range(len(reducer.works), len(reducer.buckets)):
        if reducer.missing[b]:
            return
        start(comm, reducer, b)


def through_a_function(comm, reducer, index):
    """Packs beside backward, too, and counts from what is there."""
    reducer.collect(index)
    reducer.missing[reducer.bucket_of[index]] -= 1

    def pack_and_reduce(comm, bucket):
        return reducer.all_reduce(comm, bucket.packed())

    while len(reducer.works) < len(reducer.buckets):
        bucket = reducer.buckets[len(reducer.works)]
        if not all(reducer.there[i] for i in bucket.indices):
            break
        reducer.works.append(comm.background(pack_and_reduce, bucket))


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "6.4": (
        WrongAnswer(in_order_of_completion, "order", "rank 1 in the order 3, 2, 1, 0"),
        WrongAnswer(waits_inside_the_hook, "waits", "it waits for other ranks, and backward stands still"),
        WrongAnswer(reduces_in_the_foreground, "waits", "comm.background returns at once"),
        WrongAnswer(one_bucket_per_gradient, "last", "has started"),
        WrongAnswer(never_the_last_bucket, "last", "has started 3 of 4 buckets"),
        WrongAnswer(everything_at_the_end, "late", "no bucket had been started on rank 0"),
        WrongAnswer(waits_for_the_bucket_behind, "late", "could have been under way"),
        WrongAnswer(starts_at_the_first_gradient, "early", "so what traveled was not complete"),
        WrongAnswer(starts_again_and_again, "twice", "rank 0 starts bucket 0"),
        WrongAnswer(forgets_to_count, "count", "is [2, 2, 1, 1] when all gradients are there"),
        WrongAnswer(sends_the_bare_tensor, "flag", "rank 1 has no gradient for parameter 3"),
        WrongAnswer(takes_another_all_reduce, "all_reduce", "called reducer.all_reduce 0 times for 4 buckets"),
        WrongAnswer(takes_the_mean, "sum", "It holds the mean"),
        WrongAnswer(collects_nothing, "sum", "It holds zeros"),
        WrongAnswer(waits_for_the_one_before, "waits", "backward stands still"),
        WrongAnswer(keeps_no_works, "twice", "len(reducer.works) is the number of the next bucket"),
    ),
}
RIGHT = {
    "6.4": (with_a_for_loop, through_a_function),
}
