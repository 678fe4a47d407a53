"""Notebook 06: buckets that travel while backward goes on, in the same order on every rank; PyTorch's DDP."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ...collectives import ring
from ...comm import PerRank, Results
from ...comm.base import Comm
from ...comm.network import Switch
from ...data.loading import shard_indices
from ...models.mlp import mlp
from ...parallel import ddp
from ...parallel.data_parallel import DataParallelOverlapped
from ...parallel.reducer import Bucket, Reducer, gradient_ready
from ...parallel.scaling.accounting import account, spending
from ...parallel.training import train_step
from ...units import counted
from ..checkers import because, check_course, engine_facts, exactly, in_all_cases, off_reason, with_ranks
from ..ranks import Ledger, number, on_engines, simulate
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Runner
from .lesson_06 import flat_parameters, noted_ring

if TYPE_CHECKING:
    from ...parallel.scaling.accounting import Account


STEPS, BATCH = 3, 12
SIZES = (6, 5, 4, 3)
SMALL = (300, 60)  # bytes of a bucket, and of the first: four buckets of the model above
P = 4  # ranks for measuring time
LAYERS = (64,) * 9  # eight equal layers, each of them a bucket
LAYER = (4 * 65 * 64, 4 * 65 * 64)
FORWARD, BACKWARD = 4e-3, 8e-3  # s of virtual time
NETWORK = Switch(alpha=1e-6, beta=2.7e-8)  # an all-reduce of a layer takes about 0.7 ms, its backward 1 ms


def load_optimizers() -> None:
    """Let torch import what its optimizers need, for seconds: not within the deadline of a run."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def course_of_one(
    sizes: tuple[int, ...], steps: list[list[Callable[[nn.Module], Tensor]]], momentum: float = 0.0
) -> list[np.ndarray]:
    """Return [flat parameters after each step] of one rank; steps: the functions loss(model) that each of them adds."""
    model = mlp(sizes, seed=1).double()
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), []
    for losses in steps:
        optimizer.zero_grad()
        for loss in losses:
            loss(model).backward()
        optimizer.step()
        kept.append(flat_parameters(model))
    return kept


def _batch_of(step: int, sizes: tuple[int, ...] = SIZES) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, sizes[0], generator=generator, dtype=torch.float64)
    return x, torch.randint(0, sizes[-1], (BATCH,), generator=generator)


def _train(comm: Comm, fn: Answer) -> list[np.ndarray]:
    """Return (N,) parameters after each of STEPS steps, on shards of the same batches and in two micro-batches."""
    model, strategy = mlp(SIZES, seed=1).double(), DataParallelOverlapped(ring.all_reduce, *SMALL, gradient_ready=fn)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    strategy.start(comm, model)
    for step in range(STEPS):
        x, y = (shard_indices(part, comm.rank, comm.size) for part in _batch_of(step))
        train_step(comm, model, strategy, optimizer, x, y, BATCH, micro_batches=2)
        kept.append(flat_parameters(model))
    strategy.stop()
    return kept


def _check_parameters(run: Results, where: str) -> float:
    """Raise Broken if a rank leaves the course of one rank with the whole batch; returns the largest difference."""

    def loss_of(step: int) -> Callable[[nn.Module], Tensor]:
        x, y = _batch_of(step)
        return lambda model: cross_entropy(model(x), y)

    return check_course(
        run,
        course_of_one(SIZES, [[loss_of(step)] for step in range(STEPS)], momentum=0.9),
        lambda step, rank, off: (
            f"""steps: {where}, after step {step} a parameter of rank {rank} is {number(off)} from
            where one rank with the whole batch would be: is something left over from the step before?"""
        ),
    )


