"""Every check rejects every wrong answer with the message meant for it, and accepts every right one."""

import re
import time

import numpy as np
import pytest
import torch

from hpdl_lab.checks import collective, exercises, ranks
from hpdl_lab.checks.exercises import EXERCISES, check, find
from hpdl_lab.checks.lessons import lesson_06_overlap
from hpdl_lab.checks.lessons.lesson_04 import ALL_REDUCE
from hpdl_lab.checks.record import AnswerFailed, Broken
from hpdl_lab.collectives import ring
from hpdl_lab.comm import CommTimeout, Wait, sim
from hpdl_lab.models.mlp import mlp
from tests import answers

WRONG = [(exercise, wrong) for exercise in EXERCISES for wrong in answers.WRONG[exercise.id]]
RIGHT = [(exercise, fn) for exercise in EXERCISES for fn in (exercise.reference, *answers.RIGHT[exercise.id])]
DDP_IS_SIMULATED = "PyTorch's process groups need processes"  # so that 6.5 has a test of its own below


def on_simulated_ranks(fn, *args):
    """Stands in for the engines, which may wait inside backward."""
    return sim.run(4, fn, *args, threads=True)


def in_a_cell(source, name="reduce_scatter"):
    """A function as a notebook defines it: its source has the file name of a cell."""
    namespace = {}
    exec(compile(source, "/tmp/ipykernel_1/1.py", "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize(("exercise", "wrong"), WRONG, ids=[f"{e.id}-{w.failed}" for e, w in WRONG])
def test_a_wrong_answer_is_rejected_with_its_message_in_time(exercise, wrong, monkeypatch):
    if wrong.failed == "timeout":
        monkeypatch.setattr(ranks, "DEADLINE", 0.2)  # it is waited for to the end
    started = time.process_time()  # a busy machine may take longer
    result = check(exercise, wrong.fn)
    assert not result
    assert (result.failed, wrong.says in result.message) == (wrong.failed, True), result.message
    assert time.process_time() - started < ranks.DEADLINE + 3


@pytest.mark.parametrize(("exercise", "fn"), RIGHT, ids=[f"{e.id}-{f.__name__}" for e, f in RIGHT])
def test_a_right_answer_passes_on_simulated_ranks_and_then_on_the_engines(exercise, fn):
    result = check(exercise, fn, on_simulated_ranks)
    assert result, result.message
    assert result.failed is None
    assert "correct" in str(result)
    if exercise.parallel:
        found = DDP_IS_SIMULATED if exercise.id == "6.5" else r"\b4 (MPI ranks|engines)"
        assert any(re.search(found, fact) for fact in result.facts), result.facts


def course_of_ddp(comm, share):
    """Parameters after each step as DDP makes them, with gradients that are the sum over ranks times `share`."""
    model = mlp(lesson_06_overlap.SIZES_DDP, seed=1).double()
    optimizer, course = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(lesson_06_overlap.STEPS_DDP):
        x, y = lesson_06_overlap.shard_of(comm.rank, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad) * share
        optimizer.step()
        course.append(lesson_06_overlap.flat(model))
    return course


@pytest.mark.parametrize(("share", "failed"), [(1 / 4, None), (1, "engines"), (1 / 5, "engines")])
def test_training_with_ddp_on_engines_is_compared_with_one_rank(share, failed):
    exercise = find("6.5")
    result = check(exercise, exercise.reference, lambda fn, *args: sim.run(4, course_of_ddp, share))
    assert result.failed == failed
    assert ("PyTorch's DDP on 4 MPI ranks" in str(result.facts)) == (failed is None)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_a_record_is_complete(exercise):
    wrong_answers = answers.WRONG[exercise.id]
    messages = [wrong.says for wrong in wrong_answers]
    assert len(set(messages)) >= 4
    assert answers.RIGHT[exercise.id]
    assert exercise.explanation
    assert "" in exercise.hints
    assert all(len(levels) == 3 and len(set(levels)) == 3 for levels in exercise.hints.values())
    assert {wrong.failed for wrong in wrong_answers} - {"sum", "value"}, "more than one kind of mistake"
    assert find(exercise.id) is find(exercise.name) is find(exercise.path) is exercise


def test_ids_and_names_are_unique():
    assert len({e.id for e in EXERCISES}) == len({e.name for e in EXERCISES}) == len(EXERCISES)


def test_an_unknown_exercise_lists_the_known():
    with pytest.raises(
        LookupError, match=r"no exercise is called 'ring_reduce'\. Known: hello \(0\.1\).*all_reduce \(4\.3\)"
    ):
        find("ring_reduce")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_a_stub_is_not_wrong_but_unwritten(exercise):
    def stub(*args):
        raise NotImplementedError(f"exercise {exercise.id}: write {exercise.name}")

    with pytest.raises(NotImplementedError, match=f"^exercise {exercise.id}: write {exercise.name}$"):
        check(exercise, stub)


def test_a_deadlock_names_the_line_in_the_cell_and_the_cycle():
    fn = in_a_cell(
        "def reduce_scatter(comm, x):\n"
        "    p, r = comm.size, comm.rank\n"
        "    comm.send(x[:len(x) // p].clone(), (r + 1) % p)\n"
        "    return x\n"
    )
    result = check(find("4.1"), fn)
    assert result.failed == "deadlock"
    assert re.search(r"1 +waiting +send +to rank 2 +1,332 ", result.detail)
    assert "cell:3" in result.detail
    assert "cycle: 0 -> 1 -> 2 -> 0" in result.detail


def test_an_error_names_rank_and_line_in_the_cell():
    fn = in_a_cell("def reduce_scatter(comm, x):\n    if comm.rank == 2:\n        return x[comm.sise]\n    return x\n")
    result = check(find("4.1"), fn)
    assert result.failed == "raises"
    assert (
        "AttributeError: 'SimComm' object has no attribute 'sise' (on simulated rank 2 of 3, at cell:3)"
        in result.message
    )


def test_a_loop_without_messages_names_its_line(monkeypatch):
    monkeypatch.setattr(ranks, "DEADLINE", 0.2)
    fn = in_a_cell("def reduce_scatter(comm, x):\n    i = 0\n    while i < comm.size - 1:\n        pass\n")
    result = check(find("4.1"), fn)
    assert result.failed == "timeout"
    said = r"your function was still running after 0\.2 s, in cell:[34]\. Is there a loop that never ends\?$"
    assert re.search(said, result.message), result.message


def test_of_ranks_that_would_all_loop_the_others_are_not_begun(monkeypatch):
    monkeypatch.setattr(ranks, "DEADLINE", 0.1)
    begun = []

    def loops(comm, x):
        begun.append(comm.rank)
        while True:
            pass

    assert check(find("4.1"), loops).failed == "timeout" and begun == [0]


def test_what_an_answer_prints_is_shown_only_where_it_fails_and_only_the_end_of_it(capsys):
    fn = in_a_cell(
        "def reduce_scatter(comm, x):\n    for i in range(9):\n        print('rank', comm.rank, 'line', i)\n    1 / 0\n"
    )
    result = check(find("4.1"), fn)
    assert capsys.readouterr().out == ""
    assert "your function printed (the last 10 of 27 lines):" in result.detail
    assert "rank 2 line 8" in result.detail and "rank 0 line 0" not in result.detail


def test_ranks_that_round_differently_are_rejected():
    def drifts(comm, x):
        ring.all_reduce(comm, x)
        if comm.rank == 3 and len(x) == 1001 and not bool((x == x.round()).all()):
            x.mul_(1 + 1e-7)
        return x

    result = check(find("4.3"), drifts)
    assert result.failed == "bitwise"
    assert "rank 3" in result.message and "different orders" in result.message


def test_right_on_simulated_ranks_but_wrong_on_the_engines_says_so():
    def runner(fn, *args):
        results = sim.run(4, fn, *args)
        results[2][1].x[5] += 1
        return results

    result = check(find("4.3"), ring.all_reduce, runner)
    assert result.failed == "engines"
    assert (
        "Right on simulated ranks, but wrong on the engines, with 4 ranks and 1,001 elements, on rank 2"
        in result.message
    )


def test_a_wait_on_the_engines_shows_who_waits_for_whom():
    def runner(fn, *args):
        waits = [Wait(0, "waiting", "recv", (1,), 8, 5.0, "cell:4"), Wait(1, "finished")]
        raise CommTimeout("rank 0 has waited 5 s", waits)

    for exercise, fn in ((find("4.3"), ring.all_reduce), (find("2.1"), find("2.1").reference)):
        result = check(exercise, fn, runner)
        assert result.failed == "engines"
        assert "rank 0 has waited 5 s" in result.message
        assert re.search(r"0 +waiting +recv +from rank 1 +8 +5 s +cell:4", result.detail)


def test_an_error_on_the_engines_is_one_sentence():
    def runner(fn, *args):
        raise AnswerFailed("rank 2: MemoryError: no memory for 4 GiB\n    cell:3 in work")

    for name in ("0.1", "0.2", "2.1", "4.2"):
        result = check(find(name), find(name).reference, runner)
        assert result.failed == "engines"
        said = "Right on simulated ranks, but on the engines: rank 2: MemoryError: no memory for 4 GiB."
        assert result.message == said
        assert "cell:3 in work" in result.detail


def test_trouble_with_the_engines_is_not_blamed_on_the_answer():
    def runner(fn, *args):
        raise RuntimeError("no engine cluster is running")

    for name in ("0.1", "2.1", "4.2"):
        with pytest.raises(RuntimeError, match="no engine cluster is running"):
            check(find(name), find(name).reference, runner)


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("4.1", lambda comm, x: x.resize_(0), r"x had shape \(999,\) and now has \(0,\)"),
        ("4.3", lambda comm, x: ring.all_reduce(comm, x).double(), "returned float64, but x is float32"),
        ("4.3", lambda comm, x: list(ring.all_reduce(comm, x)), "returned list: return x"),
        ("4.3", lambda comm: comm, r"raised TypeError: .*takes 1 positional argument but 2 were given"),
        ("2.1", lambda comm, g: list(comm.all_reduce(g)), r"of type list: the gradient is a .* of shape \(2,\)"),
        ("1.1", lambda w, x, y: "downhill", r"of type str: a NumPy array of shape \(2,\)"),
        ("1.1", lambda w, x, y: [[1, 2], [3]], r"of type list: a NumPy array of shape \(2,\)"),
        ("1.2", lambda w, x, y, rate: 0.0, r"of type float: a NumPy array of shape \(2,\)"),
        ("1.2", lambda w, x, y, rate: np.full(2, np.inf), r"number 0 of the result should be -1\.33464 and is inf"),
        ("1.3", lambda x: float("nan"), "you say nan"),
        ("1.3", lambda x: np.array("1"), "a float; your function returned ndarray"),
    ],
)
def test_odd_things_that_answers_do_are_said_plainly(name, answer, says):
    result = check(find(name), answer)
    assert not result
    assert re.search(says, result.message), result.message


