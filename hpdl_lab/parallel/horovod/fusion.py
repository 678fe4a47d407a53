"""The batches of tensor fusion: which gradients travel together, and behind them what ranks tell each other.

[ w3.grad ....... | w1.grad ... | lacking w3 | lacking w1 | more ]      (elements + len(params) + 1,), added over ranks

Horovod's negotiation: rank 0 finds out which gradients are ready on every rank, and says what is added next.

Autograd may finish gradients in another order on another rank. If each rank added what it has first, rank 1 would add
w1 to rank 0's w2. So in every cycle each rank tells rank 0 what it has, and rank 0 answers with one order for all:

    rank 0  ready: w3, w2        --+                          +--> w3, w2
    rank 1  ready: w2, w3        --+--> rank 0: ready on all --+--> w3, w2
    rank 2  ready: w3, w2, w1    --+    are w3 and w2          +--> w3, w2      w1 is asked for again in the next cycle

Horovod's tensor fusion: gradients that are ready together travel in one all-reduce, while backward goes on.

    first step   backward: w4 ready, w3 ready, ...                       w4 w3 | w2 w1 | = what fits the threshold
                 background, once per cycle: negotiate, fuse, all_reduce               and was ready in one cycle
    later steps  the same batches, from the response cache: each is added as soon as it is whole. Nothing is negotiated.

A batch carries, behind its gradients, one number per gradient: on how many ranks there is none (they give zeros); and
one more: how many ranks have a gradient that the cached answer does not know. So all ranks find out together, without a
message of its own, that the cache no longer tells the truth; what is left is then negotiated anew. The last number is
NaN where a gradient of a rank is not finite: only then do ranks tell each other which (consensus.py).

Horovod's promise: a script for one rank becomes one for many by three changed lines.

    comm = hpdl_lab.comm.world()                              # 1  instead of nothing
    broadcast_parameters(comm, model)                         # 2  all ranks start from the same model
    optimizer = DistributedOptimizer(optimizer, comm)         # 3  step() averages the gradients first

Each rank then reads its own share of the data. What looks at gradients before the update comes after `synchronize`:

    loss.backward()
    optimizer.synchronize()                                   # averages now; step() does not do it again
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

Ref: Sergeev & Del Balso 2018, arXiv:1802.05799, section 4.
"""

import math
import time
import warnings
import zlib
from contextlib import contextmanager
from numbers import Integral, Real
from typing import NamedTuple

import torch

from ...comm.waits import name_ranks
from ..consensus import FINE, WORDS, Verdict, condition_of, finite_in_float16, require_same_parameters, require_sums_of
from ..reducer import best_all_reduce, name_of, require_function, result_of, results_of
from .timeline import ALLREDUCE, MEMCPY_IN, MEMCPY_OUT, MPI_ALLREDUCE, NEGOTIATE, RANK_READY


def fuse(order, nbytes, dtypes, threshold):
    """Cut `order` into batches of one dtype each: greedy first fit, up to `threshold` bytes.

        order a b c d, of 3, 4, 2, 1 bytes, threshold 6:   a + c + d | b        b does not fit any more, c and d do

    Args:    order: indices, the same on every rank; nbytes, dtypes: of every gradient, by index.
             threshold: bytes; a larger gradient travels alone, and with 0 each of them does.
    Returns: list of lists of indices.
    """
    left, batches = list(order), []
    while left:
        batch, total, rest = [left[0]], nbytes[left[0]], []
        for i in left[1:]:
            if dtypes[i] == dtypes[batch[0]] and total + nbytes[i] <= threshold:
                batch.append(i)
                total += nbytes[i]
            else:
                rest.append(i)
        left = rest
        batches.append(batch)
    return batches


class Told(NamedTuple):
    """What the sum over ranks tells. lacking: for each gradient, how many ranks have none.

    more: has a rank a gradient that was not asked for? not_finite: has one NaN or infinity? too_large: places, in the
    batch, of gradients whose sum overflows float16, though all ranks' are finite.
    """

    lacking: list
    more: bool
    not_finite: bool
    too_large: list


