"""`hpdl bench ddp`: one step of training the same GPT by PyTorch's DDP, on gloo and on ours, and by our strategies.

What communication costs is what a step takes longer than the same step without any: DDP with a hook that divides and
sends nothing, our buckets with an all_reduce that does nothing. All of them take turns, and are subtracted round by
round. First, all candidates take a few steps from the same parameters, and must come to the same. On GPUs NCCL takes
the place of ours in DDP.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from .. import models
from ..comm.device.comm import DeviceComm
from ..comm.device.groups import nccl_options
from ..comm.torch.session import group_of
from ..data.loading import shard_indices
from ..models.gpt import GPT
from ..parallel.data_parallel import DataParallelBucketed, DataParallelOverlapped
from ..parallel.scaling.accounting import account
from ..torch_backend import process_group
from ..trace import now_ns
from . import launch
from .cycle import puller
from .report import Column, Report, Row, Table, field, with_memory
from .timing import quartiles, sample, slowest

if TYPE_CHECKING:
    from ..comm.base import Comm
    from ..comm.real import RealComm

    Groups: TypeAlias = dict[str, dist.ProcessGroup]


LEARNING_RATE = 0.05
CHECKED_STEPS = 3
TOLERANCE = 1e-6  # of a parameter, if three ranks or more add in different orders, or GPUs do
BASELINE, ON_HPDL, ON_NCCL = "DDP on gloo", "DDP on hpdl", "DDP on nccl"
SILENT = {  # the same steps without communication, and who is compared with them
    "DDP, silent": (BASELINE, ON_HPDL, ON_NCCL),
    "ours, silent": ("bucketed", "overlapped"),
}
WITHOUT = {name: silent for silent, names in SILENT.items() for name in names}


def _measured(key: str, form: str, part: int | str | None = None) -> Callable[[Row], str]:
    """Return the text of a column that is empty for steps without communication."""

    def text(row: Row) -> str:
        value = None if row["name"] in SILENT else row[key] if part is None else row[key][part]
        return "" if value is None else format(value, form)

    return text


TABLE = Table(
    [
        field("name", width=12, left=True),
        *(
            Column(name, lambda row, i=i: f"{row['step_ms'][i]:.2f}", "ms")
            for i, name in enumerate(("step", "p25", "p75"))
        ),
        field("samples", "samples_per_s", ".1f", unit="1/s"),
        *(Column(name, _measured("exposed_ms", ".2f", i), "ms") for i, name in enumerate(("exposed", "p25", "p75"))),
        Column("in events", _measured("in_events_ms", ".2f"), "ms"),
        Column("peak memory", _measured("peak_MiB", ".0f"), "MiB"),
        Column("#wrong", _measured("wrong", ""), width=7),
    ]
)


# -- before the ranks start ------------------------------------------------------------------------------------------


def ddp(
    ranks: int,
    size: str,
    batch: int,
    rounds: int,
    report: Report = Report(),  # noqa: B008
    device: str = "cpu",
) -> list[Row]:
    """Race the candidates, print the table; returns the rows.

    Args:    ranks: number; size: of the GPT, a name in models/gpt.py; batch: examples over all ranks;
             rounds: in which every candidate takes one step; device: "cpu" or "cuda".
    Raises:  ValueError for arguments that make no sense; RuntimeError if the ranks end with an error.
    """
    if batch < ranks:
        raise ValueError(f"a batch of {batch} has no example for some of {ranks} ranks")
    launch.warn_of_too_many(ranks)

    def memory(row: Row) -> Row:  # each in processes of its own, as memory that was in use once stays in the books
        if row["name"] in SILENT:
            return {}
        messages = launch.on_ranks(ranks, "ddp_memory", [[size, batch, row["name"]]], device=device)
        return next(message for message in messages if "peak_MiB" in message)

    messages = launch.on_ranks(ranks, "ddp", [[size, batch, rounds]], device=device)
    title = f"gpt {size}, {batch} examples a step on {ranks} ranks{' with GPUs' * (device == 'cuda')}"
    return TABLE.tell(title, with_memory(messages, memory), verdicts, report)


def verdicts(rows: list[Row]) -> list[str]:
    """Return a sentence for each of ours: how it compares with DDP on gloo."""
    gloo = next(row for row in rows if row["name"] == BASELINE)
    lines = [f"{gloo['parameters']:,} parameters."]
    if gloo["pull_us"]:
        pulled = "64 KiB that the other core had just written were read in {:.1f} us, {:.1f} to {:.1f} (quartiles)."
        lines.append(pulled.format(*gloo["pull_us"]))
    for row in rows:
        if row["name"] not in SILENT and row is not gloo:
            speed, left = gloo["step_ms"][0] / row["step_ms"][0], row["exposed_ms"][0] / gloo["exposed_ms"][0]
            lines.append(
                f"{row['name']}: {speed:.2f} times the samples/s of {BASELINE}, {left:.0%} of its exposed time."
            )
    return lines


# -- on every rank ---------------------------------------------------------------------------------------------------


def on_ranks(comm: Comm, size: str, batch: int, rounds: int) -> None:
    """Check, then time all candidates in turns; rank 0 reports a row for each."""
    comm.trace.enabled = True  # what is exposed is counted from events as well
    with process_groups(comm) as made:
        steps = {name: _Step(comm, name, size, batch, made) for name in _candidates(comm)}
        wrong = _check(comm, steps)
        times: dict[str, list[float]] = {name: [] for name in steps}
        windows: dict[str, list[tuple[int, int]]] = {name: [] for name in steps}
        pull, pulls = puller(cast("RealComm", comm)) if comm.device == "cpu" else None, []
        for _ in range(rounds):
            pulls += [float(np.median(pull()))] if pull else []
            for name, step in steps.items():
                begin = now_ns()
                times[name].append(sample(comm, step) / 1e6)
                windows[name].append((begin, now_ns()))
        for name in steps:
            times[name] = slowest(comm, times[name]).tolist()
        state = quartiles(slowest(comm, pulls) / 1e3) if len(pulls) > 1 else None
        for name, step in steps.items():
            inside = None if name in (BASELINE, ON_NCCL) else _exposed_in_events(comm, windows[name])
            if comm.rank == 0:
                found = {"name": name, "parameters": step.parameters, "wrong": wrong[name], "pull_us": state}
                comm.report(**found, **_summary(name, times, batch), in_events_ms=inside)
        for step in steps.values():
            step.stop()


def memory_on_ranks(comm: Comm, size: str, batch: int, name: str) -> None:
    """Report on rank 0 the most memory that a rank had while the candidate `name` took steps, MiB."""
    with process_groups(comm) as made:
        step = _Step(comm, name, size, batch, made)
        for _ in range(CHECKED_STEPS):
            step()
        step.stop()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    peak = slowest(comm, [torch.cuda.max_memory_allocated() / 2**20 if step.x.is_cuda else host])[0]
    if comm.rank == 0:
        comm.report(peak_MiB=round(float(peak), 1))


def _candidates(comm: Comm) -> list[str]:
    """Return the names of what can be raced on the ranks of `comm`."""
    other = ON_HPDL if isinstance(comm, DeviceComm) else ON_NCCL
    return [name for name in (*WITHOUT, *SILENT) if name != other]


@contextlib.contextmanager
def process_groups(comm: Comm) -> Generator[Groups]:
    """Yield {"gloo": process group, and "hpdl" or "nccl": process group} of the ranks of `comm`."""
    with process_group(comm, "gloo") as gloo:
        if isinstance(comm, DeviceComm):
            yield {"gloo": gloo, "nccl": nccl_group(comm)}
        else:
            yield {"gloo": gloo, "hpdl": group_of(dist.new_group(backend="hpdl", pg_options=comm))}


def nccl_group(comm: DeviceComm) -> dist.ProcessGroup:
    """Return NCCL's process group of the ranks of `comm`, which are on one machine."""
    shared = [*range(comm.size)] if torch.cuda.device_count() < comm.size else []
    return group_of(dist.new_group(backend="nccl", pg_options=nccl_options(shared)))


