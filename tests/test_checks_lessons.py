"""Lessons 02 to 06: the texts of the exercises agree with their checks, clumsy answers are told plainly what to do."""

import re

import numpy as np
import pytest

from hpdl_lab import lab, zoo
from hpdl_lab.checks import ranks
from hpdl_lab.checks.exercises import check, find
from hpdl_lab.checks.record import Broken
from hpdl_lab.collectives import jobs
from hpdl_lab.comm import PerRank, sim
from hpdl_lab.data import diabetes
from hpdl_lab.optim import gradient_descent as descent
from hpdl_lab.parallel import gossip as graphs
from hpdl_lab.parallel import gradient_descent as averaging
from hpdl_lab.parallel import gradient_descent as descent_with_server
from tests import answers


def on_one_engine(fn, *args):
    """Stands in for a cluster of one engine."""
    return sim.run(1, fn, *args)


def test_the_jobs_stand_in_the_text_of_the_exercise_and_have_one_collective_each():
    for job in jobs.JOBS:
        assert f"{job.letter}  {job.text}\n" in jobs.which_collective.__doc__
    assert sorted(jobs.which_collective().values()) == sorted(jobs.DOES)
    assert list(jobs.which_collective()) == [job.letter for job in jobs.JOBS]


def test_the_diagnoses_stand_in_the_text_of_the_exercise_and_each_is_needed():
    for name, meaning in zoo.DIAGNOSES.items():
        assert re.search(rf'"{name}" +{re.escape(meaning)}\n', zoo.diagnose.__doc__)
    assert set(zoo.diagnose().values()) == set(zoo.DIAGNOSES)
    assert list(zoo.diagnose()) == list(zoo.LETTERS)


def test_the_doctor_gives_the_reasons_that_the_ward_asks_for():
    signs = {"circle": "both receive first", "mismatch": "differ", "absent": "never called|one step early"}
    signs |= {"order": "opposite order", "error": "raised", "slow": "still computing"}
    for letter, name in zoo.LETTERS.items():
        assert re.search(signs[zoo.diagnose()[letter]], zoo.find(name).reason)


def test_the_zoo_shows_programs_and_does_not_give_their_fault_away():
    shown = str(lab.zoo())
    assert shown.count("def program(comm):") == len(zoo.LETTERS) and '"""' not in shown
    for name in zoo.LETTERS.values():
        assert name not in shown and zoo.find(name).broken.__name__ not in shown
    assert str(lab.zoo("wrong_root")).startswith("1 program with a fault\n  wrong_root: ")
    with pytest.raises(ValueError, match="no program 'Q' in the zoo: both_receive_first, "):
        lab.zoo("Q")


@pytest.mark.parametrize("number", ["3.5", "3.6", "3.7"])
def test_the_text_of_a_repair_does_not_hold_the_repair(number):
    exercise = find(number)
    assert exercise.scaffold in [wrong.fn for wrong in answers.WRONG[number]]
    assert exercise.reference.__doc__.startswith(exercise.scaffold.__doc__.split("\n")[0])
    assert "Returns: " in exercise.reference.__doc__


@pytest.mark.parametrize("number", ["2.2", "2.3", "3.1", "3.5", "3.6", "3.7", "4.4"])
def test_a_cluster_of_one_engine_is_no_fault_of_the_answer(number):
    exercise = find(number)
    result = check(exercise, exercise.reference, on_one_engine)
    assert result, result.message
    assert "engines: " in result.facts[-1]


@pytest.mark.parametrize("number", ["2.2", "2.3", "3.1", "3.5"])
def test_what_is_right_on_simulated_ranks_may_be_wrong_on_engines(number):
    def runner(fn, *args):
        results = sim.run(4, fn, *args)
        results[2] = results[1] if not isinstance(results[1], tuple) else (None, *results[2][1:])
        return results

    result = check(find(number), find(number).reference, runner)
    assert not result
    assert "on 4 engines" in result.message.lower()


def send_to_nobody(comm, w, g, rate):
    comm.send(g, comm.size)


