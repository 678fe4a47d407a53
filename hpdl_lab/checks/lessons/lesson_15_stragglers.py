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


class Case(NamedTuple):
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
        return find_straggler(lanes(self), self.least)


@cache
def lanes(case: Case) -> Lanes:
    return make_lanes(*case[1:5], **dict(case.more))


@cache
def table(case: Case) -> Table:
    """Return what each rank needs in each step: s of each op, s of the "whole" step, and of messages:

    "moved" s, and the same per byte: "link" of the rank that sends, "side" of the one that receives; "from send" and
    "from recv" per byte, from the begin of this end; "ends" per byte, of whole sends.
    """
    names = (*SECONDS, "send", "recv", "whole", "moved", "from send", "from recv", "nbytes")
    found = {name: np.zeros((case.ranks, len(lanes(case)[0]))) for name in names}
    for r, steps in enumerate(lanes(case)):
        for i, events in enumerate(steps):
            found["whole"][r, i] = events[-1].t1_ns - events[0].t0_ns
            for e in events:
                if e.op in found:
                    found[e.op][r, i] += e.t1_ns - e.t0_ns
            theirs = [e for e in lanes(case)[(r + 1) % case.ranks][i] if e.op == "recv"]
            for e, got in zip((e for e in events if e.op == "send"), theirs, strict=True):
                begins = {"moved": max(e.t0_ns, got.t0_ns), "from send": e.t0_ns, "from recv": got.t0_ns}
                for name, begin in begins.items():
                    found[name][r, i] += got.t1_ns - begin
                found["nbytes"][r, i] += e.nbytes
    per_byte = {"link": "moved", "from send": "from send", "from recv": "from recv", "ends": "send"}
    found |= {name: found[of] / found["nbytes"] for name, of in per_byte.items()}
    return found | {"side": np.roll(found["link"], 1, axis=0)}


SMOOTH, BIG = (("jitter", 0.0),), "one chunk that has 70% of the bytes"


def more(**given: float | str) -> More:
    return tuple({"steps": 7, **given}.items())


def drawn(n: int) -> list[Case]:
    """Return n cases by chance; one in 7 has no straggler, and one in 2 a decoy."""
    chance, cases = random.Random(15), []
    for i in range(n):
        ranks, cause = chance.choice((4, 5, 6, 7, 9, 16)), (*OPS, *OPS, "none")[i % 7]
        rank, decoy = chance.sample(range(ranks), 2)
        given = more(seed=chance.randrange(999), decoy=decoy if i % 2 else -1)
        slow = (rank, cause, chance.choice((1.3, 1.6, 2.5, 4.0))) if cause != "none" else (*NOBODY, 1.0)
        cases.append(Case(f"with {ranks} ranks, drawn by chance", ranks, *slow, more=given))
    return cases


CASES = (
    Case("with a slow core, and all steps alike", 5, 2, "core", 2.0, SMOOTH),
    Case("with slow input, and all steps alike", 5, 0, "input", 2.0, SMOOTH),
    Case("with a slow link, and all steps alike", 5, 4, "link", 2.0, SMOOTH),
    Case("with nothing slow, and all steps alike", 5, more=SMOOTH),
    Case("with a core that needs 1.25 times the median", 4, 1, "core", 1.25, SMOOTH),
    Case("with a core that needs 1.15 times the median", 5, 1, "core", 1.15, SMOOTH),
    Case("with a core that needs 1.15 times the median, and least=1.1", 5, 1, "core", 1.15, SMOOTH, 1.1),
    Case("with input that needs 1.3 times the median, and least=1.5", 5, 3, "input", 1.3, SMOOTH, 1.5),
    *(Case(f"with a core that is slow in {op}", 6, 3, "core", 1.5, more(part=op)) for op in OPS["core"]),
    Case(f"with a slow link, and {BIG}", 4, 2, "link", 1.4, more(big=2)),
    Case(f"with nothing slow, and {BIG}", 4, more=more(big=1)),
    Case("with nothing slow, and one rank that stalls once", 6, more=more(decoy=4)),
    Case("with a slow core, and another rank that stalls once", 6, 5, "core", 1.3, more(decoy=2, seed=3)),
    *drawn(10),
)


def worst(
    case: Case, typical: Middle = np.median, middle: Middle = np.median, least: float = 0, **names: tuple[str, ...]
) -> Found:
    """Answer as find_straggler does, with mistakes. names: columns of `table` for a cause, () for a cause left out."""
    factors = {}
    for cause, columns in ({"core": OPS["core"], "link": ("link",), "input": ("input",)} | names).items():
        if columns:
            usual = typical(sum((table(case)[name] for name in columns), np.zeros(())), axis=1)
            factors[cause] = usual / middle(usual)
    cause = max(factors, key=lambda c: float(factors[c].max()))
    enough = factors[cause].max() >= (least or case.least)
    return (int(factors[cause].argmax()), cause) if enough else NOBODY


def most(case: Case, *ops: str) -> int:
    return int(sum((table(case)[op] for op in ops), np.zeros(())).sum(axis=1).argmax())


def off_by(case: Case, n: int) -> Found:
    return case.right if case.right == NOBODY else ((case.right[0] + n) % case.ranks, case.right[1])


