"""A vector in the memory of one GPU goes to another host's: through pinned memory of both, in blocks.

    rank src   GPU --copy out--> pinned buffer --+
                                                 | wire
    rank dst   GPU <--copy in--- pinned buffer --+

If there is no GPU, an EmulatedDevice plays one: its copies take virtual time on simulated ranks, and are slowed down
to a bandwidth that is asked for on real ones.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from ..comm.base import Comm, Work
from ..measure import measure
from ..predict.graph import Need, TaskGraph

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STALE = -555.0  # in a pinned buffer of a simulated rank before its first use
BUFFERS = 2
PROBES = 8  # times as many samples of what is short, and varies the most


class _Vector(Protocol):
    """A flat tensor, or what stands for one in the memory of a device."""

    @property
    def dtype(self) -> torch.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


V = TypeVar("V", bound=_Vector)


class Device(ABC, Generic[V]):
    """An accelerator as its host sees it: asynchronous copies between its memory and pinned memory of the host.

    pinned_count: elements of pinned memory that have been asked for.
    """

    pinned_count = 0

    @abstractmethod
    def pinned(self, n: int, dtype: torch.dtype) -> Tensor:
        """Return an (n,) uninitialized tensor of the host in memory that the system never moves: copies reach it."""

    @abstractmethod
    def copy_out(self, x: V, host: Tensor) -> Work:
        """Start a copy of the vector `x` of the device to `host`, pinned, of the same length; returns Work."""

    @abstractmethod
    def copy_in(self, host: Tensor, x: V) -> Work:
        """Start a copy of `host`, pinned, to the vector `x` of the device, of the same length; returns Work."""

    @abstractmethod
    def put(self, values: Tensor) -> V:
        """Return a vector on the device with these values; its slices are views, as a tensor's are."""

    @abstractmethod
    def get(self, x: V) -> Tensor:
        """Return the values of a vector of the device."""