class _Step:
    """A candidate's step of training, always on the same examples. made: see `process_groups`."""

    def __init__(self, comm: Comm, name: str, size: str, batch: int, made: Groups) -> None:
        generator = torch.Generator().manual_seed(0)
        self.comm, self.name, self.model = comm, name, cast(GPT, models.build("gpt", size)).to(comm.device)
        tokens = torch.randint(80, (batch, self.model.block + 1), generator=generator)
        mine = tokens[shard_indices(torch.arange(batch), comm.rank, comm.size)].to(comm.device)
        self.x, self.y, self.answers = mine[:, :-1], mine[:, 1:], float(batch * self.model.block)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.run: GPT | DistributedDataParallel = self.model
        self.strategy = _strategy_of(name)
        if name.startswith("DDP"):
            group = made.get(name.removeprefix("DDP on "), made["gloo"])
            self.run = ddp = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)
            self.answers /= comm.size  # DDP averages where we add
            if name in SILENT:
                ddp.register_comm_hook(comm.size, _only_divided)
        elif self.strategy:
            self.strategy.start(comm, self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def __call__(self) -> None:
        span = self.comm.trace.span
        self.optimizer.zero_grad()
        with span("forward"):
            logits = self.run(self.x)
            loss = cross_entropy(logits.flatten(0, -2), self.y.flatten(), reduction="sum") / self.answers
        with span("backward"):
            loss.backward()
        with span("add gradients"):
            if self.strategy:
                self.strategy.add_gradients(self.comm, self.model)
        with span("update"):
            self.optimizer.step()
            if self.x.is_cuda:
                torch.cuda.synchronize()

    def flat(self) -> Tensor:
        """Return all parameters (N,), a copy."""
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def stop(self) -> None:
        if self.strategy:
            self.strategy.stop()


def _strategy_of(name: str) -> DataParallelBucketed | DataParallelOverlapped | None:
    if name == "ours, silent":
        return DataParallelBucketed(all_reduce=_nothing)
    kinds = {"bucketed": DataParallelBucketed, "overlapped": DataParallelOverlapped}
    return kinds[name]() if name in kinds else None


def _nothing(comm: Comm, x: Tensor) -> Tensor:
    """Do an all_reduce that does not communicate."""
    return x


def _only_divided(ranks, bucket):  # pyrefly: ignore[unannotated-return, unannotated-parameter]  # DDP refuses annotations that are texts
    """Act as a hook of DDP that does not communicate, and divides as DDP itself does without one."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer().div_(ranks))
    return future


def _check(comm: Comm, steps: dict[str, _Step]) -> dict[str, int]:
    """Return {name: parameters, on all ranks together, that differ from DDP on gloo after a few steps}."""
    for step in steps.values():
        for _ in range(CHECKED_STEPS):
            step()
    want, wrong = steps[BASELINE].flat(), {}
    for name, step in steps.items():
        exact = comm.size == 2 and not want.is_cuda
        off = (step.flat() - want).abs() > (0.0 if exact else TOLERANCE)
        count = 0 if name in SILENT else int(off.sum())
        wrong[name] = int(comm.all_reduce(torch.tensor([count])))
    return wrong


def _summary(name: str, times: dict[str, list[float]], batch: int) -> Row:
    """Return the median and quartiles of the steps, and of what they take longer than those without communication."""
    longer = [a - b for a, b in zip(times[name], times[WITHOUT.get(name, name)], strict=True)]
    step_ms = quartiles(times[name])
    return {
        "step_ms": step_ms,
        "samples_per_s": round(batch * 1e3 / step_ms[0], 2),
        "exposed_ms": quartiles(longer),
    }


def _exposed_in_events(comm: Comm, windows: list[tuple[int, int]]) -> float | None:
    """Return the ms per step of this rank in which it waited for communication, by its events within `windows` (ns).

    gloo's and NCCL's own work inside DDP has no events.
    """
    events = [e for e in comm.trace.events if any(begin <= e.t0_ns <= end for begin, end in windows)]
    found = account([e for e in events if e.op != "barrier"])
    return round(found.exposed * found.seconds * 1e3, 4) if found else None
