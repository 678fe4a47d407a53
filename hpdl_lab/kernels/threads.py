"""A CUDA kernel in Python, thread by thread on the CPU, with a record of every access to memory.

A kernel finds numba's simulator as `cuda`, with the shuffles and the log that the simulator lacks. Its threads
are coroutines here, which run until a barrier, a shuffle or their end, so that every launch goes the same way. Whether
two threads race is read from the log, and does not depend on which of them came first.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda as numba_cuda
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAAtomic, FakeCUDAModule

from ..comm.status import report
from ..trace import line_of
from .ladder import Kernel

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

WARP = 32  # threads that take every instruction together; shared memory has as many banks of four bytes
WORD, SECTOR = 4, 32  # bytes: of a bank; that global memory is read by
VERBS = {"read": "reads", "write": "writes", "atomic": "adds to"}
Index: TypeAlias = int | np.integer | tuple[int | np.integer, ...]

T = TypeVar("T")


class KernelError(Exception):
    """The end of a launch: `failed` is "bounds", "barrier", "shuffle" or "returns"; its text names threads, lines."""

    def __init__(self, failed: str, text: str) -> None:
        super().__init__(text)
        self.failed = failed


class SourceLocation(NamedTuple):
    """An expression in a kernel: its code, its span there, and its line as people call it, such as "cell:7"."""

    code: CodeType
    span: tuple[int | None, ...]
    line: str

    def __str__(self) -> str:
        return f" in {report.line_place(self.line)}" if self.line else ""


class Access(NamedTuple):
    """An access of a thread to an element.

    kind:   "read", "write" or "atomic"; element: its index in the flat array.
    phase:  barriers that the thread had passed; epoch: the same of cuda.syncwarp().
    nth:    how often it had come to this instruction: threads of a warp come to it together.
    fresh:  the element had not been written.
    """

    block: int
    thread: int
    array: Array
    element: int
    kind: str
    phase: int
    epoch: int
    location: SourceLocation
    nth: int
    fresh: bool

    @property
    def warp(self) -> int:
        return self.thread // WARP

    def __str__(self) -> str:
        return f"thread {self.thread} {VERBS[self.kind]} {self.array.name}[{self.element}]{self.location}"


class Array:
    """An array in a kernel: every access to an element is noted. `shared`: the block that it belongs to, or None."""

    def __init__(self, launch: Launch, values: np.ndarray, name: str = "", shared: int | None = None) -> None:
        self.launch, self.values, self.name, self.shared = launch, values, name, shared
        self.written = np.full(values.shape, shared is None)
        self.shape, self.dtype, self.ndim, self.size = values.shape, values.dtype, values.ndim, values.size

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Index) -> np.generic:
        self.note("read", index, sys._getframe(1))
        return self.values[index]

    def __iter__(self) -> Iterator[np.generic]:
        kernel = sys._getframe(1)
        for i in range(len(self)):
            self.note("read", i, kernel)
            yield self.values[i]

    def __setitem__(self, index: Index, value: object) -> None:
        self.note("write", index, sys._getframe(1))
        self.values[index] = value

    def note(self, kind: str, index: Index, frame: FrameType) -> None:
        """Log an access; raise KernelError for an element that is not there, TypeError for more than one."""
        thread = self.launch.now
        if not self.name:  # shared memory has the name that the kernel gave it
            self.name = next((name for name, value in frame.f_locals.items() if value is self), "shared")
        at = index if isinstance(index, tuple) else (index,)
        if len(at) != self.ndim or not all(isinstance(i, int | np.integer) for i in at):
            one = f"{self.name}[{', '.join('ijkl'[: self.ndim])}]"
            raise TypeError(f"a thread takes one element at a time, {one} with whole numbers, not [{index!r}]")
        flat = 0
        for i, n in zip(at, self.shape, strict=True):
            if not -n <= i < n:
                element = f"{self.name}[{', '.join(map(str, at))}]{_location_of(frame)}"
                text = f"thread {thread.index} of block {thread.block} {VERBS[kind]} {element}"
                raise KernelError("bounds", f"{text}, and there are {self.size:,} elements")
            flat = flat * n + int(i) % n
        location, fresh = _location_of(frame), not self.written.flat[flat]
        nth = thread.times[location, kind]
        thread.times[location, kind] += 1
        who = thread.block, thread.index
        self.launch.log.append(Access(*who, self, flat, kind, thread.phase, thread.epoch, location, nth, fresh))
        if kind != "read":
            self.written.flat[flat] = True


def _location_of(frame: FrameType) -> SourceLocation:
    # Not f_lasti itself: it lies a little further on once the interpreter has specialized the instruction.
    return SourceLocation(frame.f_code, _spans(frame.f_code)[frame.f_lasti // 2], line_of(frame, frame.f_lineno))


@lru_cache(maxsize=64)
def _spans(code: CodeType) -> list[tuple[int | None, ...]]:
    return list(code.co_positions())


@dataclass(eq=False)
class Thread:
    """A thread of a block, and what it waits for: the call, its location, the lanes that have to come, its value."""

    block: int
    index: int
    body: greenlet
    phase: int = 0
    epoch: int = 0
    times: Counter[tuple[SourceLocation, str]] = field(default_factory=Counter)
    call: str = ""
    location: SourceLocation | None = None
    mask: int = 0
    value: object = None
    got: dict[int, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.body.dead:
            return "has returned"
        return f"waits in cuda.{self.call}{self.location}"


class _Cuda(FakeCUDAModule):
    """The module that a kernel finds as `cuda` during a launch."""

    def __init__(self, launch: Launch) -> None:
        super().__init__((launch.blocks, 1, 1), (launch.threads, 1, 1), 0)
        self._launch = launch

    def __getattr__(self, name: str) -> NoReturn:
        known = hasattr(numba_cuda, name)
        raise AttributeError(f"cuda.{name} is not simulated here" if known else f"numba's cuda has no {name}")

    @property
    def atomic(self) -> _Atomic:
        return _Atomic()

    @property
    def shared(self) -> SharedMemory:
        return self._launch.memory

    @property
    def threadIdx(self) -> Dim3:
        return Dim3(self._launch.now.index, 0, 0)

    @property
    def blockIdx(self) -> Dim3:
        return Dim3(self._launch.now.block, 0, 0)

    @property
    def laneid(self) -> int:
        return self._launch.now.index % WARP

    def syncthreads(self) -> None:
        self._launch.meet("syncthreads", sys._getframe(1))

    def syncthreads_count(self, value: object) -> int:
        return sum(map(bool, self._launch.meet("syncthreads_count", sys._getframe(1), value=value).values()))

    def syncthreads_and(self, value: object) -> bool:
        return all(self._launch.meet("syncthreads_and", sys._getframe(1), value=value).values())

    def syncthreads_or(self, value: object) -> bool:
        return any(self._launch.meet("syncthreads_or", sys._getframe(1), value=value).values())

    def syncwarp(self, mask: int = 0xFFFFFFFF) -> None:
        self._launch.meet("syncwarp", sys._getframe(1), mask)
        self._launch.now.epoch += 1

    def shfl_sync(self, mask: int, value: T, source: int) -> T:
        return self._shuffle("shfl_sync", sys._getframe(1), mask, value, source % WARP)

    def shfl_down_sync(self, mask: int, value: T, distance: int) -> T:
        return self._shuffle("shfl_down_sync", sys._getframe(1), mask, value, self.laneid + distance)

    def shfl_up_sync(self, mask: int, value: T, distance: int) -> T:
        return self._shuffle("shfl_up_sync", sys._getframe(1), mask, value, self.laneid - distance)

    def shfl_xor_sync(self, mask: int, value: T, bits: int) -> T:
        return self._shuffle("shfl_xor_sync", sys._getframe(1), mask, value, self.laneid ^ bits)

    def _shuffle(self, call: str, frame: FrameType, mask: int, value: T, source: int) -> T:
        """Return the value of lane `source`; the thread's own if there is no such lane. Raises KernelError."""
        thread = self._launch.now
        values = self._launch.meet(call, frame, mask, value)
        if not 0 <= source < WARP:
            return value
        if source not in values:
            whose = f"of lane {source}, which the mask {mask:#x} does not name"
            raise KernelError("shuffle", f"thread {thread.index} takes the value{_location_of(frame)} {whose}")
        return values[source]


