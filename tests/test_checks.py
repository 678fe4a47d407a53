"""Every check rejects every wrong answer with the message meant for it, and accepts every right one."""

import re
import time

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from hpdl_lab import lab, zoo
from hpdl_lab.checks import ranks
from hpdl_lab.checks.exercises import EXERCISES, check, find
from hpdl_lab.checks.lessons import lesson_06_overlap
from hpdl_lab.checks.lessons.lesson_10 import A_GPT, DRAWN, stage_costs
from hpdl_lab.checks.record import AnswerFailed
from hpdl_lab.checks.scripts.table import SCRIPTS
from hpdl_lab.collectives import jobs, ring
from hpdl_lab.comm import CommTimeout, PerRank, Wait, sim
from hpdl_lab.data import diabetes
from hpdl_lab.models.mlp import mlp
from hpdl_lab.optim import gradient_descent as descent
from hpdl_lab.parallel import gossip as graphs
from hpdl_lab.parallel import gradient_descent as averaging
from hpdl_lab.parallel.pipeline.split import partition
from hpdl_lab.schedules import Action
from hpdl_lab.schedules.gpipe import gpipe
from hpdl_lab.schedules.one_f_one_b import one_f_one_b
from tests import answers
from tests.wording import raises

WRONG = [(exercise, wrong) for exercise in EXERCISES for wrong in answers.WRONG[exercise.id]]
RIGHT = [(exercise, fn) for exercise in EXERCISES for fn in (exercise.reference, *answers.RIGHT[exercise.id])]
DDP_IS_SIMULATED = "PyTorch's process groups need processes"  # so that 6.5 has a test of its own below


def engines(n):
    """Stands in for n engines, which may wait inside backward."""
    return lambda fn, *args: sim.run(n, fn, *args, threads=True)


def in_a_cell(source):
    """The function as a notebook defines it: its source has the file name of a cell."""
    namespace = {"Action": Action}
    exec(compile(source, "/tmp/ipykernel_1/1.py", "exec"), namespace)
    return namespace["f"]


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
    result = check(exercise, fn, engines(4))
    assert result and result.failed is None and "correct" in str(result), result.message
    if exercise.parallel:
        found = DDP_IS_SIMULATED if exercise.id == "6.5" else r"\b4 (MPI ranks|engines)"
        assert any(re.search(found, fact) for fact in result.facts), result.facts


PARALLEL = [e for e in EXERCISES if e.parallel and e.id != "6.5"]
OF_EACH_KIND = [
    e for e in PARALLEL if e.id in ("0.1", "2.1", "3.5", "4.3", "6.4", "8.4", "9.1", "10.4", "12.2", "13.2")
]


@pytest.mark.parametrize(
    ("exercise", "n"),
    [*((e, 3) for e in PARALLEL), *((e, n) for e in OF_EACH_KIND for n in (1, 5))],
    ids=lambda value: getattr(value, "id", value),
)
def test_any_number_of_engines_will_do(exercise, n):
    result = check(exercise, exercise.reference, engines(n))
    assert result, result.message
    assert re.search(rf"\b{n} (MPI rank|engine)|engines: only one", " ".join(result.facts))


@pytest.mark.parametrize("number", ["2.2", "2.3", "3.1", "3.5", "8.4", "9.1", "9.6", "11.2"])
def test_what_is_right_on_simulated_ranks_may_be_wrong_on_engines(number):
    def runner(fn, *args):
        results = engines(4)(fn, *args)
        results[2] = (None, *results[2][1:]) if number in ("2.2", "2.3", "3.1") else results[1]
        return results

    result = check(find(number), find(number).reference, runner)
    assert not result and "on 4 engines" in result.message.lower()


def test_one_wrong_element_on_the_engines_is_found():
    def runner(fn, *args):
        results = engines(4)(fn, *args)
        if args[-1] == 1001:
            results[2].x[5] += 1
        return results

    result = check(find("4.3"), ring.all_reduce, runner)
    assert result.failed == "engines"
    assert "not on the engines. With 4 ranks and 1,001 elements, what rank 2 returns is right" in result.message