def _timed_step(comm: Comm, fn: Answer) -> int:
    """Take two steps of a network of eight equal layers, whose arithmetic takes virtual time."""
    model = mlp(LAYERS, seed=1)
    strategy = DataParallelOverlapped(ring.all_reduce, *LAYER, gradient_ready=fn)
    x, y = _batch_of(0, LAYERS)
    x, y = shard_indices(x.float(), comm.rank, comm.size), shard_indices(y, comm.rank, comm.size)
    with spending(comm, model, FORWARD, BACKWARD):
        strategy.start(comm, model)
        comm.barrier()
        begun = comm.trace.clock()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train_step(comm, model, strategy, optimizer, x, y, BATCH)
        strategy.stop()
    return begun


def _exposure(fn: Answer = gradient_ready) -> tuple[float, Results]:
    """Return (exposed share of the communication, the run with the events of a step), in virtual time."""
    run = simulate(P, _timed_step, fn, network=NETWORK, where="in a training step", threads=True)
    events = [e for e in run.events if e.t0_ns >= max(run) and e.op != "compute"]  # forward and backward tell of it
    return 1 - cast("Account", account(events)).overlap, Results(run, events)


SIZES_OVERLAP = (5, 4, 3, 2)  # of the layers: six gradients, of 160, 32, 96, 24, 48 and 16 bytes
BUCKETS = [[5, 4], [3, 2], [1], [0]]
FORWARD_OVERLAP, BACKWARD_OVERLAP = [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]
ORDERS = (  # in which order gradients become ready on each rank
    [BACKWARD_OVERLAP] * 3,
    [BACKWARD_OVERLAP, FORWARD_OVERLAP],
    [BACKWARD_OVERLAP, [3, 2, 5, 4, 1, 0], [0, 1, 4, 5, 2, 3], BACKWARD_OVERLAP],
    [BACKWARD_OVERLAP],
)
STANDARD = 0.2  # of the communication may be exposed; of a right answer it is 0.12


class _Watched(Bucket):
    """A bucket that notes in a ledger, {rank: [numbers of buckets]}, when it is packed."""

    number: int
    started: list[int]

    def packed(self) -> Tensor:
        self.started.append(self.number)
        return super().packed()


class _Scripted(NamedTuple):
    """A rank on which gradients became ready in a given order.

    works: how many had been started after each of them; seconds: how long each call took; ended: how many at the end.
    missing: what the reducer still waited for; flats, before: the buckets after the sum, and before it.
    reduced: how often reducer.all_reduce was called.
    """

    works: list[int]
    seconds: list[float]
    ended: int
    missing: list[int]
    flats: list[np.ndarray]
    before: list[np.ndarray]
    reduced: int


def _make_ready(comm: Comm, fn: Answer, order: list[int], ledger: Ledger) -> _Scripted:
    """Call fn(comm, reducer, index) for the gradients in this order; returns Scripted."""
    model = mlp(SIZES_OVERLAP, seed=1).double()
    x = torch.randn(4, SIZES_OVERLAP[0], generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64)
    model(x).square().mean().backward()
    params = list(model.parameters())
    if comm.rank == 1:
        params[3].grad = None  # the loss of this rank does not depend on it
    buckets = [_Watched(comm, [params[i] for i in part], part) for part in BUCKETS]
    ledger[comm.rank] = []
    for b, bucket in enumerate(buckets):
        bucket.number, bucket.started = b, ledger[comm.rank]
    reduced = []
    reducer = Reducer(buckets, noted_ring(reduced))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    before = [torch.cat([grads[i].reshape(-1) for i in part]).numpy().copy() for part in BUCKETS]
    works, seconds = [], []
    for index in order:
        begun = comm.trace.clock()
        fn(comm, reducer, index)
        works.append(len(reducer.works))
        seconds.append((comm.trace.clock() - begun) / 1e9)
    for work in reducer.works:
        work.wait()
    flats = [bucket.flat.numpy().copy() for bucket in buckets]
    return _Scripted(works, seconds, len(reducer.works), list(reducer.missing), flats, before, len(reduced))


