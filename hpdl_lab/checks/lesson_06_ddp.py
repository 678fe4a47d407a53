"""Notebook 06, DDP: PyTorch's own data parallelism, with any all-reduce inside."""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import mse_loss

from ..collectives import ring
from ..models.mlp import mlp
from ..parallel import ddp as reference
from ..trace import now_ns
from .layer_part import nearly
from .overlapped_steps import load_optimizers
from .ranks import Ledger, capital, count, number, on_engines, simulate, times
from .record import Broken, Exercise, Passed

SIZES = (6, 5, 4, 3)  # of the layers: six gradients
BUCKETS = [[5, 4], [3, 2], [1, 0]]
SHARD, STEPS = 3, 3
RANKS = (3, 2, 4, 1)
TOLERANCE = 1e-10


class StandInBucket:
    """What a hook sees of dist.GradBucket."""

    def __init__(self, number, params):
        self._number, self._params = number, params
        self._flat = torch.cat([p.grad.reshape(-1) for p in params])

    def index(self):
        return self._number

    def buffer(self):
        return self._flat

    def gradients(self):
        parts = self._flat.split([p.numel() for p in self._params])
        return [part.view(p.shape) for part, p in zip(parts, self._params, strict=True)]

    def parameters(self):
        return self._params

    def is_last(self):
        return self._number == len(BUCKETS) - 1

    def set_buffer(self, flat):
        self._flat = flat


class Averaged(NamedTuple):
    """One rank after one backward: what came of each bucket, in order, and what it had before.

    kind: type of what the hook returned; done: whether its future had a value; out: that value, or None.
    calls: numbers of the tensors given to state.all_reduce.
    """

    kinds: list
    done: list
    outs: list
    before: list
    calls: list


def shard_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randn(SHARD, n, generator=generator, dtype=torch.float64) for n in (SIZES[0], SIZES[-1]))


def backward_with(comm, fn, ledger):
    """One backward, in which fn(state, bucket) is called for every bucket that is full, as DDP does."""
    model, (x, y) = mlp(SIZES, seed=1).double(), shard_of(comm.rank)
    params, calls, answered, before = list(model.parameters()), [], [], []
    missing = [len(part) for part in BUCKETS]

    def all_reduce(comm, x):
        calls.append(x.numel())
        ledger.setdefault(comm.rank, []).append(x.numel())
        return ring.all_reduce(comm, x)

    state = reference.Communication(comm, all_reduce)

    def ready(index):
        b = next(b for b, part in enumerate(BUCKETS) if index in part)
        missing[b] -= 1
        if missing[b] == 0:  # backward of this model makes the gradients in this very order
            bucket = StandInBucket(b, [params[i] for i in BUCKETS[b]])
            before.append(bucket.buffer().numpy().copy())
            answered.append(fn(state, bucket))

    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(lambda _, index=index: ready(index))
    mse_loss(model(x), y).backward()
    futures = [isinstance(a, torch.futures.Future) for a in answered]
    done = [is_future and a.done() for is_future, a in zip(futures, answered, strict=True)]
    outs = [plain(a.value()) if is_done else None for is_done, a in zip(done, answered, strict=True)]
    return Averaged([type(a).__name__ for a in answered], done, outs, before, calls)


