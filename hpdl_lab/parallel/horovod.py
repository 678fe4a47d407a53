"""Horovod's ideas: tensor fusion, negotiation, a response cache, an optimizer in three changed lines, its timeline.

    comm = hpdl_lab.comm.world()                              # 1  instead of nothing
    broadcast_parameters(comm, model)                         # 2  all ranks start from the same model
    optimizer = DistributedOptimizer(optimizer, comm)         # 3  step() averages the gradients first

Autograd may finish gradients in another order on another rank. So in every cycle of the first step each rank reports
to rank 0 what it has, and rank 0 answers with one order for all; what fits the threshold travels together:

    rank 0  ready: w3, w2        --+                          +--> [w3 w2]
    rank 1  ready: w2, w3        --+--> rank 0: ready on all --+--> [w3 w2]
    rank 2  ready: w3, w2, w1    --+    are w3 and w2          +--> [w3 w2]     w1 is asked for again in the next cycle

Later steps take these buckets from the response cache, and send each as soon as it is whole (reducer.py). What looks at
gradients before the update, such as clip_grad_norm_, comes after optimizer.synchronize(), which averages now.

The timeline has one row per gradient, in a file that Chrome and Perfetto open:

    layer4.weight   |-- NEGOTIATE_ALLREDUCE --|-------------------- ALLREDUCE ---------------------|
                      0    2  1                 MEMCPY_IN_FUSION_BUFFER | MPI_ALLREDUCE | MEMCPY_OUT_FUSION_BUFFER
                      the ranks, as they become ready

Ref: Sergeev & Del Balso 2018, arXiv:1802.05799; Horovod's docs/timeline.rst.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ..comm.base import Comm, Work, best_all_reduce
from ..trace import Event
from ..units import require_int, require_number
from .consensus import GradientCheck, require_same_parameters, require_same_values, require_sums_of
from .data_parallel import finalize_gradients
from .reducer import AllReduce, Bucket, Reducer, gradient_ready, name_of, require_function, result_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

THRESHOLD = 128 * 2**20  # bytes, as HOROVOD_FUSION_THRESHOLD
CYCLE = 1e-3  # s, as HOROVOD_CYCLE_TIME
NOT_READY = -1  # in an answer: not on all ranks yet
NEGOTIATE, ALLREDUCE, MPI_ALLREDUCE = "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE"
MEMCPY_IN, MEMCPY_OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
RANK_READY = "RANK_READY"
DEPTH = {NEGOTIATE: 0, ALLREDUCE: 0, MEMCPY_IN: 1, MPI_ALLREDUCE: 1, MEMCPY_OUT: 1}  # what is drawn inside of what


def fuse(order: Sequence[int], nbytes: Sequence[int], dtypes: Sequence[object], threshold: float) -> list[list[int]]:
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


def negotiate(comm: Comm, ready: Sequence[int], n: int) -> list[int]:
    """Find out, in one cycle, which of n gradients are ready on every rank, in one order for all ranks.

    Args:    ready: indices of what this rank has and has not been answered, in the order in which it became ready.
    Returns: indices that are ready on all ranks, in rank 0's order: the same list on every rank.
    Steps: one gather, one broadcast.   Bytes: 4n out of every rank but rank 0, 4n(p - 1) into rank 0 and out of it.
    Ref: Horovod's controller.
    """
    request = torch.full((n,), NOT_READY, dtype=torch.int32)
    for place, index in enumerate(ready):
        request[index] = place
    requests = comm.gather(request)
    answer = request
    if requests is not None:
        answer = torch.where((requests >= 0).all(0), requests[0], NOT_READY)
    places = comm.broadcast(answer).tolist()
    return sorted((i for i in range(n) if places[i] != NOT_READY), key=places.__getitem__)


def _pause(comm: Comm, seconds: float) -> None:
    """Let `seconds` pass: of virtual time on simulated ranks, by `compute`, else of real time."""
    end = comm.trace.clock() + round(seconds * 1e9)
    comm.compute(seconds)
    time.sleep(max(0, end - comm.trace.clock()) / 1e9)


Span: TypeAlias = tuple[int, int]  # ns


class _FusionBuffer(Bucket):
    """A bucket that is divided by `divisor` before it is added, and notes when it was filled and when it travelled."""

    def __init__(self, comm: Comm, params: Sequence[nn.Parameter], indices: Sequence[int], divisor: int) -> None:
        super().__init__(comm, params, indices)
        self.divisor, self.clock = divisor, comm.trace.clock
        self.came_in: list[Span] = [(0, 0)] * len(params)
        self.travelled: Span = (0, 0)

    def put(self, i: int) -> None:
        begun = self.clock()
        super().put(i)
        self.came_in[i] = begun, self.clock()

    def packed(self) -> Tensor:
        super().packed()
        if self.divisor != 1:  # before the sum, which may exceed float16 when the average does not
            self.flat[:-1] /= self.divisor
        return self.flat


class _Fusion:
    """The average (or sum) of the gradients of `params` over ranks, made while backward goes on.

    Args:    params: list of trainable parameters, in the same order on every rank; names: theirs, for messages.
             all_reduce: f(comm, x); threshold: bytes of a bucket; cycle: s between two negotiations.
             average: divide by the number of ranks; passes: backward passes that add up before a gradient is ready.
             timeline: record Horovod's activities for every gradient, see `to_horovod`.
    Use:     after backward, before the optimizer's step: `synchronize()`. Collective, as is the constructor.
    Raises:  ValueError on every rank if their parameters or options differ: which rank, what it has; or if
             all_reduce does not add up.
    Messages: in the first step a gather and a broadcast of 4n bytes per cycle, for n parameters, and a comparison of
    parameters' values; then none but the all-reduces, of N + buckets elements together for N elements of gradients.
    """

    def __init__(
        self,
        comm: Comm,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        *,
        all_reduce: AllReduce | None = None,
        threshold: float = THRESHOLD,
        cycle: float = CYCLE,
        average: bool = True,
        passes: int = 1,
        timeline: bool = False,
    ) -> None:
        require_number("threshold", threshold, 0)
        require_number("cycle", cycle, above=0)
        require_int("passes", passes, 1)
        self.comm, self.params, self.names = comm, list(params), list(names)
        self.all_reduce = best_all_reduce if all_reduce is None else require_function("all_reduce(comm, x)", all_reduce)
        self.threshold, self.cycle, self.passes, self.timeline = threshold, cycle, passes, timeline
        self.divisor = comm.size if average else 1
        self.reducer: Reducer[_FusionBuffer] | None = None  # the response cache: the first step's buckets
        self.buckets: list[_FusionBuffer] = []  # its own
        self.averaged = False  # has there been no backward since `synchronize`?
        self.gradient_check = GradientCheck(self.names)
        plan = f"fusion of {name_of(self.all_reduce)}, {threshold=}, {average=}, {passes=}"
        require_same_parameters(comm, self.params, self.names, plan)
        require_sums_of(comm, self.all_reduce, [p.dtype for p in self.params])
        self.hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self.params)]
        self._begin()

    def _begin(self) -> None:
        """Forget the last step."""
        self._passed = [0] * len(self.params)
        self._ready: list[int] = []  # in the order in which gradients became ready here
        self._negotiation: Work | None = None
        self._cycles: list[tuple[Span, list[int]]] = []  # of the negotiation: when, and what this rank asked for

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            self.averaged = False
            self._passed[index] += 1
            if self._passed[index] > self.passes:
                raise ValueError(
                    f"rank {self.comm.rank}: another backward than the {self.passes} of this step came to "
                    f"{self.names[index]}, after its gradient was sent: set `passes` to the number of backwards in a "
                    "step; after a step that failed or was left out, call synchronize() and zero_grad() on every rank "
                    "first"
                )
            if self._passed[index] == self.passes:
                if self.timeline:
                    trace = self.comm.trace
                    trace.add(trace.step(), f"{RANK_READY} {self.names[index]}", trace.clock(), trace.clock())
                self._on_ready(index)

        return on_gradient

    def _on_ready(self, index: int) -> None:
        """Start what can be started, now that the gradient of `index` is whole on this rank. Never waits."""
        self._ready.append(index)
        if self.reducer is not None:
            gradient_ready(self.comm, self.reducer, index)
        elif self.comm.has_background and self._negotiation is None:  # else it would wait here for later gradients
            self._negotiation = self.comm.background(self._negotiate)

    def synchronize(self) -> None:
        """Wait until every gradient is the average (or sum) over ranks.

        A parameter without gradient on some ranks counts as zeros there, and is named in a warning; one that has none
        on any rank keeps none. Every rank calls this once per step, also one whose shard was empty or whose backward
        failed. Whatever it raises, the next step begins anew.
        Raises:  FloatingPointError on every rank if one has NaN or infinity in a gradient: which rank, which
                 parameter; or if a sum overflows float16. ValueError on every rank, in the first step, if ranks
                 began with other parameters than rank 0. What an all_reduce in the background has raised.
        """
        try:
            for index in sorted(set(range(len(self.params))) - set(self._ready)):
                self._on_ready(index)
            if self.reducer is not None:
                buckets, totals = self.buckets, self.reducer.end(self.comm)
            else:
                buckets, totals = (self._negotiation or self.comm.background(self._negotiate)).wait()
                remedy = "averaging gradients does not make them equal: call broadcast_parameters(comm, model) first"
                require_same_values(self.comm, dict(zip(self.names, self.params, strict=True)), remedy)
                self.buckets, self.reducer = buckets, Reducer(buckets, self._reduce)
            begun = self.comm.trace.clock()
            finalize_gradients(self.comm, self.gradient_check, self.params, buckets, totals)
            if self.timeline:
                self._record(buckets, begun)
        finally:
            self._begin()
        self.averaged = True

    def _negotiate(self, comm: Comm) -> tuple[list[_FusionBuffer], list[Tensor]]:
        """Negotiate, fuse and reduce, cycle after cycle, until every gradient of this step has been answered."""
        buckets: list[_FusionBuffer] = []
        totals: list[Tensor] = []
        answered: set[int] = set()
        nbytes, dtypes = [p.nbytes for p in self.params], [p.dtype for p in self.params]
        while len(answered) < len(self.params):
            _pause(comm, self.cycle)
            waiting, begun = [i for i in self._ready if i not in answered], comm.trace.clock()
            order = negotiate(comm, waiting, len(self.params))
            self._cycles.append(((begun, comm.trace.clock()), waiting))
            new = fuse(order, nbytes, dtypes, self.threshold)
            buckets += [_FusionBuffer(comm, [self.params[i] for i in part], part, self.divisor) for part in new]
            for bucket in buckets[len(totals) :]:
                for i in range(len(bucket.params)):
                    bucket.put(i)
                totals.append(self._reduce(comm, bucket.packed(), bucket))
            answered.update(order)
        return buckets, totals

    def _reduce(self, comm: Comm, flat: Tensor, bucket: _FusionBuffer | None = None) -> Tensor:
        """Add the flat tensor of a bucket over ranks, and note when."""
        if bucket is None:
            bucket = next(b for b in self.buckets if b.flat is flat)
        begun = comm.trace.clock()
        total = result_of(self.all_reduce, comm, flat)
        bucket.travelled = begun, comm.trace.clock()
        return total

    def _record(self, buckets: Sequence[_FusionBuffer], out: int) -> None:
        """Record the activities of this step, gradient by gradient: what lies inside before what is around it."""
        trace, end = self.comm.trace, self.comm.trace.clock()
        for span, waiting in self._cycles:
            for i in waiting:
                trace.add(trace.step(), f"{NEGOTIATE} {self.names[i]}", *span)
        for bucket in buckets:
            for i, came_in in zip(bucket.indices, bucket.came_in, strict=True):
                for activity, (t0_ns, t1_ns) in (
                    (MEMCPY_IN, came_in),
                    (MPI_ALLREDUCE, bucket.travelled),
                    (MEMCPY_OUT, (out, end)),
                    (ALLREDUCE, (came_in[0], end)),
                ):
                    trace.add(trace.step(), f"{activity} {self.names[i]}", t0_ns, t1_ns)

    def close(self) -> None:
        """Remove the hooks: gradients stay on their rank from now on."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: OptimizerT,
    comm: Comm,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    *,
    all_reduce: AllReduce | None = None,
    threshold: float = THRESHOLD,
    cycle: float = CYCLE,
    average: bool = True,
    passes: int = 1,
    timeline: bool = False,
) -> OptimizerT:
    """Let `optimizer.step()` average the gradients over ranks first; returns the same optimizer. Collective.

    Reduction starts while backward goes on. It stays the optimizer that it was, with `synchronize()` besides: learning
    rate schedulers and `state_dict` see no difference. `step(closure)` would run backward after the average, and a
    GradScaler looks for infinity on its own rank alone, so that ranks would skip different steps: both are refused.

    Args:    optimizer: any torch.optim.Optimizer; its parameters in the same order on every rank.
             named_parameters: (name, parameter) pairs, for messages: model.named_parameters(); else "parameter 0", ...
             all_reduce, threshold, cycle, average, passes, timeline: see Fusion.
    Raises:  ValueError if the optimizer has nothing to train, names are missing, or ranks differ in the number,
             names, shapes or dtypes of their parameters. Later, backward: ValueError if it comes to a parameter more
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
    names = _names_of(params, named_parameters)
    fused = _Fusion(
        comm,
        params,
        names,
        all_reduce=all_reduce,
        threshold=threshold,
        cycle=cycle,
        average=average,
        passes=passes,
        timeline=timeline,
    )
    optimizer.synchronize = fused.synchronize  # pyrefly: ignore[missing-attribute]
    optimizer._step_supports_amp_scaling = True  # pyrefly: ignore[missing-attribute]
    optimizer.register_step_pre_hook(lambda _, args, kwargs: _before_step(optimizer, fused, *args[1:], **kwargs))
    return optimizer


def _before_step(optimizer: torch.optim.Optimizer, fused: _Fusion, closure: Callable[[], object] | None = None) -> None:
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


def _names_of(
    params: Sequence[nn.Parameter], named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None
) -> list[str]:
    """Return the names of `params`, in their order; "parameter 0", "parameter 1", ... if none are given."""
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


class TraceRow(TypedDict, total=False):
    """An event of Chrome's trace format: ph says which kind, ts and dur are in us."""

    ph: str
    name: str
    pid: int
    ts: float
    dur: float
    args: dict[str, object]


