"""The verbs of exercises: check an answer or a script, ask for a hint, look at the solution."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from .. import schedules
from ..checks import exercises
from ..checks.record import Answer, AnswerFailed, Drawing, Exercise
from ..checks.result import CheckResult, Note
from ..checks.scripts import table as scripts
from ..checks.scripts.table import ScriptExercise
from ..collectives.dataflow import Dataflow
from ..comm.base import Results
from ..engines.cluster import ipython
from ..engines.errors import RunFailed
from ..plain_source import plain_source
from ..plots import animation, graph, live, slots, style, timeline
from ..plots import collective as panels
from ..plots import schedule as rows
from ..schedules.schedule import Schedule
from .cluster import run, running
from .progress import progress
from .show import played

ENGINE_DEADLINE = 20.0  # s that a rank may wait for another: the first check may find ranks still importing torch
KEPT = "yours, which passes, stays"
ORDINALS = ("first", "second", "third")
# invariants that are about time: what broke them is seen in a timeline
TIMES = ("steps", "waits", "late", "overlap", "host", "prefetch")
NARROW = 5.2  # inches, of one heat map


def check(fn: Answer) -> CheckResult:
    """Check your answer: on simulated ranks, then on the engines if they run. Returns a CheckResult: true if right.

    The exercise is found by the name of the function. `.failed` names the invariant that broke, `.message` says it all.
    """
    if not callable(fn):
        raise TypeError(
            f"lab.check needs your function itself, not {type(fn).__name__}: lab.check(reduce_scatter), nothing called"
        )
    exercise, engines = _exercise_of(fn), running() is not None
    if isinstance(exercise, ScriptExercise):
        raise TypeError(f'{exercise.name} is a script of its own: lab.check_script("{exercise.file}")')
    result = exercises.check(exercise, fn, _run_answer if engines else None)
    progress().add("check", exercise=exercise.id, name=exercise.name, passed=bool(result), failed=result.failed)
    step = _next_step(exercise, result, engines)
    return replace(result, outdated=_outdated(fn), picture=_picture(exercise, result), next_step=step)


def check_script(path: str | Path) -> CheckResult:
    """Check a training script that you have converted: launch it, and compare its ranks with the one-rank script.

    The exercise is found by the name of the file: train_ddp.py, train_fsdp.py, train_tp.py or train_hybrid.py. Its
    ranks are launched as by torchrun, on CPUs, each in a folder of its own; they print losses as the one-rank script
    does. A rank that waits for another one that never comes is reported within seconds.

    Returns: a CheckResult: true if right. `.failed` names the invariant that broke, `.message` says it all.
    Raises:  TypeError for what is no name; LookupError for another name; FileNotFoundError.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f'lab.check_script needs the name of a file, such as "train_ddp.py", not {type(path).__name__}')
    path = Path(path)
    if path.name not in (names := [exercise.file for exercise in scripts.SCRIPTS]):
        known = ", ".join(names)
        raise LookupError(f"{path.name} is none of the scripts to convert, {known}: lab.watch runs any other")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}: run the cell that writes it")
    exercise = scripts.SCRIPTS[names.index(path.name)]
    result = scripts.check_script(exercise, path)
    progress().add("check", exercise=exercise.id, name=exercise.name, passed=bool(result), failed=result.failed)
    return replace(result, next_step=exercise.explanation if result else _asking_for_hints(exercise, result))


def _outdated(fn: Answer) -> str:
    """Return a sentence if a cell below the one of `fn` defines it as well, and cannot have come so far; else ""."""
    shell, code = ipython(), getattr(inspect.unwrap(fn), "__code__", None)
    if shell is None or not code:
        return ""
    cell = shell.compile.format_code_name(code.co_filename)  # ("Cell", "In[11]")
    if not cell or shell.history_manager is None:
        return ""
    definition, since = re.compile(rf"^def {fn.__name__}\b", re.M), int(re.sub(r"\D", "", cell[1])) + 1
    inputs = list(enumerate(shell.history_manager.input_hist_raw))[since:]
    later = [number for number, text in inputs if definition.search(text) and not text.startswith("%%")]
    if not later:
        return ""
    return (
        f"Checked: {fn.__name__} of {cell[1]}. In[{later[-1]}] was to define it anew and has not: look for the error "
        "below that cell."
    )


