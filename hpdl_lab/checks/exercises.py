"""The table of exercises, and `check`, which runs one of them."""

from . import lesson_00_engines, lesson_01_gradient_descent, lesson_02_parallel, lesson_04_ring
from .record import Broken
from .result import CheckResult

EXERCISES = (
    *lesson_00_engines.EXERCISES,
    *lesson_01_gradient_descent.EXERCISES,
    *lesson_02_parallel.EXERCISES,
    *lesson_04_ring.EXERCISES,
)


def find(name):
    """The exercise with this id ("4.1"), function name, or path ("hpdl_lab.collectives.ring:reduce_scatter").

    Raises: LookupError that lists what is known.
    """
    for exercise in EXERCISES:
        if name in (exercise.id, exercise.name, exercise.path):
            return exercise
    known = ", ".join(f"{e.name} ({e.id})" for e in EXERCISES)
    raise LookupError(f"no exercise is called {name!r}. Known: {known}")


def check(exercise, fn, runner=None):
    """Check `fn` as an answer to `exercise`: on simulated ranks, then, with `runner(fn, *args)`, on the engines.

    Returns: CheckResult. Raises: NotImplementedError, in one line, where `fn` is still a stub.
    """
    label = f"{exercise.id} {exercise.name}"
    try:
        passed = exercise.check(fn, runner)
    except Broken as broken:
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
    return CheckResult(label, None, "correct", facts=passed.facts, events=passed.events, size=passed.size)
