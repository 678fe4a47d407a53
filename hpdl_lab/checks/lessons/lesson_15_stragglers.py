"""Notebook 15: the straggler and its cause, in lanes of simulated trainings that the text does not show."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ...resilience.stragglers import OPS, SECONDS, Lanes, find_straggler, make_lanes
from ..checkers import because
from ..ranks import alone, capital
from ..record import Answer, Broken, Exercise, Passed, Reason

DEFAULT = 1.2  # of least
NOBODY = (-1, "none")

Found = tuple[int, str]
More: TypeAlias = tuple[tuple[str, Any], ...]  # keywords of make_lanes, such as can be hashed
Middle: TypeAlias = Callable[..., np.ndarray]  # of numbers, along an axis
Table = dict[str, np.ndarray]  # (ranks, steps) of an op, or of messages


class _Case(NamedTuple):
    """The arguments of make_lanes, and of find_straggler."""

    where: str
    ranks: int
    rank: int = -1
    cause: str = "none"
    factor: float = 1.0
    more: More = ()
    least: float = DEFAULT

    @property
    def right(self) -> Found:
        return find_straggler(_lanes(self), self.least)


@cache
def _lanes(case: _Case) -> Lanes:
    return make_lanes(*case[1:5], **dict(case.more))


@cache
def _table(case: _Case) -> Table:
    """Return what each rank needs in each step: s of each op, s of the "whole" step, and of messages:

    "moved" s, and the same per byte: "link" of the rank that sends, "side" of the one that receives; "from send" and
    "from recv" per byte, from the begin of this end; "ends" per byte, of whole sends.
    """
    names = (*SECONDS, "send", "recv", "whole", "moved", "from send", "from recv", "nbytes")
    found = {name: np.zeros((case.ranks, len(_lanes(case)[0]))) for name in names}
    for r, steps in enumerate(_lanes(case)):
        for i, events in enumerate(steps):
            found["whole"][r, i] = events[-1].t1_ns - events[0].t0_ns
            for e in events:
                if e.op in found:
                    found[e.op][r, i] += e.t1_ns - e.t0_ns
            theirs = [e for e in _lanes(case)[(r + 1) % case.ranks][i] if e.op == "recv"]
            for e, got in zip((e for e in events if e.op == "send"), theirs, strict=True):
                begins = {"moved": max(e.t0_ns, got.t0_ns), "from send": e.t0_ns, "from recv": got.t0_ns}
                for name, begin in begins.items():
                    found[name][r, i] += got.t1_ns - begin
                found["nbytes"][r, i] += e.nbytes
    per_byte = {"link": "moved", "from send": "from send", "from recv": "from recv", "ends": "send"}
    found |= {name: found[of] / found["nbytes"] for name, of in per_byte.items()}
    return found | {"side": np.roll(found["link"], 1, axis=0)}


SMOOTH, BIG = (("jitter", 0.0),), "one chunk that has 70% of the bytes"


def _more(**given: float | str) -> More:
    return tuple({"steps": 7, **given}.items())


def _drawn(n: int) -> list[_Case]:
    """Return n cases by chance; one in 7 has no straggler, and one in 2 a decoy."""
    rng, cases = random.Random(15), []
    for i in range(n):
        ranks, cause = rng.choice((4, 5, 6, 7, 9, 16)), (*OPS, *OPS, "none")[i % 7]
        rank, decoy = rng.sample(range(ranks), 2)
        given = _more(seed=rng.randrange(999), decoy=decoy if i % 2 else -1)
        slow = (rank, cause, rng.choice((1.3, 1.6, 2.5, 4.0))) if cause != "none" else (*NOBODY, 1.0)
        cases.append(_Case(f"with {ranks} ranks, drawn by chance", ranks, *slow, more=given))
    return cases


CASES = (
    _Case("with a slow core, and all steps alike", 5, 2, "core", 2.0, SMOOTH),
    _Case("with slow input, and all steps alike", 5, 0, "input", 2.0, SMOOTH),
    _Case("with a slow link, and all steps alike", 5, 4, "link", 2.0, SMOOTH),
    _Case("with nothing slow, and all steps alike", 5, more=SMOOTH),
    _Case("with a core that needs 1.25 times the median", 4, 1, "core", 1.25, SMOOTH),
    _Case("with a core that needs 1.15 times the median", 5, 1, "core", 1.15, SMOOTH),
    _Case("with a core that needs 1.15 times the median, and least=1.1", 5, 1, "core", 1.15, SMOOTH, 1.1),
    _Case("with input that needs 1.3 times the median, and least=1.5", 5, 3, "input", 1.3, SMOOTH, 1.5),
    *(_Case(f"with a core that is slow in {op}", 6, 3, "core", 1.5, _more(part=op)) for op in OPS["core"]),
    _Case(f"with a slow link, and {BIG}", 4, 2, "link", 1.4, _more(big=2)),
    _Case(f"with nothing slow, and {BIG}", 4, more=_more(big=1)),
    _Case("with nothing slow, and one rank that stalls once", 6, more=_more(decoy=4)),
    _Case("with a slow core, and another rank that stalls once", 6, 5, "core", 1.3, _more(decoy=2, seed=3)),
    *_drawn(10),
)


def _worst(
    case: _Case, typical: Middle = np.median, middle: Middle = np.median, least: float = 0, **names: tuple[str, ...]
) -> Found:
    """Answer as find_straggler does, with mistakes. names: columns of `_table` for a cause, () for a cause left out."""
    factors = {}
    for cause, columns in ({"core": OPS["core"], "link": ("link",), "input": ("input",)} | names).items():
        if columns:
            usual = typical(sum((_table(case)[name] for name in columns), np.zeros(())), axis=1)
            factors[cause] = usual / middle(usual)
    cause = max(factors, key=lambda c: float(factors[c].max()))
    enough = factors[cause].max() >= (least or case.least)
    return (int(factors[cause].argmax()), cause) if enough else NOBODY


def _most(case: _Case, *ops: str) -> int:
    return int(sum((_table(case)[op] for op in ops), np.zeros(())).sum(axis=1).argmax())


def _off_by(case: _Case, n: int) -> Found:
    return case.right if case.right == NOBODY else ((case.right[0] + n) % case.ranks, case.right[1])


STEP = "step: You name the rank with the longest steps. Which ranks can begin the next step before the others?"
WAITS = "wait: You name the rank that spends most time in its messages. For which rank does it wait?"
ONE = "steps: You look at the {} step only. Is the same rank slow in other steps?"
ONLY = "core: You look at {} only. In which other events does the core work?"
READY = "link: You also count the time in which the {}. When can the bytes begin to move?"
MISTAKES: tuple[tuple[Reason, Callable[[_Case], Found | int]], ...] = (
    ("none: You never name a rank. Is each of these trainings as fast as it could be?", lambda c: NOBODY),
    (STEP, lambda c: _most(c, "whole")),
    *((WAITS, lambda c, ops=ops: _most(c, *ops)) for ops in (("send", "recv"), ("recv",), ("send",))),
    ("least: 1.2 is only the default of `least`.", lambda c: _worst(c, least=DEFAULT)),
    ("rank: You always name the rank after the straggler. From which number do ranks count?", lambda c: _off_by(c, 1)),
    ("rank: You always name the rank before the straggler. Which lane is slow?", lambda c: _off_by(c, -1)),
    ("cause: You never say input or link. What else can slow a rank?", lambda c: _worst(c, input=(), link=())),
    ("cause: You never say link. What do the messages show?", lambda c: _worst(c, link=())),
    ("cause: You never say input. What does a rank do before forward?", lambda c: _worst(c, input=())),
    (ONE.format("first"), lambda c: _worst(c, lambda cost, axis: cost[:, 0])),
    (ONE.format("last"), lambda c: _worst(c, lambda cost, axis: cost[:, -1])),
    ("steps: One very slow step changes your answer. Is this rank slow in each step?", lambda c: _worst(c, np.mean)),
    ("steps: You judge a rank by its slowest step. What about its other steps?", lambda c: _worst(c, np.max)),
    (
        "usual: You compare with the mean of all ranks. Is the straggler a part of it?",
        lambda c: _worst(c, middle=np.mean),
    ),
    *((ONLY.format(op), lambda c, op=op: _worst(c, core=(op,))) for op in OPS["core"]),
    (
        "core: You leave out update. Which part of the machine does this work?",
        lambda c: _worst(c, core=("forward", "backward")),
    ),
    (
        "input: You count input as work of the core. Which part of the machine delivers it?",
        lambda c: _worst(c, core=tuple(SECONDS), input=()),
    ),
    (READY.format("sender waits for the receiver"), lambda c: _worst(c, link=("from send",))),
    (READY.format("receiver waits for the sender"), lambda c: _worst(c, link=("from recv",))),
    (READY.format("two ends wait for each other"), lambda c: _worst(c, link=("ends",))),
    (
        "byte: You compare seconds of messages. Do all ranks send equally many bytes?",
        lambda c: _worst(c, link=("moved",)),
    ),
    ("side: You blame the rank that receives. To which rank does a link belong?", lambda c: _worst(c, link=("side",))),
)


def _check_straggler(fn: Answer) -> Passed:
    answers = {case: _answer(fn, case) for case in CASES}
    wrong = [case for case, got in answers.items() if got != case.right]
    for why, mistake in MISTAKES if wrong else ():
        if all(mistake(case) in (got, got[0]) for case, got in answers.items()):  # a number: whatever the cause
            raise because(why, _said(wrong[0], answers[wrong[0]]))
    if wrong and NOBODY not in answers.values():
        raise because("none: You always name a rank. What if no rank is slow?", _said(CASES[3], answers[CASES[3]]))
    if wrong:
        raise because(_reason(wrong[0], answers[wrong[0]]), _said(wrong[0], answers[wrong[0]]))
    slow = sum(case.right != NOBODY for case in CASES)
    return Passed(
        f"""the right rank and cause in {slow} trainings with 4 to 16 simulated ranks, and no rank in
        {len(CASES) - slow} without a straggler"""
    )


def _answer(fn: Answer, case: _Case) -> Found:
    """Return what fn returns: (rank, cause)."""
    given = () if case.least == DEFAULT else (case.least,)
    got = alone(fn, [[[*events] for events in steps] for steps in _lanes(case)], *given, where=case.where)
    try:
        rank, cause = got
        if int(rank) == rank and 0 <= rank < case.ranks and cause in OPS or (rank, cause) == NOBODY:
            return int(rank), str(cause)
    except (TypeError, ValueError, OverflowError):
        pass
    text = 'return (rank, cause), with cause "core", "input" or "link", or (-1, "none").'
    raise Broken(f"returns: {capital(case.where)}, your function returned {got!r}: {text}")


def _said(case: _Case, got: Found) -> str:
    return f"{capital(case.where)}, you return {got}, and the right answer is {case.right}."


def _reason(case: _Case, got: Found) -> Reason:
    """Return why `got` is not right, if no known mistake explains all answers."""
    if case.right == NOBODY:
        return f"none: Does this rank usually need {case.least:g} times the median of all ranks?"
    if got == NOBODY:
        return "missed: How much does each rank usually need, compared with the others?"
    if got[0] == case.right[0]:
        return "cause: The rank is right. Which of its events are longer than on other ranks?"
    return "rank: In which events is this rank slower than others, and does it wait in them?"


EXERCISES = (Exercise("15.4", "name the straggler", find_straggler, 2, _check_straggler),)
