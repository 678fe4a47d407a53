"""Notebook 06, overlap: buckets that travel while backward goes on, in the same order on every rank."""

from typing import NamedTuple

import numpy as np
import torch

from ..collectives import ring
from ..comm import PerRank
from ..models.mlp import mlp
from ..parallel import reducer as reference
from ..parallel.reducer import Bucket
from . import overlapped_steps as steps
from .ranks import Ledger, capital, count, on_engines, simulate
from .record import Broken, Exercise, Passed

SIZES = (5, 4, 3, 2)  # of the layers: six gradients, of 160, 32, 96, 24, 48 and 16 bytes
LIMIT, FIRST = 130, 70
BUCKETS = [[5, 4], [3, 2], [1], [0]]
FORWARD, BACKWARD = [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]
ORDERS = (  # in which order gradients become ready on each rank
    [BACKWARD] * 3,
    [BACKWARD, FORWARD],
    [BACKWARD, [3, 2, 5, 4, 1, 0], [0, 1, 4, 5, 2, 3], BACKWARD],
    [BACKWARD],
)
STANDARD = 0.2  # of the communication may be exposed; of a right answer it is 0.12


class Watched(Bucket):
    """A bucket that notes in a ledger, {rank: [numbers of buckets]}, when it is packed."""

    def packed(self):
        self.started.append(self.number)
        return super().packed()


class Scripted(NamedTuple):
    """One rank, on which gradients became ready in a given order.

    works: how many had been started after each of them; seconds: how long each call took; ended: how many at the end.
    missing: what the reducer still waited for; flats, before: the buckets after the sum, and before it.
    reduced: how often reducer.all_reduce was called.
    """

    works: list
    seconds: list
    ended: int
    missing: list
    flats: list
    before: list
    reduced: int


def play(comm, fn, order, ledger):
    """Call fn(comm, reducer, index) for the gradients in this order; returns Scripted."""
    model = mlp(SIZES, seed=1).double()
    x = torch.randn(4, SIZES[0], generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64)
    model(x).square().mean().backward()
    params = list(model.parameters())
    if comm.rank == 1:
        params[3].grad = None  # the loss of this rank does not depend on it
    buckets = [Watched(comm, [params[i] for i in part], part) for part in BUCKETS]
    ledger[comm.rank] = []
    for number, bucket in enumerate(buckets):
        bucket.number, bucket.started = number, ledger[comm.rank]
    reduced = []

    def noted(comm, x):
        reduced.append(x.numel())
        return ring.all_reduce(comm, x)

    reducer = reference.Reducer(buckets, noted)
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
    return Scripted(works, seconds, len(reducer.works), list(reducer.missing), flats, before, len(reduced))


def check_gradient_ready(fn, runner=None):
    steps.load_optimizers()
    for orders in ORDERS:
        p, same = len(orders), all(order == orders[0] for order in orders)
        where = f"with {count(p, 'rank')}" + ("" if same else ", on which gradients become ready in different orders")
        ledger = Ledger()
        try:
            run = simulate(p, play, fn, PerRank(orders), ledger, where=where)
        except Broken as broken:
            raise behind(ledger, broken, capital(where)) from None
        try:
            check_starts(run, ledger, orders, capital(where))
            check_sums(run, capital(where))
        except Broken as broken:
            raise with_time(broken, fn) from None
    off = steps.check_equal_to_one_rank(fn)
    exposed, events = steps.exposure(fn)
    if exposed > STANDARD:
        raise Broken("late", f"Right, but {exposed:.0%} of the communication is exposed.")
    facts = [
        "buckets start in order on every rank, as soon as they may, whichever gradient is ready first",
        f"3 training steps on 1, 2, 3 and 4 simulated ranks: {off:.0e} at most from one rank with the whole batch",
        f"exposed: {exposed:.0%} of the communication; at most {STANDARD:.0%} was asked for, and blocking exposes all",
    ]
    if runner is not None:
        run = on_engines(runner, steps.train, fn)
        steps.check_parameters(run, f"on {count(len(run), 'engine')}")
        facts.append(f"engines: the same parameters on {count(len(run), 'MPI rank')} as on one")
    return Passed(tuple(facts), events, steps.P)


def behind(ledger, broken, where):
    """`broken`, or what is behind it: which buckets the ranks had started, in which order."""
    if broken.failed not in ("deadlock", "raises"):
        return broken
    started = {r: order for r, order in sorted(ledger.items()) if order}
    told = {r: ", ".join(map(str, order)) for r, order in started.items()}
    for r, order in started.items():
        if len(set(order)) < len(order):
            return twice(order, r, where, broken)
    least = min(map(len, started.values()), default=0)
    pairs = [(r, s) for r in started for s in started if started[r][:least] != started[s][:least]]
    if pairs:
        r, s = pairs[0]
        message = (
            f"{where}, rank {r} starts its buckets in the order {told[r]} and rank {s} in the order {told[s]}. What is "
            "started first meets what is started first: the ranks wait for each other, or add what does not belong "
            "together. A bucket that is complete has to wait for the one before it."
        )
        return Broken("order", message, f"The doctor says: {broken.message}\n{broken.detail}")
    short = [r for r, order in started.items() if len(order) < len(BUCKETS)]
    if short and len({len(order) for order in started.values()}) > 1:
        return last(short[0], len(started[short[0]]), where, broken)
    return broken


