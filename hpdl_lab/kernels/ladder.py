"""The sum of a vector on a GPU as a ladder of kernels in Python, which numba compiles; csrc/cuda/reduction.h: in CUDA.

Each is launched as kernel[blocks, THREADS](x, out): out[0], which is 0 before, becomes the sum of x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:  # numba takes 0.3 s, which only those spend who come to a kernel
    from numba import cuda

THREADS = 128  # of a block
WARP = 32  # threads that take every instruction together
ALL_LANES = 0xFFFFFFFF  # one bit for each thread of a warp

Kernel: TypeAlias = Callable[..., object]  # ours or an attendee's, jitted or not


def naive(x: np.ndarray, out: np.ndarray) -> None:
    """Add every element by one atomic: all threads of the GPU queue up for one word of memory."""
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(out, 0, x[i])


def interleaved(x: np.ndarray, out: np.ndarray) -> None:
    """Add up each block as a tree, neighbors first: words 1, 2, 4, 8 ... apart."""
    sums = cuda.shared.array(THREADS, np.float32)
    t = cuda.threadIdx.x
    total = np.float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    sums[t] = total
    cuda.syncthreads()
    distance = 1
    while distance < THREADS:
        i = 2 * distance * t
        if i < THREADS:
            sums[i] += sums[i + distance]
        cuda.syncthreads()
        distance *= 2
    if t == 0:
        cuda.atomic.add(out, 0, sums[0])


def sequential(x: np.ndarray, out: np.ndarray) -> None:
    """Add by the same tree, but the upper half to the lower one: neighbors ask for neighbors."""
    sums = cuda.shared.array(THREADS, np.float32)
    t = cuda.threadIdx.x
    total = np.float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    sums[t] = total
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if t < half:
            sums[t] += sums[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        cuda.atomic.add(out, 0, sums[0])


def gpu_sum(x: np.ndarray, out: np.ndarray) -> None:
    """Add the sum of `x` to out[0].

    gpu_sum[blocks, THREADS](x, out) launches this kernel, and all threads run it.

        n elements       each thread adds its share of them, for any number of blocks
        THREADS sums     each block adds the upper half of its sums to the lower half,
                         in shared memory, again and again
        WARP sums        one warp goes on in registers, by shuffles
        1 sum            one thread adds it to out[0]

    Args:    x: (n,) float32, for any n; out: (1,) float32, 0 before the launch.
    Steps: at most 3 barriers and 1 atomic in each block; no race, no bank conflict.
    Bytes: x is read once. Neighboring threads read neighboring elements.
    Ref: M. Harris, "Optimizing Parallel Reduction in CUDA", NVIDIA 2007.
    """
    sums = cuda.shared.array(THREADS, np.float32)
    t = cuda.threadIdx.x
    total = np.float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    sums[t] = total
    cuda.syncthreads()
    if t < 2 * WARP:
        sums[t] += sums[t + 2 * WARP]
    cuda.syncthreads()
    if t < WARP:
        total = sums[t] + sums[t + WARP]
        for distance in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(ALL_LANES, total, distance)
    if t == 0:
        cuda.atomic.add(out, 0, total)


def add_slices(tensors: Sequence[np.ndarray], first: int, count: int) -> None:
    """Add one slice of all `tensors`, and store the sum to all of them.

    The slice has `count` elements, from index `first` on. Each GPU has one of the
    (n,) tensors, and can reach all tensors.
    """
    for i in range(first + cuda.grid(1), first + count, cuda.gridsize(1)):
        total = tensors[0][i]
        for rank in range(1, len(tensors)):
            total += tensors[rank][i]
        for rank in range(len(tensors)):
            tensors[rank][i] = total


RUNGS = (naive, interleaved, sequential, gpu_sum)