def _run_answer(fn: Answer, *args: object) -> Results:
    """Run a part of a check on the engines; what the answer raises is distinguished from trouble with the engines."""
    try:
        return run(fn, *args, deadline=ENGINE_DEADLINE)
    except RunFailed as error:
        raise AnswerFailed(str(error)) from None


def hint(fn: Answer | str | None = None) -> Note:
    """Give the next hint for your last check, or for the exercise of this function: three for each kind of mistake."""
    asked = None if fn is None else _exercise_of(fn)
    last = progress().last_check(None if asked is None else asked.id)
    if asked is not None:
        exercise = asked
    elif last is not None:
        exercise = exercises.find(last["exercise"])
    else:
        raise LookupError("no exercise has been checked yet: lab.hint(reduce_scatter) asks for one by its function")
    failed = last["failed"] if last else None
    opened, hints = progress().hints_opened(exercise.id, failed), exercise.hints_for(failed)
    label = f"{exercise.id} {exercise.name}"
    which = f"no more hints, these are all {len(hints)}"
    if opened < len(hints):
        progress().add("hint", exercise=exercise.id, name=exercise.name, failed=failed, level=opened + 1)
        which = f"{ORDINALS[opened]} hint"
    about = f" on {failed!r}" if failed in exercise.hints else ""
    shown = [f"{i + 1}. {text}" for i, text in enumerate(hints[: opened + 1])]
    left = len(hints) - len(shown)
    more = f"\n\n{left} more: lab.hint()" if left else f"\n\n{_asked_for(exercise)} shows one answer."
    return Note(f"{label}: {which}{about}", lines="\n".join(shown) + more)


def solution(fn: Answer | str) -> Note:
    """Return one right answer, the library's own function, with what there is to understand about it."""
    exercise = _exercise_of(fn)
    progress().add("solution", exercise=exercise.id, name=exercise.name)
    if isinstance(exercise, ScriptExercise):
        title = f"{exercise.id} {exercise.file}: solution, notebooks/scripts/{exercise.file}"
        return Note(title, exercise.explanation, exercise.solution)
    path = (inspect.getsourcefile(exercise.reference) or "").rpartition("hpdl_lab/")[2]
    code = re.sub(r"^ *### (BEGIN|END) SOLUTION\n?", "", plain_source(exercise.reference), flags=re.M).rstrip()
    return Note(f"{exercise.id} {exercise.name}: solution, from hpdl_lab/{path}", exercise.explanation, code)


def catch_up(until: str | int) -> Note:
    """Define what the exercises of a notebook ask for, so that its later cells run, if you come late or are stuck.

        lab.catch_up("04")      all exercises of notebook 04
        lab.catch_up("4.2")     those up to 4.2

    The library's functions are defined under the names of the exercises. An answer of yours that passes its check on
    simulated ranks stays.
    Returns: a Note that says what was defined, and with which cell to go on.
    Raises:  LookupError if there is no such exercise or notebook.
    """
    number, _, last = str(until).partition(".")
    if not number.isdecimal() or not (found := exercises_until(int(number), last)):
        notebooks = dict.fromkeys(f"{int(e.id.partition('.')[0]):02d}" for e in exercises.EXERCISES)
        raise LookupError(f"{until!r} is neither a notebook with exercises ({', '.join(notebooks)}) nor one of them")
    names = vars(sys.modules["__main__"])
    states = {exercise: _state_of(exercise, names.get(exercise.name)) for exercise in found}
    names |= {exercise.name: exercise.reference for exercise, state in states.items() if state != KEPT}
    progress().add("catch_up", exercise=found[-1].id)
    text = f"Go on below the check of exercise {found[-1].id}; guesses are still yours to type. "
    text += f"lab.solution({found[-1].name}) shows what was defined."
    lines = "\n".join(f"{exercise.id}  {exercise.name}: {state}" for exercise, state in states.items())
    return Note(f"caught up to exercise {found[-1].id}", text, lines)


