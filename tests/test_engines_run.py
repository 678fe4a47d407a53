"""Functions on real engines: what travels there, what comes back, what is said on the way."""

import os
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from hpdl_lab.collectives import table
from hpdl_lab.comm.base import PerRank
from hpdl_lab.engines.errors import RunFailed
from hpdl_lab.trace import Event, line_of

FACTOR = 10


@dataclass
class Pair:
    rank: int
    value: float


def rank_of(comm):
    return comm.rank


# -- there and back -----------------------------------------------------------------------------------------------


def test_results_come_in_rank_order_with_events_and_seconds(cluster):
    def around(comm):
        x = np.full(3, float(comm.rank), "float32")
        y = np.empty_like(x)
        comm.sendrecv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)
        return y.tolist()

    results = cluster.run(around)
    assert results == [[3.0] * 3, [0.0] * 3, [1.0] * 3, [2.0] * 3]
    sends = [e for e in results.events if e.op == "send"]
    assert all(isinstance(e, Event) for e in results.events)
    assert sorted((e.rank, e.peer, e.nbytes) for e in sends) == [(0, 1, 12), (1, 2, 12), (2, 3, 12), (3, 0, 12)]
    assert {e.line for e in sends} == {f"test_engines_run.py:{around.__code__.co_firstlineno + 3}"}
    assert 0 < results.seconds < 30


def test_an_engine_is_the_mpi_rank_and_the_ipyparallel_engine_of_the_same_number(cluster):
    pids = cluster.run(lambda comm: os.getpid())
    view = cluster.client[:]
    assert view.apply_sync(os.getpid) == pids
    assert view.pull("mpi_rank", block=True) == [0, 1, 2, 3]