def course_of_ddp(comm, share):
    """Parameters after each step as DDP makes them, with gradients that are the sum over ranks times `share`."""
    model = mlp(lesson_06_overlap.SIZES, seed=1).double()
    optimizer, course = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(lesson_06_overlap.STEPS):
        x, y = lesson_06_overlap.ddp_shard(comm.rank, step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad) * share
        optimizer.step()
        course.append(lesson_06_overlap.flat_parameters(model))
    return course


@pytest.mark.parametrize(("share", "failed"), [(1 / 4, None), (1, "engines")])
def test_training_with_ddp_on_engines_is_compared_with_one_rank(share, failed):
    result = check(find("6.5"), find("6.5").reference, lambda fn, *args: sim.run(4, course_of_ddp, share))
    assert result.failed == failed
    assert ("PyTorch's DDP on 4 MPI ranks" in str(result.facts)) == (failed is None)


def test_the_exercises_of_a_notebook_are_numbered_without_a_gap():
    ids = {e.id for e in (*EXERCISES, *SCRIPTS)}
    assert len(ids) == len(EXERCISES) + len(SCRIPTS)
    for notebook, _, number in (name.partition(".") for name in ids):
        assert number == "1" or f"{notebook}.{int(number) - 1}" in ids
    assert len({e.name for e in EXERCISES}) == len(EXERCISES)
    assert set(answers.WRONG) == set(answers.RIGHT) == {e.id for e in EXERCISES}
    assert sum(map(len, answers.WRONG.values())) >= 730


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_a_record_is_complete(exercise):
    assert len({wrong.says for wrong in answers.WRONG[exercise.id]}) >= 4 and answers.RIGHT[exercise.id]
    assert exercise.explanation and "" in exercise.hints
    assert all(len(levels) == len(set(levels)) == 3 for levels in exercise.hints.values())
    assert find(exercise.id) is find(exercise.name) is find(exercise.path) is exercise


def test_an_unknown_exercise_lists_the_known():
    with raises(LookupError, "'ring_reduce'", "0.1", "all_reduce", "4.3"):
        find("ring_reduce")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_a_stub_is_not_wrong_but_unwritten(exercise):
    def stub(*args):
        raise NotImplementedError(f"exercise {exercise.id}: write {exercise.name}")

    with pytest.raises(NotImplementedError, match=f"^exercise {exercise.id}: write {exercise.name}$"):
        check(exercise, stub)


IN_A_CELL = {  # (exercise, source of f, invariant, pattern of the message, pattern of the detail)
    "a deadlock names the line and the cycle": (
        "4.1",
        "def f(comm, x):\n    comm.send(x[:333].clone(), (comm.rank + 1) % comm.size)\n    return x\n",
        "deadlock",
        "",
        r"1 +waiting +send +to rank 2 +1,332 .*cell:2(.|\n)*cycle: 0 -> 1 -> 2 -> 0",
    ),
    "an error names rank and line": (
        "4.1",
        "def f(comm, x):\n    return x[comm.sise] if comm.rank == 2 else x\n",
        "raises",
        r"has no attribute 'sise' \(on simulated rank 2 of 3, at cell:2\)",
        "",
    ),
    "a loop without messages names its line": (
        "4.1",
        "def f(comm, x):\n    while True:\n        pass\n",
        "timeout",
        r"still running after 0\.2 s, in cell:[23]\. Is there a loop that never ends\?$",
        "",
    ),
    "also without ranks": (
        "10.1",
        "def f(rank, ranks, micro_batches):\n    while True:\n        Action(rank, 'F', 0)\n",
        "timeout",
        r"still running after 0\.2 s, in cell:",
        "",
    ),
    "and where something is to be refused": (
        "10.6",
        "def f(costs, stages):\n    while stages > len(costs):\n        pass\n    return reference(costs, stages)\n",
        "timeout",
        "in cell:",
        "",
    ),
    "the end of what it printed is shown": (
        "4.1",
        "def f(comm, x):\n    for i in range(9):\n        print('rank', comm.rank, 'line', i)\n    1 / 0\n",
        "raises",
        "",
        r"the last 10 of 27 lines\):(.|\n)*rank 2 line 8$",
    ),
    "it may not end Python": ("6.3", "def f(*args):\n    raise SystemExit(3)\n", "raises", "raised SystemExit: 3", ""),
    "a refusal by another error": (
        "11.3",
        "def f(ranks, predict, limit):\n    return 1 / 0\n",
        "raises",
        r"ZeroDivisionError: division by zero \(at cell:2\)",
        "",
    ),
}