class _Atomic:
    """cuda.atomic of numba's simulator; each call is one access."""

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(FakeCUDAAtomic(), name)

        def call(array: Array, index: Index, *values: object) -> object:
            array.note("atomic", index, sys._getframe(1))
            return method(array.values, index, *values)

        return call


class SharedMemory:
    """cuda.shared of one block: threads that come to the same line get the same array, not written yet."""

    def __init__(self, launch: Launch, block: int) -> None:
        self.launch, self.block = launch, block
        self.arrays: dict[SourceLocation, Array] = {}

    def array(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        location = _location_of(sys._getframe(1))
        if location not in self.arrays:
            known = np.dtype(getattr(dtype, "name", dtype))  # of numba's types too
            values = np.full(shape, np.nan if known.kind == "f" else 0, known)
            self.arrays[location] = Array(self.launch, values, shared=self.block)
        return self.arrays[location]


class Launch:
    """A run of kernel[blocks, threads](*arguments), block after block; NumPy arrays among the arguments are changed.

    log:      every Access, in the order in which they came.
    barriers: the most that any block has passed.
    Raises:   KernelError, and whatever the kernel raises.
    """

    def __init__(self, kernel: Kernel, blocks: int, threads: int, *arguments: object) -> None:
        self.blocks, self.threads, self.barriers = blocks, threads, 0
        self.log: list[Access] = []
        body = _with_cuda(kernel, _Cuda(self))
        names = [*inspect.signature(body).parameters, *[""] * len(arguments)]
        recorded = [_recording(self, value, name) for value, name in zip(arguments, names, strict=False)]
        for block in range(blocks):
            self._run_block(block, body, recorded)

    def _run_block(self, block: int, body: Callable[..., object], arguments: list[object]) -> None:
        self.memory = SharedMemory(self, block)
        threads = [Thread(block, i, greenlet(body)) for i in range(self.threads)]
        ready = threads
        while ready:
            for thread in ready:
                self.now = thread
                returned = thread.body.switch(*(() if thread.body else arguments))
                if thread.body.dead and returned is not None:
                    raise KernelError("returns", f"thread {thread.index} of block {block} returns {returned!r:.40}")
            ready = _released(threads)
        self.barriers = max(self.barriers, *(thread.phase for thread in threads))

    def meet(self, call: str, frame: FrameType, mask: int = 0, value: T = None) -> dict[int, T]:
        """Wait for the block, or for the lanes of `mask` if there is one: {thread or lane: the value it brings}."""
        thread = self.now
        if mask and not mask >> thread.index % WARP & 1:
            where = f"cuda.{call}{_location_of(frame)}"
            raise KernelError("shuffle", f"thread {thread.index} calls {where} with {mask:#x}, without its lane")
        thread.call, thread.location, thread.mask, thread.value = call, _location_of(frame), mask, value
        getcurrent().parent.switch()  # pyrefly: ignore[missing-attribute] # every thread has a parent
        return thread.got


def _released(threads: list[Thread]) -> list[Thread]:
    """Return the threads of a block that may go on, as all whom they wait for have come; [] once all have returned.

    Raises:  KernelError if none may.
    """
    waiting, free = [thread for thread in threads if not thread.body.dead], list[Thread]()
    warps: dict[tuple[int, SourceLocation | None, int], list[Thread]] = defaultdict(list)
    for thread in waiting:
        if thread.mask:
            warps[thread.index // WARP, thread.location, thread.mask].append(thread)
    for lanes in warps.values():
        if len(lanes) == len(_awaited(lanes[0], threads)):
            values = {thread.index % WARP: thread.value for thread in lanes}
            for thread in lanes:
                thread.got = values
            free += lanes
    if not free and waiting and all(_together(thread, waiting[0]) for thread in threads):
        values, free = {thread.index: thread.value for thread in waiting}, waiting
        for thread in free:
            thread.got, thread.phase = values, thread.phase + 1
    if waiting and not free:
        raise missing(threads, waiting)
    return free


def _awaited(thread: Thread, threads: list[Thread]) -> list[Thread]:
    """Return the threads of the block `threads` that one of them waits for: the lanes of its mask, or all."""
    first = thread.index - thread.index % WARP
    warp = threads[first : first + WARP]
    return [t for t in warp if thread.mask >> t.index % WARP & 1] if thread.mask else threads


def _together(a: Thread, b: Thread) -> bool:
    """Return True if both wait in the same call of the same kind."""
    return not a.body.dead and (a.location, a.mask) == (b.location, b.mask)


def missing(threads: list[Thread], waiting: list[Thread]) -> KernelError:
    """Return the error that says why no thread of a block can go on."""
    one = next((thread for thread in waiting if thread.mask), waiting[0])
    group = _awaited(one, threads)
    others = [thread for thread in group if not _together(thread, one)]
    same = [thread for thread in others if str(thread) == str(others[0])]
    whom = f"that the mask {one.mask:#x} names" if one.mask else "of its block"
    text = f"thread {one.index} of block {one.block} {one} for all {len(group)} threads {whom}"
    state = str(same[0])
    if len(same) > 1:
        state = state.replace("has ", "have ", 1).replace("waits ", "wait ", 1)
    return KernelError("shuffle" if one.mask else "barrier", f"{text}, but {_named_threads(same)} {state}")


def _named_threads(threads: list[Thread]) -> str:
    """Return "thread 3", "threads 64 to 127", "64 threads, the first of them 1"."""
    numbers = [thread.index for thread in threads]
    if len(numbers) == 1:
        return f"thread {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"threads {numbers[0]} to {numbers[-1]}"
    return f"{len(numbers)} threads, the first of them {numbers[0]},"


def _recording(launch: Launch, value: object, name: str) -> object:
    """Return `value` as a kernel gets it: arrays, also in a tuple, note what is done to them."""
    if isinstance(value, tuple | list):
        return tuple(_recording(launch, item, f"{name}[{i}]") for i, item in enumerate(value))
    return Array(launch, value, name) if isinstance(value, np.ndarray) else value


def _with_cuda(kernel: Kernel, cuda: _Cuda) -> FunctionType:
    """Return `kernel` and the functions of its module, jitted or not, with another module for numba's `cuda`."""
    plain: FunctionType = getattr(kernel, "py_func", kernel)
    scope = plain.__globals__ | {"cuda": cuda}
    for name, value in plain.__globals__.items():
        inner = getattr(value, "py_func", value)
        if value is numba_cuda:
            scope[name] = cuda
        elif isinstance(inner, FunctionType) and inner.__globals__ is plain.__globals__:
            scope[name] = FunctionType(inner.__code__, scope, name, inner.__defaults__, inner.__closure__)
    return FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__, plain.__closure__)


# -- what the log says ------------------------------------------------------------------------------------------------


def races(log: list[Access]) -> Iterator[tuple[Access, Access]]:
    """Yield pairs of accesses to one element, one of them a write, by threads that nothing has put into an order."""
    elements: dict[tuple[int, int], list[Access]] = defaultdict(list)
    for access in log:
        elements[id(access.array), access.element].append(access)
    for found in elements.values():
        plain = [access for access in found if access.kind != "atomic"]
        for a in found:
            if a.kind != "read":
                yield from ((a, b) for b in (plain if a.kind == "atomic" else found) if _unordered(a, b))


def _unordered(a: Access, b: Access) -> bool:
    if (a.block, a.thread) == (b.block, b.thread):
        return False
    return a.block != b.block or (a.phase == b.phase and (a.warp != b.warp or a.epoch == b.epoch))


def by_warps(log: list[Access], shared: bool) -> Iterator[list[Access]]:
    """Return, for each instruction of a warp, the accesses of its threads to shared or to global memory."""
    found: dict[tuple[int, int, SourceLocation, str, int], list[Access]] = defaultdict(list)
    for access in log:
        if (access.array.shared is not None) == shared:
            found[access.block, access.warp, access.location, access.kind, access.nth].append(access)
    return iter(found.values())


def banks(accesses: list[Access]) -> dict[int, dict[int, Access]]:
    """Return {bank: {word: the first Access to it}} for one instruction of a warp."""
    found: dict[int, dict[int, Access]] = defaultdict(dict)
    for access in accesses:
        word = access.element * access.array.dtype.itemsize // WORD
        found[word % WARP].setdefault(word, access)
    return found


def words_per_bank(accesses: list[Access]) -> list[int]:
    """Return the number of different words of each bank that one instruction of a warp asks for."""
    found = banks(accesses)
    return [len(found.get(bank, ())) for bank in range(WARP)]


def conflicts(accesses: list[Access]) -> int:
    """Return how often one instruction of a warp is repeated, because threads want different words of one bank.

    Elements of eight bytes take two turns in any case: half a warp at a time.
    """
    width = max(accesses[0].array.dtype.itemsize, WORD)
    halves: dict[int, list[Access]] = defaultdict(list)
    for access in accesses:
        halves[access.thread % WARP * width // (WARP * WORD)].append(access)
    return sum(max(map(len, banks(half).values())) - 1 for half in halves.values())


def sectors(accesses: list[Access]) -> int:
    """Return how many pieces of SECTOR bytes one instruction of a warp moves between the GPU and its memory."""
    return len({access.element * access.array.dtype.itemsize // SECTOR for access in accesses})


def counts(launch: Launch) -> dict[str, int]:
    """Return the costs of a launch, the columns of the ladder's table."""
    shared, others = list(by_warps(launch.log, True)), list(by_warps(launch.log, False))
    return {
        "atomics": sum(access.kind == "atomic" for access in launch.log),
        "sectors": sum(sectors(accesses) for accesses in others if accesses[0].kind != "atomic"),
        "barriers": launch.barriers,
        "shared": len(shared),
        "conflicts": sum(map(conflicts, shared)),
        "races": sum(1 for _ in races(launch.log)),
    }