def test_guard_elements_are_next_to_x_on_both_sides():
    def writes_before(comm, x):
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0)
        return ring.all_reduce(comm, x)

    result = check(find("4.3"), writes_before)
    assert result.failed == "bounds"
    assert "1 before its first element" in result.message


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_every_number_of_ranks_meets_every_size(p):
    sizes = [n for ranks_, n in collective.cases() if ranks_ == p]
    assert {0, 1, p - 1, 1000, 1001} <= set(sizes)
    assert all(len({tuple(row) for row in collective.inputs(p, n)}) == p for n in sizes if n > 1)


def test_a_failure_carries_the_events_of_a_right_answer_in_the_same_run():
    result = check(find("4.3"), ring.all_reduce_naive)
    assert result.size == 8
    assert sum(e.nbytes for e in result.events if e.op == "send") == 8 * 28_000
    assert sum(e.nbytes for e in result.expected if e.op == "send") == 8 * 7_000


def test_the_events_are_those_of_the_run_that_was_judged_not_of_the_runs_that_explain_it():
    result = check(find("4.1"), answers.WRONG["4.1"][1].fn)  # the average, on 3 ranks with 999 elements
    assert (result.failed, result.size) == ("sum", 3)
    assert sum(e.nbytes for e in result.events if e.op == "send") == 3 * 2 * 333 * 4
    stuck = check(find("4.1"), answers.WRONG["4.1"][5].fn)
    assert stuck.failed == "deadlock" and stuck.events == [], "the run failed, and an earlier one is no evidence"