def exercises_until(notebook: int, last: str) -> list[Exercise]:
    """Return the exercises of a notebook, up to its `last` one ("" for all); none if it has no such exercise.

    Scripts count, but are not among them: no cell needs one.
    """
    found = [e for e in exercises.EXERCISES if e.id.startswith(f"{notebook}.")]
    if last and f"{notebook}.{last}" not in {e.id for e in (*found, *scripts.SCRIPTS)}:
        return []
    return [e for e in found if not last or int(e.id.partition(".")[2]) <= int(last)]


def _state_of(exercise: Exercise, own: object) -> str:
    """Return what lab.catch_up does about `own`, which has the name of an exercise: KEPT, or why it is replaced."""
    if own is None or own is exercise.reference:
        return "defined"
    try:
        return KEPT if callable(own) and exercises.check(exercise, own) else "defined, in place of one that fails"
    except NotImplementedError:
        return "defined"


def _exercise_of(fn: Answer | str) -> Exercise | ScriptExercise:
    """Return the exercise with the name of this function, or this name. Raises LookupError that lists what is known."""
    return exercises.find(fn if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__))


def _next_step(exercise: Exercise, result: CheckResult, engines: bool) -> str:
    """Return the sentence that says what to do now."""
    if result:
        if engines or not exercise.parallel:
            return exercise.explanation
        return (
            f"Checked on simulated ranks only, because no engines run: lab.start() starts four. {exercise.explanation}"
        )
    return _asking_for_hints(exercise, result)


def _asking_for_hints(exercise: Exercise | ScriptExercise, result: CheckResult) -> str:
    """Return the sentence about the next hint."""
    opened = progress().hints_opened(exercise.id, result.failed)
    if opened >= len(ORDINALS):
        return f"All hints are open. {_asked_for(exercise)} shows one answer."
    return f"For a {ORDINALS[opened]} hint: lab.hint()"


def _asked_for(exercise: Exercise | ScriptExercise) -> str:
    """Return the call that shows the solution."""
    name = f'"{exercise.name}"' if isinstance(exercise, ScriptExercise) else exercise.name
    return f"lab.solution({name})"


def _picture(exercise: Exercise, result: CheckResult) -> str:
    """Return HTML of the picture that explains the result, or ""."""
    drawing = exercise.picture
    if result:
        return "" if drawing is None else _reward(drawing, result)
    if not result.events or not result.expected:
        return ""
    got, expected = (graph.traffic_of(events, result.size) for events in (result.events, result.expected))
    if not np.array_equal(got, expected):
        return _drawn(graph.draw_traffic, got, expected, "Bytes from rank to rank", alt="who sent how much to whom")
    if result.failed in TIMES:
        title = drawing.title if drawing and drawing.kind == "timeline" else "Your messages, in virtual time"
        return _drawn(timeline.draw, result.events, title, alt="who waited for whom")
    return ""


def _reward(drawing: Drawing, result: CheckResult) -> str:
    """Return HTML of what a right answer shows."""
    title = drawing.title
    if drawing.kind == "traffic":
        matrix = graph.traffic_of(result.events, result.size)
        return _drawn(graph.draw_traffic, matrix, None, title, alt=title, width=NARROW)
    if drawing.kind == "timeline":
        return _drawn(timeline.draw, result.events, title, alt=title)
    match drawing.data():
        case Dataflow() as flow if drawing.kind == "animation":
            return animation.html(*played(flow))
        case Dataflow() as flow:
            return _drawn(panels.draw, flow, alt=panels.title_of(flow), height=panels.Sheet(flow).height)
        case Schedule() as plan:
            return _drawn(rows.draw, plan, schedules.evaluate(plan), alt=str(plan), height=rows.height(plan))
        case slots_over_steps:
            return _drawn(slots.draw, *slots_over_steps, alt=title, height=slots.HEIGHT)


def _drawn(draw: style.Draw, *args: object, alt: str, height: float = style.HEIGHT, width: float = style.WIDTH) -> str:
    """Draw once; returns HTML."""
    figure = style.new_figure(width, height)
    with style.style_context():
        draw(figure, *args)
    return live.html(figure, alt)
