"""The table of exercises, and `check`, which runs one of them."""

import difflib

from . import (
    lesson_00_engines,
    lesson_01_gradient_descent,
    lesson_02_gossip,
    lesson_02_parallel,
    lesson_02_server,
    lesson_03_collectives,
    lesson_03_diagnosis,
    lesson_03_messages,
    lesson_03_repair,
    lesson_04_choose,
    lesson_04_pipeline,
    lesson_04_ring,
    lesson_06_average,
    lesson_06_buckets,
    lesson_06_ddp,
    lesson_06_loop,
    lesson_06_overlap,
    lesson_06_replicas,
    lesson_09_halo,
    lesson_09_heads,
    lesson_09_linear,
    lesson_09_sequence,
    lesson_10_backward,
    lesson_10_orders,
    lesson_10_partition,
    lesson_10_zero_bubble,
    lesson_11_gradients,
    lesson_11_mesh,
    lesson_11_search,
)
from .record import Broken, Exercise
from .result import CheckResult

EXERCISES = (
    *lesson_00_engines.EXERCISES,
    *lesson_01_gradient_descent.EXERCISES,
    *lesson_02_parallel.EXERCISES,
    *lesson_02_server.EXERCISES,
    *lesson_02_gossip.EXERCISES,
    *lesson_03_messages.EXERCISES,
    *lesson_03_collectives.EXERCISES,
    *lesson_03_diagnosis.EXERCISES,
    *lesson_03_repair.EXERCISES,
    *lesson_04_ring.EXERCISES,
    *lesson_04_pipeline.EXERCISES,
    *lesson_04_choose.EXERCISES,
    *lesson_06_replicas.EXERCISES,
    *lesson_06_average.EXERCISES,
    *lesson_06_buckets.EXERCISES,
    *lesson_06_overlap.EXERCISES,
    *lesson_06_ddp.EXERCISES,
    *lesson_06_loop.EXERCISES,
    *lesson_09_linear.EXERCISES,
    *lesson_09_heads.EXERCISES,
    *lesson_09_sequence.EXERCISES,
    *lesson_09_halo.EXERCISES,
    *lesson_10_orders.EXERCISES,
    *lesson_10_partition.EXERCISES,
    *lesson_10_zero_bubble.EXERCISES,
    *lesson_10_backward.EXERCISES,
    *lesson_11_mesh.EXERCISES,
    *lesson_11_gradients.EXERCISES,
    *lesson_11_search.EXERCISES,
)


def find(name):
    """The exercise with this id ("4.1"), function name, or path ("hpdl_lab.collectives.ring:reduce_scatter").

    Raises: LookupError that lists what is known.
    """
    for exercise in EXERCISES:
        if name in (exercise.id, exercise.name, exercise.path):
            return exercise
    if meant := closest(name):
        raise LookupError(f"no exercise is called {name!r}: did you mean {meant.name} ({meant.id})?")
    known = ", ".join(f"{e.name} ({e.id})" for e in EXERCISES)
    raise LookupError(f"no exercise is called {name!r}. Known: {known}")


def closest(name: str) -> Exercise | None:
    """The exercise whose name is most like `name`, the longest one that is a part of it first; None if none is."""
    parts = sorted((e.name for e in EXERCISES if e.name in name), key=len)
    near = parts[-1:] or difflib.get_close_matches(name, [e.name for e in EXERCISES], n=1, cutoff=0.8)
    return find(near[0]) if near else None


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
