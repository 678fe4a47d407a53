"""Parts of checks: the same result as a reference, in every case and on the engines; reasons as rows.

A judge is a function judge(run, where, *given) that raises Broken for what is wrong with a run, `where` being "With 3
ranks" or "On 4 engines". Bytes, messages and steps are in traffic.py; what a collective promises is in collective.py, a
part of a layer in layer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..comm import Results
from ..units import counted
from .ranks import ALONE, capital, in_company, kind, number, on_engines, simulate, times, unlike
from .record import Answer, Broken, Reason, Rows, Runner

if TYPE_CHECKING:
    from ..comm.network import Network


def in_all_cases(
    fn: Answer,
    call: Callable[..., object],
    cases: Iterable[tuple[int, *tuple[object, ...]]],
    where: Callable[..., str],
    judge: Callable[..., object],
    blame: Callable[..., Reason | None] | None = None,
    network: Network | None = None,
    threads: bool = False,
) -> Results:
    """Judge call(comm, fn, *given) in every case (ranks, *given); returns the last Results.

    where:  where(ranks, *given) -> "with 3 ranks"; blame: blame(broken, where, *given) -> Reason that says more,
            or None, if the run itself failed; network, threads: see `simulate`.
    """
    run = Results()
    for p, *given in cases:
        text = where(p, *given)
        try:
            run = simulate(p, call, fn, *given, where=text, network=network, threads=threads)
        except Broken as broken:
            if blame and (why := blame(broken, capital(text), *given)):
                broken.restate(why)
            raise broken from None
        judge(run, capital(text), *given)
    return run


def with_ranks(p: int, *given: object) -> str:
    return f"with {counted(p, 'rank')}"


def engine_facts(
    runner: Runner,
    judge: Callable[..., object],
    call: Callable[..., object],
    *given: object,
    each: Iterable[tuple[object, ...]] = ((),),
    company: bool = False,
    say: str = "right on {}",
) -> list[str]:
    """Return the facts that call(comm, *given, *more) shows on the engines, if any, with each `more` in turn.

    company: it needs more than one engine.
    """
    facts: list[str] = []
    if runner is None:
        return facts
    for more in each:
        run = on_engines(runner, *([in_company] if company else []), call, *given, *more)
        if run == [None]:
            return [ALONE]
        try:
            judge(run, f"On {counted(len(run), 'engine')}", *given[1:], *more)
        except Broken as broken:
            where = "Right on simulated ranks, but not on the engines"
            raise broken.restate(f"engines: {where}. {broken.message}") from None
        facts = ["engines: " + say.format(counted(len(run), "MPI rank"))]
    return facts


def reason(got: object, rows: Rows, close: Callable[..., object] = np.allclose) -> Reason | None:
    """Return the reason of the first row (value, reason) whose value was got, or None."""
    return next((why for value, why in rows if close(got, value)), None)


def because(why: Reason, text: str) -> Broken:
    """Return Broken of the invariant of `why`: `text`, then the sentence."""
    failed, _, sentence = why.partition(": ")
    return Broken(f"{failed}: {text} {sentence}")


def exactly(got: np.ndarray, value: np.ndarray) -> bool:
    """Return True if float64 arrays are equal but for the order of additions."""
    return np.allclose(got, value, rtol=1e-10, atol=1e-10)


def off_reason(got: np.ndarray, right: np.ndarray, rows: Rows, otherwise: Reason = "sum: ") -> Reason:
    """Return `reason` for a mean that is not `right`, or a reason for rounding, or for a multiple of the mean."""
    if found := reason(got, rows, exactly) or nearly(got, right):
        return found
    share = times(got, right)
    return otherwise if share is None else f"mean: That is {number(share)} times the mean: what do you divide by?"


def nearly(got: np.ndarray, right: np.ndarray) -> Reason | None:
    """Return what is wrong with an array that is right but for its rounding; None if it is not."""
    if got.shape != right.shape or not np.allclose(got, right, rtol=1e-4, atol=1e-4):
        return None
    return f"""dtype: That is right to the 7 digits of float32, and not to the 16 of {right.dtype}: keep the dtype of x
        in all that you compute and send."""


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return True for each element that is the same in a and b, (d,), but for rounding of float64 sums over ranks."""
    return np.isclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max(initial=0))


def check_course(
    run: Sequence[Sequence[np.ndarray]], right: list[np.ndarray], say: Callable[[int, int, float], str]
) -> float:
    """Return the largest difference between run, [arrays after each step] of each rank, and `right`, from one rank.

    Raises:  Broken(say(step, rank, difference)) if it is more than rounding.
    """
    worst = 0.0
    for step, wanted in enumerate(right):
        for rank, kept in enumerate(run):
            off = float(np.abs(kept[step] - wanted).max())
            if not off < 1e-10:
                raise Broken(say(step, rank, off))
            worst = max(worst, off)
    return worst


def first_wrong(name: str, got: np.ndarray, right: np.ndarray, is_right: np.ndarray) -> str:
    """Return "g[2] on rank 1 should be 3 and is 4" for the first place not in is_right; name: "g{} on rank 1"."""
    places = np.argwhere(~np.asarray(is_right))[0].tolist()
    at = places[0] if len(places) == 1 else places
    i = tuple(places)
    return f"{name.format(f'[{at}]' if len(places) == 1 else at)} should be {number(right[i])} and is {number(got[i])}"


def check_arrays(
    run: Results,
    expected: Sequence[np.ndarray] | np.ndarray,
    where: str,
    name: str,
    promise: str,
    explain: Callable[[np.ndarray, int], Reason],
    rank: Callable[[int], str] = lambda r: f"rank {r}",
    same: Callable[[np.ndarray, np.ndarray], np.ndarray] = _same,
) -> None:
    """Raise Broken unless every rank returns the array that it was given, overwritten with expected[r].

    run: [(what was returned, the array, ...)]; name: of the array; explain(out, r) -> Reason.
    """
    for r, (out, held, *_) in enumerate(run):
        if unlike(out, held):
            raise Broken(f"returns: {where}, {rank(r)} returned {unlike(out, held)}: {promise} {kind(held)}.")
        right = same(out, expected[r])
        if not right.all():
            text = first_wrong(f"{name}{{}} on {rank(r)}", out, expected[r], right)
            raise because(explain(out, r), f"{where}, {text}.")
        if not same(held, expected[r]).all():
            raise Broken(f"in place: {where}, what {rank(r)} returns is right, but {name} was not overwritten with it.")
