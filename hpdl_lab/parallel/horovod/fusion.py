"""Horovod's tensor fusion: gradients that are ready together travel in one all-reduce, while backward goes on.

    first step   backward: w4 ready, w3 ready, ...                       w4 w3 | w2 w1 | = what fits the threshold
                 background, once per cycle: negotiate, fuse, all_reduce               and was ready in one cycle
    later steps  the same batches, from the response cache: each is added as soon as it is whole. Nothing is negotiated.

A batch carries, behind its gradients, one number per gradient: on how many ranks there is none (they give zeros); and
one more: how many ranks have a gradient that the cached answer does not know. So all ranks find out together, without a
message of its own, that the cache no longer tells the truth; what is left is then negotiated anew. The last number is
NaN where a gradient of a rank is not finite: only then do ranks tell each other which (verdict.py).
"""

import warnings
from contextlib import contextmanager
from numbers import Integral, Real

import torch

from ..agreement import require_same_parameters
from ..data import best_all_reduce, name_of, require_function, result_of
from ..known_sum import require_sums_of
from ..verdict import FINE, WORDS, Verdict, condition_of
from .fused_batch import fuse, pack, unpack
from .negotiation import checksums, negotiate, pause
from .timeline import ALLREDUCE, MEMCPY_IN, MEMCPY_OUT, MPI_ALLREDUCE, NEGOTIATE, RANK_READY

THRESHOLD = 128 * 2**20  # bytes, as HOROVOD_FUSION_THRESHOLD
CYCLE = 1e-3  # s, as HOROVOD_CYCLE_TIME