STEP = "step: You name the rank with the longest steps. Which ranks can begin the next step before the others?"
WAITS = "wait: You name the rank that is longest in its messages. For whom does it wait?"
ONE = "steps: You look at the {} step only. Is it the same rank in others?"
ONLY = "core: You look at {} only. In which other events does the core work?"
READY = "link: You also count the time in which the {}. When can the bytes begin to move?"
MISTAKES: tuple[tuple[Reason, Callable[[Case], Found | int]], ...] = (
    ("none: You never name a rank. Is each of these trainings as fast as it could be?", lambda c: NOBODY),
    (STEP, lambda c: most(c, "whole")),
    *((WAITS, lambda c, ops=ops: most(c, *ops)) for ops in (("send", "recv"), ("recv",), ("send",))),
    ("least: 1.2 is only the default of `least`.", lambda c: worst(c, least=DEFAULT)),
    ("rank: You always name the rank after the straggler. From which number do ranks count?", lambda c: off_by(c, 1)),
    ("rank: You always name the rank before the straggler. Whose lane is slow?", lambda c: off_by(c, -1)),
    ("cause: You never say input or link. What else can slow a rank?", lambda c: worst(c, input=(), link=())),
    ("cause: You never say link. What do messages tell?", lambda c: worst(c, link=())),
    ("cause: You never say input. What does a rank do before forward?", lambda c: worst(c, input=())),
    (ONE.format("first"), lambda c: worst(c, lambda cost, axis: cost[:, 0])),
    (ONE.format("last"), lambda c: worst(c, lambda cost, axis: cost[:, -1])),
    ("steps: One very slow step changes your answer. Does it slow each step?", lambda c: worst(c, np.mean)),
    ("steps: You judge a rank by its slowest step. What about all others?", lambda c: worst(c, np.max)),
    (
        "usual: You compare with the mean of all ranks. Is the straggler a part of it?",
        lambda c: worst(c, middle=np.mean),
    ),
    *((ONLY.format(op), lambda c, op=op: worst(c, core=(op,))) for op in OPS["core"]),
    ("core: You leave out update. Who does this work?", lambda c: worst(c, core=("forward", "backward"))),
    (
        "input: You count input as work of the core. For which part of the machine does a rank wait in it?",
        lambda c: worst(c, core=tuple(SECONDS), input=()),
    ),
    (READY.format("sender waits for the receiver"), lambda c: worst(c, link=("from send",))),
    (READY.format("receiver waits for the sender"), lambda c: worst(c, link=("from recv",))),
    (READY.format("two ends wait for each other"), lambda c: worst(c, link=("ends",))),
    (
        "byte: You compare seconds of messages. Do all ranks send equally many bytes?",
        lambda c: worst(c, link=("moved",)),
    ),
    ("side: You charge the rank that receives. To which rank does a link belong?", lambda c: worst(c, link=("side",))),
)


def check_straggler(fn: Answer) -> Passed:
    answers = {case: answer(fn, case) for case in CASES}
    wrong = [case for case, got in answers.items() if got != case.right]
    for why, mistake in MISTAKES if wrong else ():
        if all(mistake(case) in (got, got[0]) for case, got in answers.items()):  # a number: whatever the cause
            raise because(why, said(wrong[0], answers[wrong[0]]))
    if wrong and NOBODY not in answers.values():
        raise because("none: You always name a rank. What if no rank is slow?", said(CASES[3], answers[CASES[3]]))
    if wrong:
        raise because(reason(wrong[0], answers[wrong[0]]), said(wrong[0], answers[wrong[0]]))
    slow = sum(case.right != NOBODY for case in CASES)
    return Passed(
        f"""the right rank and cause in {slow} trainings with 4 to 16 simulated ranks, and no rank in
        {len(CASES) - slow} without a straggler"""
    )


def answer(fn: Answer, case: Case) -> Found:
    """Return what fn returns: (rank, cause)."""
    given = () if case.least == DEFAULT else (case.least,)
    got = alone(fn, [[[*events] for events in steps] for steps in lanes(case)], *given, where=case.where)
    try:
        rank, cause = got
        if int(rank) == rank and 0 <= rank < case.ranks and cause in OPS or (rank, cause) == NOBODY:
            return int(rank), str(cause)
    except (TypeError, ValueError, OverflowError):
        pass
    text = 'return (rank, "core"), with "input" or "link" in its place, or (-1, "none").'
    raise Broken(f"returns: {capital(case.where)}, your function returned {got!r}: {text}")


def said(case: Case, got: Found) -> str:
    return f"{capital(case.where)}, you return {got}, and right is {case.right}."


def reason(case: Case, got: Found) -> Reason:
    """Return why `got` is not right, if no known mistake explains all answers."""
    if case.right == NOBODY:
        return f"none: Does this rank usually need {case.least:g} times the median of all ranks?"
    if got == NOBODY:
        return "missed: How much does each rank usually need, compared with the others?"
    if got[0] == case.right[0]:
        return "cause: The rank is right. Which of its events are longer than those of other ranks?"
    return "rank: In which events is this rank slower than others, and does it wait in them?"


EXERCISES = (Exercise("15.4", "name the straggler", find_straggler, 2, check_straggler),)
