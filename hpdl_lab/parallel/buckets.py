"""Buckets of gradients: large enough that latency is paid seldom, small enough that the first can leave early.

registration      w1   b1   w2   b2   w3   b3
backward                    <------------------  the gradient of b3 is ready first
buckets           [ w1   b1 ] [ w2   b2 ] [ w3 b3 ]
sent                  third       second      first: small, so that something is under way soon
"""

from .data import Strategy, require_function
from .packing import by_dtype

MIB = 1 << 20


def assign_buckets(nbytes, limit, first):
    """Which parameters share a bucket: neighbors, in the order in which backward makes their gradients.

    Backward goes through the layers from the last to the first. So does this: it fills a bucket until the next
    gradient would not fit, and then begins another. A gradient larger than the limit gets a bucket of its own.

        nbytes = [400, 40, 400, 40, 100, 10], limit = 450, first = 120   ->   [[5, 4], [3, 2], [1, 0]]

    Args:    nbytes: [bytes of the gradient] of every parameter, in the order of registration.
             limit: bytes that a bucket holds at most; first: the same of the first bucket, which is sent first.
    Returns: list of buckets, each a list of indices into nbytes; every index once, in reverse order of registration.
    Ref: Li et al. 2020 (PyTorch DDP), section 3.2.3: 25 MiB, of which the first bucket takes 1.
    """
    ### BEGIN SOLUTION
    buckets, room = [], 0
    for index in reversed(range(len(nbytes))):
        if not buckets or nbytes[index] > room:
            room = limit if buckets else first
            buckets.append([])
        buckets[-1].append(index)
        room -= nbytes[index]
    return buckets
    ### END SOLUTION


class DataParallelBucketed(Strategy):
    """One all-reduce per bucket, after backward: the sizes of DataParallelOverlapped, without its overlap.

    bucket_nbytes, first_nbytes: see assign_buckets, in whose place another function can cut them. Parameters of
    different dtypes share no bucket.
    The defaults are those of DDP, for networks between hosts: for small models, or in the memory of one machine, try a
    tenth of them.
    Steps: one all_reduce per bucket.   Bytes per rank: those of all_reduce for N + 1 elements of each bucket.
    """

    def __init__(self, all_reduce=None, bucket_nbytes=25 * MIB, first_nbytes=1 * MIB, assign_buckets=assign_buckets):
        super().__init__(all_reduce)
        if not all(isinstance(nbytes, int | float) and nbytes >= 1 for nbytes in (bucket_nbytes, first_nbytes)):
            got = f"got {bucket_nbytes!r} and {first_nbytes!r} for the first"
            raise ValueError(f"a bucket holds a number of bytes, at least 1: {got}")
        self.bucket_nbytes, self.first_nbytes = bucket_nbytes, first_nbytes
        self.assign_buckets = require_function("assign_buckets(nbytes, limit, first)", assign_buckets)

    def assign(self, params):
        buckets, groups = [], by_dtype(params).values()
        for indices in groups:
            nbytes = [params[i].nbytes for i in indices]
            assigned = self.assign_buckets(nbytes, self.bucket_nbytes, self.first_nbytes)
            require_every_index(assigned, len(indices))
            buckets += [[indices[i] for i in bucket] for bucket in assigned]
        if len(groups) > 1:  # whichever dtype: a bucket is complete when its first-registered gradient is ready
            buckets.sort(key=min, reverse=True)
        return buckets


def require_every_index(buckets, n):
    """Raise ValueError unless `buckets` hold each of 0, ..., n - 1 once."""
    held = sorted(index for bucket in buckets for index in bucket)
    if held != list(range(n)) or not all(buckets):
        raise ValueError(f"buckets of {n} parameters hold each of 0 to {n - 1} once, and none is empty: got {buckets}")
