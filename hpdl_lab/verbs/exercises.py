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
from ..checks.lessons.lesson_13_serving import compared
from ..checks.record import Answer, AnswerFailed, Exercise
from ..checks.result import CheckResult, Note
from ..checks.scripts import table as scripts
from ..checks.scripts.table import ScriptExercise
from ..collectives.table import find
from ..comm.base import Results
from ..engines.cluster import ipython
from ..engines.errors import RunFailed
from ..plain_source import plain_source
from ..plots import animation, graph, live, slots, style, timeline
from ..plots import collective as panels
from ..plots import schedule as rows
from .cluster import run, running
from .progress import progress
from .show import of_table, played

ENGINE_DEADLINE = 20.0  # s that a rank may wait for another: the first check may find ranks still importing torch
KEPT = "yours, which passes, stays"
ORDINALS = ("first", "second", "third")
RING_RANKS = 4  # of the picture for a right answer, as in the notebook
TRAFFIC = {  # exercise whose messages are shown: title of the picture
    "server_step": "Everything passes through rank 0",
    "gossip_step": "Your messages on a wheel: neighbors only",
    "halo_exchange": "Your halos: rows for the neighbors, and for nobody else",
    "reduce_gradients": "Your sums: each rank with those that hold the same parameters",
    "do_backward": "Activations to the next rank, gradients to the one before",
    "sharded_step": "Your three steps: the bytes of three all-reduces",
}
TIMELINES = {  # whose events are shown in virtual time
    "broadcast": "Your segments along the chain, in virtual time",
    "gradient_ready": "Your buckets travel while backward goes on: a step in virtual time",
    "pipelined_copy": "Your blocks in three stages, in virtual time",
    "all_reduce_on_stream": "Your streams on rank 0, in virtual time",
    "gather_and_release": "Your gathers behind forward and backward, in virtual time",
}
SCHEDULES = {"gpipe": "gpipe", "one_f_one_b": "1f1b", "zero_bubble_h1": "zero_bubble_h1"}  # drawn on RING_RANKS
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
    exercise, engines = exercise_of(fn), running() is not None
    if isinstance(exercise, ScriptExercise):
        raise TypeError(f'{exercise.name} is a script of its own: lab.check_script("{exercise.file}")')
    result = exercises.check(exercise, fn, run_answer if engines else None)
    progress().add("check", exercise=exercise.id, name=exercise.name, passed=bool(result), failed=result.failed)
    step = next_step(exercise, result, engines)
    return replace(result, outdated=outdated(fn), picture=picture(exercise, result), next_step=step)


def check_script(path: str | Path) -> CheckResult:
    """Check a training script that you have converted: launch it, and compare its ranks with the one-rank script.

    The exercise is found by the name of the file: train_ddp.py, train_tp.py or train_hybrid.py. Its ranks are launched
    as by torchrun, on CPUs, each in a folder of its own; they print losses as the one-rank script does. A rank that
    waits for another one that never comes is reported within seconds.

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
    return replace(result, next_step=exercise.explanation if result else asking_for_hints(exercise, result))


def outdated(fn: Answer) -> str:
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


def run_answer(fn: Answer, *args: object) -> Results:
    """Run a part of a check on the engines; what the answer raises is distinguished from trouble with the engines."""
    try:
        return run(fn, *args, deadline=ENGINE_DEADLINE)
    except RunFailed as error:
        raise AnswerFailed(str(error)) from None


def hint(fn: Answer | str | None = None) -> Note:
    """Give the next hint for your last check, or for the exercise of this function: three for each kind of mistake."""
    asked = None if fn is None else exercise_of(fn)
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
    more = f"\n\n{left} more: lab.hint()" if left else f"\n\n{asked_for(exercise)} shows one answer."
    return Note(f"{label}: {which}{about}", lines="\n".join(shown) + more)


def solution(fn: Answer | str) -> Note:
    """Return one right answer, the library's own function, with what there is to understand about it."""
    exercise = exercise_of(fn)
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
    states = {exercise: state_of(exercise, names.get(exercise.name)) for exercise in found}
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


