"""The ledger of a rank in ways to train one model on the same ranks, by formula and counted in a real step.

parameters, gradients, optimizer    bytes of the memory behind these tensors, when gradients have been added
activations                         the most that autograd has kept for backward at once, and inputs of blocks
temporaries                         what forward and backward of one token, or example, take more than gradients
most                                all of that at once, by torch's memory profiler, in forward and backward
process                             by how much the peak of the process is above what it has when all is gone
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn.functional import cross_entropy

from ...comm.base import Comm
from ...mesh import Grid
from ...models.transformer import PreNorm
from ..data_parallel import DataParallel, Strategy
from ..recompute import recompute
from ..zero import ZeRO1, ZeRO2, ZeRO3
from .machine import grid_of
from .measure import grid_steps
from .memory import Memory, SavedBytes, memory_of
from .spec import Spec

if TYPE_CHECKING:
    from collections.abc import Generator

STRATEGIES: tuple[type[Strategy], ...] = (DataParallel, ZeRO1, ZeRO2, ZeRO3)
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Setup(NamedTuple):
    """A setup of training. training: "adam" or "mixed adam"; stage: of ZeRO; recompute: "blocks" or False.

    axis: along which all ranks lie, "dp", "tp" or "pp".
    """

    name: str
    training: str = "mixed adam"
    stage: int = 0
    recompute: bool | str = False
    axis: str = "dp"

    def grid(self, ranks: int) -> Grid:
        return grid_of(**{self.axis: ranks})

    def micro_batches(self, ranks: int) -> int:
        return ranks if self.axis == "pp" else 1


WAYS = (
    Setup("32 bits", "adam"),
    Setup("32 bits, tp", "adam", axis="tp"),
    Setup("32 bits, pp", "adam", axis="pp"),
    Setup("16 bits"),
    Setup("16 bits, recomputed", recompute="blocks"),
    Setup("ZeRO-1", stage=1),
    Setup("ZeRO-2", stage=2),
    Setup("ZeRO-3", stage=3),
    Setup("ZeRO-3, recomputed", stage=3, recompute="blocks"),
)


class Counted(NamedTuple):
    """The memory of one rank. most, process: bytes, None if ranks are not processes of their own."""

    held: Memory
    most: int | None = None
    process: int | None = None


def predicted(spec: Spec, setup: Setup, ranks: int, batch: int) -> Memory:
    """Predict what the fullest of `ranks` ranks holds. Args: spec: of any training; batch: examples of all ranks."""
    grid, micro_batches = setup.grid(ranks), setup.micro_batches(ranks)
    each = batch // (grid["dp"] * micro_batches)
    spec = replace(spec, training=setup.training)
    rows = memory_of(spec, grid, "1f1b", micro_batches, each, recompute=setup.recompute, stage=setup.stage)
    return max(rows, key=lambda held: held.total)


def can_be(spec: Spec, setup: Setup, ranks: int) -> bool:
    """Return True if `ranks` ranks can share the model so: whole heads, a layer each, blocks to recompute."""
    if setup.axis == "tp":
        return ranks > 1 and spec.heads > 0 and spec.heads % ranks == 0
    return 1 < ranks <= len(spec.layers) if setup.axis == "pp" else not setup.recompute or spec.heads > 0


def adam(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=False)


def count_memory(comm: Comm, model: nn.Module, setup: Setup, x: Tensor, y: Tensor, costs: list[float]) -> Counted:
    """Take three steps of `setup` and count in the last, when the optimizer has its state. Collective.

    Args:    model: is empty afterwards; x, y: the whole batch, the same on every rank; costs: see HybridParallel.
    """
    _free_memory(comm)
    if setup.axis == "dp":
        counted = _count_replica(comm, model, setup, x, y)
    else:
        options = {"schedule": "1f1b", "micro_batches": setup.micro_batches(comm.size), "costs": costs}
        counted = Counted(grid_steps(comm, model, setup.grid(comm.size), x, y, options, 0, adam).held)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data, tensor.grad = tensor.new_empty(0), None
    return counted._replace(process=_free_memory(comm))


def _count_replica(comm: Comm, model: nn.Module, setup: Setup, x: Tensor, y: Tensor) -> Counted:
    if setup.recompute:
        recompute(model, PreNorm)
    strategy = STRATEGIES[setup.stage](precision="bfloat16" if setup.training == "mixed adam" else None)
    strategy.start(comm, model)
    mine = slice(comm.rank * len(x) // comm.size, (comm.rank + 1) * len(x) // comm.size)
    try:
        optimizer = strategy.optimizer(model, adam)

        def step(x: Tensor, y: Tensor) -> tuple[dict[str, int], int]:
            """Return (bytes held when gradients are there, bytes more than before that forward and backward took)."""
            if setup.stage == 0:
                for bucket in strategy.require_begun().buckets:
                    bucket.attach()
            with _peak(comm) as found:
                strategy.scaled(cross_entropy(model(x).flatten(0, -2), y.flatten())).backward()
            held = [strategy.held(model, optimizer)]
            strategy.add_gradients(comm, model)
            held.append(strategy.held(model, optimizer))
            optimizer.step()
            return max(held, key=lambda kinds: sum(kinds.values())), found[0]

        step(x[mine], y[mine])
        held, grew = step(x[:1, :1], y[:1, :1]) if y.ndim > 1 else step(x[:1], y[:1])
        passing = max(0, grew - held["gradients"]) if setup.stage else 0
        kept = SavedBytes([*strategy.tensors(model)["parameters"], x, y])
        inputs, graphs = [0], [0]

        def look(block: nn.Module, args: tuple[Tensor]) -> None:
            """Count what torch.utils.checkpoint keeps, and what it will keep for a while: no other hook sees it."""
            with SavedBytes([*strategy.tensors(model)["parameters"], *args]) as graph:
                PreNorm.forward(cast(PreNorm, block), args[0].detach().requires_grad_())
            graphs.append(graph.most)
            inputs.append(args[0].nbytes)
            kept.add(args[0].untyped_storage(), 1)

        for block in (module for module in model.modules() if setup.recompute and isinstance(module, PreNorm)):
            strategy.hook(block.register_forward_pre_hook(look))
        with kept:
            held, grew = step(x[mine], y[mine])
    finally:
        strategy.stop()
    most = held["parameters"] + held["optimizer"] + grew + (held["gradients"] if setup.stage == 0 else 0)
    activations = max(kept.most, sum(inputs) + max(graphs))
    return Counted(Memory(**held, activations=activations, temporaries=passing), None if comm.simulated else most)


@contextmanager
def _peak(comm: Comm) -> Generator[list[int]]:
    """Yield a list of one number: the most bytes that torch has allocated within and not freed.

    0 on simulated ranks, which share a process.
    """
    found = [0]
    if comm.simulated:
        yield found
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else torch's profiler says that it begins and ends
    with profile(profile_memory=True) as profiler:
        yield found
    now = 0
    recorded = profiler.kineto_results.events()  # pyrefly: ignore[missing-attribute]
    events = [e for e in recorded if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        found[0] = max(found[0], now)


def _free_memory(comm: Comm) -> int | None:
    """Give all free memory back to the system; returns by how much the peak since the last call is above what is left.

    None on simulated ranks, which share a process, and off Linux.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        if not comm.simulated:
            ctypes.CDLL(None).malloc_trim(0)
            status = STATUS.read_text()
            highest, now = (1024 * int(status.partition(f"{name}:")[2].split()[0]) for name in ("VmHWM", "VmRSS"))
            CLEAR.write_text("5")  # the peak begins anew
            return highest - now
    return None
