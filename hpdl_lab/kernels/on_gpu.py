"""Kernels in Python, those of ladder.py or an attendee's, compiled by numba for this GPU: each checked, then timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from ..features import Missing, gpu
from . import ladder
from .reduction import REPEATS, WARM_UP, whole_numbers

SIZE = 256 << 20  # bytes that are added: far beyond the caches of a GPU
BLOCKS_PER_PROCESSOR = 16  # of ladder.THREADS threads: as many as a multiprocessor holds


def why_not() -> str:
    """Why numba cannot compile for a GPU here, in one sentence; "" where it can."""
    if reason := gpu.why_no_gpu():
        return reason
    from numba import cuda

    return "" if cuda.is_available() else "numba finds no CUDA: pip install 'hpdl_lab[gpu]' brings what it needs"


def compiled(kernel: Callable) -> Any:
    """`kernel` for this GPU, to be launched as compiled(kernel)[blocks, threads](x, out)."""
    from numba import cuda

    kernel = getattr(kernel, "py_func", kernel)
    return cuda.jit(FunctionType(kernel.__code__, kernel.__globals__ | {"cuda": cuda}, kernel.__name__))


def rows(
    kernels: Sequence[Callable] = ladder.RUNGS,
    sizes: Sequence[int] = (SIZE,),
    device: int = 0,
    bandwidth: float = math.nan,
) -> Iterator[dict[str, Any]]:
    """One row per size and kernel, with the columns of reduction.Ladder.rows.

    bandwidth: of the GPU's memory, bytes/s. Raises Missing where there is no GPU.
    """
    if reason := why_not():
        raise Missing(reason)
    import torch
    from numba import cuda

    cuda.select_device(device)
    stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
    blocks = BLOCKS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    for size in sizes:
        host = whole_numbers(size // 4, "float32")
        x, out = host.to(f"cuda:{device}"), torch.zeros(1, device=f"cuda:{device}")
        for rung, kernel in enumerate(kernels):
            launch, times_us = compiled(kernel)[blocks, ladder.THREADS, stream], []
            for _ in range(WARM_UP + REPEATS):
                out.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                launch(cuda.as_cuda_array(x), cuda.as_cuda_array(out))
                end.record()
                end.synchronize()
                times_us.append(begin.elapsed_time(end) * 1e3)
            time_us = statistics.median(times_us[WARM_UP:])
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
