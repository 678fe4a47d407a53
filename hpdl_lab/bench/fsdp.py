"""`hpdl bench memory`: one step of training the same GPT with sharded parameters, by PyTorch's FSDP2 and by our ZeRO3.

Both shard the same units, the blocks and what is left, and run on the same back ends: gloo and "hpdl". First all take a
few steps from the same parameters, and must come to the same; then they take turns, and are compared round by round.
Memory is measured in processes of its own for each, as what was in use once stays in the books.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from .. import models
from ..comm.torch.transport import from_process_group
from ..data.loading import shard_indices
from ..models.gpt import GPT
from ..parallel.data_parallel import DataParallelOverlapped, Strategy
from ..parallel.zero import ZeRO3
from . import launch
from .ddp import process_groups
from .report import Column, Report, Row, Table, field, with_memory
from .timing import quartiles, sample, slowest

if TYPE_CHECKING:
    from ..comm.base import Comm

CHECKED_STEPS = 3
TOLERANCE = 1e-5  # of a parameter: three ranks or more add in different orders
BACKENDS = ("gloo", "hpdl")
WHOLE = "not sharded"  # our data parallelism, whose memory is what sharding is compared with
NAMES = (*(f"{who} on {backend}" for backend in BACKENDS for who in ("FSDP2", "ZeRO3")), WHOLE)
TABLE = Table(
    [
        field("name", width=14, left=True),
        *(Column(n, lambda row, i=i: f"{row['step_ms'][i]:.2f}", "ms") for i, n in enumerate(("step", "p25", "p75"))),
        *(
            Column(n, lambda row, i=i: f"{row['of_fsdp2'][i]:.2f}" if row["of_fsdp2"] else "")
            for i, n in enumerate(("of FSDP2", "p25", "p75"))
        ),
        Column("held", lambda row: f"{row['held_MiB']:.1f}", "MiB"),
        Column("peak memory", lambda row: f"{row['peak_MiB']:.0f}", "MiB", 12),
        Column("of the step", lambda row: f"{row['own_MiB']:.0f}", "MiB", 12),
        field("loss", "loss", ".6f", width=9),
        field("#wrong", "wrong", width=7),
    ]
)


def race_memory(ranks: int, size: str, batch: int, rounds: int, report: Report = Report()) -> list[Row]:  # noqa: B008
    """Race the candidates, print the table; returns the rows.

    Args:    ranks: number; size: of the GPT, a name in models/gpt.py; batch: examples over all ranks;
             rounds: in which every candidate takes one step.
    Raises:  ValueError for arguments that make no sense; RuntimeError if the ranks end with an error.
    """
    if batch < ranks:
        raise ValueError(f"a batch of {batch} has no example for some of {ranks} ranks")
    launch.warn_of_too_many(ranks)

    def peak(row: Row) -> Row:
        messages = launch.on_ranks(ranks, "fsdp_memory", [[size, batch, row["name"]]])
        return next(message for message in messages if "peak_MiB" in message)

    messages = launch.on_ranks(ranks, "fsdp", [[size, batch, rounds]])
    title = f"gpt {size} with sharded parameters, {batch} examples a step on {ranks} ranks"
    return TABLE.tell(title, with_memory(messages, peak), _verdicts, report)


def _verdicts(rows: list[Row]) -> list[str]:
    """Return a sentence for each of ours: how it compares with FSDP2 on the same back end."""
    named = {row["name"]: row for row in rows}
    lines = [f"{rows[0]['parameters']:,} parameters, AdamW: 16 bytes each, {rows[0]['parameters'] / 2**16:.0f} MiB."]
    for backend in BACKENDS:
        ours, theirs = named[f"ZeRO3 on {backend}"], named[f"FSDP2 on {backend}"]
        lines.append(
            f"{backend}: our step takes {ours['of_fsdp2'][0]:.2f} times as long as FSDP2's, median of the rounds, "
            f"and {ours['own_MiB'] / theirs['own_MiB']:.2f} times its memory."
        )
    return lines


# -- on every rank ---------------------------------------------------------------------------------------------------


def on_ranks(comm: Comm, size: str, batch: int, rounds: int) -> None:
    """Check, then time all candidates in turns; rank 0 reports a row for each."""
    with process_groups(comm) as made:
        steps = {name: FsdpStep(comm, name, size, batch, made) for name in NAMES}
        wrong = count_differing(comm, steps)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for i in range(rounds):
            for name in NAMES if i % 2 else reversed(NAMES):  # who is first changes
                times[name].append(sample(comm, steps[name]) / 1e6)
        for name in steps:
            times[name] = slowest(comm, times[name]).tolist()
        for name, step in steps.items():
            loss = float(comm.all_reduce(torch.tensor([step.first], dtype=torch.float64)))
            held_MiB = float(slowest(comm, [step.held() / 2**20])[0])
            theirs = times[name.replace("ZeRO3", "FSDP2")]
            ratios = [a / b for a, b in zip(times[name], theirs, strict=True)] if name.startswith("ZeRO3") else None
            if comm.rank == 0:
                found = {"name": name, "parameters": step.parameters, "wrong": wrong[name], "loss": loss}
                found["held_MiB"] = held_MiB
                comm.report(**found, step_ms=quartiles(times[name]), of_fsdp2=ratios and quartiles(ratios))
            step.stop()


def memory_on_ranks(comm: Comm, size: str, batch: int, name: str) -> None:
    """Report on rank 0 the most memory that a rank had while the candidate took steps, in all and without the start."""
    with process_groups(comm) as made:
        _warm_up()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        step = FsdpStep(comm, name, size, batch, made)
        for _ in range(CHECKED_STEPS):
            step()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        step.stop()
    peak, own = (float(slowest(comm, [mib])[0]) for mib in (after, after - before))
    if comm.rank == 0:
        comm.report(peak_MiB=round(peak, 1), own_MiB=round(own, 1))


def _warm_up() -> None:
    """Take a step without other ranks, so that what torch takes at the first one is not counted."""
    model = cast(GPT, models.build("gpt", "tiny"))
    optimizer = _adamw(model.parameters())
    model(torch.zeros(1, model.block, dtype=torch.int64)).sum().backward()
    optimizer.step()


class FsdpStep:
    """A candidate's step of training, always on the same examples. made: {back end: process group}."""

    def __init__(self, comm: Comm, name: str, size: str, batch: int, made: dict[str, dist.ProcessGroup]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.comm, self.name, self.model = comm, name, cast(GPT, models.build("gpt", size))
        tokens = torch.randint(80, (batch, self.model.block + 1), generator=generator)
        mine = tokens[shard_indices(torch.arange(batch), comm.rank, comm.size)]
        self.x, self.y, self.answers = mine[:, :-1], mine[:, 1:], batch * self.model.block
        self.parameters, self.first = sum(p.numel() for p in self.model.parameters()), 0.0
        self.closing = contextlib.ExitStack()
        self.strategy: Strategy | None = None
        group = made.get(name.rpartition(" ")[2], made["gloo"])
        if name.startswith("FSDP2"):
            mesh = DeviceMesh.from_group(group, "cpu")
            for unit in (*self.model.blocks, self.model):
                fully_shard(unit, mesh=mesh)
                whole = cast(FSDPModule, unit)
                whole.set_gradient_divide_factor(1.0)  # the loss is divided, as ours
                whole.set_force_sum_reduction_for_comms(True)  # what gloo has
            self.optimizer: Any = _adamw(self.model.parameters())
        else:
            self.on = self.closing.enter_context(from_process_group(group)) if name.endswith("gloo") else comm
            self.strategy = DataParallelOverlapped() if name == WHOLE else ZeRO3()
            self.strategy.start(self.on, self.model)
            self.optimizer = self.strategy.optimizer(self.model, _adamw)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.x)
        loss = cross_entropy(logits.flatten(0, -2), self.y.flatten(), reduction="sum") / self.answers
        loss.backward()
        if self.strategy:
            self.strategy.add_gradients(self.on, self.model)
        self.optimizer.step()
        self.first = self.first or loss.item()

    def flat(self) -> Tensor:
        """Return all parameters (N,), a copy. Collective."""
        if self.strategy:
            state = self.strategy.stateful(self.model).state_dict()
            return torch.cat([state[name].reshape(-1) for name, _ in self.model.named_parameters()])
        return torch.cat([cast(DTensor, p).full_tensor().detach().reshape(-1) for p in self.model.parameters()])

    def held(self) -> int:
        """Return the bytes of parameters and of the optimizer's states that this rank holds between two steps."""
        if self.strategy:
            found = self.strategy.held(self.model, self.optimizer)
            return found["parameters"] + found["optimizer"]
        states = [value for row in self.optimizer.state.values() for value in row.values()]
        tensors = [*self.model.parameters(), *states]
        return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)

    def stop(self) -> None:
        if self.strategy:
            self.strategy.stop()
        self.closing.close()


def _adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    # eps: Adam divides by the size of a gradient, and one that is all rounding errors would decide on a whole step.
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-5)


def count_differing(comm: Comm, steps: dict[str, FsdpStep]) -> dict[str, int]:
    """Return {name: parameters, on all ranks together, that differ from FSDP2 on gloo after a few steps}."""
    for step in steps.values():
        for _ in range(CHECKED_STEPS):
            step()
    want = steps[NAMES[0]].flat()
    found = {}
    for name, step in steps.items():
        count = int(((step.flat() - want).abs() > TOLERANCE).sum())
        found[name] = int(comm.all_reduce(torch.tensor([count])))
    return found
