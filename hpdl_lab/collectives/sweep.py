"""Correct first, timed second: ways to do one collective over sizes, side by side in one run, on every kind of rank.

A sample is the time of a few calls in a row on the slowest rank, divided by the calls. The samples of one size and one
function give the median and the quartiles. The time is the communicator's own: virtual on simulated ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..comm.base import Comm, Row
from ..comm.buffers import ITEMSIZE, is_tensor, synchronize, to_numpy
from ..comm.errors import WrongAnswer
from ..features import cores
from . import expected
from .cost import busbw_factor, fit_link

if TYPE_CHECKING:
    from torch import Tensor

    from ..comm.buffers import Array

Collective: TypeAlias = Callable[[Comm, Any], Any]
SAMPLES = 9
SAMPLE_NS = 2_000_000  # a sample is at least this long where the time is real, so that the clock's grain is nothing
PING_SIZES = (8, 1024, 16 * 1024, 128 * 1024, 1024 * 1024)
PING_NBYTES = 2**21  # that a sample of round trips moves at most, unless one moves more: slow links take a while


def race_algorithms(
    comm: Comm,
    functions: Mapping[str, Collective],
    sizes: Sequence[int],
    dtype: str = "float32",
    samples: int = SAMPLES,
    sample_ns: int = SAMPLE_NS,
    rest_s: float = 0.0,
    collective: str = "all_reduce",
    ping_sizes: tuple[int, ...] = PING_SIZES,
) -> None:
    """Report `ping_pong` and, if time is real, `all_at_once` as {alpha, beta, gamma, contended}, then `sweep_sizes`."""
    alpha, beta, gamma = ping_pong(comm, samples, 20 if sample_ns else 1, ping_sizes)
    contended = all_at_once(comm, samples, 20, ping_sizes) if sample_ns else None
    if comm.rank == 0:
        comm.report(alpha=alpha, beta=beta, gamma=gamma, contended=contended)
    sweep_sizes(comm, functions, sizes, dtype, samples, sample_ns, rest_s, collective)


def sweep_sizes(
    comm: Comm,
    functions: Mapping[str, Collective],
    sizes: Sequence[int],
    dtype: str = "float32",
    samples: int = SAMPLES,
    sample_ns: int = SAMPLE_NS,
    rest_s: float = 0.0,
    collective: str = "all_reduce",
) -> None:
    """Check and time a collective; rank 0 reports one row, with the columns of nccl-tests, per function and size.

    Args:    functions: {name: f(comm, x)}, as the functions of collectives/table.py: x is flat, the result is in x,
             and what is returned is x or the part of it with the result. The root is rank 0.
             sizes: bytes of x, whole elements; if every rank has a chunk, they are rounded up to equal chunks.
             dtype: "float32" or "float64". samples: per row; sample_ns: least time of one, 0 for a single call.
             rest_s: sleep after each row, in which a notebook can draw it without taking a core from what is timed.
             collective: one of expected.COLLECTIVES.
    Returns: None. Row: name, collective, size (bytes), count, type, redop, root, time_us (median), p25_us, p75_us,
             algbw_GBps, busbw_GBps, wrong, ranks, cores.
    Raises:  WrongAnswer, on every rank, naming function, rank, index, expected and got.
    """
    counts = [whole_chunks(count_of(size, dtype), comm.size, collective) for size in sizes]
    # One buffer for all of them, where possible in shared memory: good for kernels that use it, the same to the others.
    buffer = comm.allocate((max(counts),), dtype)
    for count in dict.fromkeys(counts):
        x = buffer[:count]
        for name, function in functions.items():
            _require_right(comm, name, function, x, collective)
            times = sample_calls(comm, function, x, samples, sample_ns)
            if comm.rank == 0:
                comm.report(**row(name, count, dtype, times, comm, collective))
            time.sleep(rest_s)


def count_of(size: int, dtype: str) -> int:
    """Return the elements in `size` bytes. Raises ValueError if that is not a whole number, or none."""
    if size < ITEMSIZE[dtype] or size % ITEMSIZE[dtype]:
        raise ValueError(f"{size:,} bytes are not a whole number of {dtype}, which have {ITEMSIZE[dtype]} bytes each")
    return size // ITEMSIZE[dtype]


def whole_chunks(count: int, p: int, collective: str) -> int:
    """Return `count`, or the next number that p ranks share in equal chunks, if the collective gives each one."""
    return -(-count // p) * p if collective in expected.CHUNKED else count


def row(name: str, count: int, dtype: str, times: np.ndarray, comm: Comm, collective: str = "all_reduce") -> Row:
    """Return a row from (samples,) ns per call. redop, root: as nccl-tests has them: "none", -1 if there is none."""
    p25, median, p75 = (float(q) for q in np.percentile(times, (25, 50, 75)))
    size = count * ITEMSIZE[dtype]
    algbw = size / median if median else 0.0  # bytes per ns are GB/s
    return {
        "name": name,
        "collective": collective,
        "size": size,
        "count": count,
        "type": dtype,
        "redop": "sum" if collective in expected.ADDS else "none",
        "root": 0 if collective in expected.ROOTED else -1,
        "time_us": median / 1e3,
        "p25_us": p25 / 1e3,
        "p75_us": p75 / 1e3,
        "algbw_GBps": algbw,
        "busbw_GBps": algbw * busbw_factor(collective, comm.size),
        "wrong": 0,
        "ranks": comm.size,
        "cores": cores()  # of this node; a simulated rank is a node of its own
        * math.ceil(comm.size / comm.node_size),
    }


def _require_right(comm: Comm, name: str, function: Collective, x: Tensor, collective: str = "all_reduce") -> None:
    """Run `function` once on small whole numbers, whose sums are exact, and compare every element."""
    fill_with(x, expected.brought(collective, len(x), comm.size, comm.rank))
    begin, want = expected.expected_result(collective, len(x), comm.size, comm.rank)
    result = function(comm, x)
    got = np.asarray(to_numpy(x if result is None else result), dtype=np.float64).reshape(-1)
    if len(want) != len(x) and len(got) == len(x):
        got = got[begin : begin + len(want)]  # the whole x; a part of it is the result
    if len(want) == 0:
        mine = [0.0, 0.0, 0.0, 0.0]
    elif got.shape != want.shape:
        mine = [1.0, -1.0, len(want), len(got)]
    else:
        wrong = np.flatnonzero(got != want)
        first = wrong[0] if len(wrong) else 0
        mine = [len(wrong), begin + first, want[first], got[first]]
    reports = np.asarray(comm.all_gather(np.array(mine, dtype=np.float64)))  # so that every rank stops
    for rank, (count, first, want, have) in enumerate(reports):
        if count and first < 0:
            raise WrongAnswer(f"{name} is not timed: rank {rank} gave {want:,.0f} elements and got {have:,.0f} back")
        if count:
            word = "sum" if collective in expected.ADDS else "result"
            raise WrongAnswer(
                f"{name} is not timed, because its {word} is wrong: on rank {rank}, {count:,.0f} of {len(x):,} "
                f"elements, first at index {first:,.0f}: expected {want:g}, got {have:g}; lab.check says why"
            )


def fill_with(x: Array, values: np.ndarray) -> None:
    """Set x[...] = values, for a tensor or an array."""
    if is_tensor(x):
        import torch

        x.copy_(torch.as_tensor(values))
    else:
        x[...] = values


def sample_calls(comm: Comm, function: Collective, x: Tensor, samples: int, sample_ns: int) -> np.ndarray:
    """Return (samples,) ns per call, each of the slowest rank. Zeros are added: sums of sums would overflow."""
    fill_with(x, np.zeros(len(x)))
    times = _own_times(comm, function, x, samples, sample_ns)
    return np.asarray(comm.all_gather(times)).max(axis=0)


def _own_times(
    comm: Comm, function: Collective, x: Tensor, samples: int, sample_ns: int, most: float = math.inf
) -> np.ndarray:
    """Return (samples,) ns per call on this rank's clock; a sample is `most` calls at most."""
    clock, recording = comm.trace.clock, comm.trace.enabled
    comm.trace.enabled = False  # a record of every message would be part of the time
    try:
        calls = 1
        if sample_ns:
            begin = clock()
            function(comm, x)
            synchronize(x)
            slowest = float(np.max(np.asarray(comm.all_gather(np.array([clock() - begin], dtype=np.float64)))))
            calls = int(min(most, max(1, math.ceil(sample_ns / max(slowest, 1.0)))))
        times = np.empty(samples)
        for i in range(samples):
            comm.barrier()
            begin = clock()
            for _ in range(calls):
                function(comm, x)
            synchronize(x)
            times[i] = (clock() - begin) / calls
        return times
    finally:
        comm.trace.enabled = recording


