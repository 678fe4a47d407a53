"""Notebook 05: a vector from GPU to GPU, through pinned memory of the hosts, in blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...comm import Results
from ...comm.base import Comm
from ...comm.errors import ForgottenWait
from ...comm.network import Switch
from ...kernels import staging
from ...kernels.staging import pipelined_copy
from ...trace import Event
from ...units import counted
from ..checkers import engine_facts, in_all_cases
from ..ranks import SENTINEL, number, off_by, simulate
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Runner
from ..traffic import check_waits, in_barriers

MOST_BLOCKS = 3  # of pinned memory on a rank
SLACK = 2  # block times more than the best answer's
CASES = (  # (ranks, elements, block, source, destination)
    (2, 12, 4, 0, 1),
    (2, 1000, 100, 0, 1),
    (2, 1001, 100, 1, 0),
    (3, 1000, 64, 2, 0),
    (2, 7, 10, 0, 1),
    (2, 30, 10, 1, 0),
    (2, 0, 4, 0, 1),
)
TIMED = (2, 1600, 100, 0, 1)
UNIT = Switch(alpha=1.0, beta=0.0)  # on which a message takes 1 s, whatever its size
ENGINES = (1001, 100, 0, 1)
EQUAL, FAST = (1.0, 1.0), (0.25, 0.25)  # message times of a copy out, and of a copy in
SPEEDS = {
    EQUAL: "a copy takes as long as a message",
    FAST: "copies are faster than messages",
    (4.0, 0.25): "copies out are slower than messages",
    (0.25, 4.0): "copies in are slower than messages",
}
LATE = 100.0  # s
UNWAITED = {  # what a rank never waited for: the invariant that this breaks, and why
    "copy_out": ("early", "until its wait() returns, the buffer does not hold the block"),
    "copy_in": ("reuse", "until its wait() returns, the buffer is being read, and x does not hold the block"),
    "receive": ("arrival", "until its wait() returns, the buffer does not hold the block"),
}


Speeds = tuple[float, float]


class _Moved(NamedTuple):
    """values: what x holds at the end; pinned: elements of pinned memory; begun: ns, when the answer was called."""

    values: np.ndarray
    pinned: int
    begun: int


def _values_of(rank: int, src: int, dst: int, n: int) -> np.ndarray:
    """Return the values of x on a rank at the beginning: something worth reading on the source only."""
    return np.arange(1, n + 1.0) if rank == src else np.full(n, SENTINEL)


def _move(
    comm: Comm, fn: Answer, n: int, block: int, src: int, dst: int, copies: Speeds = EQUAL, late: float = 0.0
) -> _Moved:
    """Call the answer. copies: s of a copy out, and of one in; late: s of virtual time after which `dst` calls it."""
    device = staging.device_of(comm, copies[comm.rank == dst])
    x = device.put(torch.from_numpy(_values_of(comm.rank, src, dst, n)).float())
    comm.barrier()
    begun = comm.trace.clock()
    if comm.rank == dst and late:
        comm.compute(late)
    fn(comm, x, src, dst, device, block)
    return _Moved(device.get(x).double().numpy(), device.pinned_count, begun)


def _move_on_engines(comm: Comm, fn: Answer, n: int, block: int, src: int, dst: int) -> _Moved:
    return _move(comm, fn, n, block, src, dst, copies=(1e-4, 1e-4))


def _staging_case(p: int, n: int, block: int, src: int, dst: int, copies: Speeds = EQUAL, late: float = 0.0) -> str:
    text = f"with {counted(n, 'element')} in blocks of {block}, from rank {src} to rank {dst} of {p}"
    if late:
        return f"{text}, which receives later"
    return text if copies == EQUAL else f"{text}, if {SPEEDS[copies]}"


def _check_pipelined_copy(fn: Answer, runner: Runner = None) -> Passed:
    in_all_cases(fn, _move, CASES, _staging_case, _check_moved, _why_unwaited, network=UNIT)
    in_all_cases(fn, _move, [(*TIMED, FAST, LATE)], _staging_case, _check_moved, network=UNIT)
    runs = [in_all_cases(fn, _move, [(*TIMED, copies)], _staging_case, _check_moved, network=UNIT) for copies in SPEEDS]
    took = [_check_time(run, *TIMED, copies) for run, copies in zip(runs, SPEEDS, strict=True)]
    equal = runs[0]
    check_waits(equal.events, 2)
    _, n, block, *_ = TIMED
    facts = [
        f"copies: right in {len(CASES)} cases on 2 and 3 ranks, also if no block divides the vector",
        f"pinned memory: {max(left.pinned for left in equal) // block} blocks on a rank at most",
        f"time: {number(took[0])} block times for {n // block} blocks; one stage after the other takes "
        f"{3 * n // block}",
    ]
    facts += engine_facts(runner, _check_moved, _move_on_engines, fn, *ENGINES, company=True)
    return Passed(*facts, run=Results(equal, _staged(equal)))


def _why_unwaited(broken: Broken, where: str, *given: object) -> Reason | None:
    """Return the sentence about a copy or a receive without its wait; None if another error ended the run."""
    if not isinstance(broken.__cause__, ForgottenWait):
        return None
    text = str(broken.__cause__).partition(": ")[0]
    what = next(name for name in UNWAITED if name in text)
    failed, why = UNWAITED[what]
    return f"{failed}: {where}, {text.replace(f'_{what} in the background', f'device.{what}')}: {why}."


def _staged(run: Results) -> list[Event]:
    """Return the events of a run that are drawn: copies and messages."""
    return [e for e in run.events if e.op in ("copy out", "send", "recv", "copy in")]


def _check_moved(
    run: Results, where: str, n: int, block: int, src: int, dst: int, copies: Speeds = EQUAL, late: float = 0.0
) -> None:
    """Raise Broken unless the values have arrived, through little pinned memory, and nothing else has changed."""
    for r, left in enumerate(run):
        if r == dst:
            continue
        if not np.array_equal(left.values, _values_of(r, src, dst, n)):
            raise Broken(f"source: {where}, x has changed on rank {r}: only rank {dst}, the destination, writes to x.")
    got, expected = run[dst].values, _values_of(src, src, dst, n)
    if not np.array_equal(got, expected):
        raise Broken(_why_moved(run.events, got, expected, where, block, src, dst, src if late else dst))
    for r, left in enumerate(run):
        if left.pinned > MOST_BLOCKS * block:
            raise Broken(f"""memory: {where}, rank {r} takes {counted(left.pinned, "element")} of pinned memory, which
                is {left.pinned / block:.3g} blocks: two are enough.""")
    came, blocks = sum(e.op == "recv" and e.rank == dst for e in run.events), -(-n // block)
    if came != blocks:
        raise Broken(f"""blocks: {where}, all values arrive, but rank {dst} receives {counted(came, "message")}, and
            there are {blocks} blocks: {off_by(came, blocks, "message")}.""")


def _why_moved(
    events: list[Event], got: np.ndarray, expected: np.ndarray, where: str, block: int, src: int, dst: int, suspect: int
) -> str:
    """Return the sentence about values that are not right on the destination.

    suspect: whose buffer is used again too early, if one is: a source shows it if the destination is late, and has
             shown nothing before any other case.
    """
    i, n = int(np.argmax(got != expected)), len(got)
    first = f"{where}, x[{i}] on rank {dst} should be {number(expected[i])} and is {number(got[i])}."
    if got[i] == SENTINEL:
        lacking = int((got == SENTINEL).sum())
        short = lacking == n % block and i == n - lacking
        why = "The last block is shorter than the others, and has to travel too." if short else "Which blocks do not?"
        return f"missing: {first} {counted(lacking, 'element')} never arrived. {why}"
    if got[i] == staging.STALE or got[i] < expected[i]:
        what = "That is what the pinned buffer held before"
        if _begins_early(events, src):
            return f"""early: {first} {what}: rank {src} sends a block before its copy has ended. A copy is
                asynchronous: until wait() returns, the buffer does not hold the block."""
        return f"""arrival: {first} {what}: rank {dst} copies a block to its device before the message has arrived.
            irecv is asynchronous: until wait() returns, the buffer does not hold the block."""
    needed = "its send has" if suspect == src else "its copy to the device has"
    return f"""reuse: {first} This value belongs {number(got[i] - expected[i])} elements further on: on rank {suspect} a
        buffer gets the next block while {needed} not ended."""


def _begins_early(events: list[Event], src: int) -> bool:
    """Return True if a send of rank `src` was begun before the copy of its block had ended."""
    copied = sorted(e.t1_ns for e in events if e.rank == src and e.op == "copy out")
    sent = sorted(e.t0_ns for e in events if e.rank == src and e.op == "send")[-len(copied) :]
    return any(begin < end for begin, end in zip(sent, copied, strict=False))


def _check_time(run: Results, p: int, n: int, block: int, src: int, dst: int, copies: Speeds) -> float:
    """Return the seconds, if a message takes 1. Raises Broken if stages wait for each other."""
    took = run.seconds - run[0].begun / 1e9
    stages, blocks = (*copies, 1.0), n // block
    best = sum(stages) + (blocks - 1) * max(stages)
    if took <= best + SLACK * max(stages):
        return took
    head = f"""Right, but {blocks} blocks take {number(took)} message times if {SPEEDS[copies]}, and
        {number(best)} are enough: """
    broken = Broken(f"overlap: {head}{_why_slow(run, blocks, took, stages)}", events=_staged(run), size=p)
    given = n, block, src, dst, copies
    broken.expected = _staged(simulate(p, _move, pipelined_copy, *given, network=UNIT, evidence=False))
    raise broken


def _why_slow(run: Results, blocks: int, took: float, stages: tuple[float, ...]) -> str:
    """Return why blocks took so many s. stages: the s of one block in each of them."""
    if waits := in_barriers([e for e in run.events if e.t0_ns >= run[0].begun]):
        return waits
    if took >= blocks * sum(stages) - 1e-9:
        return """a block goes through all three stages before the next one begins. Two buffers on each rank let a
            block be copied while another one is on the wire."""
    idle = int(_overlaps(run.events, 0, "copy out"))
    verb = ("copies the next block out", "copies the block before to its device")[idle]
    return f"while a block is on the wire, rank {idle} never {verb}."


def _overlaps(events: list[Event], rank: int, stage: str) -> bool:
    """Return True if a copy of this rank goes on during a message, which takes 1 s from the later of its two ends."""
    ends = [sorted(e.t0_ns for e in events if e.op == op and e.rank == r) for r, op in ((0, "send"), (1, "recv"))]
    begins = [max(pair) for pair in zip(*ends, strict=True)]
    copies = [(e.t0_ns, e.t1_ns) for e in events if e.op == stage and e.rank == rank]
    return any(begin < t + 10**9 and t < end for begin, end in copies for t in begins)


EXERCISES = (
    Exercise(
        "5.4",
        "a vector from GPU to GPU, in blocks",
        pipelined_copy,
        3,
        _check_pipelined_copy,
        picture=Drawing("timeline", "Your blocks in three stages, in virtual time"),
    ),
)