def test_a_result_shows_itself_in_a_notebook_and_in_a_terminal():
    result = check(find("4.1"), ring.all_reduce_naive)
    bundle = result._repr_mimebundle_()
    assert bundle["text/plain"] == str(result) == repr(result)
    assert str(result).startswith("4.1 reduce_scatter: not yet (returns)")
    assert "<div" in bundle["text/html"] and "not yet" in bundle["text/html"]
    assert bool(result) is False


def test_what_a_function_says_cannot_become_html():
    result = check(find("0.1"), lambda comm: "<script>alert(1)</script>")
    assert "<script>" in result.message
    assert "<script>" not in result._repr_html_()


def test_broken_answers_leave_no_timer_and_no_redirected_output_behind(capsys):
    check(find("4.1"), answers.WRONG["4.1"][5].fn)
    print("still here")
    assert capsys.readouterr().out == "still here\n"


def test_float_results_within_rounding_pass_and_beyond_fail():
    def sloppy(comm, x):
        ring.all_reduce(comm, x)
        if not bool((x == x.round()).all()):
            x.mul_(1.001)
        return x

    with pytest.raises(Broken, match="Whole numbers are added exactly"):
        collective.check_rounding(ALL_REDUCE, sloppy)


def test_the_table_lists_every_exercise_of_the_notebooks():
    numbers = {0: 2, 1: 3, 2: 3, 3: 7, 4: 5, 6: 6, 9: 6, 10: 5, 11: 4}  # notebook: exercises
    expected = [f"{notebook}.{k}" for notebook, n in numbers.items() for k in range(1, n + 1)]
    assert [e.id for e in exercises.EXERCISES] == expected
    assert set(answers.WRONG) == set(answers.RIGHT) == set(expected)
    assert sum(map(len, answers.WRONG.values())) >= 680
