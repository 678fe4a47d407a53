"""Answers to gpu_sum of notebook 05 that a check must reject or accept."""

import numpy as np
from numba import cuda

from hpdl_lab.kernels.ladder import ALL_LANES, THREADS, WARP, interleaved, naive, sequential


def warps_first(x, out):
    """Every warp by shuffles, then the first warp the sums of warps, as csrc/cuda has it."""
    sums = cuda.shared.array(WARP, np.float32)
    t = cuda.threadIdx.x
    total = np.float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    for distance in (16, 8, 4, 2, 1):
        total += cuda.shfl_down_sync(ALL_LANES, total, distance)
    if t % WARP == 0:
        sums[t // WARP] = total
    cuda.syncthreads()
    if t < WARP:
        total = sums[t] if t < THREADS // WARP else np.float32(0)
        for distance in (2, 1):
            total += cuda.shfl_xor_sync(ALL_LANES, total, distance)
        if t == 0:
            cuda.atomic.add(out, 0, total)


@cuda.jit
def jitted(x, out):
    """With the decorator that a script would have, and steps of its own."""
    sums = cuda.shared.array(shape=(4,), dtype=np.float32)
    t = cuda.threadIdx.x
    step = cuda.blockDim.x * cuda.gridDim.x
    i = cuda.blockIdx.x * cuda.blockDim.x + t
    total = 0.0
    while i < len(x):
        total += x[i]
        i += step
    total = sum_of_warp(total)
    if cuda.laneid == 0:
        sums[t // 32] = total
    cuda.syncthreads()
    if t == 0:
        cuda.atomic.add(out, 0, sums[0] + sums[1] + sums[2] + sums[3])


@cuda.jit(device=True)
def sum_of_warp(value):
    distance = 16
    while distance:
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, distance)
        distance >>= 1
    return value


def in_step(x, out):
    """Shared memory to the end, in which the last warp keeps in step."""
    sums = cuda.shared.array(THREADS, np.float32)
    t = cuda.threadIdx.x
    total = np.float32(0)
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        total += x[i]
    sums[t] = total
    cuda.syncthreads()
    if t < 64:
        sums[t] += sums[t + 64]
    cuda.syncthreads()
    if t < 32:
        for half in (32, 16, 8, 4, 2, 1):
            if t < half:
                sums[t] += sums[t + half]
            cuda.syncwarp()
    if t == 0:
        cuda.atomic.add(out, 0, sums[0])


def block_by_block(x, out):
    """Every block takes a part of x as it lies there; its warps leave their sums in columns."""
    sums = cuda.shared.array((4, 2), np.float32)
    t, lane = cuda.threadIdx.x, cuda.laneid
    each = (x.size + cuda.gridDim.x - 1) // cuda.gridDim.x
    total = np.float32(0)
    for i in range(cuda.blockIdx.x * each + t, min(x.size, (cuda.blockIdx.x + 1) * each), THREADS):
        total += x[i]
    for bit in range(5):
        total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << bit)
    if lane == 0:
        sums[t // WARP, 1] = total
    cuda.syncthreads()
    if t == 0:
        for warp in range(1, THREADS // WARP):
            total += sums[warp, 1]
        cuda.atomic.add(out, 0, total)


WRONG = {
    "5.3": """
race: with no barrier between them
    -     sums[t] = total
    -     cuda.syncthreads()
    +     sums[t] = total
race: with no barrier between them
    -         sums[t] += sums[t + 2 * WARP]
    -     cuda.syncthreads()
    +         sums[t] += sums[t + 2 * WARP]
race: cuda.atomic.add is for what they share
    cuda.atomic.add(out, 0, total) => out[0] += total
race @in_step: with no barrier between them
    cuda.syncwarp() => pass
banks @interleaved: both in bank 0: the warp takes 2 turns in place of 1
barriers @sequential: with 8 barriers in a block
atomics @naive: 1,000 atomics, 384 of them in block 0
atomics: 384 atomics, 128 of them in block 0
    -     if t == 0:
    -         cuda.atomic.add(out, 0, total)
    +     cuda.atomic.add(out, 0, total if t == 0 else np.float32(0))
barrier: threads 64 to 127 have returned
    -         sums[t] += sums[t + 2 * WARP]
    -     cuda.syncthreads()
    +         sums[t] += sums[t + 2 * WARP]
    +         cuda.syncthreads()
barrier: but 64 threads, the first of them 1, wait
    -     cuda.syncthreads()
    -     if t < 2 * WARP:
    +     if t % 2 == 0:
    +         cuda.syncthreads()
    +     else:
    +         cuda.syncthreads()
    +     if t < 2 * WARP:
tail: no thread reads 616 elements, the first is x[384]
    -     for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
    -         total += x[i]
    +     i = cuda.grid(1)
    +     if i < x.size:
    +         total += x[i]
tail: no thread reads 232 elements, the first is x[768]
    -     for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
    -         total += x[i]
    +     for k in range(x.size // cuda.gridsize(1)):
    +         total += x[cuda.grid(1) + k * cuda.gridsize(1)]
bounds: reads x[1000]
    -     for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
    -         total += x[i]
    +     for k in range((x.size + cuda.gridsize(1) - 1) // cuda.gridsize(1)):
    +         total += x[cuda.grid(1) + k * cuda.gridsize(1)]
twice: x[128] is read
    range(cuda.grid(1), x.size, cuda.gridsize(1)) => range(cuda.grid(1), x.size, THREADS)
coalesced: The warp
    -     for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
    +     each = (x.size + cuda.gridsize(1) - 1) // cuda.gridsize(1)
    +     for i in range(cuda.grid(1) * each, min(x.size, (cuda.grid(1) + 1) * each)):
work: thread 0 of block 0 reads 1,000 elements, and 3 for each of the 384 threads
    if cuda.grid(1) == 0:
        for i in range(x.size):
            out[0] += x[i]
work: thread 0 of block 0 reads 384 elements
    if cuda.threadIdx.x == 0:
        total = np.float32(0)
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            for k in range(i, min(i + THREADS, x.size)):
                total += x[k]
        cuda.atomic.add(out, 0, total)
sum: follow the partial sum of lane 16 of warp 0
    (16, 8, 4, 2, 1) => (8, 4, 2, 1)
sum: follow the partial sum of lane 1 of warp 0
    (16, 8, 4, 2, 1) => (16, 8, 4, 2)
sum: follow the partial sum of lane 0 of warp 1
    total = sums[t] + sums[t + WARP] => total = sums[t]
shuffle: without its lane
    ALL_LANES => 65535
shuffle: but threads 16 to 31 have returned
    t < WARP => t < WARP // 2
unwritten: which no thread has written
    -     sums[t] = total
    +     if cuda.grid(1) < x.size:
    +         sums[t] = total
sum: does every partial sum begin at 0?
    total = np.float32(0) => total = np.float32(1)
input: x belongs to the caller
    -         total += x[i]
    +         total += x[i]
    +         x[i] = 0
returns: thread 32 of block 0 returns
    -     if t == 0:
    -         cuda.atomic.add(out, 0, total)
    +     return total
raises: numba's cuda has no syncthread (
    -     if t < 2 * WARP:
    -         sums[t] += sums[t + 2 * WARP]
    -     cuda.syncthreads()
    +     cuda.syncthread()
timeout: Is there a loop that never ends?
    while True:
        pass
""",
}
RIGHT = {"5.3": (warps_first, jitted, in_step, block_by_block)}
COMPLETED = {
    "5.3": [
        "if t < 2 * WARP:\n    sums[t] += sums[t + 2 * WARP]\ncuda.syncthreads()",
        "cuda.shfl_down_sync(ALL_LANES, total, distance)",
    ],
}