def _check_gradient_ready(fn: Answer, runner: Runner = None) -> Passed:
    load_optimizers()

    def judge(run: Results, where: str, orders: Sequence[list[int]], ledger: Ledger) -> None:
        try:
            _check_starts(run, ledger, orders, where)
            _check_sums(run, where)
        except Broken as broken:
            raise _with_time(broken, fn) from None

    cases = [(len(orders), PerRank(orders), Ledger()) for orders in ORDERS]
    in_all_cases(fn, _make_ready, cases, _order_case, judge, _explain_order)
    ranks = ((2,), (3,), (1,), (4,))
    run = in_all_cases(
        fn, _train, ranks, lambda p: f"in a training step {with_ranks(p)}", _check_parameters, threads=True
    )
    off = _check_parameters(run, "")
    exposed, run = _exposure(fn)
    if exposed > STANDARD:
        raise Broken(f"late: Right, but {exposed:.0%} of the communication is exposed.")
    facts = [
        "buckets start in order on every rank, as soon as they may, whichever gradient is ready first",
        f"3 training steps on 1, 2, 3 and 4 simulated ranks: {off:.0e} at most from one rank with the whole batch",
        f"exposed: {exposed:.0%} of the communication; at most {STANDARD:.0%} was asked for, and blocking exposes all",
    ]
    facts += engine_facts(runner, _check_parameters, _train, fn, say="the same parameters on {} as on one")
    return Passed(*facts, run=run)


def _order_case(p: int, orders: Sequence[list[int]], ledger: Ledger) -> str:
    same = all(order == orders[0] for order in orders)
    return with_ranks(p) + ("" if same else ", on which gradients become ready in different orders")


def _explain_order(broken: Broken, where: str, orders: Sequence[list[int]], ledger: Ledger) -> Reason | None:
    """Return which ranks started buckets more than once, in different orders, or not all of them, if any did."""
    if broken.failed not in ("deadlock", "raises"):
        return None
    started = {r: order for r, order in sorted(ledger.items()) if order}
    for r, order in started.items():
        if len(set(order)) < len(order):
            return _twice(order, r, where)
    least = min(map(len, started.values()), default=0)
    for r, s in itertools.permutations(started, 2):
        if started[r][:least] != started[s][:least]:
            text = [", ".join(map(str, started[rank])) for rank in (r, s)]
            broken.detail = f"The report says: {broken.message}\n{broken.detail}"
            return f"""order: {where}, rank {r} starts its buckets in the order {text[0]}, rank {s} in the order
                {text[1]}, so different buckets would be added. A complete bucket has to wait for the one before it."""
    short = [r for r, order in started.items() if len(order) < len(BUCKETS)]
    if short and len({len(order) for order in started.values()}) > 1:
        return _last(short[0], len(started[short[0]]), where)
    return None


def _twice(order: list[int], r: int, where: str) -> Reason:
    b = next(b for b in order if order.count(b) > 1)
    return f"""twice: {where}, rank {r} starts bucket {b} {order.count(b)} times: the sums are added once more.
        len(reducer.works) is the number of the next bucket; those before it are under way."""


def _last(r: int, n: int, where: str) -> Reason:
    return f"""last: {where}, rank {r} has started {n} of {len(BUCKETS)} buckets when all its gradients are there. One
        gradient may complete the bucket for which several others are waiting: start all of them, the last one too."""


