"""Simulated ranks: coroutines, or threads, in this process with a virtual clock, on any network, in any number.

`run(8, f, x)` calls `f(comm, x)` on eight ranks. The scheduler always resumes the rank whose virtual time is least,
so a run is deterministic and messages are booked in the order of time. Arithmetic is free unless a rank calls
`comm.compute(...)`. When no rank can go on, that is a deadlock, proved and not timed out.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from .. import inject as injected
from ..base import Comm, PerRank, Results, Row, Work, require_callable
from ..buffers import ArrayT, deliver, extent_of, payload_of
from ..calls import begin
from ..errors import ForgottenWait
from ..network import Switch
from .background import Lane, SimBackground
from .channel import Channel, End
from .scheduler import Scheduler

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..base import OnRow
    from ..buffers import Array
    from ..calls import Facts
    from ..network import Network
    from .channel import Answer, Meeting
    from .rank import Key, SimRank


def run(
    size: int,
    fn: Callable[..., object],
    *args: object,
    network: Network | None = None,
    deadline: float = 60.0,
    on_row: OnRow | None = None,
    trace: bool = True,
    inject: injected.Injection | None = None,
    threads: bool = False,
) -> Results:
    """Call `fn(comm, *args)` on `size` simulated ranks; returns Results: what each rank returned, in rank order.

    Args:    args: copied for every rank; a PerRank gives rank i its item i.
             network: a network of comm/network; default Switch().
             deadline: seconds of real time after which the run is stopped, wherever it is; time in which it waits for
             a core that other processes have, or in which the whole process stands still, does not count.
             on_row: called with every row that a rank reports; trace: record events.
             inject: an Injection of comm/inject.py: ranks and links that are slow.
             threads: each rank is a thread instead of a coroutine, and one runs at a time: slower, but a function
             may wait for other ranks inside autograd's backward. Times, events and errors are the same.
    Raises:  Deadlock when no rank can go on; CommTimeout at the deadline; Mismatch for ranks that contradict each
             other; else the error of the lowest rank that failed, with `.rank`, `.waits` and `.reason` set and notes
             that name rank and line and say what the other ranks were doing.
    """
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"sim.run needs at least 1 rank, got {size!r}")
    for arg in args:
        if isinstance(arg, PerRank) and len(arg) != size:
            raise ValueError(f"PerRank has {len(arg)} items for {size} ranks")
    if inject is not None:
        inject.check(size)
    scheduler = Scheduler(size, network or Switch(), trace, inject or None, threads)
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        if on_row is not None:
            on_row(row)

    def body(rank: SimRank) -> object:
        mine = [a[rank.index] if isinstance(a, PerRank) else a for a in args]
        return fn(SimComm(scheduler, rank, range(size), keep), *(copy.deepcopy(a) for a in mine))

    values = scheduler.run(body, deadline)
    events = itertools.chain.from_iterable(rank.trace.log for rank in scheduler.ranks)
    return Results(values, events, rows, seconds=scheduler.seconds)


class SimComm(Comm):
    """A communicator of simulated ranks. `members[i]` is the index, in the scheduler, of this communicator's rank i."""

    has_background = True
    simulated = True

    def __init__(
        self, scheduler: Scheduler, state: SimRank, members: Sequence[int], on_row: OnRow | None, key: Key = ()
    ) -> None:
        super().__init__(members.index(state.index), len(members), state.trace, on_row, state.calls)
        self.scheduler, self.state, self.members = scheduler, state, members
        self.key = key
        self.meetings = self.allocated = 0  # so far
        self._channels_to: dict[int, Channel] = {}  # by peer
        self._channels_from: dict[int, Channel] = {}
        self._background: tuple[Lane, SimComm] | None = None  # what runs there, and its communicator

    def isend(self, x: Array, dst: int) -> SimWork:
        self.check_peer(dst, "sends to")
        if self.state.delay or self.state.ahead:
            self._before_a_message()
        return SimWork(self, "send", x, dst)

    def irecv(self, x: Array, src: int) -> SimWork:
        self.check_peer(src, "receives from")
        if self.state.ahead:
            self.state.synchronize()
        return SimWork(self, "recv", x, src)

    def channel_to(self, peer: int) -> Channel:
        """Return the Channel from this rank to rank `peer` of this communicator."""
        channel = self._channels_to.get(peer)
        if channel is None:
            channel = self.scheduler.channel(self.key, self.state.index, self.members[peer])
            self._channels_to[peer] = channel
        return channel

    def channel_from(self, peer: int) -> Channel:
        """Return the Channel from rank `peer` of this communicator to this rank."""
        channel = self._channels_from.get(peer)
        if channel is None:
            channel = self.scheduler.channel(self.key, self.members[peer], self.state.index)
            self._channels_from[peer] = channel
        return channel

    def barrier(self) -> None:
        self._meet("barrier")

    def split(self, color: object, key: object = 0) -> SimComm:
        members = self._meet("split", (color, key)).parts[self.state.index]
        path = (*self.key, self.meetings, repr(color))
        part = SimComm(self.scheduler, self.state, members, self.on_row, path)
        part.name = self.name_of_part(color)
        return part

    def allocate(self, shape: int | Sequence[int], dtype: str | torch.dtype = "float32") -> Tensor:
        import torch

        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.allocated += 1
        segments = self.scheduler.segments
        if (place := (self.key, self.allocated)) not in segments:
            segments[place] = [torch.zeros(shape, dtype=dtype) for _ in self.members]
        mine = segments[place][self.rank]
        if (mine.shape, mine.dtype) != (shape, dtype):
            raise ValueError(
                f"counts and dtypes differ: rank {self.rank} calls allocate of {shape} {dtype}, another one of "
                f"{tuple(mine.shape)} {mine.dtype}"
            )
        return mine

    def views(self, x: ArrayT) -> list[ArrayT]:
        if isinstance(x, np.ndarray):
            return super().views(x)
        storage = x.untyped_storage().data_ptr()  # of an empty tensor, too, x.data_ptr() says nothing
        for (key, _), everybodys in self.scheduler.segments.items():
            if key == self.key and everybodys[self.rank].untyped_storage().data_ptr() == storage:
                return [theirs.as_strided(x.shape, x.stride(), x.storage_offset()) for theirs in everybodys]  # pyrefly: ignore[bad-return]
        return super().views(x)

    def background(self, fn: Callable[..., object], *args: object, after: Sequence[Work] = ()) -> SimBackground:
        require_callable(fn)
        if other := [work for work in after if not isinstance(work, SimBackground)]:
            raise TypeError(f"after= takes what comm.background returns, not {type(other[0]).__name__}")
        if self._background is None:
            lane = Lane(self.state)
            double = SimComm(self.scheduler, lane, self.members, self.on_row, (*self.key, "background"))
            double.name = f"{self.name} background".lstrip()
            self._background = lane, double
        return SimBackground(self.state, *self._background, fn, args, cast("Sequence[SimBackground]", after))

    def compute(self, seconds: float = 0.0, flops: float = 0.0) -> None:
        state = self.state
        step, t0 = state.trace.step(), state.clock_ns()
        state.spend(seconds + flops / self.scheduler.network.flops_per_s)
        state.trace.add(step, "compute", t0, state.clock_ns(), line=state.trace.line())

    def _meet(self, op: str, answer: Answer = None) -> Meeting:
        """Wait for every rank of this communicator to call the same operation; returns their Meeting."""
        self.meetings += 1
        state = self.state
        if state.delay or state.ahead:
            self._before_a_message()
        step, t0, line = state.trace.step(), state.clock_ns(), state.trace.line()
        call = begin(self, op, line=line)
        meeting = state.meet(call, (self.key, self.meetings), self.members, answer)
        state.trace.add(step, op, t0, state.clock_ns(), line=line)
        return meeting

    def _before_a_message(self) -> None:
        """Spend the delay that was injected into this rank, then let the others catch up with it."""
        state = self.state
        if state.delay:
            step, t0 = state.trace.step(), state.clock_ns()
            state.spend(state.delay)
            state.trace.add(step, injected.OP, t0, state.clock_ns(), line=state.trace.line())
        state.synchronize()