def test_some_ranks_only(cluster):
    assert cluster.run(lambda comm: (comm.rank, comm.size), ranks=[3, 1]) == [(0, 2), (1, 2)]
    assert cluster.run(rank_of, ranks=2) == [0]
    assert cluster.run(rank_of, ranks=range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("ranks", [[], [4], [-1], [1, 1], ["a"], 7])
def test_wrong_ranks_are_named(cluster, ranks):
    with pytest.raises(ValueError, match="from 0 to 3"):
        cluster.run(rank_of, ranks=ranks)


@pytest.mark.parametrize("deadline", [0, -1, "10", None, float("nan"), True])
def test_a_wrong_deadline_is_named(cluster, deadline):
    with pytest.raises(ValueError, match="^deadline must be a number above 0, got"):
        cluster.run(rank_of, deadline=deadline)


def test_per_rank_arguments(cluster):
    assert cluster.run(lambda comm, a, b, c: (a, b, c), 1, PerRank("wxyz"), 3) == [(1, each, 3) for each in "wxyz"]
    with pytest.raises(ValueError, match="PerRank of 3 items for 4 ranks"):
        cluster.run(lambda comm, a: a, PerRank([1, 2, 3]))


def test_functions_travel_with_their_globals_and_closures(cluster):
    offset = 5

    def twice(x):
        return 2 * x

    def compute(comm):
        return FACTOR * twice(comm.rank) + offset

    assert cluster.run(compute) == [5, 25, 45, 65]


def test_objects_of_the_attendees_classes_come_back_as_such(cluster):
    results = cluster.run(lambda comm: Pair(comm.rank, 0.5))
    assert results == [Pair(rank, 0.5) for rank in range(4)]


def test_a_changed_module_of_the_attendee_is_used_at_once(cluster, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which tells files of one second and size apart by nothing
    for value in (1, 2):
        (tmp_path / "attendees_module.py").write_text(
            f"def f(comm):\n    return {value}, helper()\ndef helper():\n    return 7\n"
        )
        sys.modules.pop("attendees_module", None)
        import attendees_module

        os.utime(tmp_path / "attendees_module.py", (value, value))
        assert cluster.run(attendees_module.f) == [(value, 7)] * 4


def test_a_module_beside_the_notebook_can_be_imported_inside_a_function(cluster, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside_the_notebook.py").write_text("answer = 42\n")

    def ask(comm):
        import beside_the_notebook

        return beside_the_notebook.answer

    assert cluster.run(ask) == [42] * 4


def test_large_arrays_travel_both_ways(cluster):
    x = np.arange(1 << 21, dtype="float64")  # 16 MiB to each rank
    results = cluster.run(lambda comm, x: x * comm.rank, x)
    for rank, y in enumerate(results):
        np.testing.assert_array_equal(y, x * rank)


def test_tensors_travel_both_ways(cluster):
    torch = pytest.importorskip("torch")
    results = cluster.run(lambda comm, x: comm.rank * x, torch.ones(3, requires_grad=True))
    assert [r.tolist() for r in results] == [[float(rank)] * 3 for rank in range(4)]


def test_torch_is_imported_by_itself_soon_after_the_start(cluster):
    pytest.importorskip("torch")
    cluster.run(rank_of)
    for _ in range(300):
        if all(cluster.run(lambda comm: hasattr(sys.modules.get("torch"), "Tensor"))):
            return
        time.sleep(0.1)
    raise AssertionError("no torch after 30 s")


def test_threads_per_rank_are_bounded(cluster):
    cores = len(os.sched_getaffinity(0))
    assert cluster.run(lambda comm: int(os.environ["OMP_NUM_THREADS"])) == [max(1, cores // 4)] * 4


def test_many_runs_in_a_row(cluster):
    for _ in range(200):
        assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_what_other_libraries_call_it_is_translated(cluster):
    with pytest.raises(RunFailed, match=r"AttributeError: .* here it is comm.rank\n"):
        cluster.run(lambda comm: comm.Get_rank(), ranks=[1])
    for call in (lambda comm: comm.send(np.zeros(2), dest=1), lambda comm: comm.isend(np.zeros(2), dest=1)):
        with pytest.raises(RunFailed, match=r"TypeError: comm.i?send\(\) .*'dest'; here it is comm.i?send\(x, dst\)"):
            cluster.run(call)


def test_a_refusal_of_this_package_shows_none_of_its_lines_and_a_bug_does(cluster):
    with pytest.raises(RunFailed) as caught:
        cluster.run(table.find_algorithm, "all_reduce")  # which takes comm for a name
    assert str(caught.value).startswith("ranks 0-3: LookupError: ") and "table.py" not in str(caught.value)
    with pytest.raises(RunFailed, match=r"AttributeError: .*\n    \w+.py:\d+ in line_of"):
        cluster.run(line_of, 3)  # which takes comm for a frame


def test_nobody_can_answer_an_engine(cluster):
    with pytest.raises(RunFailed, match=r"^ranks 0-3: EOFError: a rank cannot call input\(\)"):
        cluster.run(lambda comm: input())


class Autocall:
    """As IPython's `exit` in a kernel, which refers to its shell."""

    __module__ = "ipykernel.zmqshell"

    def __init__(self):
        self.shell = threading.Lock()


exit = Autocall()


# -- what cannot travel -------------------------------------------------------------------------------------------


def test_what_cannot_travel_there_is_named(cluster):
    lock = threading.Lock()

    def uses_a_lock(comm):
        return lock

    with pytest.raises(TypeError, match=r"uses_a_lock .* uses the variable lock, a lock .* inside the function"):
        cluster.run(uses_a_lock)
    with pytest.raises(TypeError, match=r"your lambda .* it uses exit, which only the notebook has$"):
        cluster.run(lambda comm: exit())
    with pytest.raises(TypeError, match=r"argument 2, a lock, cannot travel"):
        cluster.run(lambda comm, a, b: None, 1, lock)
    with pytest.raises(TypeError, match=r"PerRank argument cannot travel"):
        cluster.run(lambda comm, a: None, PerRank([lock] * 4))
    with pytest.raises(TypeError, match=r"needs a function .* got a int: 42"):
        cluster.run(42)
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_what_cannot_travel_back_is_named(cluster):
    def returns_a_lock(comm):
        return threading.Lock() if comm.rank == 1 else None

    with pytest.raises(RunFailed, match=r"^rank 1: it returned a lock that cannot travel") as caught:
        cluster.run(returns_a_lock)
    assert list(caught.value.errors) == [1]


def all_reduce(comm, x):
    return x


@pytest.mark.parametrize(
    ("fn", "args", "text"),
    [
        (lambda: 0, (), r"^your lambda\(\) takes 0 arguments, and lab.run gives it comm$"),
        (lambda x: x, (3,), r"^your lambda\(x\) takes 1 argument, and lab.run gives it 2: comm and 1 more$"),
        (all_reduce, (), r"^all_reduce\(comm, x\) needs x as well: lab.run\(fn, x\)$"),
        (all_reduce, (1, 2), r"^all_reduce\(comm, x\) takes 2 arguments, and lab.run gives it 3: comm and 2 more$"),
    ],
)
def test_arguments_that_do_not_fit_are_counted_or_named(fn, args, text, cluster):
    with pytest.raises(TypeError, match=text):
        cluster.run(fn, *args)
    assert cluster.run(rank_of) == [0, 1, 2, 3]