def _check_starts(run: Results, ledger: Ledger, orders: Sequence[list[int]], where: str) -> None:
    """Raise Broken unless every bucket was started once, as soon as it might, and no call took time."""
    p = len(run)
    for r, (left, order) in enumerate(zip(run, orders, strict=True)):
        started = ledger[r]
        if len(set(started)) < len(started):
            raise Broken(_twice(started, r, where))
        slow = next((i for i, s in zip(order, left.seconds, strict=True) if s > 0), None)
        if slow is not None and p > 1:
            took = left.seconds[order.index(slow)]
            raise Broken(f"""waits: {where}, gradient_ready of parameter {slow} took {took * 1e6:.3g} µs of virtual time
                on rank {r}: it waits for other ranks, and backward stands still. comm.background returns at once.""")
        wanted = _expected_starts(order)
        for k, (got, right) in enumerate(zip(left.works, wanted, strict=True)):
            if got > right:
                raise Broken(f"""early: {where}, {counted(got, "bucket")} had been started on rank {r} when the
                    gradients {", ".join(map(str, order[: k + 1]))} were there: not all of a bucket of {BUCKETS}.""")
        if any(left.missing):
            raise Broken(f"""count: {where}, reducer.missing on rank {r} is {left.missing} when all gradients are there:
                every gradient counts its own bucket down by one, to 0.""")
        if left.ended < len(BUCKETS):
            raise Broken(_last(r, left.ended, where))
        for k, (got, right) in enumerate(zip(left.works, wanted, strict=True)):
            if got < right:
                only = f"only {counted(got, 'bucket')}" if got else "no bucket"
                raise Broken(f"""late: {where}, {only} had been started on rank {r} when the gradients
                    {", ".join(map(str, order[: k + 1]))} were there: of {BUCKETS} {right} could be under way.""")


def _expected_starts(order: list[int]) -> list[int]:
    """Return how many buckets can have been started after each gradient of `order`."""
    there, wanted = set(), []
    for index in order:
        there.add(index)
        complete = [set(bucket) <= there for bucket in BUCKETS]
        wanted.append(complete.index(False) if False in complete else len(BUCKETS))
    return wanted


def _check_sums(run: Results, where: str) -> None:
    """Raise Broken unless every bucket holds the sum over ranks, and its flag."""
    p = len(run)
    for b, bucket in enumerate(BUCKETS):
        total = sum(left.before[b] for left in run)
        for r, left in enumerate(run):
            if not np.allclose(left.flats[b][:-1], total, rtol=1e-10, atol=1e-12):
                why = ""
                if np.allclose(left.flats[b][:-1] * p, total, rtol=1e-10, atol=1e-12):
                    why = " It holds the mean: dividing is left to add_gradients."
                elif not left.flats[b].any():
                    why = " It holds zeros: reducer.collect(index) copies a gradient into its bucket."
                raise Broken(f"""sum: {where}, bucket {b} on rank {r}, of the gradients {bucket}, does not hold their
                    sum over ranks.{why}""")
            lacking = float(p > 1 and 3 in bucket)
            if left.flats[b][-1] != lacking:
                raise Broken(f"""flag: {where}, rank 1 has no gradient for parameter 3, and the sum hides it: the flag
                    behind bucket {b} is {left.flats[b][-1]:g} after the sum. reducer.buckets[b].packed() writes it.""")
    for r, left in enumerate(run):
        if left.reduced < len(BUCKETS):
            raise Broken(f"""all_reduce: {where}, the sums are right, but rank {r} called reducer.all_reduce
                {counted(left.reduced, "time")} for {len(BUCKETS)} buckets: the reducer decides which one is used.""")


def _with_time(broken: Broken, fn: Answer) -> Broken:
    """Return `broken`, with what it costs in a training step if it costs time."""
    if broken.failed not in ("waits", "late"):
        return broken
    try:
        exposed, run = _exposure(fn)
    except Broken:
        return broken
    time = f"In a training step {exposed:.0%} of the communication is exposed this way; {STANDARD:.0%} is allowed."
    broken.events, broken.expected, broken.size = run.events, _exposure(gradient_ready)[1].events, P
    return broken.restate(f"{broken.failed}: {broken.message} {time}")


BUCKETS_DDP = [[5, 4], [3, 2], [1, 0]]
SHARD = 3


class _StandInBucket:
    """A dist.GradBucket, as far as a hook uses it."""

    def __init__(self, number: int, params: list[Tensor]) -> None:
        self._number, self._params = number, params
        self._flat = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])

    def index(self) -> int:
        return self._number

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        parts = self._flat.split([p.numel() for p in self._params])
        return [part.view(p.shape) for part, p in zip(parts, self._params, strict=True)]

    def parameters(self) -> list[Tensor]:
        return self._params

    def is_last(self) -> bool:
        return self._number == len(BUCKETS_DDP) - 1

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat


