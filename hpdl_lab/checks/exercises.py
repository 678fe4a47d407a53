"""The table of exercises, and `check`, which runs one of them."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

from . import lessons as package
from .ranks import judged, with_evidence
from .record import Answer, Broken, Exercise, Runner
from .result import CheckResult
from .scripts.table import SCRIPTS, ScriptExercise


def _lessons() -> list[ModuleType]:
    """Return the modules that hold exercises: all of lessons/, found and not listed."""
    return [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]


EXERCISES: tuple[Exercise, ...] = tuple(
    sorted((e for lesson in _lessons() for e in lesson.EXERCISES), key=lambda e: tuple(map(int, e.id.split("."))))
)


def find(name: str) -> Exercise | ScriptExercise:
    """Return the exercise with this id ("4.1"), function name, or path ("hpdl_lab.collectives.ring:reduce_scatter").

    Returns: an Exercise, or a ScriptExercise, which has its id, its name, its hints and its stars as well.

    Raises: LookupError that lists what is known.
    """
    for exercise in EXERCISES:
        if name in (exercise.id, exercise.name, exercise.path):
            return exercise
    for script in SCRIPTS:
        if name in (script.id, script.name, script.file):
            return script
    if meant := _closest(name):
        raise LookupError(f"no exercise is called {name!r}: did you mean {meant.name} ({meant.id})?")
    known = ", ".join(f"{e.name} ({e.id})" for e in EXERCISES)
    raise LookupError(f"no exercise is called {name!r}. Known: {known}")


def _closest(name: str) -> Exercise | None:
    """Return the exercise whose name is most like `name`, the longest that is a part of it first; None if none is."""
    parts = sorted((e.name for e in EXERCISES if e.name in name), key=len)
    near = parts[-1:] or difflib.get_close_matches(name, [e.name for e in EXERCISES], n=1, cutoff=0.8)
    return next((e for e in EXERCISES if e.name in near), None)


def check(exercise: Exercise, fn: Answer, runner: Runner = None) -> CheckResult:
    """Check `fn` as an answer to `exercise`: on simulated ranks, then, with `runner(fn, *args)`, on the engines.

    Returns: CheckResult. Raises: NotImplementedError, in one line, if `fn` is still a stub.
    """
    label = f"{exercise.id} {exercise.name}"
    judged.set(None)
    try:
        passed = exercise.check(fn, runner) if exercise.parallel else exercise.check(fn)
    except Broken as broken:
        with_evidence(broken)
        return CheckResult(
            exercise=label,
            failed=broken.failed,
            message=broken.message,
            detail=broken.detail.strip("\n"),
            events=broken.events,
            expected=broken.expected,
            size=broken.size,
        )
    except NotImplementedError as error:
        raise NotImplementedError(str(error) or f"exercise {exercise.id}: write {exercise.name}") from None
    finally:
        judged.set(None)
    return CheckResult(label, None, "correct", facts=passed.facts, events=passed.events, size=passed.size)
