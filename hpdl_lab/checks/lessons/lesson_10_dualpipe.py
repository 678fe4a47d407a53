"""Notebook 10: what hides an all-to-all in the timeline of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

from ...parallel.pipeline.overlap import Bar, hidden_by
from ...schedules import Action
from ..ranks import alone, capital, number
from ..record import Answer, Broken, Exercise, Passed

FORWARD, BACKWARD, OTHER = Action(1, "F", 5), Action(6, "B", 1), Action(1, "F", 4)


def _bar(begin: float, end: float, action: Action, name: str = "experts") -> Bar:
    return Bar(begin, end, action, name)


CASES: tuple[tuple[str, tuple[float, float], list[Bar]], ...] = (  # (what it is, the message, what is computed)
    ("an all-to-all during one segment", (2.0, 3.0), [_bar(0.0, 1.5, OTHER), _bar(1.5, 4.0, BACKWARD)]),
    ("an all-to-all between two segments", (2.0, 5.0), [_bar(0.0, 2.5, BACKWARD), _bar(4.0, 6.0, OTHER)]),
    ("an all-to-all longer than a segment", (1.0, 4.0), [_bar(1.5, 2.5, OTHER), _bar(5.0, 6.0, BACKWARD)]),
    (
        "an all-to-all during two segments of one action",
        (1.0, 4.0),
        [_bar(0.0, 1.5, OTHER), _bar(1.5, 2.5, BACKWARD), _bar(3.0, 4.5, BACKWARD, "attention")],
    ),
    ("a segment that ends as the all-to-all begins", (2.0, 3.0), [_bar(0.0, 2.0, OTHER), _bar(2.5, 4.0, BACKWARD)]),
    ("an all-to-all that nothing hides", (2.0, 3.0), [_bar(0.0, 1.0, OTHER), _bar(3.0, 4.0, BACKWARD)]),
    ("a rank that computes nothing", (0.0, 1.25), []),
)


def _check_hidden_by(fn: Answer) -> Passed:
    for what, (begin, end), computing in CASES:
        message = Bar(begin, end, FORWARD, "dispatch")
        where = f"for {what}, from {number(begin)} to {number(end)} s"
        found = alone(fn, message, computing, where=f"{where},", keep="message computing")
        where = capital(where)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], dict):
            raise Broken(
                f"returns: {where} your function returned {found!r:.60}: return a dict and a number of seconds."
            )
        under, rest = found
        if not isinstance(rest, Real) or not all(isinstance(s, Real) for s in under.values()):
            raise Broken(f"returns: {where} your function returned {found!r:.80}: seconds are numbers.")
        if odd := [key for key in under if not isinstance(key, str)]:
            raise Broken(
                f"returns: {where} {odd[0]!r} is a key of your dict: use str(bar.action), which is short, such as 6B1."
            )
        _judge(under, float(rest), message, computing, where)
    return Passed(
        f"right in {len(CASES)} timelines: what hides an all-to-all, and for how long nothing does",
        "lab.dualpipe(...).together has .computing and .sending, for the same question",
    )


def _judge(under: dict[str, float], rest: float, message: Bar, computing: Sequence[Bar], where: str) -> None:
    """Raise Broken unless this is what hides `message`."""
    right, alone_for = hidden_by(message, computing)
    for key, seconds in under.items():
        if key not in right:
            if seconds > 0:
                raise Broken(f"meanwhile: {where} {number(seconds)} s of {key} hide it, but {key} computes only before "
                             "or after.")  # fmt: skip
            raise Broken(f"meanwhile: {where} {key} hides it for {number(seconds)} s: leave out what does not "
                         "compute meanwhile.")  # fmt: skip
    for key, seconds in right.items():
        bars = [bar for bar in computing if str(bar.action) == key]
        if key not in under:
            raise Broken(f"missing: {where} {key} computes meanwhile for {number(seconds)} s, and you do not name it.")
        got = under[key]
        if _same(got, seconds):
            continue
        text = f"{where} {key} hides it for {number(seconds)} s, and you say {number(got)}"
        if _same(got, sum(bar.end - bar.begin for bar in bars)):
            raise Broken(f"clip: {text}: that is all of {key}, also its time before or after the all-to-all.")
        parts = [hidden_by(message, [bar])[0].get(key, 0.0) for bar in bars]
        if any(_same(got, part) for part in parts):
            raise Broken(f"sum: {text}: that is one of its {len(bars)} segments: add them up.")
        raise Broken(f"clip: {text}.")
    if not _same(rest, alone_for):
        text = f"{where} nothing hides it for {number(alone_for)} s, and you say {number(rest)}"
        if _same(rest, message.end - message.begin):
            text += ": that is all of it"
        raise Broken(f"exposed: {text}.")


def _same(a: float, b: float) -> bool:
    return abs(a - b) < 1e-9


EXERCISES = (
    Exercise("10.5", "read DualPipe in the timeline: what hides an all-to-all", hidden_by, 1, _check_hidden_by),
)
