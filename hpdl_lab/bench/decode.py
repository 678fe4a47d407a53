"""A step of tensor-parallel decode: on our communicator and on gloo, and what computation and messages add up to.

    computes   rank 0  [    ][  ][   ]      what lies between two all-reduces takes as long as on the slower rank
               rank 1  [  ][    ][   ]
    model = the sum of these  +  alpha + n beta for each all-reduce  +  an all-gather of logits

All is measured in turns on the same ranks: what shards compute that send nothing, all-reduces in a row, and the step.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import models
from ..collectives.cost import fit_link
from ..collectives.native import gloo_group
from ..inference.engine import Engine
from ..parallel.scaling.profile import Rehearsal
from ..parallel.tensor.model import shard
from . import launch
from .inference import SIZES, THETA
from .report import Column, Report, Row, Table, field
from .timing import quartiles, slowest

if TYPE_CHECKING:
    from ..comm.base import Comm

BATCHES = (1, 4, 16)  # requests that decode at once
PROMPT, STEPS, WARM_UP = 32, 30, 3  # tokens; steps of a sample
SIZES_OF_MESSAGES = (1, 4, 16, 64)  # times d numbers
CALLS = 20  # all-reduces in a row
OURS, GLOO, ALONE = "ours", "gloo", "no messages"

TABLE = Table(
    [
        field("requests", "batch"),
        field("name", width=12, left=True),
        Column("step", lambda row: f"{row['step_ms'][0]:.3f}", "ms"),
        Column("p25", lambda row: f"{row['step_ms'][1]:.3f}", "ms"),
        Column("p75", lambda row: f"{row['step_ms'][2]:.3f}", "ms"),
        Column("model", lambda row: f"{row['model_ms']:.3f}" if row["model_ms"] else "", "ms"),
        Column("model/step", lambda row: f"{row['of_step'][0]:.2f}" if row["of_step"] else ""),
        Column("of gloo", lambda row: f"{row['of_gloo'][0]:.2f}" if row["of_gloo"] else ""),
        field("#wrong", "wrong", width=6),
    ]
)


def race_decode(ranks: int, size: str, rounds: int, report: Report = Report()) -> list[Row]:  # noqa: B008
    """Race both on `ranks` new ranks, print the table; returns its rows, and writes them as `report` says."""
    launch.warn_of_too_many(ranks)
    messages = launch.on_ranks(ranks, "decode", [[size, batch, rounds] for batch in BATCHES])
    return TABLE.tell(f"a step of decode, a {size} LLaMA on {ranks} ranks", messages, _verdicts, report)


def _verdicts(rows: list[Row]) -> list[str]:
    return [
        f"{row['batch']} requests: our step takes {row['of_gloo'][0]:.2f} times as long as on gloo; "
        f"{row['all_reduces']} all-reduces of {row['nbytes']:,} bytes, alpha {row['alpha_us']:.1f} us."
        for row in rows
        if row["of_gloo"]
    ]


# -- on every rank ----------------------------------------------------------------------------------------------------


class _Gloo:
    """The calls of a shard of a model on a communicator, done by a gloo group of the same ranks."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size, self.group = comm.rank, comm.size, gloo_group(comm)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.size, *x.shape)
        self.group.allgather([[*out.unbind()]], [x]).wait()
        return out


def on_ranks(comm: Comm, size: str, batch: int, rounds: int) -> None:
    """Time all candidates in turns; rank 0 reports a row for each."""
    fields: dict[str, Any] = SIZES[size]
    whole = models.build("llama", **fields, rope_theta=THETA).eval()
    rehearsal = Rehearsal(comm, None)
    comms: dict[str, Any] = {OURS: comm, GLOO: _Gloo(comm), ALONE: rehearsal}
    parts = {name: shard(one, copy.deepcopy(whole)) for name, one in comms.items()}
    made = {name: _run(comm, part, batch)[1] for name, part in parts.items()}
    rehearsal.called.clear()
    parts[ALONE](torch.zeros(batch, 1, dtype=torch.int64))
    sent = [nbytes for _, nbytes, _ in rehearsal.called]  # of the all-reduces of a step
    logits = torch.ones(batch, 1, -(-SIZES[size]["vocabulary"] // comm.size))
    sizes = [4 * SIZES[size]["width"] * n for n in SIZES_OF_MESSAGES]
    talks: dict[int, Callable[[], object]] = {n: lambda n=n: comm.all_reduce(torch.ones(n // 4)) for n in sizes}
    talks[0] = lambda: comm.all_gather(logits)
    steps: dict[str, list[float]] = {name: [] for name in parts}
    computing = list[float]()  # ms per step, of the slower rank between any two all-reduces
    calls: dict[int, list[float]] = {n: [] for n in talks}
    for i in range(rounds):
        for name in list(parts)[:: 1 if i % 2 else -1]:  # who is first changes
            steps[name].append(_run(comm, parts[name], batch)[0])
        between = np.diff([ns for ns, *_ in rehearsal.called[-STEPS * len(sent) - 1 :]]) / 1e6
        computing.append(float(slowest(comm, between.tolist()).sum()) / STEPS)
        for n, talk in talks.items():
            calls[n].append(_in_a_row(comm, talk))
    step_ms = {name: slowest(comm, times).tolist() for name, times in steps.items()}
    talk_s = {n: statistics.median(slowest(comm, times)) for n, times in calls.items()}
    alpha, beta = fit_link(sizes, [talk_s[n] for n in sizes])
    messages = sum(alpha + n * beta for n in sent) + talk_s[0]
    models_ms = [ms + 1e3 * messages for ms in computing]
    for name in parts if comm.rank == 0 else ():
        ratios = [ours / gloo for ours, gloo in zip(step_ms[OURS], step_ms[GLOO], strict=True)]
        comm.report(
            batch=batch,
            name=name,
            step_ms=quartiles(step_ms[name]),
            model_ms=statistics.median(models_ms) if name == OURS else None,
            of_step=quartiles([m / ms for m, ms in zip(models_ms, step_ms[OURS], strict=True)])
            if name == OURS
            else None,
            of_gloo=quartiles(ratios) if name == OURS else None,
            all_reduces=len(sent),
            nbytes=sent[0],
            alpha_us=1e6 * alpha,
            wrong=sum(a != b for a, b in zip(made[name], made[OURS], strict=True)) if name == GLOO else 0,
        )


def _run(comm: Comm, part: nn.Module, batch: int) -> tuple[float, list[int]]:
    """Return (ms per step of decode, all tokens) of `batch` requests."""
    engine = Engine(part, slots=batch, budget=batch * PROMPT)
    prompts = [[(7 * i + 3 * j) % engine.vocabulary for j in range(PROMPT)] for i in range(batch)]
    streams = [engine.submit(prompt, STEPS + WARM_UP + 1) for prompt in prompts]
    for _ in range(WARM_UP):
        engine.step()
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - begin
    return 1e3 * seconds / STEPS, [token for stream in streams for token in stream.request.output_tokens]


def _in_a_row(comm: Comm, talk: Callable[[], object]) -> float:
    """Return s per call."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        talk()
    return (time.perf_counter() - begin) / CALLS
