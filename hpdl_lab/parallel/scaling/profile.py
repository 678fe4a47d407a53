"""Steps of training on this machine, timed in turn with rehearsals of them and with their all-reduces alone.

A rehearsal says what a rank computes, and when, while all ranks compute at once. All-reduces in a row say what messages
cost here. What goes on in the background is also rehearsed together with it: the two slow each other down (overlap.py).
All are taken in turn, so that a machine that becomes slower meanwhile slows down all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import numpy as np
import torch
from torch import Tensor

from ...comm.base import Comm, Done, Work
from ...comm.buffers import ArrayT, copy_into, new_like, synchronize
from ...data.dataset import Dataset
from ...data.loading import shard_indices
from ...measure import measure
from ...trace import Event, Trace, now_ns
from .. import training
from ..consensus import require_sums_of
from ..data_parallel import Strategy
from ..reducer import AllReduce, allocate, allocate_in_background
from .overlap import Both, Message, StepProfile

if TYPE_CHECKING:
    from ...comm.buffers import Array

LEAST, MOST = 5, 80  # steps that are timed
WARM_UP = 2
TINY = 8  # bytes, of the message that says what the number of messages costs


class Timings(NamedTuple):
    """The times of what was timed in turn, the same on every rank. steps: [s] of the slowest rank, one for each turn.

    profiles: [StepProfile] of the slowest rank; empty if the strategy cannot be rehearsed, and `why`.
    talks: [s] of all the step's all-reduces in a row, and tiny: [s] of one of TINY bytes; empty on one rank.
    both: [overlap.Both] of rehearsals with those all-reduces in the background; empty if none is sent there.
    """

    steps: list[float]
    profiles: list[StepProfile]
    talks: list[float]
    tiny: list[float]
    both: list[Both]
    why: str = ""


class _Trainer:
    """A model under training on one rank: each call is a step on this rank's shard of the first n examples."""

    def __init__(self, comm: Comm, model: torch.nn.Module, strategy: Strategy, data: Dataset) -> None:
        self.comm, self.model, self.strategy, self.data = comm, model.to(comm.device), strategy, data
        strategy.start(comm, self.model)
        self.optimizer = strategy.optimizer(self.model, lambda params: torch.optim.SGD(params, lr=1e-3))

    def __call__(self, n: int) -> None:
        mine = shard_indices(torch.arange(n) % len(self.data.train_y), self.comm.rank, self.comm.size)
        x, y = (part[mine].to(self.comm.device) for part in (self.data.train_x, self.data.train_y))
        training.train_step(self.comm, self.model, self.strategy, self.optimizer, x, y, n)
        synchronize(next(self.model.parameters()))


class RehearsedStep:
    """A step that waits for no message. A call with the number of examples over all ranks gives its StepProfile.

    Raises: NotRehearsed, at once or in a call, if the strategy cannot be rehearsed.
    """

    def __init__(self, comm: Comm, model: torch.nn.Module, strategy: Strategy, data: Dataset) -> None:
        free_of_charge = rehearsed(strategy)
        self.comm = Rehearsal(comm, strategy.all_reduce)
        self.step = _Trainer(self.comm, copy.deepcopy(model), free_of_charge, data)
        self.comm.starting = False

    def __call__(self, n: int) -> StepProfile:
        comm = self.comm
        samples = len(shard_indices(torch.arange(n), comm.rank, comm.size))
        comm.called.clear()
        seen = len(comm.trace.log)
        begin = now_ns()
        self.step(n)
        end = now_ns()
        ends = {event.op: event.t1_ns for event in comm.trace.events[seen:]}
        forward, backward, added = ((ends[op] - begin) / 1e9 for op in ("forward", "backward", "add gradients"))
        comm.wait_for_all()
        messages = tuple(Message((t - begin) / 1e9, nbytes, background) for t, nbytes, background in comm.called)
        return StepProfile(samples, forward, backward, added, (end - begin) / 1e9, messages)