class _DeviceVector:
    """A vector in the memory of an EmulatedDevice: a length, a dtype, slices, and no values that the host can read."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, part: slice) -> _DeviceVector:
        if not isinstance(part, slice):
            raise TypeError("the host cannot read an element on the device: copy_out brings a slice to pinned memory")
        return _DeviceVector(self._values[part])

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype


class _EmulatedDevice(Device[_DeviceVector]):
    """A device whose copies take alpha + beta * bytes, in each direction one after the other.

    Collective over `comm`: each copy engine is the background of a communicator of this rank alone.
    """

    def __init__(self, comm: Comm, alpha: float = 0.0, beta: float = 0.0) -> None:
        """Take alpha s per copy, beta s per byte; on real ranks at least, since a copy takes time there in any case."""
        self.alpha, self.beta = alpha, beta
        self.out, self.into = comm.split(comm.rank), comm.split(comm.rank)
        self._pinned: list[Tensor] = []

    def pinned(self, n: int, dtype: torch.dtype) -> Tensor:
        import torch

        self.pinned_count += n
        self._pinned.append(torch.empty(n, dtype=dtype))
        if self.out.simulated:  # real memory holds anything, and to fill it takes time
            self._pinned[-1].fill_(STALE)
        return self._pinned[-1]

    def copy_out(self, x: _DeviceVector, host: Tensor) -> Work:
        self._require("copy_out", x, host)
        return self.out.background(self._copy_out, x._values, host)

    def copy_in(self, host: Tensor, x: _DeviceVector) -> Work:
        self._require("copy_in", x, host)
        return self.into.background(self._copy_in, host, x._values)

    def put(self, values: Tensor) -> _DeviceVector:
        return _DeviceVector(values.clone())

    def get(self, x: _DeviceVector) -> Tensor:
        return x._values.clone()

    def _require(self, what: str, x: object, host: object) -> None:
        """Raise TypeError, ValueError unless `x` is on the device, and `host` a part of a pinned buffer as long."""
        import torch

        if not isinstance(x, _DeviceVector) or not isinstance(host, torch.Tensor):
            order = "(x, host)" if what == "copy_out" else "(host, x)"
            raise TypeError(f"device.{what}{order} needs a slice of x, on the device, and a pinned tensor")
        if not any(0 <= host.data_ptr() - buffer.data_ptr() <= buffer.nbytes - host.nbytes for buffer in self._pinned):
            raise ValueError(f"device.{what} got a tensor that is not pinned: make it with device.pinned(n, x.dtype)")
        if len(x) != len(host) or x.dtype != host.dtype:
            raise ValueError(f"device.{what}: {len(x):,} elements on the device and {len(host):,} in pinned memory")

    def _copy_out(self, comm: Comm, x: Tensor, host: Tensor) -> None:
        self._copy(comm, "copy out", x, host)

    def _copy_in(self, comm: Comm, host: Tensor, x: Tensor) -> None:
        self._copy(comm, "copy in", host, x)

    def _copy(self, comm: Comm, op: str, source: Tensor, target: Tensor) -> None:
        """Copy in the background: what arrives is there at the end of the copy, and not before."""
        seconds, trace = self.alpha + self.beta * source.nbytes, comm.trace
        step, t0 = trace.step(), trace.clock()
        if comm.simulated:
            comm.compute(seconds)
        else:
            time.sleep(max(0.0, seconds))
        target.copy_(source)
        trace.add(step, op, t0, trace.clock(), nbytes=source.nbytes, line=trace.line())


class CudaDevice(Device["Tensor"]):
    """The GPU of this rank: one stream for each direction, because a GPU has a copy engine for each."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = torch.device(device)
        self.out, self.into = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)

    def pinned(self, n: int, dtype: torch.dtype) -> Tensor:
        import torch

        self.pinned_count += n
        return torch.empty(n, dtype=dtype, pin_memory=True)

    def copy_out(self, x: Tensor, host: Tensor) -> Work:
        return self._copy(self.out, x, host)

    def copy_in(self, host: Tensor, x: Tensor) -> Work:
        return self._copy(self.into, host, x)

    def put(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    def get(self, x: Tensor) -> Tensor:
        return x.cpu()

    def _copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> Work:
        import torch

        stream.wait_stream(torch.cuda.current_stream(self.device))  # on which x was computed
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _Recorded(stream.record_event())


class _Recorded(Work):
    """The work that a stream had been given when `event` was recorded."""

    def __init__(self, event: torch.Event | torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        while not self.test():  # here an interrupt reaches the rank, as it would not within CUDA
            time.sleep(0)

    def test(self) -> bool:
        return bool(self.event.query())


def device_of(comm: Comm, alpha: float = 0.0, beta: float = 0.0) -> Device[Any]:
    """Return the GPU of this rank, or an EmulatedDevice with this alpha (s) and beta (s per byte). Collective."""
    return _EmulatedDevice(comm, alpha, beta) if comm.device == "cpu" else CudaDevice(comm.device)


def pipelined_copy(comm: Comm, x: V, src: int, dst: int, device: Device[V], block: int) -> None:
    """Copy `x` on the device of rank `src` to `x` on the device of `dst`, in blocks.

        time          0        1        2        3        4
        copy out   block 0  block 1  block 2
        wire                block 0  block 1  block 2
        copy in                      block 0  block 1  block 2

    Args:    x: (n,) vector on the device, overwritten on `dst`. Slices, such as x[2:5],
             are views on the device.
             src, dst: two ranks; all other ranks do nothing.
             device: device.pinned(n, x.dtype) returns an (n,) tensor in pinned memory.
             device.copy_out(part of x, pinned) and device.copy_in(pinned, part of x)
             start a copy and return a Work.
             block: elements of a block; the last block may have fewer.
    Memory: two blocks of pinned memory on src and on dst.
    Time: blocks + 2 block times, if all stages are equally fast.
    Ref: Wang et al. 2011, "MVAPICH2-GPU: optimized GPU to GPU communication for
    InfiniBand clusters".
    """
    ### BEGIN SOLUTION
    pieces = [x[first : first + block] for first in range(0, len(x), block)]
    buffers = [device.pinned(block, x.dtype), device.pinned(block, x.dtype)]
    staged = [buffers[k % 2][: len(piece)] for k, piece in enumerate(pieces)]
    works = []
    if comm.rank == src:
        for k, piece in enumerate(pieces):
            if k >= 2:
                works[k - 2].wait()  # its buffer is the one that is filled now
            device.copy_out(piece, staged[k]).wait()
            works.append(comm.isend(staged[k], dst))
        for work in works[-2:]:
            work.wait()
    elif comm.rank == dst:
        works = [comm.irecv(buffer, src) for buffer in staged[:2]]
        for k, piece in enumerate(pieces):
            works[k].wait()
            device.copy_in(staged[k], piece).wait()
            if k + 2 < len(pieces):
                works.append(comm.irecv(staged[k + 2], src))
    ### END SOLUTION


# -- how long it takes ------------------------------------------------------------------------------------------------


class StagingCosts(NamedTuple):
    """The s for a block of b bytes: alpha + beta b on the wire, copy_alpha + copy_beta b for a copy, each way."""

    alpha: float
    beta: float
    copy_alpha: float
    copy_beta: float

    def wire(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes

    def copy(self, nbytes: float) -> float:
        return self.copy_alpha + self.copy_beta * nbytes


def seconds(costs: StagingCosts, nbytes: float, block: float) -> float:
    """Return the s of pipelined_copy: each stage once, and the slowest once for each further block.

    Args:    nbytes: of the vector; block: bytes of a block. The last one counts as a part of a block.
    """
    block = min(block, nbytes)
    wire, copy = costs.wire(block), costs.copy(block)
    return wire + 2 * copy + (nbytes / block - 1) * max(wire, copy)


def best_block(costs: StagingCosts, nbytes: float) -> float:
    """Return the bytes of the best block: there the derivative of `seconds` is 0. With n = nbytes, copies of B bytes/s:

    the wire is the slowest     n/b alpha + 2 b/B + what b does not change        b = sqrt(n alpha B / 2)
    the copies are              n/b copy_alpha + b (1/B + beta) + ...             b = sqrt(n copy_alpha / (1/B + beta))
    """
    if not nbytes:
        return 0.0
    candidates = [nbytes]
    if costs.copy_beta > 0:
        candidates.append((nbytes * costs.alpha / (2 * costs.copy_beta)) ** 0.5)
    if costs.copy_beta + costs.beta > 0:
        candidates.append((nbytes * costs.copy_alpha / (costs.copy_beta + costs.beta)) ** 0.5)
    if costs.beta != costs.copy_beta:  # at which both are equally slow
        candidates.append((costs.copy_alpha - costs.alpha) / (costs.beta - costs.copy_beta))
    return min((b for b in candidates if 0 < b <= nbytes), key=lambda b: seconds(costs, nbytes, b))


def stages(costs: StagingCosts, nbytes: int, block: int) -> list[tuple[list[float], list[float]]]:
    """Return ([when each block begins], [when it ends]) for copy out, wire, copy in, in s: BUFFERS on both ranks."""
    graph, blocks = TaskGraph(), [min(block, nbytes - first) for first in range(0, nbytes, block)]
    for k, size in enumerate(blocks):
        before = 3 * (k - BUFFERS)  # the number of the copy out of the block that had the same buffer
        freed = before >= 0
        graph.add(costs.copy(size), [Need(before + 1)] * freed, row="copy out")
        graph.add(costs.wire(size), [Need(3 * k), *[Need(before + 2)] * freed], row="wire")
        graph.add(costs.copy(size), [Need(3 * k + 1)], row="copy in")
    begins, ends = graph.times()
    return [(begins[stage::3], ends[stage::3]) for stage in range(3)]


# -- measured on any ranks --------------------------------------------------------------------------------------------


def sweep_blocks(
    comm: Comm,
    fn: Callable[[Comm, Any, int, int, Device[Any], int], object],
    nbytes: int,
    blocks: Sequence[int],
    copies: tuple[float, float] = (0.0, 0.0),
    samples: int = 5,
    rest_s: float = 0.0,
) -> None:
    """Check and time fn(comm, x, 0, 1, device, block) for every size of a block; rank 1 reports a row for each.

    Args:    nbytes: of x, float32; blocks: bytes, whole elements. copies: (alpha s, beta s per byte) of emulated ones.
             rest_s: sleep after each row, in which a notebook can draw it.
    Returns: None. Rows: {wire: {bytes: s}, copy: {bytes: s}} of single messages and copies; then {block, seconds
             (median), p25, p75, correct}.
    """
    import torch

    device, clock, probes = device_of(comm, *copies), comm.trace.clock, (4, max(blocks))
    recording, comm.trace.enabled = comm.trace.enabled, False
    timed = partial(measure, clock=clock, warmup=int(not comm.simulated))
    if comm.rank < 2:
        values = torch.arange(nbytes // 4, dtype=torch.float32)
        x, host = device.put(values), device.pinned(max(blocks) // 4, values.dtype)
        wire, copy = {}, {}
        for n in probes:
            part, pinned = x[: n // 4], host[: n // 4]
            often = samples * (PROBES if n == 4 else 1)
            copy[n] = timed(partial(_copied_out, device, part, pinned), repeats=often).median
            wire[n] = timed(partial(_there_and_back, comm, pinned), repeats=often).median / 2
        if comm.rank == 1:
            comm.report(wire=wire, copy=copy)
        for block in blocks:
            x = device.put(values * (comm.rank == 0))
            run = partial(fn, comm, x, 0, 1, device, block // 4)
            taken = timed(run, barrier=partial(_there_and_back, comm, host[:1]), repeats=samples)
            if comm.rank == 1:
                (p25, p75), correct = taken.quartiles, torch.equal(device.get(x), values)
                comm.report(block=block, seconds=taken.median, p25=p25, p75=p75, correct=correct)
            time.sleep(rest_s)
    comm.trace.enabled = recording


def _there_and_back(comm: Comm, x: Tensor) -> None:
    """Send `x` from rank 0 to rank 1 and back."""
    for sender in (0, 1):
        comm.send(x, 1 - comm.rank) if comm.rank == sender else comm.recv(x, 1 - comm.rank)


def _copied_out(device: Device[V], x: V, host: Tensor) -> None:
    """Copy from the device to the host, and wait for the end."""
    device.copy_out(x, host).wait()