@pytest.mark.parametrize(("number", "source", "failed", "message", "detail"), IN_A_CELL.values(), ids=IN_A_CELL)
def test_a_function_in_a_cell_is_told_where_it_fails(number, source, failed, message, detail, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "DEADLINE", 0.2)
    answer = in_a_cell(source)
    answer.__globals__["reference"] = find(number).reference
    result = check(find(number), answer)
    assert result.failed == failed
    assert re.search(message, result.message), result.message
    assert re.search(detail, result.detail), result.detail
    assert capsys.readouterr().out == ""


def test_of_ranks_that_would_all_loop_the_others_are_not_begun(monkeypatch):
    monkeypatch.setattr(ranks, "DEADLINE", 0.1)
    begun = []

    def loops(comm, x):
        begun.append(comm.rank)
        while True:
            pass

    assert check(find("4.1"), loops).failed == "timeout" and begun == [0]


@pytest.mark.parametrize("number", ["0.1", "2.1", "4.3"])
def test_what_goes_wrong_on_the_engines_is_the_answers_fault_or_passes(number):
    def runner(error):
        def raises(fn, *args):
            raise error

        return raises

    waits = [Wait(0, "waiting", "recv", (1,), 8, 5.0, "cell:4"), Wait(1, "finished")]
    exercise = find(number)
    stuck = check(exercise, exercise.reference, runner(CommTimeout("rank 0 has waited 5 s", waits)))
    assert stuck.failed == "engines" and "rank 0 has waited 5 s" in stuck.message
    assert re.search(r"0 +waiting +recv +from rank 1 +8 +5 s +cell:4", stuck.detail)
    failed = check(exercise, exercise.reference, runner(AnswerFailed("rank 2: MemoryError\n    cell:3 in work")))
    assert failed.message == "Right on simulated ranks, but on the engines: rank 2: MemoryError."
    assert "cell:3 in work" in failed.detail
    with pytest.raises(RuntimeError, match="no engine cluster"):
        check(exercise, exercise.reference, runner(RuntimeError("no engine cluster is running")))


def never_waits(comm, x):
    if comm.rank < 2:
        comm.irecv(x, 0) if comm.rank else comm.send(x, 1)
    return x


def all_gradients(value):
    def fn(mesh, parameters):
        for placed in parameters:
            placed.parameter.grad = value and placed.parameter.detach() * value

    return fn