def ping_pong(
    comm: Comm, samples: int = SAMPLES, repeats: int = 20, sizes: tuple[int, ...] = PING_SIZES
) -> tuple[float, float, float]:
    """Fit the cost of a message between ranks 0 and 1, and of adding: the numbers of collectives/cost.py.

        0 --x--> 1, 0 <--x-- 1      half a round trip is alpha + beta * bytes

    Args:    repeats: round trips per sample, 1 if the time is virtual.
             sizes: bytes; on links that let a burst pass at once, larger than it, but for one that is tiny.
    Returns: (alpha s, beta s/byte, gamma s/byte), the same on every rank; zeros on one rank alone.
    """
    fitted = np.zeros(3)
    if comm.size > 1:
        recording, comm.trace.enabled = comm.trace.enabled, False
        if comm.rank < 2:
            few = {n: max(1, min(repeats, PING_NBYTES // n)) for n in sizes}
            times = [one_way(comm, _bytes_on(comm.device, n), samples, few[n]) for n in sizes]
            if min(times) > 0:
                fitted[:2] = fit_link(sizes, times)
            fitted[2] = _time_of_adding(comm, samples)
        comm.trace.enabled = recording
        fitted = np.asarray(comm.broadcast(fitted))
    return float(fitted[0]), float(fitted[1]), float(fitted[2])


def all_at_once(
    comm: Comm, samples: int, repeats: int, sizes: tuple[int, ...] = PING_SIZES
) -> tuple[float, float, float]:
    """Return the three numbers of ping_pong when all ranks send to the next one and add: they share cores and memory.

    0 --x--> 1 --x--> 2 --x--> 3 --x--> 0      a step of a ring is alpha + beta * bytes
    """
    fitted = np.zeros(3)
    if comm.size > 1:
        recording, comm.trace.enabled = comm.trace.enabled, False
        times = [_shift(comm, n, samples, max(1, min(repeats, PING_NBYTES // n))) for n in sizes]
        comm.barrier()
        fitted[2] = _time_of_adding(comm, samples)
        if min(times) > 0:
            fitted[:2] = fit_link(sizes, times)
        comm.trace.enabled = recording
        fitted = np.asarray(comm.broadcast(fitted))
    return float(fitted[0]), float(fitted[1]), float(fitted[2])


def _shift(comm: Comm, n: int, samples: int, repeats: int) -> float:
    """Return the seconds in which every rank hands n bytes to the next one: the median."""
    x, y = _bytes_on(comm.device, n), _bytes_on(comm.device, n)
    clock, times = comm.trace.clock, []
    for _ in range(samples):
        comm.barrier()
        begin = clock()
        for _ in range(repeats):
            comm.sendrecv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)
        times.append((clock() - begin) / repeats / 1e9)
    return float(np.median(times))


def _bytes_on(device: str, n: int) -> Array:
    """Return n bytes to send, in the memory of the ranks' tensors: an array, or a tensor on a GPU."""
    if device == "cpu":
        return np.zeros(n, np.uint8)
    import torch

    return torch.zeros(n, dtype=torch.uint8, device=device)


def one_way(comm: Comm, x: Array, samples: int, repeats: int) -> float:
    """Return the seconds from rank 0 to rank 1, or back: the median."""
    other, clock, times = 1 - comm.rank, comm.trace.clock, []
    for _ in range(samples):
        begin = clock()
        for _ in range(repeats):
            for sender in (0, 1):
                comm.send(x, other) if comm.rank == sender else comm.recv(x, other)
        times.append((clock() - begin) / repeats / 2e9)
    return float(np.median(times))


def _time_of_adding(comm: Comm, samples: int) -> float:
    """Return the seconds per byte of x += y for float32 that fit no first-level cache."""
    x, y, clock, times = np.zeros(2**18, np.float32), np.ones(2**18, np.float32), comm.trace.clock, []
    for _ in range(samples):
        begin = clock()
        x += y
        times.append((clock() - begin) / 1e9 / x.nbytes)
    return float(np.median(times))


MOST_ROUNDS = 500  # per sample


def time_rounds(comm: Comm, fn: Collective, sizes: Sequence[int], samples: int, sample_ns: int) -> None:
    """Check and time `fn` for each size; rank 0 reports {size, seconds (median, one way), p25, p75}."""
    buffer = comm.allocate((max(sizes),), "uint8")
    for size in sizes:
        x = buffer[:size]
        _require_echo(comm, fn, x)
        times = _half_rounds(comm, fn, x, samples, sample_ns)
        if comm.rank == 0:
            p25, median, p75 = (float(q) for q in np.percentile(times, (25, 50, 75)))
            comm.report(size=size, seconds=median, p25=p25, p75=p75)


def _require_echo(comm: Comm, fn: Collective, x: Tensor) -> None:
    """Raise WrongAnswer, on every rank, unless rank 1 gets what rank 0 has, and rank 0 gets it back."""
    x[:] = 7 + comm.rank
    fn(comm, x)
    wrong = int((x != 7).sum()) if comm.rank < 2 else 0
    for rank, count in enumerate(np.asarray(comm.all_gather(np.array([wrong]))).reshape(-1)):
        if count:
            raise WrongAnswer(
                f"ping-pong is not timed: rank 0 sent {len(x):,} bytes with the value 7, and after a round "
                f"{count:,} of those on rank {rank} are something else; lab.check says why"
            )


def _half_rounds(comm: Comm, fn: Collective, x: Tensor, samples: int, sample_ns: int) -> np.ndarray:
    """Return (samples,) s of half a round on this rank's clock; each sample is many rounds if time is real."""
    return _own_times(comm, fn, x, samples, sample_ns, MOST_ROUNDS) / 2e9