def time_steps(
    comm: Comm, model: torch.nn.Module, strategy: Strategy, data: Dataset, n: int, seconds: float = 1.0
) -> Timings:
    """Time steps on a global batch of n, their rehearsals, and their all-reduces, in turn. Steps leave events.

    Args:    model: nn.Module; strategy: as in parallel/data_parallel.py, not started; both are left as they are.
             data: a data set, the same on every rank; n: examples over all ranks; seconds: about as long as it takes.
    Returns: Timings.
    Raises:  WrongAnswer, on every rank, if the all-reduce does not add up: one that does nothing would scale best.
    """
    if hasattr(strategy, "all_reduce"):
        require_sums_of(comm, strategy.all_reduce, [torch.float32])
    step = _Trainer(comm, copy.deepcopy(model), copy.deepcopy(strategy), data)
    rehearsal: RehearsedStep | None = None
    profile: StepProfile | None = None
    why = ""
    try:
        rehearsal = RehearsedStep(comm, model, strategy, data)
        profile = rehearsal(n)
    except NotRehearsed as error:
        why = str(error)
    talk = _Talk(comm, strategy.all_reduce, profile.messages) if profile and comm.size > 1 else None
    overlapped = _Overlapped(comm, rehearsal) if rehearsal and talk and talk.background else None

    def once() -> Iterator[float]:
        begin = 0
        yield _timed(comm, lambda: step(n))
        if profile and rehearsal:
            comm.barrier()
            begin = comm.trace.clock()
            yield from _in_a_row(rehearsal(n))
        if talk:
            yield from talk.times_since(begin)
        if overlapped:
            overlapped.rehearse(n)

    rows = _turns(comm, once, seconds)  # (ranks, turns, columns)
    steps, rehearsals, talks = np.split(rows, (1, rows.shape[2] - 3 * bool(talk)), axis=2)
    most = -(-n // comm.size)  # examples of the rank with the longest shard
    profiles = [_as_profile(profile, row, most) for row in _slowest(rehearsals)] if profile else []
    before, after, tiny = talks.max(axis=0).T if talk else np.zeros((3, 0))
    both = overlapped.slowest(rows.shape[1]) if overlapped else []
    return Timings(steps[..., 0].max(axis=0).tolist(), profiles, (after - before).tolist(), tiny.tolist(), both, why)


class _Talk:
    """The all-reduces of a step in a row, with nothing between them."""

    def __init__(self, comm: Comm, all_reduce: AllReduce, messages: Sequence[Message]) -> None:
        """Make room for the messages of a StepProfile. Collective."""
        self.comm, self.all_reduce = comm, all_reduce
        self.background = messages[-1].background
        sizes = [message.nbytes // 4 for message in messages]
        memory = (allocate_in_background if self.background else allocate)(comm, max(sizes), torch.float32)
        self.tensors = [memory[:size] for size in sizes]

    def times_since(self, begin: int) -> Iterator[float]:
        """Yield, of this rank, s from `begin` until it began, s until it ended, s of an all-reduce of TINY bytes."""
        clock = self.comm.trace.clock
        if self.background:
            self.comm.barrier()
            begin = clock()
        yield (clock() - begin) / 1e9
        self.reduce(self.tensors)
        yield (clock() - begin) / 1e9
        yield _timed(self.comm, lambda: self.reduce([self.tensors[0][: TINY // 4]]))

    def reduce(self, tensors: Sequence[Tensor]) -> None:
        works = [self.comm.background(self.all_reduce, x) for x in tensors if self.background]
        for work in works:
            work.wait()
        for x in tensors if not self.background else ():
            self.all_reduce(self.comm, x)


class _Overlapped:
    """Rehearsals that send their all-reduces. taken: [(s of one, ns when it began, ns when all had ended)]."""

    def __init__(self, comm: Comm, rehearsal: RehearsedStep) -> None:
        self.comm, self.rehearsal = comm, rehearsal
        self.taken: list[tuple[float, int, int]] = []

    def rehearse(self, n: int) -> None:
        """Take one, on a global batch of n."""
        self.comm.barrier()
        self.rehearsal.comm.sends = True
        begin = now_ns()
        profile = self.rehearsal(n)
        self.taken.append((profile.end, begin, now_ns()))
        self.rehearsal.comm.sends = False

    def slowest(self, turns: int) -> list[Both]:
        """Return [Both] of the rank that took longest, of the last `_turns`, the same on every rank. Collective."""
        events = [event for event in self.comm.trace.events if event.lane]
        mine = [(end, self.seconds_until_sent(begin, last, events)) for end, begin, last in self.taken[-turns:]]
        rows = np.asarray(self.comm.all_gather(np.array(mine)))  # (ranks, turns, 2)
        return [Both(*row) for row in rows.max(axis=0).tolist()]

    def seconds_until_sent(self, begin: int, last: int, events: Sequence[Event]) -> float:
        """Return s from `begin` until the last message ended; no rank waited for it before `last`."""
        ends = [event.t1_ns for event in events if begin < event.t1_ns <= last]
        return (max(ends, default=last) - begin) / 1e9


def rehearse(
    comm: Comm,
    model: torch.nn.Module,
    strategy: Strategy,
    data: Dataset,
    batches: Collection[int],
    seconds: float = 1.0,
) -> list[StepProfile]:
    """Return StepProfiles of this machine for other numbers of examples per rank, while all ranks compute at once.

    Args:    batches: numbers of examples of each rank; seconds: about as long as all of it takes.
    Returns: list of StepProfiles in rising order of their samples, the same on every rank.
    Raises:  NotRehearsed if the strategy cannot be.
    """
    rehearsal = RehearsedStep(comm, model, strategy, data)
    profiles = []
    for samples in sorted(batches):

        def once(n: int = samples * comm.size) -> list[float]:
            comm.barrier()
            return _in_a_row(rehearsal(n))

        profile = rehearsal(samples * comm.size)
        rows = _slowest(_turns(comm, once, seconds / len(batches)))
        profiles.append(_as_profile(profile, np.median(rows, axis=0), samples))
    return profiles


def _turns(comm: Comm, once: Callable[[], Iterable[float]], seconds: float) -> np.ndarray:
    """Return (ranks, samples, columns) of `once()`, as often as fits into `seconds`; untraced turns come first."""
    last = 0
    recording, comm.trace.enabled = comm.trace.enabled, False
    try:
        for _ in range(WARM_UP):
            begin = now_ns()  # also on simulated ranks, whose own clock says nothing about rehearsals
            list(once())
            last = now_ns() - begin
    finally:
        comm.trace.enabled = recording
    longest = float(np.asarray(comm.all_gather(np.array([last], dtype=np.float64))).max())
    samples = int(min(MOST, max(LEAST, seconds * 1e9 / max(longest, 1.0))))
    return np.asarray(comm.all_gather(np.array([list(once()) for _ in range(samples)])))


def _timed(comm: Comm, call: Callable[[], object]) -> float:
    """Return seconds of `call()` on this rank's clock; all ranks begin together."""
    return measure(call, warmup=0, repeats=1, barrier=comm.barrier, clock=comm.trace.clock).median


def _in_a_row(profile: StepProfile) -> list[float]:
    """Return the times of a StepProfile as numbers, its end first."""
    times = (profile.end, profile.forward, profile.backward, profile.added)
    return [*times, *(message.at for message in profile.messages)]


def _slowest(rows: np.ndarray) -> np.ndarray:
    """Return (turns, columns) of the slowest rank in each turn. rows: (ranks, turns, columns) of `_in_a_row`."""
    return rows[rows[..., 0].argmax(axis=0), np.arange(rows.shape[1])]


def _as_profile(like: StepProfile, row: np.ndarray, samples: int) -> StepProfile:
    """Return the StepProfile with the messages of `like` and the times of `row`, which `_in_a_row` made."""
    end, forward, backward, added, *calls = row.tolist()
    messages = tuple(m._replace(at=at) for m, at in zip(like.messages, calls, strict=True))
    return StepProfile(samples, forward, backward, added, end, messages)


# -- a step that waits for no message ----------------------------------------------------------------------------------
#
# All-reduces that hold up the rank are left out. Those in the background are sent, or left out too: what they cost the
# rank even if they hide, since a core that moves bytes computes nothing, is the difference of both.


class Rehearsal(Comm):
    """The communicator of a rehearsal on the ranks of `comm`. What it does not send, everybody is taken to have equal.

    own_all_reduce: the strategy's, for what runs in the background; None if nothing does.
    sends: whether what runs in the background is sent.
    called: [(ns, bytes, whether in the background)] of all-reduces; under_way: the Works of these.
    starting: whether the strategy may still broadcast parameters and compare notes, which no step does.
    """

    def __init__(self, comm: Comm, own_all_reduce: AllReduce | None) -> None:
        super().__init__(comm.rank, comm.size, Trace(comm.rank, clock=now_ns))
        self.comm, self.own_all_reduce = comm, own_all_reduce
        self.under_way: list[Work] = []
        self.node_rank, self.node_size, self.device = comm.node_rank, comm.node_size, comm.device
        self.called: list[tuple[int, int, bool]] = []
        self.starting, self.sends = True, False

    @property
    def has_background(self) -> bool:
        return self.comm.has_background

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[False] = False) -> ArrayT: ...

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[True]) -> Work: ...

    def all_reduce(self, x: ArrayT, async_op: bool = False) -> ArrayT | Work:
        self.called.append((now_ns(), x.nbytes, False))
        return x

    def background(self, fn: Callable[..., object], *args: Any, after: Sequence[Work] = ()) -> Work:
        """Start, if this `sends`, an all-reduce of the first argument in the background; wait for nothing."""
        if self.starting:  # the memory that buckets are sent from
            return self.comm.background(fn, *args, after=after)
        if fn is not _free:
            raise NotRehearsed("a strategy that does more than all-reduces in the background cannot be rehearsed")
        self.called.append((now_ns(), args[0].nbytes, self.has_background))
        if self.has_background and self.sends and self.own_all_reduce is not None:
            self.under_way.append(self.comm.background(self.own_all_reduce, *args))
        return Done.of(lambda comm: args[0], self)

    def barrier(self) -> None:
        pass

    def broadcast(self, x: ArrayT, root: int = 0) -> ArrayT:
        self.require_starting()
        return x

    def all_gather(self, x: ArrayT) -> ArrayT:
        self.require_starting()
        stack = new_like(x, (self.size, *x.shape))
        for rank in range(self.size):
            copy_into(stack[rank], x)
        return stack

    def split(self, color: object, key: object = 0) -> Comm:
        return Rehearsal(self.comm, self.own_all_reduce)

    def allocate(self, shape: int | Sequence[int], dtype: str | torch.dtype = "float32") -> Tensor:
        return self.comm.allocate(shape, dtype)

    def isend(self, x: Array, dst: int) -> NoReturn:
        raise NotRehearsed("a strategy that sends messages of its own cannot be rehearsed")

    def irecv(self, x: Array, src: int) -> NoReturn:
        self.isend(x, src)

    def wait_for_all(self) -> None:
        """Wait for what is under way: the next rehearsal begins with nothing."""
        while self.under_way:
            self.under_way.pop(0).wait()

    def require_starting(self) -> None:
        if not self.starting:
            raise NotRehearsed("a strategy that broadcasts or gathers in every step cannot be rehearsed")


class NotRehearsed(TypeError):
    """A strategy whose steps cannot be divided into computing and all-reduces."""


def _free(comm: Comm, x: Tensor) -> Tensor:
    """Reduce as a rehearsal does."""
    return comm.all_reduce(x)


def rehearsed(strategy: Strategy) -> Strategy:
    """Return a copy of `strategy`, not started, with an all-reduce that costs nothing. Raises NotRehearsed."""
    if not hasattr(strategy, "all_reduce"):
        raise NotRehearsed(f"{type(strategy).__name__} has no all_reduce that could be left out")
    strategy = copy.deepcopy(strategy)
    strategy.all_reduce = _free
    return strategy