def pack(params, lacking, more, divisor):
    """The flat tensor of this rank. The last number is NaN where one of its gradients is not finite.

    Args:    lacking: for each of `params`, whether this rank has no gradient: zeros travel. more: has it one that is
             in no batch? divisor: of the gradients, before they are added.
    """
    grads = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params]
    told = [float(lacks) for lacks in lacking] + [float(more)]
    flat = torch.cat([*grads, grads[0].new_tensor(told)])
    values = flat[: -len(told)]
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    flat[-1] += 0 * values.sum(dtype=wide)  # 0 times a finite sum is 0, else NaN
    if divisor != 1:
        values /= divisor
    return flat


def unpack(flat, params):
    """([the part of `flat` that is the sum of each gradient], Told)."""
    *sums, told = flat.split([*(p.numel() for p in params), len(params) + 1])
    *lacking, more = told.tolist()
    too_large = [place for place, total in enumerate(sums) if not finite_in_float16(total)]
    not_finite = math.isnan(more)
    return sums, Told([round(n) for n in lacking], more > 0, not_finite, [] if not_finite else too_large)


NOT_READY, LACKING = -1, -2  # in an answer: not on all ranks yet; no rank has this gradient at all


NONE = -1  # no rank differs


def negotiate(comm, ready, lacking, n, values=None, names=()):
    """One cycle: which of n gradients are ready on every rank, in one order for all ranks.

    Args:    ready: indices of what this rank has and has not been answered, in the order in which it became ready;
             lacking: those among them of which it has no gradient and will give zeros. Different per rank.
             values: checksums of the n parameters, to be compared besides, or None: on all ranks alike. names: theirs.
    Returns: (order, absent): indices that are ready on all ranks, in rank 0's order; those that no rank has a gradient
             of. Both lists are the same on every rank.
    Raises:  ValueError on every rank where `values` differ: averaged gradients keep equal replicas equal, no more.
    Steps: one gather, one broadcast.   Bytes: 4n out of every rank but rank 0, 4n(p - 1) into rank 0 and out of it;
    with values 4n more from each rank to rank 0, and 8 more back.
    Ref: Sergeev & Del Balso 2018, section 3; Horovod's controller.
    """
    request = torch.full((n,), NOT_READY, dtype=torch.int32)
    for place, index in enumerate(ready):
        request[index] = place + n * (index in lacking)  # n and above: ready, with zeros
    compares = values is not None
    requests = comm.gather(torch.cat([request, values]) if compares else request)
    answer = torch.full((n + 2 * compares,), NOT_READY, dtype=torch.int32)
    if requests is not None:
        if compares:
            requests, values = requests.split(n, dim=1)
            answer[n:] = torch.tensor(first_difference(values))
        everywhere = (requests >= 0).all(0)
        nowhere = (requests >= n).all(0)
        order = sorted(torch.nonzero(everywhere & ~nowhere).flatten().tolist(), key=lambda i: int(requests[0, i]) % n)
        answer[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order), dtype=torch.int32)
        answer[:n][nowhere] = LACKING
    answer = comm.broadcast(answer).tolist()
    if compares and answer[n] != NONE:
        raise ValueError(not_the_same(answer[n], names[answer[n + 1]]))
    order = sorted((i for i in range(n) if answer[i] >= 0), key=answer.__getitem__)
    return order, [i for i in range(n) if answer[i] == LACKING]


def checksums(params):
    """(n,) int32: a CRC-32 of the bytes of each parameter."""
    flat = [p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for p in params]
    return torch.tensor([zlib.crc32(data) - (1 << 31) for data in flat], dtype=torch.int32)


