"""Notebook 00: functions that run on every rank."""

import os
import re
from typing import NamedTuple

import numpy as np

from ...comm import Results
from ...comm.base import Comm
from ...parallel import messages as reference
from ...units import counted
from ..checkers import because, engine_facts, in_all_cases, with_ranks
from ..ranks import on_engines
from ..record import Answer, Broken, Exercise, Passed, Reason, Runner

NUMBERS = 3  # in the array of 0.2


def _check_hello(fn: Answer, runner: Runner = None) -> Passed:
    """Check that every rank prints its own number and the number of ranks, in whatever words."""
    in_all_cases(fn, lambda comm, fn: fn(comm), ((4,), (1,), (3,)), with_ranks, _check_sentences)
    facts = ["every rank returns its number, on 1, 3 and 4 simulated ranks"]
    return Passed(*facts, *engine_facts(runner, _check_sentences, fn, say="{} said hello"))


def _check_sentences(results: Results, where: str) -> None:
    p = len(results)
    for r, said in enumerate(results):
        if said is None:
            raise Broken(f"""returns: {where}, rank {r} returned nothing: print shows a text, return hands it
                back.""")
        if not isinstance(said, str):
            raise Broken(f"""returns: {where}, rank {r} returned {said!r}: a str was asked for, not
                {type(said).__name__}.""")
    if p > 1 and len(set(results)) == 1:
        raise Broken(f"rank: {where}, all of them returned {results[0]!r}: comm.rank is different on every rank.")
    for r, said in enumerate(results):
        numbers = {int(digits) for digits in re.findall(r"\d+", said)}
        called = re.search(r"\brank\D?\D?(\d+)", said, re.IGNORECASE)
        if called and int(called[1]) == p != r and r in numbers:
            raise Broken(f"""rank: {where}, rank {r} returned {said!r}: its number is {r}, and {p} is the
                number of ranks.""")
        if {r, p} <= numbers:
            continue
        if r in numbers:
            raise Broken(f"""size: {where}, rank {r} returned {said!r}: the number of ranks is {p}, which
                is comm.size.""")
        why = "because ranks count from 0" if r + 1 in numbers else "which is not in the text as a separate number"
        raise Broken(f"rank: {where}, rank {r} returned {said!r}: its number is {r}, {why}.")


class _Filled(NamedTuple):
    """The returned value, and the array that the answer was given, afterwards."""

    out: object
    x: np.ndarray


def _fill(comm: Comm, fn: Answer) -> _Filled:
    x = np.zeros(NUMBERS)
    return _Filled(fn(comm, x), x)


def _check_fill_with_rank(fn: Answer, runner: Runner = None) -> Passed:
    """Check (process id, x): x holds the rank's own number, whatever the other ranks have written into theirs."""
    here = os.getpid()

    def judge(run: Results, where: str) -> None:
        _check_filled(run, where, [here] * len(run))

    in_all_cases(fn, _fill, ((4,), (1,), (3,)), with_ranks, judge)
    facts = [f"each rank sees its own number alone, on 1, 3 and 4 simulated ranks, all in process {here}"]
    if runner is not None:
        pids = list(on_engines(runner, lambda comm: os.getpid()))
        run = on_engines(runner, _fill, fn)
        _check_filled(run, f"On {counted(len(run), 'engine')}", pids)
        facts.append(f"{counted(len(pids), 'engine')}, each a process of its own: {', '.join(map(str, pids))}")
    return Passed(*facts)


def _check_filled(run: Results, where: str, pids: list[int]) -> None:
    """Raise Broken unless every rank filled its own x, after all had met in a barrier returned it, and its process."""
    p = len(run)
    for r, (out, x) in enumerate(run):
        if out is None:
            raise Broken(f"returns: {where}, rank {r} returned nothing: return a tuple of the process id and x.")
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise Broken(f"""returns: {where}, rank {r} returned {out!r}: a tuple of two was asked for, (process id,
                x).""")
        pid, seen = out
        if not isinstance(pid, int) or not isinstance(seen, np.ndarray):
            kinds = ", ".join(type(part).__name__ for part in out)
            raise Broken(f"""order: {where}, rank {r} returned ({kinds}): an int and an array were asked for, in this
                order.""")
        if seen.shape != x.shape or not (seen == r).all():
            why = _why_filled(seen, r, p)
            raise because(why, f"{where}, rank {r} returned x = {seen}, and should see {np.full(NUMBERS, float(r))}.")
        if not np.array_equal(x, seen):
            raise Broken(f"""object: {where}, the x that rank {r} got still holds {x}: x = ... gives the name x to
                another array, x[:] = ... writes into the array that is there.""")
        if pid != pids[r]:
            raise Broken(f"""process: {where}, rank {r} returned {pid} as its process id, which is not the process that
                runs it.""")
    waited = {e.rank for e in run.events if e.op == "barrier"}
    if p > 1 and (hasty := [r for r in range(p) if r not in waited]):
        raise Broken(f"""barrier: {where}, rank {hasty[0]} does not wait for the others: it may return before they have
            written. comm.barrier() returns when all ranks have called it.""")


def _why_filled(seen: np.ndarray, r: int, p: int) -> Reason:
    """Return the Reason for an x that does not hold the number of rank r alone."""
    first, *others = seen.tolist() or [None]
    if first == r and not any(others):
        return "element: That is one element: x[:] = ... fills the whole of x."
    if (seen == r + 1).all():
        return "rank: Ranks count from 0."
    if (seen == p).all():
        return f"rank: {p} is the number of ranks, which is comm.size."
    if (seen == sum(range(p))).all():
        return "sum: That is the sum over ranks: the ranks need no message here."
    return "rank: comm.rank is the number of this rank."


EXERCISES = (
    Exercise("0.1", "hello from every rank", reference.hello, 1, _check_hello),
    Exercise("0.2", "nothing is shared", reference.fill_with_rank, 1, _check_fill_with_rank),
)
