"""Communication beside backward: a bucket is sent as soon as its gradients are there, while others are computed.

rank's thread   backward: layer 4 | layer 3 | layer 2 | layer 1 |wait| update
beside it                            [bucket 0]   [bucket 1][bucket 2]
                                                             ^^^^^ only what is left after backward is exposed
"""

from ..comm.errors import CommError
from .buckets import MIB, DataParallelBucketed, assign_buckets
from .data import checked, require_function


class Reducer:
    """How far the buckets of one model are, in the step that is being made.

    buckets:    [packing.Bucket], in the order in which every rank starts them.
    all_reduce: f(comm, x), what is done with them.
    bucket_of:  [number of its bucket] of every parameter.
    missing:    [how many gradients it still waits for] of every bucket.
    works:      [Work] of the buckets that have been started: bucket len(works) is the next.
    given_up:   [Work] of a step that failed before it had all gradients: waited for with the next, for nothing.
    """

    def __init__(self, buckets, all_reduce):
        self.buckets, self.all_reduce = buckets, all_reduce
        self.place = {i: (b, k) for b, bucket in enumerate(buckets) for k, i in enumerate(bucket.indices)}
        self.bucket_of = [self.place[i][0] for i in range(len(self.place))]
        self.given_up = []
        self.begin()

    def begin(self):
        """A new step: nothing is there yet, nothing has been started."""
        self.missing = [len(bucket.indices) for bucket in self.buckets]
        self.there = [False] * len(self.bucket_of)
        self.works = []

    def collect(self, index):
        """Copy the gradient of parameter `index` into its bucket. Raises ValueError where it was there already."""
        if self.there[index]:
            self.given_up += self.works
            self.begin()
            raise ValueError(
                f"the gradient of parameter {index} became ready twice in one step: all backward passes but the last "
                "belong into `with strategy.accumulating():`; or the backward before this one failed"
            )
        self.there[index] = True
        bucket, k = self.place[index]
        self.buckets[bucket].put(k)

    def end(self):
        """Wait for all buckets, and begin a new step. Returns [what all_reduce has returned] of every bucket.

        Raises what results_of raises: a step that failed leaves nothing under way, unless other ranks do not answer.
        """
        works, given_up, self.given_up = self.works, self.given_up, []
        self.begin()
        return results_of([*given_up, *works])[len(given_up) :]


def results_of(works):
    """Wait for all; returns [what each has returned].

    Raises what the first of them raised, after all have ended: nothing is left under way. A CommError passes at once,
    because then other ranks do not answer.
    """
    results, first = [], None
    for work in works:
        try:
            results.append(work.wait())
        except CommError:
            raise
        except Exception as error:
            first = first or error
    if first is not None:
        raise first
    return results


def gradient_ready(comm, reducer, index):
    """What the hook of parameter `index` does when backward has made its gradient: send what can be sent.

    It counts the gradient in its bucket. Then it starts every bucket that is complete *and* next in order, in the
    background. Gradients become ready in another order on another rank (a branch not taken, two streams), and ranks
    that start bucket 1 and bucket 0 in different orders wait for each other for ever. So bucket 2, complete, waits
    for bucket 1; and the gradient that completes bucket 1 may start several.

        missing [0, 1, 0], works [w0]   --- the last gradient of bucket 1 --->   missing [0, 0, 0], works [w0, w1, w2]

    Args:    reducer: a Reducer. Yours to change are reducer.missing (one less) and reducer.works (append what
             `comm.background(f, x)` returns). `reducer.buckets[b].packed()` is the flat tensor of bucket b.
             index: of the parameter, from 0, in the order of registration.
    Returns: None, at once: it waits for nothing, because backward must go on.
    Steps: one reducer.all_reduce per bucket, all in the order of the buckets.
    Ref: Li et al. 2020 (PyTorch DDP), section 3.2.3; Awan et al. 2017 (S-Caffe).
    """
    reducer.collect(index)  # copies the gradient into its bucket
    ### BEGIN SOLUTION
    reducer.missing[reducer.bucket_of[index]] -= 1
    while len(reducer.works) < len(reducer.buckets) and reducer.missing[len(reducer.works)] == 0:
        bucket = reducer.buckets[len(reducer.works)]
        reducer.works.append(comm.background(reducer.all_reduce, bucket.packed()))
    ### END SOLUTION


class DataParallelOverlapped(DataParallelBucketed):
    """The buckets of DataParallelBucketed, each sent while backward still computes the gradients of the others.

    Every trainable parameter has a hook that autograd calls when its gradient is complete. A parameter that backward
    does not reach keeps its bucket, and those behind it, back until add_gradients, which counts it as zeros.
    gradient_ready: what the hook does.
    Steps: one all_reduce per bucket.   Bytes per rank: those of all_reduce for N + 1 elements of each bucket.
    """

    beside = True

    def __init__(
        self,
        all_reduce=None,
        bucket_nbytes=25 * MIB,
        first_nbytes=1 * MIB,
        assign_buckets=assign_buckets,
        gradient_ready=gradient_ready,
    ):
        super().__init__(all_reduce, bucket_nbytes, first_nbytes, assign_buckets)
        self.gradient_ready = require_function("gradient_ready(comm, reducer, index)", gradient_ready)

    @property
    def talks_in_backward(self):
        return self.gradient_ready is not gradient_ready  # that of somebody else may do anything

    def start(self, comm, model):
        super().start(comm, model)
        self.reducer = Reducer(self.buckets, self.all_reduce)
        self.hooks = [
            param.register_post_accumulate_grad_hook(self.hook(comm, index)) for index, param in enumerate(self.params)
        ]

    def hook(self, comm, index):
        def ready(param):
            if not self.adds_up:
                self.gradient_ready(comm, self.reducer, index)

        return ready

    def add_gradients(self, comm, model):
        """Send what backward has not reached, and wait until all buckets have come back. See Strategy."""
        self.require_started(model)
        reducer = self.reducer
        for index in reversed(range(len(self.params))):
            if not reducer.there[index]:
                self.gradient_ready(comm, reducer, index)
        if len(reducer.works) != len(self.buckets):
            raise ValueError(
                f"gradient_ready has started {len(reducer.works)} of {len(self.buckets)} buckets; all are complete"
            )
        results = reducer.end()
        self.hand_back(comm, [checked(out, comm, b.flat) for out, b in zip(results, self.buckets, strict=True)])

    def stop(self):
        """Remove the hooks."""
        for hook in getattr(self, "hooks", ()):
            hook.remove()
        self.hooks = []
        super().stop()
