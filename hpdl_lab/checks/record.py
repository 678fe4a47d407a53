"""The record of an exercise. The check is one of its fields; texts about it stand in notebooks/hints/."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..collectives.dataflow import Dataflow
from ..comm import Results
from ..schedules.schedule import Schedule
from ..trace import Event
from .hints import Hinted

Answer: TypeAlias = Callable[..., Any]  # a function that an attendee has written
Reason: TypeAlias = str  # "invariant: sentence", the sentence perhaps empty
Rows: TypeAlias = Iterable[tuple[Any, Reason]]  # what may be got, and what is wrong with it
Runner: TypeAlias = Callable[..., Results] | None  # runner(fn, *args) makes every engine call fn(comm, *args)


class Broken(Exception):
    """An answer breaks an invariant: Broken("bytes: the result is right, but rank 0 sent ...").

    text:    the invariant, which chooses the hints, and what is wrong, where, and why, in sentences with numbers; line
             breaks count as spaces. They become `failed` and `message`.
    detail:  lines to show below it as they are (who waits for whom).
    events:  of the failing run, on `size` ranks, attached by `exercises.check`; expected: events of a right answer
             in the same run. Either may be empty.
    """

    def __init__(self, text: str, detail: str = "", events: Iterable[Event] = (), size: int = 0) -> None:
        super().__init__(text)
        self.restate(text)
        self.detail, self.events, self.expected, self.size = detail, list(events), [], size

    def restate(self, text: str) -> Broken:
        """Say it with another text, as more is known about the same failure; returns itself."""
        self.failed, _, message = text.partition(": ")
        self.message = " ".join(message.split())
        return self


class AnswerFailed(Exception):
    """An error of the answer on the engines, raised by a runner: the text names the error, the rank and the line."""


class Passed:
    """The result of a check of a right answer.

    facts:  sentences with the number against its target; line breaks count as spaces.
    run:    the Results whose events show it, if there are any.
    """

    def __init__(self, *facts: str, run: Results | None = None) -> None:
        self.facts = tuple(" ".join(fact.split()) for fact in facts)
        self.events, self.size = ([], 0) if run is None else (run.events, len(run))


@dataclass(frozen=True)
class Drawing:
    """The picture that lab.check shows with a right answer.

    kind:  "traffic" (who sent how much to whom) or "timeline" of the check's events; "still" or "animation" of `data`.
    data:  f() -> a Schedule, a Dataflow, or arguments of plots.slots.draw.
    """

    kind: Literal["traffic", "timeline", "still", "animation"]
    title: str = ""
    data: Callable[[], Schedule | Dataflow | tuple[object, ...]] = tuple


@dataclass(frozen=True)
class Exercise(Hinted):
    """An exercise.

    id:        "4.1": notebook 4, first exercise; `title` is one line for lists of exercises.
    reference: the library function that solves it; its name is the name of the exercise.
    stars:     1 beginner, 2 intermediate, 3 advanced; also nbgrader's points.
    check:     check(fn, runner) -> Passed, or raises Broken. `runner(fn, *args)` runs on the engines, or is None;
               it raises AnswerFailed or CommError for the answer's faults, and anything else for other trouble.
               check(fn) if no ranks take part.
    scaffold:  a broken function; what it does stands in the attendee's cell, to be repaired, in the place of a stub.
    picture:   of a right answer; None: there is none.
    """

    id: str
    title: str
    reference: Answer
    stars: int
    check: Callable[..., Passed]
    scaffold: Answer | None = None
    picture: Drawing | None = None

    @property
    def parallel(self) -> bool:
        """True if ranks take part, so that the check goes on to the engines."""
        return "runner" in inspect.signature(self.check).parameters

    @property
    def name(self) -> str:
        return self.reference.__name__

    @property
    def path(self) -> str:
        """The name in notebook sources: "package.module:function"."""
        return f"{self.reference.__module__}:{self.reference.__qualname__}"