class SimWork(End):
    """An end of a message, as its rank uses it."""

    done = False

    def __init__(self, comm: SimComm, op: str, x: Array, peer: int) -> None:
        self.buffer = extent_of(x, op)
        self.comm, self.op, self.x, self.peer = comm, op, x, peer
        state = comm.state
        self.posted = state.clock
        self.step, self.line = state.trace.step(), state.trace.line()
        self.call = comm.calling
        if self.call is None or not self.call.nth:
            state.calls.note((op, self.line))
        if op == "recv":
            state.unwaited[id(self)] = self
            comm.channel_from(peer).post_receive(self)
            return
        if 0 < comm.scheduler.network.eager_nbytes >= self.buffer.nbytes:
            self.payload = payload_of(x, self.buffer.nbytes)
            self.end = state.clock
        comm.channel_to(peer).post_send(self)

    def wait(self) -> None:
        if self.done:
            return
        state = self.comm.state
        state.unwaited.pop(id(self), None)
        if state.ahead:
            state.synchronize()
        if self.end is None:
            state.block(self)
        elif self.end > state.clock:
            state.sleep_until(self.end)
        self.done = True
        if self.error is not None:
            raise self.error
        peer, begun, now = self.comm.members[self.peer], round(self.posted * 1e9), state.clock_ns()
        if self.op == "recv":
            deliver(self.payload, self.x)
            self.payload = b""
        state.trace.add(self.step, self.op, begun, now, peer, self.buffer.nbytes, self.line)
        if state.scheduler.inject is not None:
            self._record_slow_link(peer, now)

    def _record_slow_link(self, peer: int, now: int) -> None:
        """Record what this message has lost to an injected slow link."""
        channel = self.comm.channel_to(self.peer) if self.op == "send" else self.comm.channel_from(self.peer)
        lost, trace = round(channel.lost * self.buffer.nbytes * 1e9), self.comm.state.trace
        if lost:
            trace.add(trace.step(), injected.OP, now - lost, now, peer, line=self.line)

    def test(self) -> bool:
        state = self.comm.state
        if self.end is None or self.end > state.clock:
            state.sleep_until(state.clock + self.comm.scheduler.network.alpha)
        return self.end is not None and self.end <= state.clock

    @property
    def in_background(self) -> bool:
        return bool(self.comm.state.trace.lane)

    def forgotten(self) -> ForgottenWait:
        """Return the error of a rank that ends without waiting for this."""
        return ForgottenWait.of(self.comm.state.index, self.comm.members[self.peer], self.line)

    def waits_for(self) -> Facts:
        call, buffer = self.call, self.buffer
        info = {"op": self.op, "peers": (self.comm.members[self.peer],), "nbytes": buffer.nbytes, "line": self.line}
        if call is None or not call.nth:
            about = {"count": buffer.count, "dtype": buffer.dtype, "comm": self.comm.name}
            counts = self.comm.calls.times(self.op, self.line)
        else:
            about, counts = call.facts(), self.comm.calls.times(call.op, call.line)
        return {**info, **about, "call": call.op if call else "", "counts": counts}
