"""comm.background on real ranks: what a communicator is given to do asynchronously, one after the other.

    main thread    background(f, x)   background(all_reduce, y)   compute ...            wait()
                        |                   |
    Python thread       `--- f(comm', x)    |      functions: they need the interpreter's lock between their waits
    progress thread                         `---   all_reduce(y): compiled, without Python (csrc/progress.h)

Both work on comm', a double of the communicator: the same ranks, other messages, another shared memory. It is made by
the Python thread when it first has something to do, through a communicator on which the foreground never has anything
collective under way, so that the ranks may come there at different times. An all_reduce goes to the progress thread
only when no function is before it, and a function waits until the progress thread is done.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..features import compiled_module
from ..trace import now_ns
from .base import Work
from .buffers import buffer_of
from .calls import begin
from .errors import ForgottenWait, Mismatch
from .status.operation import OfThread
from .status.table import Slot, Status, waits_of
from .status.waiting import NAP, Waiting

if TYPE_CHECKING:
    from .. import _core
    from .buffers import Array, Buffer
    from .calls import Facts
    from .status.operation import Waitable
    from .status.report import Wait
    from .transport import Pending, Ranks

SOON = 0.3  # s: for the thread to come out of its waits; then its Python code is interrupted
LATER = 1.0  # s: for that; code that ignores it is left where it is, and finds its communicator closed
LOOK = 1e-3  # s: between two looks of the Python thread at the progress thread


class Background:
    """The work that the communicator `comm` does while its rank goes on."""

    def __init__(self, comm: Ranks) -> None:
        self.comm = comm
        self.double: Ranks | None = None  # comm', once it has been made
        self.waiting = _BackgroundWaiting(comm.waiting)
        self.progress = compiled_module().Progress()
        self._trace = comm.trace.in_lane("background")
        self._functions: queue.SimpleQueue[FunctionWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_function: FunctionWork | None = None
        self._broken: BaseException | None = None
        self._works: deque[BackgroundWork] = deque()  # in order, without works that have been seen to end
        self._unwaited: dict[int, BackgroundWork] = {}  # by id

    def start(self, fn: Callable[..., object], args: tuple[Any, ...], after: Sequence[Work] = ()) -> BackgroundWork:
        """Give `fn(comm', *args)` to the background, to begin behind the works in `after`; return its Work."""
        line = self.comm.trace.line()
        self.waiting.take_limits(self.comm.waiting)
        work = None if after else self._compiled(fn, args, line)
        work = work or self._function(fn, args, line, after)
        self._works.append(work)
        self._unwaited[id(work)] = work
        return work

    def _compiled(self, fn: Callable[..., object], args: tuple[Any, ...], line: str) -> CompiledWork | None:
        """Return the work of the progress thread, or None if Python has to do it."""
        double, last = self.double, self._last_function
        if getattr(fn, "only_calls", "") != "all_reduce" or len(args) != 1 or double is None:
            return None
        if (last is not None and not last.has_ended()) or double.broken or self.waiting.inject is not None:
            return None
        try:
            buffer = buffer_of(args[0], "all_reduce")
            task = double.begin_all_reduce(self.progress, args[0])
        except (ValueError, TypeError):
            return None  # the same is raised again in its turn
        return None if task is None else CompiledWork(self, double, task, args[0], buffer, line)

    def _function(
        self, fn: Callable[..., object], args: tuple[Any, ...], line: str, after: Sequence[Work]
    ) -> FunctionWork:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True, name="hpdl-background")
            self._thread.start()
        before: list[BackgroundWork] = [work for work in self._works if isinstance(work, CompiledWork)]
        before += [work for work in after if isinstance(work, BackgroundWork)]  # others have ended
        work = self._last_function = FunctionWork(self, fn, args, line, before)
        self._functions.put(work)
        return work

    # -- main thread ------------------------------------------------------------------------------------------------

    def finish(self, work: BackgroundWork | None = None) -> None:
        """Wait until `work` has ended, and everything before it; without a work: note what has ended by itself.

        A work keeps its result or error. Raises CommTimeout, RankFailed, KeyboardInterrupt if one does not end.
        """
        while self._works and (not work.finished if work else self._works[0].has_ended()):
            self._works[0].finish()
            self._works.popleft()

    def waited(self, work: BackgroundWork) -> None:
        """Somebody knows how `work` has ended."""
        self._unwaited.pop(id(work), None)

    def require_no_forgotten_wait(self) -> None:
        """Raise ForgottenWait if a work was never waited for."""
        for work in self._unwaited.values():
            raise ForgottenWait.of_background(self.comm.names[self.comm.rank], work.what, work.line)

    def close(self) -> list[Pending]:
        """End both threads. Return the messages that are under way in comm', and keeps what MPI may still write to."""
        if self.progress.stop():
            self.comm.session.cancelled.append(self.progress)
        self.waiting.stop()
        if self._thread is not None:
            self._functions.put(None)
            if not _ends(self._thread, SOON):
                _interrupt(self._thread)
                _ends(self._thread, LATER)
        return [] if self.double is None else self.double.release()

    # -- Python thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it is for the main thread, whose sleep it ends
        with suppress(KeyboardInterrupt):  # of `close`
            while (work := self._functions.get()) is not None:
                work.run()

    def open(self) -> Ranks:
        """Return comm', made at the first call. Collective over all ranks of the communicator, in their threads."""
        if self._broken is not None:
            raise self._broken
        double = self.double
        if double is None:
            try:
                double = self.comm.double(self.waiting, self._trace)
            except BaseException as error:
                self._broken = error
                raise
            self.double = double
        return double

    def signs_of_life(self) -> int:
        """Count what the Python thread has communicated so far: collectives in shared memory may wait for nothing."""
        double = self.double
        groups = [] if double is None else [double, *double.parts]
        return self.waiting.looks + sum(group.collectives for group in groups)

    def work_for(self, line: str) -> None:
        """Note that what comes now is on behalf of `line`."""
        self._trace.line_of_call = self.waiting.own.line = line


