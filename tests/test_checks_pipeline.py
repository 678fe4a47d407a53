"""Lesson 10: texts of exercises agree with their checks, clumsy answers are told plainly, right ones get a picture."""

import pytest

from hpdl_lab import lab, schedules
from hpdl_lab.checks import ranks
from hpdl_lab.checks.exercises import check, find
from hpdl_lab.checks.lessons.lesson_10 import A_GPT, DRAWN, parts_of
from hpdl_lab.comm import sim
from hpdl_lab.parallel.pipeline.naive import do_backward
from hpdl_lab.parallel.pipeline.partition import partition
from hpdl_lab.schedules import Action
from hpdl_lab.schedules.gpipe import gpipe
from hpdl_lab.schedules.one_f_one_b import one_f_one_b
from hpdl_lab.schedules.zero_bubble import zero_bubble_h1


@pytest.mark.parametrize(
    ("number", "answer", "says"),
    [
        ("10.1", lambda rank, ranks, m: None, "rank 0 gets nothing: return the list of its actions"),
        ("10.1", lambda rank, ranks, m: (a for a in gpipe(rank, ranks, m)), "gets generator: return a list of Action"),
        ("10.1", lambda rank, ranks: [], "takes 2 positional arguments but 3 were given"),
        ("10.1", lambda rank, ranks, m: [(rank, "F")], "each item is an Action, such as Action(2, \"F\", 5)"),
        ("10.1", lambda rank, ranks, m: [Action(rank, "f", 0)], "does 0f0, nothing that a stage does"),
        ("10.1", lambda rank, ranks, m: [Action(rank, "F", i / 1) for i in range(m)], "there is no micro-batch 0.0"),
        ("10.1", lambda rank, ranks, m: gpipe(rank, ranks, m)[:-2], "never does the backward of micro-batches 2, 3"),
        ("10.2", lambda rank, ranks, m: one_f_one_b(0, ranks, m), "rank 1 holds stage 1 and no other"),
        ("10.3", lambda costs, stages: None, "your function returned nothing: return the list of sizes"),
        ("10.3", lambda costs, stages: 3, "your function returned 3: sizes are a list of whole numbers"),
        ("10.3", lambda costs, stages: [1.5] * stages, "sizes are a list of whole numbers"),
        ("10.3", lambda costs, stages: [*partition(costs, stages)[:-1], -1], "a stage without a layer"),
        ("10.4", lambda rank, ranks, m: one_f_one_b(rank, ranks, m), "does 0B0, backward: in this schedule every"),
        ("10.5", lambda comm, schedule, action, saved: None, "has no gradient for 0.weight"),
        ("10.5", lambda comm, schedule, action: None, "takes 3 positional arguments but 4 were given"),
    ],
)  # fmt: skip
def test_clumsy_answers_are_told_plainly(number, answer, says):
    result = check(find(number), answer)
    assert not result
    assert says in result.message
    assert len(result.message) < 400


def test_a_wrong_schedule_is_shown_as_far_as_it_can_be():
    late = check(find("10.2"), lambda rank, ranks, m: gpipe(rank, ranks, m))
    assert "rank 2  .  .  F0 F1 F2 F3 B0 --" in late.detail
    stuck = check(find("10.2"), lambda rank, ranks, m: [Action(rank, k, i) for _, k, i in one_f_one_b(2 - rank, 3, 4)])
    assert stuck.failed == "deadlock" and stuck.detail.startswith("rank 0  F0 B0 F1 B1")


def test_the_partition_in_the_docstring_is_the_best():
    costs, stages = DRAWN
    sizes = partition(costs, stages)
    assert sizes == [2, 3, 1] and parts_of(sizes, costs) == [6, 6, 4]
    assert "three stages, which cost 6, 6 and 4" in partition.__doc__
    assert max(parts_of(partition(A_GPT, 4), A_GPT)) == 6


def test_a_cluster_of_one_engine_is_no_fault_of_the_answer():
    result = check(find("10.5"), do_backward, lambda fn, *args: sim.run(1, fn, *args))
    assert result and result.facts[-1].startswith("engines: only one is running")


def test_what_is_right_on_simulated_ranks_may_be_wrong_on_engines():
    def runner(fn, *args):
        results = list(sim.run(4, fn, *args))
        results[1].grads[1]["0.bias"][0] += 1
        return results

    result = check(find("10.5"), do_backward, runner)
    assert result.failed == "gradient" and "On 4 engines, the gradient of 0.bias[0] of stage 1" in result.message


@pytest.mark.parametrize("answer", [gpipe, one_f_one_b, zero_bubble_h1])
def test_a_right_schedule_is_drawn(answer):
    result = lab.check(answer)
    assert result and "data:image/png;base64" in result.picture


def test_numbers_of_the_explanations():
    one, zero = (schedules.evaluate(schedules.build(name, 4, 8)) for name in ("1f1b", "zero_bubble_h1"))
    assert (one.makespan, one.bubble * one.makespan) == (33, pytest.approx(9))
    assert (zero.makespan, zero.bubble * zero.makespan) == (27, pytest.approx(3))
    assert "9 of 33 for p=4, m=8" in find("10.4").explanation and "3 of 27" in find("10.4").explanation


def test_an_endless_loop_names_its_line_and_not_what_a_tuple_is_made_by(monkeypatch):
    monkeypatch.setattr(ranks, "DEADLINE", 0.1)
    source = "def gpipe(rank, ranks, micro_batches):\n    while True:\n        Action(rank, 'F', 0)\n"
    namespace = {"Action": Action}
    exec(compile(source, "/tmp/ipykernel_1/1.py", "exec"), namespace)
    for _ in range(3):  # it may be caught in Action.__new__, which is a string somewhere
        result = check(find("10.1"), namespace["gpipe"])
        assert result.failed == "timeout" and "in cell:" in result.message