class Fusion:
    """Averages (or adds) the gradients of `params` over ranks while backward goes on.

    Args:    params: list of trainable parameters, in the same order on every rank; names: theirs, for messages.
             all_reduce: f(comm, x); threshold: bytes of a batch; cycle: s between two negotiations.
             average: divide by the number of ranks; passes: backward passes that add up before a gradient is ready.
             timeline: record Horovod's activities for every gradient, see parallel/horovod/timeline.py.
    Use:     after backward, before the optimizer's step: `synchronize()`. Collective, as is the constructor.
    Raises:  ValueError on every rank where their parameters or options differ: which rank, what it has; or where
             all_reduce does not add up.
    Messages: in the first step a gather and a broadcast of 4n bytes per cycle, for n parameters, and of 4n and 8 bytes
    more in the first cycle, which compares the values; then none but the all-reduces, of N + n + batches elements
    together for N elements of gradients.
    """

    def __init__(
        self,
        comm,
        params,
        names,
        *,
        all_reduce=None,
        threshold=THRESHOLD,
        cycle=CYCLE,
        average=True,
        passes=1,
        timeline=False,
    ):
        numbers = isinstance(threshold, Real) and isinstance(cycle, Real) and isinstance(passes, Integral)
        if not numbers or threshold < 0 or not cycle > 0 or passes < 1:
            told = f"threshold {threshold!r}, cycle {cycle!r}, passes {passes!r}"
            raise ValueError(f"fusion needs a threshold >= 0 bytes, a cycle > 0 s and passes >= 1, got {told}")
        self.comm, self.params, self.names = comm, list(params), list(names)
        self.all_reduce = best_all_reduce if all_reduce is None else require_function("all_reduce(comm, x)", all_reduce)
        self.threshold, self.cycle, self.average, self.passes = threshold, cycle, average, passes
        self.timeline = timeline
        self.nbytes = [p.numel() * p.element_size() for p in self.params]
        self.dtypes = [p.dtype for p in self.params]
        self.cache = None  # the batches, as the first step has found them
        self.averaged = False  # has there been no backward since `synchronize`?
        self.unused = {}  # name: on how many ranks it had no gradient in the last step
        self._warned = self._same = False  # said that gradients are missing; seen that all ranks' parameters are equal
        plan = f"fusion of {name_of(self.all_reduce)}, {threshold=}, {average=}, {passes=}"
        require_same_parameters(comm, self.params, self.names, plan)
        require_sums_of(comm, self.all_reduce, self.dtypes)
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self.params)]
        self._begin()

    def _begin(self):
        """Forget the last step."""
        self._passed = [0] * len(self.params)
        self._ready = []  # indices, in the order in which their gradients became ready here
        self._lacking = set()  # those among them that this rank has no gradient of
        self._reduced = set()
        self._missing = {}  # index: on how many ranks there is no gradient
        self._works, self._started = [], 0  # batches of the cache
        self._negotiation = None
        self._cache_lies = False
        self._said = {}  # index: FINE, NONE, NAN or INFINITE, of batches in which a gradient of this rank is not finite
        self._not_finite = False  # on any rank
        self._too_large = []  # indices of sums that overflow float16
        self._broken = False

    def _hook(self, index):
        def on_gradient(_):
            self.averaged = False
            self._passed[index] += 1
            if self._passed[index] > self.passes:
                raise ValueError(self._too_often(index))
            if self._passed[index] == self.passes:
                self._on_ready(index)

        return on_gradient

    def _too_often(self, index):
        return (
            f"rank {self.comm.rank}: another backward than the {self.passes} of this step came to {self.names[index]}, "
            "whose gradient is on its way already: give `passes` the number of backwards in a step; after a step that "
            "failed or was left out call synchronize() and zero_grad() on every rank first"
        )

    def _on_ready(self, index):
        """The gradient of `index` is whole on this rank: start what can be started. Never waits."""
        self._ready.append(index)
        if self.timeline:
            trace = self.comm.trace
            trace.add(trace.step(), f"{RANK_READY} {self.names[index]}", trace.clock(), trace.clock())
        if self.cache is None:
            if self.comm.runs_beside:  # else it would wait here for gradients that come later
                self._negotiation = self._negotiation or self.comm.background(self._negotiate)
            return
        # The last batch waits for `synchronize`, which alone knows whether anything else has become ready.
        while self._started < len(self.cache) - 1 and set(self.cache[self._started]) <= set(self._ready):
            self._start_next()

    def _start_next(self):
        self._works.append(self.comm.background(self._reduce, self.cache[self._started]))
        self._started += 1

    def synchronize(self):
        """Wait until every gradient is the average (or sum) over ranks.

        A parameter without gradient on some ranks counts as zeros there, and is named in a warning; one that has none
        on any rank keeps none. Every rank calls this once per step, also one whose shard was empty or whose backward
        failed. Whatever it raises, the next step begins anew.
        Raises:  FloatingPointError on every rank where one has NaN or infinity in a gradient: which rank, which
                 parameter; or where a sum overflows float16. ValueError on every rank, in the first step, where ranks
                 began with other parameters than rank 0. What an all_reduce in the background has raised.
        """
        for i, param in enumerate(self.params):
            if i not in self._ready:
                if param.grad is None:
                    self._lacking.add(i)
                self._ready.append(i)
        try:
            self._finish()
            self._require_finite()
            self._name_unused()
        finally:
            self._begin()
        self.averaged = True

    def _finish(self):
        """Start what has not been started, and wait for all of it."""
        if self.cache is not None:
            while self._started < len(self.cache):
                self._start_next()
            wait_for_all(self._works)
            if self._cache_lies:
                self.cache = None
        if self.cache is None:
            (self._negotiation or self.comm.background(self._negotiate)).wait()

    def _require_finite(self):
        """Raise FloatingPointError on every rank where one has NaN or infinity. Messages only where one has."""
        if self._not_finite:
            said = [self._said.get(i, FINE) for i in range(len(self.params))]
            rows = self.comm.all_gather(torch.tensor(said, dtype=torch.uint8, device=self.comm.device)).tolist()
            if any(condition in WORDS for row in rows for condition in row):  # or all is finite, but a sum of it
                raise FloatingPointError(Verdict(self.names).not_finite(rows))
        if self._too_large:
            raise FloatingPointError(Verdict(self.names).too_large(max(self._too_large)))

    def _name_unused(self):
        """Keep, and say once, which parameters have no gradient on some ranks only."""
        self.unused = {self.names[i]: ranks for i, ranks in self._missing.items() if ranks}
        some = [f"{name} (on {ranks})" for name, ranks in self.unused.items() if ranks < self.comm.size]
        if some and not self._warned and self.comm.rank == 0:
            self._warned = True
            text = f"no gradient on some of {self.comm.size} ranks: {', '.join(some)}; they count as zeros there"
            warnings.warn(text, stacklevel=3)

    def close(self):
        """Remove the hooks: gradients stay on their rank from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- in the background ------------------------------------------------------------------------------------------

    def _negotiate(self, comm):
        """Cycle after cycle, until every gradient of this step has been answered: negotiate, fuse, reduce."""
        n, answered, batches = len(self.params), set(self._reduced), []
        whole = not answered
        while len(answered) < n:
            pause(comm, self.cycle)
            waiting = [i for i in self._ready if i not in answered]
            values = None if self._same else checksums(self.params)
            with self._activity(comm, NEGOTIATE, waiting):
                order, absent = negotiate(comm, waiting, self._lacking, n, values, self.names)
            self._same = True
            self._missing |= dict.fromkeys(absent, comm.size)
            new = fuse(order, self.nbytes, self.dtypes, self.threshold)
            for batch in new:
                self._reduce(comm, batch)
            batches += new
            answered.update(order, absent)
        if whole and batches:
            self.cache = batches

    def _reduce(self, comm, batch):
        """Replace the gradients of `batch` by their average over ranks, or by their sum.

        Nothing, where an earlier batch has failed here: its error is what is told, not a mix-up of what comes after.
        """
        if self._broken:
            return
        self._broken = True
        with self._activity(comm, ALLREDUCE, batch):
            with self._activity(comm, MEMCPY_IN, batch):
                flat = self._pack(batch, comm.size)
            with self._activity(comm, MPI_ALLREDUCE, batch):
                flat = result_of(self.all_reduce, comm, flat)
            with self._activity(comm, MEMCPY_OUT, batch):
                self._unpack(flat, batch, comm.size)
        self._reduced.update(batch)
        self._broken = False

    def _pack(self, batch, size):
        """The gradients of `batch` in one flat tensor, see horovod/fused_batch.py."""
        params = [self.params[i] for i in batch]
        divisor = size if self._divides_first(params[0].dtype) else 1
        flat = pack(params, [i in self._lacking for i in batch], self._knows_more(), divisor)
        if torch.isnan(flat[-1]):
            self._said |= {i: condition_of(self.params[i].grad) for i in batch}
        return flat

    def _divides_first(self, dtype):
        """A sum over many ranks may exceed float16, which ends at 65,504, where the average does not."""
        return self.average and dtype == torch.float16

    def _unpack(self, flat, batch, size):
        """Hand the sums over ranks back to the parameters, and keep what else the ranks have told."""
        params = [self.params[i] for i in batch]
        sums, told = unpack(flat, params)
        divided = not self.average or self._divides_first(flat.dtype)
        for i, param, total, ranks in zip(batch, params, sums, told.lacking, strict=True):
            self._missing[i] = ranks
            grad = total.clone() if divided else total / size
            param.grad = None if ranks == size else grad.view_as(param)
        self._cache_lies |= told.more
        self._not_finite |= told.not_finite
        self._too_large += [batch[place] for place in told.too_large]

    def _knows_more(self):
        """True where this rank has a gradient that is not in the cache."""
        if self.cache is None:
            return False
        return not set(self._ready) - self._lacking <= {i for batch in self.cache for i in batch}

    @contextmanager
    def _activity(self, comm, name, indices):
        """Record what is done for the gradients `indices`, one event each, where there is a timeline."""
        begun = comm.trace.clock()
        yield
        if self.timeline:
            for i in indices:
                comm.trace.add(comm.trace.step(), f"{name} {self.names[i]}", begun, comm.trace.clock())


def wait_for_all(works):
    """Wait for each of them, so that none is forgotten, and raise what the first one that failed has raised."""
    errors = []
    for work in works:
        try:
            work.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