def tensor_and_rank_swapped(comm, x):
    return comm.recv(1, x) if comm.rank == 0 else x


def never_waits(comm, x):
    if comm.rank == 1:
        comm.irecv(x, 0)
    elif comm.rank == 0:
        comm.send(x, 1)
    return x


def strided(comm, x, root=0, segments=4):
    for k in range(segments if comm.rank == 0 else 0):
        comm.send(x[k::segments], 1)
    return x


@pytest.mark.parametrize(
    ("number", "answer", "says"),
    [
        ("2.2", lambda comm, w, g, rate: list(w), "type list: every rank returns w, a NumPy array of shape (2,)"),
        ("2.2", lambda comm, w, g: w, "takes 3 positional arguments but 4 were given"),
        ("2.2", send_to_nobody, "rank 0 sends to rank 4: ranks here are 0 to 3"),
        ("2.3", lambda comm, x, graph: 3, "something of type int: return x, a NumPy array of shape (10,)"),
        ("3.1", tensor_and_rank_swapped, "comm.send(x, to), comm.recv(x, source)"),
        ("3.1", never_waits, "never waited for its receive from rank 0"),
        ("3.1", lambda comm, x: x, "rank 1 does not hold what rank 0 sent"),
        ("3.2", lambda sizes, seconds: ("a", "b"), "return two numbers, alpha and beta"),
        ("3.2", lambda sizes, seconds: (np.nan, np.nan), "Is there a division by zero"),
        ("3.2", lambda sizes, seconds: (find("3.2").reference(sizes, seconds)[0], np.nan), "a division by zero"),
        ("3.2", lambda sizes, seconds: sizes.clear(), "changed its arguments: work on copies"),
        ("3.3", lambda: {"A": 1}, "Job A: no collective is called 1"),
        ("3.4", lambda: {"A": ["circle"]}, "Program A: there is no diagnosis ['circle']"),
        ("3.5", lambda comm: [1, 2] if comm.rank else 3.0, "rank 0 returned 3 and should return 4"),
        ("3.5", lambda comm: [1, 2], "rank 0 returned [1, 2]: every rank returns a float, here 4"),
        ("4.4", strided, "cannot send a non-contiguous tensor"),
        ("4.4", lambda comm, x: x, "takes 2 positional arguments but 4 were given"),
        ("4.5", lambda costs, p, nbytes, alpha, beta: costs["ring"].steps, "has no attribute 'steps'"),
    ],
)
def test_clumsy_answers_are_told_plainly(number, answer, says):
    result = check(find(number), answer)
    assert not result
    assert says.lower() in result.message.lower(), result.message
    assert len(result.message) < 400


def answers_of(*numbers):
    """(number, function) of every answer to these exercises that the check accepts."""
    return [(e.id, fn) for e in map(find, numbers) for fn in (e.reference, *answers.RIGHT[e.id])]


