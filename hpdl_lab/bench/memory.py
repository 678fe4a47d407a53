"""The speed of memory when all ranks use it at once, and of all-reduces beside it; a buffer that is written again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..collectives import ring
from ..collectives.memory import ONE_PASS, STAGED, staged
from ..collectives.sweep import row
from . import timing

if TYPE_CHECKING:
    from torch import Tensor

    from ..comm.real import RealComm

SAMPLES, SAMPLE_NS = 7, 2_000_000
ROUNDS = 300  # times that a chunk is written in one setting
STREAM = {"copy": 2, "add": 3, "in place": 2}  # vectors that are read or written; ref: McCalpin 1995
RING = "ring"


@contextmanager
def _on_own_core(comm: RealComm) -> Generator[None]:
    """Let this rank compute on one core, if there is one for each rank, and record no events."""
    cores, threads, recording = sorted(os.sched_getaffinity(0)), torch.get_num_threads(), comm.trace.enabled
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    comm.trace.enabled = False
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        comm.trace.enabled = recording


def measure_roofline(comm: RealComm, sizes: list[int], rest_s: float) -> None:
    """Report on rank 0 a row for each size in bytes and each kernel of STREAM or all-reduce, all in turns.

    copy: b = a; add: c = a + b; in place: the sum of the halves of `a` goes to both, as in one pass. They work on
    float32 tensors of each rank's own, on all ranks at once. rest_s: sleep after each size. Rows: of sweep.row, and
    stream: the bytes that one rank moves, 0 for an all-reduce.
    """
    largest = max(sizes) // 4
    registered, shared, result = (comm.allocate(largest) for _ in range(3))
    own = [torch.zeros(largest) for _ in range(4)]
    for size in sizes:
        n = size // 4
        a, b, c, x = (tensor[:n] for tensor in own)
        runs = stream(comm, a, b, c) | _all_reduces(comm, x, registered[:n], shared[:n], result[:n])
        with _on_own_core(comm):
            taken = timing.in_turns(comm, [*runs.values()], SAMPLES, SAMPLE_NS)
        for name, times in zip(runs, taken, strict=True):
            if comm.rank == 0:
                comm.report(**row(name, n, "float32", times, comm), stream=STREAM.get(name, 0) * size)
        time.sleep(rest_s)


def stream(comm: RealComm, a: Tensor, b: Tensor, c: Tensor) -> dict[str, Callable[[], object]]:
    """Return {name: run} of the kernels of STREAM, in compiled code."""
    kernel = comm.core.instructions()[0]
    halves = [*a.split(len(a) // 2)]
    operands = {"copy": ([a], [b]), "add": ([a, b], [c]), "in place": (halves, halves)}
    return {name: comm.core.Sum(kernel, *operands[name]) for name in STREAM}


def _all_reduces(
    comm: RealComm, x: Tensor, registered: Tensor, shared: Tensor, result: Tensor
) -> dict[str, Callable[[], object]]:
    """Return {name: run}: one pass compiled, the others in Python. They add zeros: sums of sums would overflow."""
    return {
        ONE_PASS: lambda: comm.all_reduce(registered),
        STAGED: lambda: staged(comm, x, shared, result),
        RING: lambda: ring.all_reduce(comm, x),
    }


def measure_write_again(comm: RealComm, nbytes: int, most: int, rest_s: float) -> None:
    """Let rank 0 write chunks of `nbytes` into memory that all ranks share, and rank 1 read them, one after the other.

    The memory is a chunk, two, four ... `most` bytes, and each chunk of it is written in turn. Rank 0 reports a row for
    each and for both states: memory (bytes), read (whether rank 1 has read), write_us with p25_us and p75_us, read_us.
    """
    memory = comm.views(comm.allocate(most // 4))[0]
    own, kernel = torch.zeros(nbytes // 4), comm.core.instructions()[0]
    chunks = [*memory.split(nbytes // 4)]
    writes = [comm.core.Sum(kernel, [own], [chunk]) for chunk in chunks]
    reads = [comm.core.Sum(kernel, [chunk], [own]) for chunk in chunks]
    counts = [2**k for k in range(len(chunks).bit_length())]
    for count in counts:
        for read in (False, True):
            with _on_own_core(comm):
                times = np.array(
                    [_time_round(comm, writes[i % count], reads[i % count], read) for i in range(ROUNDS + count)]
                )
            written, loaded = np.asarray(comm.all_gather(times[count:]))[:2] / 1e3
            if comm.rank == 0:
                median, p25, p75 = (float(value) for value in timing.quartiles(written))
                also = {"read_us": float(np.median(loaded))} if read else {}
                comm.report(memory=count * nbytes, write_us=median, p25_us=p25, p75_us=p75, read=read, **also)
            time.sleep(rest_s)


def _time_round(comm: RealComm, write: Callable[[], object], load: Callable[[], object], read: bool) -> float:
    """Return the ns that rank 0 takes to write, or rank 1, after it, to read; only one of them works at a time."""
    took = _timed(write) if comm.rank == 0 else 0.0
    comm.barrier()
    if comm.rank == 1 and read:
        took = _timed(load)
    comm.barrier()
    return took


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    run()
    return float(time.perf_counter_ns() - begin)