@pytest.mark.parametrize(
    ("number", "answer", "says"),
    [
        ("1.1", lambda w, x, y: "downhill", "of type str: a NumPy array of shape (2,)"),
        ("1.1", lambda w, x, y: np.ones(2)[2], "one step too far"),
        ("1.2", lambda w, x, y, rate: np.full(2, np.inf), "number 0 of the result should be -1.33464 and is inf"),
        ("1.3", lambda x: float("nan"), "you say nan"),
        ("1.3", lambda x: np.array("1"), "returned array('1', dtype='<U1'): the rate is one number"),
        ("2.1", lambda comm, g: list(comm.all_reduce(g)), "of type list: the gradient is a NumPy array of shape (2,)"),
        ("2.2", lambda comm, w, g: w, "takes 3 positional arguments but 4 were given"),
        ("2.2", lambda comm, w, g, rate: comm.send(g, comm.size), "rank 0 sends to rank 4: ranks here are 0 to 3"),
        ("3.1", lambda comm, x: comm.recv(1, x) if comm.rank == 0 else x, "comm.send(x, dst), comm.recv(x, src)"),
        ("3.1", never_waits, "never waited for its receive from rank 0"),
        ("3.2", lambda sizes, seconds: (np.nan, np.nan), "Is there a division by zero"),
        ("3.2", lambda sizes, seconds: sizes.clear(), "your function changed sizes"),
        ("3.3", lambda: {"A": 1}, "Job A: no collective is called 1"),
        ("3.5", lambda comm: [1, 2], "rank 0 returned [1, 2]: every rank returns a float, here 4"),
        ("4.1", lambda comm, x: x.resize_(0), "x had shape (999,) and now has (0,)"),
        ("4.3", lambda comm, x: ring.all_reduce(comm, x).double(), "returned float64, but x is float32"),
        ("4.3", lambda comm, x: list(ring.all_reduce(comm, x)), "returned list: return x"),
        ("4.5", lambda costs, p, nbytes, alpha, beta: costs["ring"].steps, "has no attribute 'steps'"),
        ("9.1", lambda comm, x, weight, bias: [1], "something of type list: return this rank's columns"),
        ("9.1", lambda comm, x, weight, bias: linear(x, weight, bias) / 0 * 0, "NaN is no number"),
        ("9.1", lambda comm, x, weight, bias: torch.tensor(3.0), "returned shape (), where (2, 3, 6) is right"),
        ("9.6", lambda comm, x, rows: comm.isend(x[:, :, :1], 1), "use x.contiguous()"),
        ("10.1", lambda rank, ranks, m: None, "rank 0 gets nothing: return the list of its actions"),
        ("10.1", lambda rank, ranks, m: (a for a in gpipe(rank, ranks, m)), "gets generator: return a list of Action"),
        ("10.1", lambda rank, ranks, m: [Action(rank, "f", 0)], "does 0f0, nothing that a stage does"),
        ("10.1", lambda rank, ranks, m: [Action(rank, "F", i / 1) for i in range(m)], "there is no micro-batch 0.0"),
        ("10.6", lambda costs, stages: None, "your function returned nothing: return the list of sizes"),
        ("10.6", lambda costs, stages: [*partition(costs, stages)[:-1], -1], "a stage without a layer"),
        ("10.4", lambda comm, schedule, action, saved: None, "has no gradient for 0.weight"),
        ("11.1", lambda sizes, axis: {0: [1]}, "groups are a list of lists of ranks"),
        ("11.1", lambda sizes, axis: [[rank] for rank in range(12)], "Ranks 0 and 6 differ along axis 0 only"),
        ("11.2", all_gradients(None), "still has no gradient, while other replicas have the sum"),
        ("11.2", all_gradients(float("nan")), "should be 7 and is nan. It has to be added over dp"),
        ("11.3", lambda ranks, predict, limit: predict, "return (dp, pp, tp), three ints"),
        ("11.3", lambda ranks, predict, limit: (-1, -1, 12), "dp -1 x pp -1 x tp 12, which cannot be"),
        ("13.1", lambda x, qkv, out, keys, values: None, "returned nothing for token 1"),
        ("13.2", lambda comm, x, layers: [x], "something of type list: return (b, d)"),
        ("13.3", lambda running, waiting, slots, budget: {}, "returned {}: return a list of ints"),
        ("13.3", lambda running, waiting, slots, budget: [-1], "and each gets a number, 0 if it has to wait"),
        ("13.4", lambda free, pages, tokens, page_size: 1, "something of type int was returned"),
        ("13.5", lambda acceptance, gamma: "many", "'many': return a float"),
    ],
)
def test_clumsy_answers_are_told_plainly(number, answer, says):
    result = check(find(number), answer)
    assert not result
    assert says in result.message, result.message
    assert len(result.message) < 420


def test_a_failure_carries_the_events_of_a_right_answer_in_the_same_run():
    result = check(find("4.3"), ring.all_reduce_naive)
    assert result.size == 8
    assert sum(e.nbytes for e in result.events if e.op == "send") == 8 * 28_000
    assert sum(e.nbytes for e in result.expected if e.op == "send") == 8 * 7_000


def test_the_events_are_those_of_the_run_that_was_judged_not_of_the_runs_that_explain_it():
    wrong = {answer.failed: answer.fn for answer in reversed(answers.WRONG["4.1"])}
    result = check(find("4.1"), wrong["sum"])  # the average, on 3 ranks with 999 elements
    assert (result.failed, result.size) == ("sum", 3)
    assert sum(e.nbytes for e in result.events if e.op == "send") == 3 * 2 * 333 * 4
    stuck = check(find("4.1"), wrong["deadlock"])
    assert stuck.failed == "deadlock" and stuck.events == [], "the run failed, and an earlier one is no evidence"