@pytest.mark.parametrize(
    ("number", "fn"),
    answers_of("1.1", "1.2", "1.3", "2.1", "2.2", "2.3", "3.1", "3.2"),
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_a_check_accepts_serves_the_notebooks_own_data(number, fn):
    x, y = (part[:440] for part in diabetes.load())
    w, graph = np.array([0.3, -0.2]), graphs.graph("star", 16)
    step = descent.gradient_step(w, x, y, 0.5)
    if number == "1.1":
        assert np.allclose(fn(w, x, y), descent.gradient(w, x, y), rtol=1e-9)
    elif number == "1.2":
        assert np.allclose(fn(w, x, y, 0.5), step, rtol=1e-9)
    elif number == "1.3":
        assert fn(x) == pytest.approx(1.0542, rel=0.01)
    elif number == "2.1":
        assert np.allclose(sim.run(4, averaging.step_together, w, x, y, 0.5, fn), step, rtol=1e-12)
    elif number == "2.2":
        assert np.allclose(sim.run(5, descent_with_server.step_with_server, w, x, y, 0.5, fn), step, rtol=1e-12)
    elif number == "2.3":
        values = np.random.default_rng(0).normal(size=(16, 3))
        assert np.allclose(sim.run(16, fn, PerRank(list(values)), graph), graphs.metropolis(graph) @ values)
    elif number == "3.1":
        times = lab.ping_pong(fn, (8, "1KiB"), ranks=4)
        assert times.seconds[1] > times.seconds[0] > 0
    else:
        sizes = [8 * 4**k for k in range(11)]
        assert np.allclose(fn(sizes, [1e-6 + 1e-10 * n for n in sizes]), (1e-6, 1e-10), rtol=1e-3)


@pytest.mark.parametrize(
    ("value", "index", "told"), [([1, 2], 2, True), (np.ones(2), 2, True), (np.ones(2), 7, False)], ids=str
)
def test_the_first_index_that_is_not_there_is_said_to_be_one_step_too_many(value, index, told):
    result = check(find("1.1"), lambda w, x, y: value[index])
    assert result.failed == "raises" and "IndexError" in result.message
    assert ("one step too far" in result.message) == told


def in_a_cell(source):
    """The function `f` as a notebook defines it: its source has the file name of a cell."""
    namespace = {}
    exec(compile(source, "/tmp/ipykernel_1/1.py", "exec"), namespace)
    return namespace["f"]


def test_a_function_without_ranks_has_a_deadline_too(monkeypatch):
    monkeypatch.setattr(ranks, "DEADLINE", 0.1)
    result = check(find("6.3"), in_a_cell("def f(nbytes, limit, first):\n    while True:\n        pass\n"))
    assert result.failed == "timeout" and "still running after 0.1 s, in cell:" in result.message


def test_a_function_without_ranks_that_raises_is_told_with_its_line_and_what_it_printed(capsys):
    result = check(find("6.3"), in_a_cell("def f(nbytes, limit, first):\n    print(limit)\n    return nbytes[99]\n"))
    assert result.failed == "raises"
    assert "your function raised IndexError: list index out of range (at cell:3)" in result.message
    assert "your function printed:\n  450" in result.detail
    assert capsys.readouterr().out == ""


def test_a_function_that_wants_to_end_python_is_told_so():
    result = check(find("6.3"), in_a_cell("def f(nbytes, limit, first):\n    raise SystemExit(3)\n"))
    assert result.failed == "raises" and "your function raised SystemExit: 3" in result.message


@pytest.mark.parametrize(
    ("number", "source", "failed", "says"),
    [
        (
            "9.3",
            "def f(rank, ranks, heads, width):\n    return reference(rank, ranks, heads, width) if heads % ranks == 0 "
            "else 1 / 0\n",
            "raises",
            "ZeroDivisionError: division by zero (at cell:2): raise ValueError with the numbers.",
        ),
        (
            "11.4",
            "def f(ranks, predict, limit):\n    return reference(ranks, predict, limit) if limit > 10 else 1 / 0\n",
            "refuse",
            "ZeroDivisionError: division by zero (at cell:2). Raise a ValueError with the numbers.",
        ),
    ],
)
def test_a_refusal_by_another_error_is_told_with_its_line(number, source, failed, says):
    answer = in_a_cell(source)
    answer.__globals__["reference"] = find(number).reference
    result = check(find(number), answer)
    assert result.failed == failed and says in result.message, result.message


def test_what_has_to_refuse_something_may_still_be_unwritten_or_never_end(monkeypatch):
    monkeypatch.setattr(ranks, "DEADLINE", 0.1)
    unwritten = in_a_cell("def f(costs, stages):\n    raise NotImplementedError('exercise 10.3')\n")
    with pytest.raises(NotImplementedError, match=r"exercise 10\.3"):
        ranks.tried(unwritten, [1.0], 2)
    with pytest.raises(Broken, match=r"still running after 0\.1 s, in cell:") as caught:
        ranks.tried(in_a_cell("def f(costs, stages):\n    while True:\n        pass\n"), [1.0], 2)
    assert caught.value.failed == "timeout"