class BackgroundWork(Work):
    """Something that runs in the background, has run or will run. what: its name, line: where it was begun."""

    value: object = None
    error: BaseException | None = None
    finished = False  # the main thread knows its end

    def __init__(self, background: Background, what: str, line: str) -> None:
        self.background, self.what, self.line = background, what, line

    def wait(self) -> Any:
        trace = self.background.comm.trace
        step, t0 = trace.step(), trace.clock()
        try:
            self.background.finish(self)
        finally:
            trace.add(step, "wait", t0, trace.clock(), line=trace.line() if trace.enabled else "")
            self.background.waited(self)
        if self.error is not None:
            raise self.error
        return self.value

    def test(self) -> bool:
        self.background.finish()
        if self.finished:
            self.background.waited(self)
        return self.finished

    @abstractmethod
    def has_ended(self) -> bool:
        """Return True if it will not go on: what it ended with is there."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the end, as the first work that has not ended."""


class CompiledWork(BackgroundWork):
    """An all_reduce of the progress thread, which has been begun."""

    def __init__(
        self, background: Background, double: Ranks, task: _core.Task, x: Array, buffer: Buffer, line: str
    ) -> None:
        super().__init__(background, "all_reduce", line)
        self._double, self._buffer = double, buffer
        self._under_way: tuple[_core.Task, Array] | None = task, x
        self._step, self._call = double.trace.step(), begin(double, "all_reduce", x, line=line)

    def has_ended(self) -> bool:
        under_way = self._under_way  # which the main thread may forget at any time
        return under_way is None or under_way[0].ended

    def finish(self) -> None:
        double, waiting = self._double, self.background.comm.waiting
        if self._under_way is None:
            return
        task, x = self._under_way

        def peers() -> tuple[int, ...]:
            if double.shares_memory:
                return tuple(double.members[r] for r in task.missing())
            come: Facts = {"comm": self._call.comm, "nth": self._call.nth}
            return waiting.missing(double.members, "all_reduce", lambda: come)()

        try:
            waiting.finish(task, "all_reduce", peers, self._buffer.nbytes, self.line, facts=self._facts)
            self.value = x
            self._record(task)
        except ValueError as error:
            self.error = error
            try:
                double.require_same(task)
            except Mismatch as mismatch:
                self.error = mismatch
        except RuntimeError as error:
            self.error, double.broken = error, "all_reduce"
        self.finished, self._under_way = True, None

    def _record(self, task: _core.Task) -> None:
        """Add the events of this all_reduce, with the times at which it began and ended."""
        double = self._double
        trace = double.trace
        for end, peer, nbytes, t0, t1 in task.transfers():
            trace.add(trace.step(), end, t0, t1, double.names[peer], nbytes, self.line)
        trace.add(self._step, "all_reduce", task.t0_ns, task.t1_ns, nbytes=self._buffer.nbytes, line=self.line)

    def _facts(self) -> Facts:
        """Return the fields of errors.Wait for a rank that waits for it."""
        info = {**self._call.facts(), "dtype": self._buffer.dtype if self._buffer.count else ""}
        return {**info, "counts": self.background.comm.calls.times("all_reduce", self.line)}