class _Hooked(NamedTuple):
    """A rank after one backward: what came of each bucket, in order, and what it had before.

    kinds: types of what the hook returned; done: whether its future had a value; outs: that value, or None.
    calls: numbers of the tensors given to state.all_reduce.
    """

    kinds: list[str]
    done: list[bool]
    outs: list[np.ndarray | str | None]
    before: list[np.ndarray]
    calls: list[int]


def ddp_shard(rank: int, step: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randn(SHARD, n, generator=generator, dtype=torch.float64) for n in (SIZES[0], SIZES[-1]))


def _backward_with(comm: Comm, fn: Answer, ledger: Ledger) -> _Hooked:
    """Run one backward, in which fn(state, bucket) is called for every bucket that is full, as DDP does."""
    model, (x, y) = mlp(SIZES, seed=1).double(), ddp_shard(comm.rank)
    params, answered, before = list(model.parameters()), [], []
    missing = [len(part) for part in BUCKETS_DDP]
    calls = ledger.setdefault(comm.rank, [])
    state = ddp.Communication(comm, noted_ring(calls))

    def ready(index: int) -> None:
        b = next(b for b, part in enumerate(BUCKETS_DDP) if index in part)
        missing[b] -= 1
        if missing[b] == 0:  # backward of this model makes the gradients in this very order
            bucket = _StandInBucket(b, [params[i] for i in BUCKETS_DDP[b]])
            before.append(bucket.buffer().numpy().copy())
            answered.append(fn(state, bucket))

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(lambda _, index=index: ready(index))
    mse_loss(model(x), y).backward()
    done = [isinstance(a, torch.futures.Future) and a.done() for a in answered]
    outs = [_plain(a.value()) if is_done else None for is_done, a in zip(done, answered, strict=True)]
    return _Hooked([type(a).__name__ for a in answered], done, outs, before, calls)


def _plain(value: object) -> np.ndarray | str:
    """Return a future's value as an array, or its kind in words if it is none."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    return f"something of type {type(value).__name__}"


def _check_ddp_hook(fn: Answer, runner: Runner = None) -> Passed:
    load_optimizers()
    cases = [(p, Ledger()) for p in (3, 2, 4, 1)]
    run = in_all_cases(fn, _backward_with, cases, with_ranks, _check_averages, _by_order, threads=True)
    n = len(BUCKETS_DDP)
    facts = [f"every bucket averaged, on 1, 2, 3 and 4 simulated ranks: {n} all-reduces for 6 gradients"]
    if runner is not None:
        run = on_engines(runner, _train_ddp, fn)
        facts.append(_compare(run))
    return Passed(*facts, run=run)


def _by_order(broken: Broken, where: str, ledger: Ledger) -> Reason | None:
    """Return which ranks reduced their buckets in different orders, if any did."""
    first = ledger.get(0, [])
    for r, sizes in sorted(ledger.items()):
        k = min(len(sizes), len(first))
        if sizes[:k] != first[:k]:
            return f"""order: {where}, rank 0 gave all_reduce {", ".join(map(str, first))} numbers, in this order, and
                rank {r} gave it {", ".join(map(str, sizes))}. DDP calls the hook in the same order on every rank."""
    return None


def _check_averages(run: Results, where: str, ledger: Ledger) -> None:
    """Raise Broken unless every future holds the average of its bucket."""
    p = len(run)
    for b in range(len(BUCKETS_DDP)):
        mean = sum((left.before[b] for left in run), np.zeros(())) / p
        for r, left in enumerate(run):
            head, out = f"{where}, for bucket {b} rank {r}'s hook", left.outs[b]
            if left.kinds[b] != "Future":
                what = "nothing" if left.kinds[b] == "NoneType" else f"something of type {left.kinds[b]}"
                raise Broken(f"""future: {head} returned {what}: DDP asks for a torch.futures.Future, whose value it
                    takes later.""")
            if not left.done[b]:
                raise Broken(f"""future: {head} returned a future without a value, and backward is over: DDP
                    waits for the value forever. future.set_result(tensor) sets it.""")
            if isinstance(out, str) or out.shape != mean.shape:
                got = out if isinstance(out, str) else f"a tensor of shape {out.shape}"
                raise Broken(f"""shape: {head} promised {got}: DDP needs the flat tensor of the bucket, of shape
                    {mean.shape}.""")
            if not exactly(out, mean):
                i = int(np.argmax(~np.isclose(out, mean, 1e-10, 1e-10)))
                text = f"should give {number(mean[i])} for number {i}, the mean over ranks, and gives {number(out[i])}."
                raise because(_why_average(out, mean, left.before[b], r, p), f"{head} {text}")
    for r, left in enumerate(run):
        if p > 1 and len(left.calls) != len(BUCKETS_DDP):
            raise Broken(f"""all_reduce: {where}, the averages are right, but rank {r} called state.all_reduce
                {len(left.calls)} times for {len(BUCKETS_DDP)} buckets: the state decides which one is used.""")


def _why_average(out: np.ndarray, mean: np.ndarray, mine: np.ndarray, r: int, p: int) -> Reason:
    """Return the Reason for the tensor of rank r's hook for a bucket, which is not the mean."""
    rows = (
        (p * mean, f"mean: That is the sum over {p} ranks: DDP divides nothing when it has a hook."),
        (mean / p, f"mean: It was divided by {p} twice."),
        (p * mean / 2, f"size: You divided by 2, but there are {p} ranks: state.comm.size."),
        (mine, f"buffer: That is what rank {r} had before: is it the sum that you give to the future, or a copy?"),
        (mine / p, f"buffer: That is rank {r}'s own bucket divided by {p}: the others are not in it."),
    )
    return off_reason(out, mean, rows)