def first_difference(values):
    """(rank, index): the first rank whose checksums are not rank 0's, and where; (NONE, NONE). values: (p, n)."""
    differs = values != values[0]
    ranks = torch.nonzero(differs.any(1)).flatten().tolist()
    return (ranks[0], int(differs[ranks[0]].nonzero()[0])) if ranks else (NONE, NONE)


def not_the_same(rank, name):
    return (
        f"{name_ranks([rank])} began with other parameters than rank 0, first in {name}: they would stay apart, "
        "because only gradients are averaged. broadcast_parameters(comm, model) on every rank, before the first step"
    )


def pause(comm, seconds):
    """Let `seconds` pass: of virtual time on simulated ranks, where `compute` spends it, else of real time."""
    end = comm.trace.clock() + round(seconds * 1e9)
    comm.compute(seconds)
    time.sleep(max(0, end - comm.trace.clock()) / 1e9)


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
            results_of(self._works)
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
        """The gradients of `batch` in one flat tensor, see pack."""
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


def DistributedOptimizer(optimizer, comm, named_parameters=None, **fusion):
    """Let `optimizer.step()` average the gradients over ranks first; returns the same optimizer. Collective.

    Reduction starts while backward goes on. It stays the optimizer that it was, with `synchronize()` besides: learning
    rate schedulers and `state_dict` see no difference. `step(closure)` would run backward after the average, and a
    GradScaler looks for infinity on its own rank alone, so that ranks would skip different steps: both are refused.

    Args:    optimizer: any torch.optim.Optimizer; its parameters in the same order on every rank.
             named_parameters: (name, parameter) pairs, for messages: model.named_parameters(); else "parameter 0", ...
             fusion: all_reduce, threshold, cycle, average, passes, timeline: see parallel/horovod/fusion.py.
    Raises:  ValueError where the optimizer has nothing to train, names are missing, or ranks differ in the number,
             names, shapes or dtypes of their parameters. Later, backward: ValueError where it comes to a parameter more
             than `passes` times in one step; `step` and `synchronize`: see Fusion.synchronize.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"DistributedOptimizer(optimizer, comm) needs an optimizer of torch.optim, got {kind}")
    if hasattr(optimizer, "synchronize"):
        raise ValueError("this optimizer averages its gradients already: DistributedOptimizer once is enough")
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not params:
        raise ValueError("this optimizer has no parameter that requires a gradient: nothing to average")
    names = names_of(params, named_parameters)
    fused = Fusion(comm, params, names, **fusion)
    optimizer.synchronize = fused.synchronize
    optimizer._step_supports_amp_scaling = True  # GradScaler then calls `step` on every rank, where it is refused
    optimizer.register_step_pre_hook(lambda _, args, kwargs: before_step(optimizer, fused, *args[1:], **kwargs))
    return optimizer


def before_step(optimizer, fused, closure=None):
    """Average the gradients, unless `synchronize` has done it since the last backward."""
    if closure is not None:
        raise ValueError(
            "step(closure): gradients are averaged before step runs the closure, which would replace them by this "
            "rank's own. Call closure() yourself, then step()"
        )
    if hasattr(optimizer, "found_inf"):
        raise ValueError(
            "GradScaler looks at this rank's gradients before they are averaged, and ranks would skip different steps. "
            "Train in bfloat16, or scale the loss yourself and divide the gradients after optimizer.synchronize()"
        )
    if not fused.averaged:
        fused.synchronize()
    fused.averaged = False


def names_of(params, named_parameters=None):
    """The names of `params`, in their order; "parameter 0", "parameter 1", ... where none are given."""
    if named_parameters is None:
        return [f"parameter {i}" for i in range(len(params))]
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("named_parameters are pairs of a name and a parameter: model.named_parameters()")
    known = {id(param): name for name, param in pairs}
    missing = [i for i, param in enumerate(params) if id(param) not in known]
    if missing:
        of = f"{len(missing)} of the optimizer's {len(params)} parameters"
        raise ValueError(f"named_parameters lacks {of}, first of all number {missing[0]}")
    return [known[id(param)] for param in params]