def to_horovod(events: Iterable[Event], rank: int = 0) -> list[TraceRow]:
    """Return events as Horovod's trace: list of dicts, begins and ends balanced for every gradient, times in us.

    Args:    events: trace.Event of all ranks; rank: whose activities are shown, as Horovod shows the coordinator's.
    """
    activities = [e for e in events if _activity(e) in (RANK_READY, *DEPTH)]
    origin = min((e.t0_ns for e in activities), default=0)
    by_tensor: dict[str, list[Event]] = {}
    for e in sorted(activities, key=lambda e: (e.t0_ns, e.step)):
        by_tensor.setdefault(e.op.partition(" ")[2], []).append(e)
    rows: list[TraceRow] = []
    for pid, (name, of_tensor) in enumerate(by_tensor.items(), 1):
        rows.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        rows.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        for e in of_tensor:
            if _activity(e) == RANK_READY:
                rows.append({"ph": "X", "name": str(e.rank), "pid": pid, "ts": (e.t0_ns - origin) / 1e3, "dur": 0})
        rows += _nested([e for e in of_tensor if e.rank == rank and _activity(e) != RANK_READY], pid, origin)
    return rows


def _nested(activities: Sequence[Event], pid: int, origin: int) -> Iterator[TraceRow]:
    """Yield begins and ends of one gradient's activities: each of depth 1 lies within the next one of depth 0.

    An event is recorded when it ends, so what lies inside comes before what is around it.
    """
    inside: list[TraceRow] = []
    for e in sorted(activities, key=lambda e: e.step):
        begin: TraceRow = {"ph": "B", "name": _activity(e), "pid": pid, "ts": (e.t0_ns - origin) / 1e3}
        end: TraceRow = {"ph": "E", "pid": pid, "ts": (e.t1_ns - origin) / 1e3}
        if DEPTH[_activity(e)]:
            inside += [begin, end]
        else:
            yield from [begin, *inside, end]
            inside = []


def _activity(event: Event) -> str:
    """Return the first word of its op; the rest is the name of the gradient."""
    return event.op.partition(" ")[0]


def save_timeline(events: Iterable[Event], path: str, rank: int = 0) -> None:
    """Write `to_horovod(events)` to `path`. The file is whole JSON after every event, so it can be read meanwhile."""
    with open(path, "w") as file:
        file.write("[\n]\n")
        for i, row in enumerate(to_horovod(events, rank)):
            file.seek(file.tell() - len("]\n"))
            file.write(("," if i else "") + json.dumps(row) + "\n]\n")
            file.flush()
