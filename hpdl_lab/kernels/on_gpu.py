"""Kernels in Python, from ladder.py or by an attendee, compiled by numba for this GPU: each checked, then timed."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..features import Missing, gpu
from . import ladder
from .ladder import Kernel
from .reduction import REPEATS, WARM_UP, random_whole_numbers

if TYPE_CHECKING:
    from ..comm.base import Row

SIZE = 256 << 20  # bytes that are added: far beyond the caches of a GPU
QUEUE_CYCLES = 20_000_000  # 10 ms of the GPU, in which the host queues all launches: one takes it tens of microseconds
BLOCKS_PER_PROCESSOR = 16  # of ladder.THREADS threads: as many as a multiprocessor holds


class Compiled(Protocol):
    """A kernel that is launched as compiled[blocks, threads](x, out)."""

    def __getitem__(self, shape: tuple[int, int], /) -> Callable[..., object]: ...


@functools.cache
def why_not() -> str:
    """Return in one sentence why numba cannot compile for a GPU here; "" if it can, which a kernel has shown."""
    if reason := gpu.why_no_gpu():
        return reason
    try:
        compiled(ladder.naive)[1, ladder.THREADS](*np.zeros((2, 1), np.float32))
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return f"numba cannot compile for this GPU ({what}): pip install 'hpdl_lab[gpu]' brings what it needs"
    return ""


def compiled(kernel: Kernel) -> Compiled:
    """Return `kernel` for this GPU."""
    from numba import cuda

    plain: FunctionType = getattr(kernel, "py_func", kernel)
    scope = plain.__globals__ | {"cuda": cuda}
    inner = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)
    return cuda.jit(inner)  # pyrefly: ignore[bad-return]


def rows(
    kernels: Sequence[Kernel] = ladder.RUNGS,
    sizes: Sequence[int] = (SIZE,),
    device: int = 0,
    bandwidth: float = math.nan,
) -> Iterator[Row]:
    """Yield one row per size and kernel, with the columns of reduction.Ladder.rows.

    bandwidth: of the GPU's memory, bytes/s. Raises Missing if there is no GPU.
    """
    if reason := why_not():
        raise Missing(reason)
    import torch
    from numba import cuda

    cuda.select_device(device)
    blocks = BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    for size in sizes:
        host = random_whole_numbers(size // 4, "float32")
        x, out = host.to(f"cuda:{device}"), torch.zeros(1, device=f"cuda:{device}")
        for rung, kernel in enumerate(kernels):
            launch = compiled(kernel)[blocks, ladder.THREADS]
            arrays = cuda.as_cuda_array(x), cuda.as_cuda_array(out)
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
            for _ in range(WARM_UP):
                launch(*arrays)
            torch.cuda.synchronize(device)
            torch.cuda._sleep(QUEUE_CYCLES)
            for begin, end in events:
                out.zero_()
                begin.record()
                launch(*arrays)
                end.record()
            torch.cuda.synchronize(device)
            time_us = statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in events)
            yield {
                "size": size,
                "count": x.numel(),
                "type": "float32",
                "rung": rung + 1,
                "name": kernel.__name__,
                "change": "in Python, compiled by numba",
                "time_us": time_us,
                "GBps": size / time_us / 1e3,
                "of_bandwidth": size / (time_us * 1e-6) / bandwidth,
                "wrong": int(float(out) != float(host.double().sum())),
            }