def plain(value):
    """A future's value as an array, or what it is instead, in words."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    return f"something of type {type(value).__name__}"


def check_ddp_hook(fn, runner=None):
    load_optimizers()
    for p in RANKS:
        where, ledger = f"with {count(p, 'rank')}", Ledger()
        try:
            run = simulate(p, backward_with, fn, ledger, where=where, threads=True)
        except Broken as broken:
            raise by_order(ledger, broken, capital(where)) from None
        check_averages(run, capital(where))
    facts = [f"every bucket averaged, on 1, 2, 3 and 4 simulated ranks: {len(BUCKETS)} all-reduces for 6 gradients"]
    if runner is not None:
        run = on_engines(runner, train, fn)
        facts.append(check_course(run))
    return Passed(tuple(facts), run.events, len(run))


def by_order(ledger, broken, where):
    """`broken`, or what is behind it: ranks that reduced their buckets in different orders."""
    for r, sizes in sorted(ledger.items()):
        first = ledger.get(0, [])
        k = min(len(sizes), len(first))
        if sizes[:k] != first[:k]:
            message = (
                f"{where}, rank 0 gave all_reduce {listed(first)} numbers, in this order, and rank {r} gave it "
                f"{listed(sizes)}: what meets there are different buckets. DDP calls the hook in the same order on "
                "every rank; keep it."
            )
            return Broken("order", message, broken.detail)
    return broken


def listed(numbers):
    return ", ".join(map(str, numbers))


def check_averages(run, where):
    """Raise Broken unless every future holds the average of its bucket."""
    p = len(run)
    for b in range(len(BUCKETS)):
        mean = sum(left.before[b] for left in run) / p
        for r, left in enumerate(run):
            head = f"{where}, for bucket {b} rank {r}'s hook"
            if left.kinds[b] != "Future":
                what = "nothing" if left.kinds[b] == "NoneType" else f"something of type {left.kinds[b]}"
                message = f"{head} returned {what}: DDP asks for a torch.futures.Future, whose value it takes later."
                raise Broken("future", message)
            if not left.done[b]:
                message = (
                    f"{head} returned a future without a value, and backward is over: nobody will give it one, and DDP "
                    "waits for it for ever. future.set_result(tensor) does."
                )
                raise Broken("future", message)
            out = left.outs[b]
            if isinstance(out, str) or out.shape != mean.shape:
                got = out if isinstance(out, str) else f"a tensor of shape {out.shape}"
                message = f"{head} promised {got}: DDP needs the flat tensor of the bucket, of shape {mean.shape}."
                raise Broken("shape", message)
            if not np.allclose(out, mean, rtol=TOLERANCE, atol=TOLERANCE):
                i = int(np.argmax(~np.isclose(out, mean, rtol=TOLERANCE, atol=TOLERANCE)))
                failed, why = explain(out, r, b, run)
                message = f"{head} should give {number(mean[i])} for number {i}, the mean over ranks, and gives "
                raise Broken(failed, f"{message}{number(out[i])}. {why}".rstrip())
    for r, left in enumerate(run):
        if p > 1 and len(left.calls) != len(BUCKETS):
            message = (
                f"{where}, the averages are right, but rank {r} called state.all_reduce {len(left.calls)} times for "
                f"{len(BUCKETS)} buckets: the state says which all-reduce is to be used, perhaps that of lesson 04."
            )
            raise Broken("all_reduce", message)


def explain(out, r, b, run):
    """(invariant, sentence) for what rank r's hook gave for bucket b, which is not the mean."""
    p, total, mine = len(run), sum(left.before[b] for left in run), run[r].before[b]
    for value, failed, why in (
        (total, "mean", f"That is the sum over {p} ranks: DDP divides nothing when it has a hook."),
        (total / p / p, "mean", f"It was divided by {p} twice."),
        (total / 2, "size", f"You divided by 2, but there are {p} ranks: state.comm.size."),
        (mine, "buffer", f"That is what rank {r} had before: is it the sum that you give to the future, or a copy?"),
        (mine / p, "buffer", f"That is rank {r}'s own bucket divided by {p}: the others are not in it."),
    ):
        if np.allclose(out, value, rtol=TOLERANCE, atol=TOLERANCE):
            return failed, why
    if found := nearly(out, total / p):
        return found
    share = times(out, total / p)
    return ("sum", "") if share is None else ("mean", f"That is {number(share)} times the mean: what do you divide by?")


def train(comm, fn):
    """[parameters after each of STEPS steps] of PyTorch's DDP with the hook; nothing on simulated ranks."""
    if comm.trace.clock is not now_ns:
        return []
    from torch.nn.parallel import DistributedDataParallel  # takes torch.distributed along

    from ..comm.torch_group import process_group

    model, kept = mlp(SIZES, seed=1).double(), []
    with process_group(comm):
        ddp = DistributedDataParallel(model, bucket_cap_mb=3e-4)
        ddp.register_comm_hook(reference.Communication(comm, ring.all_reduce), fn)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            x, y = shard_of(comm.rank, step)
            optimizer.zero_grad()
            mse_loss(ddp(x), y).backward()
            optimizer.step()
            kept.append(flat(model))
    return kept


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def check_course(run):
    """Compare DDP on the engines with one rank that has the whole batch. Returns a fact."""
    p = len(run)
    if not run[0]:
        return "engines: these ranks are simulated, and PyTorch's process groups need processes"
    model = mlp(SIZES, seed=1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    worst = 0.0
    for step in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(shard_of(r, step) for r in range(p)), strict=True))
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        for r, kept in enumerate(run):
            off = float(np.abs(kept[step] - flat(model)).max())
            worst = max(worst, off)
            if not off < TOLERANCE:
                message = (
                    f"Right on simulated ranks, but with PyTorch's DDP on {count(p, 'engine')} rank {r} is {off:.2g} "
                    f"from where one rank with the whole batch would be after step {step}."
                )
                raise Broken("engines", message)
    return f"engines: PyTorch's DDP on {count(p, 'MPI rank')}, {STEPS} steps, {worst:.0e} at most from one rank"


EXERCISES = (
    Exercise(
        id="6.5",
        title="PyTorch's DDP on your own ring",
        reference=reference.ddp_hook,
        stars=3,
        check=check_ddp_hook,
        explanation=(
            "DDP does the rest as before: buckets, order, hooks, unused parameters. What travels, and how, is yours: "
            "people put compression and 16-bit sums here. This hook blocks backward, as you have written it; "
            "ddp_hook_beside in the same file does the same in the background, with two lines more."
        ),
    ),
)
