"""Streams: queues of work that a device, or a background, does in order while the host goes on.

The interface is as in torch.cuda.Stream: record_event, wait_event, synchronize. What is launched here is a function
f(comm, *args) and runs in the background of the stream's communicator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from ..comm.base import Comm, Work

if TYPE_CHECKING:
    from torch import Tensor

    AllReduce: TypeAlias = Callable[[Comm, Tensor], object]  # in place
    OnStream: TypeAlias = Callable[["Stream", Tensor, "Stream", AllReduce], object]  # as all_reduce_on_stream

T = TypeVar("T")


class _Event:
    """A place in a stream: behind the works that were launched before."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def synchronize(self) -> None:
        """Let the host wait until the stream has come to this place."""
        for work in self._works:
            work.wait()

    def query(self) -> bool:
        """Return True when the stream has come to this place."""
        return all(work.test() for work in self._works)


class Stream:
    """A queue of functions f(comm, *args) that run in order, with the communicator of this stream; no host waits."""

    def __init__(self, comm: Comm, name: str) -> None:
        """Use a communicator whose background has no other user: comm.split(comm.rank) if work needs no other rank."""
        self.name, self._comm = name, comm
        self._works: list[Work] = []  # that the host has not waited for
        self._after: list[Work] = []  # what the next work waits for

    def launch(self, fn: Callable[..., object], *args: object) -> None:
        """Append fn(comm, *args) to the stream, and return at once. It touches its tensors when its turn comes."""
        work = self._comm.background(self._named, fn, *args, after=tuple(self._after))
        self._works.append(work)
        self._after = []

    def record_event(self) -> _Event:
        """Return the Event of all that has been launched here so far, and of all that this stream waits for."""
        return _Event(self._works[-1:] + self._after)

    def wait_event(self, event: _Event) -> None:
        """Let what is launched here from now on begin when `event` has come. Nothing else waits."""
        if not isinstance(event, _Event):
            raise TypeError(f"wait_event needs what record_event() returns, got {type(event).__name__}")
        self._after += event._works

    def synchronize(self) -> None:
        """Let the host wait for all that has been launched here."""
        for work in self._works:
            work.wait()

    def _named(self, comm: Comm, fn: Callable[..., T], *args: object) -> T:
        comm.trace.lane = self.name
        return fn(comm, *args)


def all_reduce_on_stream(comm_stream: Stream, x: Tensor, stream: Stream, all_reduce: AllReduce) -> None:
    """Launch an all-reduce of `x` between earlier and later kernels of `stream`.

        host           launch   all_reduce_on_stream   launch   ... goes on
        stream         | produce x |                            | consume x |
        comm_stream                | all_reduce(comm, x) -------|

    Args:    comm_stream: comm_stream.launch(f, x) adds a call f(comm, x) to this
             stream; comm is the communicator of all ranks.
             x: (n,) tensor, overwritten with the sum. Kernels in the queue of `stream`
             may not have computed x yet.
             stream: stream.record_event() marks the present end of the queue, and
             returns this event. After stream.wait_event(event), kernels that are
             launched later wait for `event`. (comm_stream has both calls, too.)
             all_reduce: f(comm, x), in place.
    Returns: None, at once. The host does not wait, nor does any third stream.
    Ref: Dryden et al. 2018, "Aluminum: An Asynchronous, GPU-Aware Communication Library
    Optimized for Large-Scale Training of Deep Neural Networks on HPC Systems".
    """
    ### BEGIN SOLUTION
    comm_stream.wait_event(stream.record_event())
    comm_stream.launch(all_reduce, x)
    stream.wait_event(comm_stream.record_event())
    ### END SOLUTION


SHOWN = ("launch", "produce", "all_reduce", "consume", "other work")  # what a step does, besides waiting


class Stepped(NamedTuple):
    """x: the mean over the ranks; launched, done: s after which the host had launched all, and all was done."""

    x: Tensor
    launched: float
    done: float


def step(comm: Comm, x: Tensor, fn: OnStream, seconds: float = 0.02) -> Stepped:
    """Produce `x`, add it up by fn(comm_stream, x, stream, all_reduce), and divide it, all of it on one stream.

    Args:    fn: as all_reduce_on_stream. x: (n,) tensor, which rank r multiplies by r + 1 to produce it.
             seconds: for each of both kernels, and for a third one on another stream.
    """
    stream, other = Stream(comm.split(comm.rank), "compute"), Stream(comm.split(comm.rank), "other")
    comm_stream = Stream(comm, "comm")
    streams = stream, other, comm_stream

    def kernel(op: str, act: Callable[[], object]) -> Callable[[Comm], None]:
        def run(comm: Comm) -> None:
            with comm.trace.span(op):
                comm.compute(seconds)
                time.sleep(0 if comm.simulated else seconds)
                act()

        return run

    def all_reduce(comm: Comm, x: Tensor) -> None:
        with comm.trace.span("all_reduce"):
            comm.all_reduce(x)

    for each in streams:  # which makes its background
        each.launch(lambda comm: None)
        each.synchronize()
    comm.barrier()
    begun = comm.trace.clock()
    with comm.trace.span("launch"):
        stream.launch(kernel("produce", lambda: x.mul_(comm.rank + 1)))
        other.launch(kernel("other work", lambda: None))
        fn(comm_stream, x, stream, all_reduce)
        stream.launch(kernel("consume", lambda: x.div_(comm.size)))
    launched = comm.trace.clock()
    for each in streams:
        each.synchronize()
    return Stepped(x, (launched - begun) / 1e9, (comm.trace.clock() - begun) / 1e9)