class FunctionWork(BackgroundWork):
    """A function of the Python thread. before: works of other threads that have to end before it begins."""

    def __init__(
        self,
        background: Background,
        fn: Callable[..., object],
        args: tuple[Any, ...],
        line: str,
        before: list[BackgroundWork],
    ) -> None:
        super().__init__(background, getattr(fn, "__name__", type(fn).__name__), line)
        self._call: tuple[Callable[..., object], tuple[Any, ...]] | None = fn, args
        self._before = before
        self._ended = threading.Event()

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def run(self) -> None:
        """In the Python thread: do it."""
        background = self.background
        try:
            while any(not work.has_ended() for work in self._before):
                if background.waiting.stopping:
                    raise KeyboardInterrupt
                time.sleep(LOOK)
            background.work_for(self.line)
            if self._call is not None:
                fn, args = self._call
                self.value = fn(background.open(), *args)
                del fn, args
        except BaseException as error:
            self.error = error
        self._call, self._before = None, []
        self._ended.set()

    def finish(self) -> None:
        background, status = self.background, self.background.waiting.own
        ending = _Ending(self._ended, background.signs_of_life)
        background.comm.waiting.watch(ending, self.what, lambda: status.own, self.line)
        self.finished = True


def _ends(thread: threading.Thread, seconds: float) -> bool:
    """Return True if `thread` ends within `seconds`: in short waits: one is lost if the process is stopped."""
    for _ in range(10):
        thread.join(seconds / 10)
    return not thread.is_alive()


def _interrupt(thread: threading.Thread) -> None:
    """Raise KeyboardInterrupt in the Python code of another thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt))


# -- how the background waits ------------------------------------------------------------------------------------------
#
# By the same rules as the rank, but it publishes nothing: a rank has one slot in the status table, which only its main
# thread writes. So a wait in the background is published by the main thread, when that waits for the background itself;
# otherwise what the main thread does is of interest.


class _ThreadStatus:
    """The status table as the background sees it: its own waits stay in `own` (a Slot, or None).

    line: source line to report when no user frame is on the stack.
    """

    def __init__(self, status: Status, rank: int) -> None:
        self._status, self._rank = status, rank
        self.own: Slot | None = None
        self.line = ""

    def publish(
        self,
        rank: int,
        state: str,
        run: int = 0,
        op: str = "",
        peers: Sequence[int] = (),
        nbytes: int = 0,
        since_ns: int = 0,
        until_ns: int = 0,
        line: str = "",
        facts: Facts | None = None,
    ) -> None:
        times = since_ns or now_ns(), until_ns
        self.own = Slot(os.getpid(), run, state, op, tuple(peers), nbytes, *times, line or self.line, facts or {})

    def end_wait(self, rank: int) -> None:
        if self.own is not None:
            self.own = self.own._replace(until_ns=now_ns())

    def exchange(self, members: tuple[int, ...]) -> None:
        """Do nothing: the main thread does that."""

    def slot(self, rank: int) -> Slot:
        return self.own if rank == self._rank and self.own else self._status.slot(rank)

    def waits(self, ranks: Sequence[int] | None = None, run: int | None = None) -> list[Wait]:
        return waits_of(self, ranks or (), run)  # of the slots that are seen from here

    def leave(self, members: tuple[int, ...]) -> None:
        """Do nothing: the main thread does that."""

    def died(self, rank: int) -> bool:
        return self._status.died(rank)

    def is_unreachable(self, rank: int) -> bool:
        return self._status.is_unreachable(rank)


class _BackgroundWaiting(Waiting):
    """The waits of the background of the rank of `waiting`, in a thread of its own.

    Its naps are short and come soon, because the rank computes on the same core.
    """

    in_background = True

    def __init__(self, waiting: Waiting) -> None:
        self.own = _ThreadStatus(waiting.status, waiting.rank)
        super().__init__(self.own, waiting.rank, waiting.members, waiting.run, waiting.deadline, oversubscribed=True)
        self.calls, self.stopping = waiting.calls, False
        self.looks = 0  # at what it waits for

    def take_limits(self, waiting: Waiting) -> None:
        """Take over what may have changed in `waiting`."""
        self.deadline, self.inject = waiting.deadline, waiting.inject

    def stop(self) -> None:
        """End every wait now."""
        self.stopping = True

    def _wait(self, operation: Waitable, seconds: float, nap: float) -> bool:
        if self.stopping:
            raise KeyboardInterrupt
        self.looks += 1
        return super()._wait(operation, seconds, nap or NAP)


class _Ending(OfThread):
    """The end of what another thread does. progress: a function whose value changes when that thread communicates."""

    def __init__(self, ended: threading.Event, progress: Callable[[], int]) -> None:
        self.ended, self._progress = ended, progress

    @property
    def progress(self) -> int:
        return self._progress()