def twice(order, r, where, broken=None):
    number = next(b for b in order if order.count(b) > 1)
    message = (
        f"{where}, rank {r} starts bucket {number} {order.count(number)} times: the sums are added once more. "
        "len(reducer.works) is the number of the next bucket; those before it are under way."
    )
    return Broken("twice", message, broken.detail if broken else "")


def last(r, n, where, broken=None):
    message = (
        f"{where}, rank {r} has started {n} of {len(BUCKETS)} buckets when all its gradients are there. One gradient "
        "may complete the bucket for which several others are waiting: start all of them, the last one too."
    )
    return Broken("last", message, broken.detail if broken else "")


def check_starts(run, ledger, orders, where):
    """Raise Broken unless every bucket was started once, as soon as it might, and no call took time."""
    p = len(run)
    for r, (left, order) in enumerate(zip(run, orders, strict=True)):
        started = ledger[r]
        if len(set(started)) < len(started):
            raise twice(started, r, where)
        slow = next((i for i, s in zip(order, left.seconds, strict=True) if s > 0), None)
        if slow is not None and p > 1:
            took = left.seconds[order.index(slow)]
            message = (
                f"{where}, gradient_ready of parameter {slow} took {took * 1e6:.3g} µs of virtual time on rank {r}: it "
                "waits for other ranks, and backward stands still. comm.background returns at once; its Work is waited "
                "for after backward, by add_gradients."
            )
            raise Broken("waits", message)
        wanted = expected_starts(order)
        for k, (got, right) in enumerate(zip(left.works, wanted, strict=True)):
            if got > right:
                message = (
                    f"{where}, {count(got, 'bucket')} had been started on rank {r} when the gradients "
                    f"{', '.join(map(str, order[: k + 1]))} were there: the buckets are {BUCKETS}, so what traveled "
                    "was not complete."
                )
                raise Broken("early", message)
        if any(left.missing):
            told = f"{where}, reducer.missing on rank {r} is {left.missing} when all gradients are there"
            raise Broken("count", f"{told}: every gradient counts its own bucket down by one, to 0.")
        if left.ended < len(BUCKETS):
            raise last(r, left.ended, where)
        for k, (got, right) in enumerate(zip(left.works, wanted, strict=True)):
            if got < right:
                message = (
                    f"{where}, {started_so_far(got)} on rank {r} when the gradients "
                    f"{', '.join(map(str, order[: k + 1]))} were there: the buckets are {BUCKETS}, so {right} could "
                    "have been under way, while backward computes the others."
                )
                raise Broken("late", message)


def started_so_far(n):
    return "no bucket had been started" if n == 0 else f"only {count(n, 'bucket')} had been started"


def expected_starts(order):
    """How many buckets can have been started after each gradient of `order`."""
    there, wanted = set(), []
    for index in order:
        there.add(index)
        complete = [set(bucket) <= there for bucket in BUCKETS]
        wanted.append(complete.index(False) if False in complete else len(BUCKETS))
    return wanted


def check_sums(run, where):
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
                message = (
                    f"{where}, bucket {b} on rank {r}, of the gradients {bucket}, does not hold their sum over ranks."
                    f"{why}"
                )
                raise Broken("sum", message)
            lacking = float(p > 1 and 3 in bucket)
            if left.flats[b][-1] != lacking:
                message = (
                    f"{where}, rank 1 has no gradient for parameter 3, and nobody will know: the flag behind bucket "
                    f"{b} is {left.flats[b][-1]:g} after the sum. reducer.buckets[b].packed() writes it; .flat is the "
                    "bare tensor."
                )
                raise Broken("flag", message)
    for r, left in enumerate(run):
        if left.reduced < len(BUCKETS):
            message = (
                f"{where}, the sums are right, but rank {r} called reducer.all_reduce {count(left.reduced, 'time')} "
                f"for {len(BUCKETS)} buckets: the reducer says which all-reduce is to be used."
            )
            raise Broken("all_reduce", message)


def with_time(broken, fn):
    """`broken`, with what it costs in a training step where it costs time."""
    if broken.failed not in ("waits", "late"):
        return broken
    try:
        exposed, events = steps.exposure(fn)
    except Broken:
        return broken
    time = f"In a training step {exposed:.0%} of the communication is exposed so; {STANDARD:.0%} is the most."
    message = f"{broken.message} {time}"
    found = Broken(broken.failed, message, broken.detail, events, steps.P)
    found.expected = steps.exposure(reference.gradient_ready)[1]
    return found


EXERCISES = (
    Exercise(
        id="6.4",
        title="send buckets while backward goes on",
        reference=reference.gradient_ready,
        stars=3,
        check=check_gradient_ready,
        explanation=(
            "Now only the last bucket shows: everything else travels while backward computes. The order costs a "
            "little, and buys that no rank ever asks another what it is about to send. PyTorch's DDP and S-Caffe do "
            "the same; Horovod lets rank 0 negotiate an order instead, once, and remembers it."
        ),
    ),
)
