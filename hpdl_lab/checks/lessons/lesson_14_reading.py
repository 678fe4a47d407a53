"""Notebook 14: workers and prefetch with which a step does not wait, for epochs that the text does not show."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import mean
from typing import NamedTuple

from ...performance.reading import play, trace, workers_and_prefetch
from ...units import counted
from ..checkers import because
from ..ranks import alone, capital
from ..record import Answer, Broken, Exercise, Passed, Reason

LIMIT = 0.01  # of the time of the steps, which waits may add
NEXT = range(100, 110)  # seeds of epochs that follow

Pair = tuple[int, int]


class _Case(NamedTuple):
    """A measured epoch, and what there is to read it with."""

    where: str
    reads: tuple[float, ...]
    step: float
    cores: int
    room: int

    def waiting(self, pair: Pair, late: float = 0, first: float = 0) -> float:
        """Return how much the waits add to the time of the steps, as a share of it.

        late: see `play`; first: how much of the wait for the first batch counts, 0 in a right answer.
        """
        played = play(self.reads, self.step, *pair, late=late * self.step)
        return played.waiting(self.step) + first * played.taken[0] / self.step / (len(self.reads) - 1)

    def workers(self, seconds: float) -> int:
        """Return the workers that are needed if each read takes as long as this."""
        return math.ceil(seconds / self.step)


@cache
def _least(case: _Case, late: float = 0, first: float = 0) -> Pair | None:
    """Return the right answer, or the answer with the mistakes that `waiting` describes."""
    pairs = ((w, p) for w in range(1, case.cores + 1) for p in range(1, case.room // w + 1))
    return next((pair for pair in pairs if case.waiting(pair, late, first) <= LIMIT), None)


JITTER, STORM = tuple(trace(1, slow=0)), tuple(trace(2, storm=12))
TAIL = _Case("with slow reads, and little memory", tuple(trace(5, 1200)), 0.03, 16, 24)
CASES = (
    _Case("with equal reads, faster than a step", (0.1,) * 60, 0.15, 4, 8),
    _Case("with equal reads of 0.1 s, and steps of 0.04 s", (0.1,) * 300, 0.04, 8, 16),
    _Case("with jitter", JITTER, 0.045, 8, 16),
    _Case("with slow reads", tuple(trace(3)), 0.15, 8, 24),
    _Case("with many slow reads", tuple(trace(4, slow=0.08)), 0.05, 16, 32),
    TAIL,
    _Case("with a storm of slow reads at the beginning", STORM, 0.05, 16, 24),
    _Case("with as many cores as are needed", STORM, 0.15, 3, 24),
    _Case("with 4 cores, and a fast step", JITTER, 0.02, 4, 64),
    _Case("with memory for 3 batches", tuple(trace(6)), 0.05, 16, 3),
)
MANY = "In every epoch, you return the workers that the {} read needs."
MISTAKES: tuple[tuple[Reason, Callable[[_Case], int | Pair | None]], ...] = (
    (
        "none: You never return a pair. The first batch always has to be waited for: does that time count?",
        lambda c: None,
    ),
    ("start: The wait for the first batch does not count.", lambda c: _least(c, first=1)),
    (f"average: {MANY.format('average')} What happens after a slow one?", lambda c: c.workers(mean(c.reads))),
    (f"average: {MANY.format('fastest')} How long do others take?", lambda c: c.workers(min(c.reads))),
    (f"tail: {MANY.format('slowest')} Could batches that are ready bridge it?", lambda c: c.workers(max(c.reads))),
    ("returns: Those numbers are in the wrong order.", lambda c: (pair := _least(c)) and pair[::-1]),
    (
        "total: prefetch counts the places for one worker, and you count all places.",
        lambda c: (pair := _least(c)) and (pair[0], pair[0] * pair[1]),
    ),
    ("place: A place becomes free as soon as the step takes the batch: not a step later.", lambda c: _least(c, late=1)),
)


def _check_workers(fn: Answer) -> Passed:
    answers = {case: _answer(fn, case) for case in CASES}
    wrong = [case for case, got in answers.items() if got != _least(case)]
    for why, mistake in MISTAKES if wrong else ():
        if all(_alike(case, got, mistake(case)) for case, got in answers.items()):
            case = next((case for case in wrong if (answers[case] or [0])[0] != (_least(case) or [0])[0]), wrong[0])
            text = f"{capital(case.where)}, you return {_said(answers[case])}, and right is {_said(_least(case))}."
            raise because(why, text)
    if wrong:
        raise _broken(wrong[0], answers[wrong[0]])
    pair = _least(TAIL) or (1, 1)
    later = sorted(TAIL._replace(reads=tuple(trace(seed, 1200))).waiting(pair) for seed in NEXT)
    return Passed(
        f"right for {len(CASES)} epochs in virtual time, with jitter, slow reads, and a storm of them",
        f"""{TAIL.where}: {_said(pair)}, though the average read needs {TAIL.workers(mean(TAIL.reads))} workers; with
        memory for 48 batches in place of {TAIL.room}: {_said(_least(TAIL._replace(room=48)))}""",
        f"""in {len(NEXT)} more epochs on the same storage, waits add {later[0]:.1%} to {later[-1]:.1%}: a measured
        epoch is a sample""",
    )


def _answer(fn: Answer, case: _Case) -> Pair | None:
    """Return what fn returns: (workers, prefetch), or None."""
    got = alone(fn, [*case.reads], *case[2:], where=case.where)
    try:
        workers, prefetch = (0, 0) if got is None else map(int, got)
        if got is None or ([workers, prefetch] == [*got] and min(workers, prefetch) > 0):
            return None if got is None else (workers, prefetch)
    except (TypeError, ValueError, OverflowError):
        pass
    text = "return (workers, prefetch), two whole numbers from 1 on, or None."
    raise Broken(f"returns: {capital(case.where)}, your function returned {got!r}: {text}")


def _alike(case: _Case, got: Pair | None, wrong: int | Pair | None) -> bool:
    """Return whether `got` is this wrong answer; a number stands for the workers alone."""
    if isinstance(wrong, int):
        return got[0] in (wrong, min(wrong, case.cores)) if got else not _least(case)
    return got == wrong


def _said(pair: Pair | None) -> str:
    return f"{counted(pair[0], 'worker')} with prefetch {pair[1]}" if pair else "None"


def _broken(case: _Case, got: Pair | None) -> Broken:
    """Return the reason for which `got` is not right."""
    right, text = _least(case), f"{capital(case.where)}, you return {_said(got)}."
    enough = f"With {_said(right)}, waits add {case.waiting(right):.2%} to the time of the steps." if right else ""
    if got is None:
        return Broken(f"none: {text} {enough}")
    workers, places = got[0], got[0] * got[1]
    if workers > case.cores:
        cores = counted(case.cores, "core is", "cores are")
        return Broken(f"limits: {text} Only {cores} free, and each further worker takes a core from a rank.")
    if places > case.room:
        return Broken(f"limits: {text} Those are {places} places, and there is memory for {case.room} batches.")
    if case.waiting(got) <= LIMIT:
        part = "workers" if right and workers > right[0] else "prefetch"
        return Broken(f"cost: {text} That is more {part} than needed. {enough}")

    begins, ends, taken = play(case.reads, case.step, *got)
    i = max(range(1, len(ends)), key=lambda i: taken[i] - taken[i - 1])
    text += f" Waits add {case.waiting(got):.1%} to the time of the steps. The longest wait is for batch {i}."
    if i >= places and begins[i] == taken[i - places]:
        why = f"Until the step took batch {i - places}, no place was free for it. When may a read begin?"
        return Broken(f"ahead: {text} {why}")
    read = f"Worker {i % workers} was reading batch {i - workers} until {begins[i]:.2f} s." if i >= workers else ""
    return Broken(f"busy: {text} {read} Which worker reads which batch, and when?")


EXERCISES = (Exercise("14.5", "input that never starves", workers_and_prefetch, 2, _check_workers),)