def test_a_result_shows_itself_in_a_notebook_and_in_a_terminal_and_cannot_become_html():
    result = check(find("0.1"), lambda comm: "<script>alert(1)</script>")
    bundle = result._repr_mimebundle_()
    assert bundle["text/plain"] == str(result) == repr(result) and "<script>" in result.message
    assert str(result).startswith("0.1 hello: not yet (rank)") and bool(result) is False
    assert "not yet" in bundle["text/html"] and "<script>" not in bundle["text/html"]


def test_a_wrong_schedule_is_shown_as_far_as_it_can_be():
    late = check(find("10.2"), lambda rank, ranks, m: gpipe(rank, ranks, m))
    assert "rank 2  .  .  F0 F1 F2 F3 B0 --" in late.detail
    stuck = check(find("10.2"), lambda rank, ranks, m: [Action(rank, k, i) for _, k, i in one_f_one_b(2 - rank, 3, 4)])
    assert stuck.failed == "deadlock" and stuck.detail.startswith("rank 0  F0 B0 F1 B1")


def test_the_texts_of_exercises_agree_with_their_checks():
    for job in jobs.JOBS:
        assert f"{job.letter}  {job.text}\n" in jobs.which_collective.__doc__
    for name, meaning in zoo.DIAGNOSES.items():
        assert re.search(rf'"{name}" +{re.escape(meaning)}\n', zoo.diagnose.__doc__)
    costs, stages = DRAWN
    assert partition(costs, stages) == [2, 3, 1] and stage_costs([2, 3, 1], costs) == [6, 6, 4]
    assert "stages that cost 6, 6 and 4" in partition.__doc__
    assert max(stage_costs(partition(A_GPT, 4), A_GPT)) == 6


@pytest.mark.parametrize("number", ["3.5", "3.6"])
def test_the_text_of_a_repair_does_not_hold_the_repair(number):
    exercise = find(number)
    assert exercise.scaffold in [wrong.fn for wrong in answers.WRONG[number]]
    assert exercise.reference.__doc__.startswith(exercise.scaffold.__doc__.split("\n")[0])


def test_the_zoo_shows_programs_and_does_not_give_their_fault_away():
    shown = str(lab.show("zoo"))
    assert shown.count("def program(comm):") == len(zoo.LABELS) and '"""' not in shown
    for name in zoo.LABELS.values():
        assert name not in shown and zoo.find(name).broken.__name__ not in shown
    assert str(lab.show(zoo.find("wrong_root"))).startswith("1 program with a fault\n  wrong_root: ")
    with raises(ValueError, "'Q'", "both_receive_first"):
        lab.show(zoo.find("Q"))


def on_the_notebooks_data(number, fn):
    """(what an answer gives there, what it should give, to how many digits)."""
    x, y = (part[:440] for part in diabetes.load())
    w, values, graph = np.array([0.3, -0.2]), np.random.default_rng(0).normal(size=(16, 3)), graphs.graph("star", 16)
    step, sizes = descent.gradient_step(w, x, y, 0.5), [8 * 4**k for k in range(11)]
    return {
        "1.1": lambda: (fn(w, x, y), descent.gradient(w, x, y), 9),
        "1.2": lambda: (fn(w, x, y, 0.5), step, 9),
        "1.3": lambda: (fn(x), 1.0542, 2),
        "2.1": lambda: (sim.run(4, averaging.step_together, w, x, y, 0.5, fn), step, 12),
        "2.2": lambda: (sim.run(5, averaging.step_with_server, w, x, y, 0.5, fn), step, 12),
        "2.3": lambda: (sim.run(16, fn, PerRank(list(values)), graph), graphs.metropolis(graph) @ values, 5),
        "3.2": lambda: (fn(sizes, [1e-6 + 1e-10 * n for n in sizes]), (1e-6, 1e-10), 3),
    }[number]()


@pytest.mark.parametrize(
    ("exercise", "fn"), [row for row in RIGHT if row[0].id in ("1.1", "1.2", "1.3", "2.1", "2.2", "2.3", "3.2")]
)
def test_what_a_check_accepts_serves_the_notebooks_own_data(exercise, fn):
    got, right, digits = on_the_notebooks_data(exercise.id, fn)
    assert np.allclose(got, right, rtol=10.0**-digits, atol=1e-15)
