"""What checks are made of: the same result as a reference, in every case and on the engines; reasons as rows.

A judge is a function judge(run, where, *given) that raises Broken for what is wrong with a run, `where` being "With 3
ranks" or "On 4 engines". Bytes, messages and steps are in traffic.py; what a collective promises is in collective.py, a
part of a layer in layer.py.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..comm import Results
from ..units import counted
from .ranks import ALONE, capital, in_company, kind, number, on_engines, simulate, times, unlike
from .record import Broken, Reason, Rows, Runner


def in_all_cases(
    fn: Callable,
    call: Callable,
    cases: Iterable[tuple],
    where: Callable,
    judge: Callable,
    blame: Callable | None = None,
    **how: Any,
) -> Results:
    """Judge call(comm, fn, *given) in every case (ranks, *given); returns the last Results.

    where:  where(ranks, *given) -> "with 3 ranks"; blame: blame(broken, where, *given) -> Reason that says more,
            or None, where the run itself failed; how: see `simulate`.
    """
    for p, *given in cases:
        text = where(p, *given)
        try:
            run = simulate(p, call, fn, *given, where=text, **how)
        except Broken as broken:
            if why := blame and blame(broken, capital(text), *given):
                broken.restate(why)
            raise broken from None
        judge(run, capital(text), *given)
    return run


def with_ranks(p: int, *given: Any) -> str:
    return f"with {counted(p, 'rank')}"


def engine_facts(
    runner: Runner, judge: Callable, call: Callable, *given: Any, company: bool = False, say: str = "right on {}"
) -> list[str]:
    """What call(comm, *given) has shown on the engines, if there are any; company: it needs more than one."""
    if runner is None:
        return []
    run = on_engines(runner, in_company, call, *given) if company else on_engines(runner, call, *given)
    if run == [None]:
        return [ALONE]
    judge(run, f"On {counted(len(run), 'engine')}", *given[1:])
    return ["engines: " + say.format(counted(len(run), "MPI rank"))]


def reason(got: Any, rows: Rows, close: Callable = np.allclose) -> Reason | None:
    """That of the first row (value, reason) whose value was got, or None."""
    return next((why for value, why in rows if close(got, value)), None)


def because(why: Reason, text: str) -> Broken:
    """Broken of this invariant: `text`, then the sentence."""
    failed, _, sentence = why.partition(": ")
    return Broken(f"{failed}: {text} {sentence}")


def exactly(got: np.ndarray, value: np.ndarray) -> bool:
    """Of float64 arrays: equal but for the order of additions."""
    return np.allclose(got, value, rtol=1e-10, atol=1e-10)


def off_reason(got: np.ndarray, right: np.ndarray, rows: Rows, otherwise: Reason = "sum: ") -> Reason:
    """`reason` for a mean that is not `right`; also rounding, and any multiple."""
    if found := reason(got, rows, exactly) or nearly(got, right):
        return found
    share = times(got, right)
    return otherwise if share is None else f"mean: That is {number(share)} times the mean: what do you divide by?"


def nearly(got: np.ndarray, right: np.ndarray) -> Reason | None:
    """What is wrong with an array that is right but for its rounding; None where it is not."""
    if got.shape != right.shape or not np.allclose(got, right, rtol=1e-4, atol=1e-4):
        return None
    return f"""dtype: That is right to the 7 digits of float32, and not to the 16 of {right.dtype}: keep the dtype of x
        in all that you compute and send."""


def same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where a and b, (d,), are the same but for the rounding of float64 sums over a few ranks."""
    return np.isclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max(initial=0))


def check_course(run: Sequence[Any], right: list[np.ndarray], say: Callable) -> float:
    """The largest difference between run, [arrays after each step] of each rank, and `right`, those of one rank alone.

    Raises:  Broken(say(step, rank, difference)) where it is more than rounding.
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
    """ "g[2] on rank 1 should be 3 and is 4", of the first place where is_right is False; name: "g{} on rank 1"."""
    places = np.argwhere(~np.asarray(is_right))[0].tolist()
    at = places[0] if len(places) == 1 else places
    i = tuple(places)
    return f"{name.format(f'[{at}]' if len(places) == 1 else at)} should be {number(right[i])} and is {number(got[i])}"


def check_arrays(
    run: Results,
    expected: Sequence[np.ndarray],
    where: str,
    name: str,
    promise: str,
    explain: Callable,
    rank: Callable = lambda r: f"rank {r}",
    same: Callable = same,
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