def _train_ddp(comm: Comm, fn: Answer) -> list[np.ndarray]:
    """Return [parameters after each of STEPS steps] of PyTorch's DDP with the hook; nothing on simulated ranks."""
    if comm.simulated:
        return []
    from torch.nn.parallel import DistributedDataParallel  # takes torch.distributed along

    from ...comm.torch.group import process_group

    model, kept = mlp(SIZES, seed=1).double(), []
    with process_group(comm):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=3e-4)
        wrapped.register_comm_hook(ddp.Communication(comm, ring.all_reduce), fn)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            x, y = ddp_shard(comm.rank, step)
            optimizer.zero_grad()
            mse_loss(wrapped(x), y).backward()
            optimizer.step()
            kept.append(flat_parameters(model))
    return kept


def _compare(run: Results) -> str:
    """Compare DDP on the engines with one rank that has the whole batch. Returns a fact."""
    p = len(run)
    if not run[0]:
        return "engines: these ranks are simulated, and PyTorch's process groups need processes"

    def loss_of(step: int) -> Callable[[nn.Module], Tensor]:
        x, y = (torch.cat(parts) for parts in zip(*(ddp_shard(r, step) for r in range(p)), strict=True))
        return lambda model: mse_loss(model(x), y)

    worst = check_course(
        run,
        course_of_one(SIZES, [[loss_of(step)] for step in range(STEPS)], momentum=0.9),
        lambda step, rank, off: (
            f"""engines: Right on simulated ranks, but with PyTorch's DDP on {counted(p, "engine")}
            rank {rank} is {off:.2g} from where one rank with the whole batch would be after step {step}."""
        ),
    )
    return f"engines: PyTorch's DDP on {counted(p, 'MPI rank')}, {STEPS} steps, {worst:.0e} at most from one rank"


EXERCISES = (
    Exercise(
        "6.4",
        "send buckets while backward goes on",
        gradient_ready,
        3,
        _check_gradient_ready,
        picture=Drawing("timeline", "Your buckets travel while backward goes on: a step in virtual time"),
    ),
    Exercise("6.5", "PyTorch's DDP on your own ring", ddp.ddp_hook, 3, _check_ddp_hook),
)