def state_of(exercise: Exercise, own: object) -> str:
    """Return what lab.catch_up does about `own`, which has the name of an exercise: KEPT, or why it is replaced."""
    if own is None or own is exercise.reference:
        return "defined"
    try:
        return KEPT if callable(own) and exercises.check(exercise, own) else "defined, in place of one that fails"
    except NotImplementedError:
        return "defined"


def exercise_of(fn: Answer | str) -> Exercise | ScriptExercise:
    """Return the exercise with the name of this function, or this name. Raises LookupError that lists what is known."""
    return exercises.find(fn if isinstance(fn, str) else getattr(fn, "__name__", type(fn).__name__))


def next_step(exercise: Exercise, result: CheckResult, engines: bool) -> str:
    """Return the sentence that says what to do now."""
    if result:
        if engines or not exercise.parallel:
            return exercise.explanation
        return (
            f"Checked on simulated ranks only, because no engines run: lab.start() starts four. {exercise.explanation}"
        )
    return asking_for_hints(exercise, result)


def asking_for_hints(exercise: Exercise | ScriptExercise, result: CheckResult) -> str:
    """Return the sentence about the next hint."""
    opened = progress().hints_opened(exercise.id, result.failed)
    if opened >= len(ORDINALS):
        return f"All hints are open. {asked_for(exercise)} shows one answer."
    return f"For a {ORDINALS[opened]} hint: lab.hint()"


def asked_for(exercise: Exercise | ScriptExercise) -> str:
    """Return the call that shows the solution."""
    name = f'"{exercise.name}"' if isinstance(exercise, ScriptExercise) else exercise.name
    return f"lab.solution({name})"


def picture(exercise: Exercise, result: CheckResult) -> str:
    """Return HTML of the picture that explains the result, or ""."""
    if result:
        return reward(exercise.name, result)
    if not result.events or not result.expected:
        return ""
    got, expected = (graph.traffic_of(events, result.size) for events in (result.events, result.expected))
    if not np.array_equal(got, expected):
        return drawn(graph.draw_traffic, got, expected, "Bytes from rank to rank", alt="who sent how much to whom")
    if result.failed in TIMES:
        title = TIMELINES.get(exercise.name, "Your messages, in virtual time")
        return drawn(timeline.draw, result.events, title, alt="who waited for whom")
    return ""


def reward(name: str, result: CheckResult) -> str:
    """Return HTML of what the right answer does: the ring as far as it has been written, or its messages."""
    if name in TRAFFIC:
        matrix = graph.traffic_of(result.events, result.size)
        return drawn(graph.draw_traffic, matrix, None, TRAFFIC[name], alt=TRAFFIC[name], width=NARROW)
    if name in TIMELINES:
        return drawn(timeline.draw, result.events, TIMELINES[name], alt=TIMELINES[name])
    if name in SCHEDULES:
        plan = schedules.build(SCHEDULES[name], RING_RANKS, 2 * RING_RANKS)
        return drawn(rows.draw, plan, schedules.evaluate(plan), alt=str(plan), height=rows.height(plan))
    if name == "reduce_scatter":
        story = of_table(find("ring", name), RING_RANKS, {})
        return drawn(panels.draw, story, alt=panels.title_of(story), height=panels.Sheet(story).height)
    if name == "schedule":
        return drawn(slots.draw, *compared(), alt="who had which slot in each step", height=slots.HEIGHT)
    if name == "all_reduce":
        return animation.html(*played(of_table(find("ring"), RING_RANKS, {})))
    return ""


def drawn(draw: style.Draw, *args: object, alt: str, height: float = style.HEIGHT, width: float = style.WIDTH) -> str:
    """Draw once; returns HTML."""
    figure = style.new_figure(width, height)
    with style.look():
        draw(figure, *args)
    return live.html(figure, alt)
