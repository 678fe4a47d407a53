"""Functions on real engines: what travels there, what comes back, what is said on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from hpdl_lab.comm.base import PerRank
from hpdl_lab.engines.errors import EngineError, RunFailed
from hpdl_lab.trace import Event

pytestmark = pytest.mark.timeout(60)

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
    with pytest.raises(ValueError, match="number of seconds"):
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
    if "OMP_NUM_THREADS" not in os.environ:
        assert cluster.run(lambda comm: int(os.environ["OMP_NUM_THREADS"])) == [max(1, cores // 4)] * 4


def test_many_runs_in_a_row(cluster):
    for _ in range(200):
        assert cluster.run(rank_of) == [0, 1, 2, 3]


# -- what cannot travel -------------------------------------------------------------------------------------------


def test_what_cannot_travel_there_is_named(cluster):
    lock = threading.Lock()

    def uses_a_lock(comm):
        return lock

    with pytest.raises(TypeError, match=r"uses_a_lock .* uses the variable lock, a lock .* inside uses_a_lock"):
        cluster.run(uses_a_lock)
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


# -- errors -------------------------------------------------------------------------------------------------------


def test_an_error_is_shown_once_per_kind_with_ranks_and_line(cluster):
    def wrong(comm):
        if comm.rank < 3:
            raise KeyError("weights")
        return 1 / 0

    with pytest.raises(RunFailed) as caught:
        cluster.run(wrong)
    first = wrong.__code__.co_firstlineno
    text = str(caught.value)
    assert "ranks 0-2: KeyError: 'weights'" in text
    assert f'test_engines_run.py:{first + 2} in wrong:  raise KeyError("weights")' in text
    assert "rank 3: ZeroDivisionError: division by zero" in text
    assert text.count("KeyError:") == 1
    assert caught.value.errors[3].line == f"test_engines_run.py:{first + 3}"
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_an_error_inside_a_library_shows_the_attendees_line(cluster):
    def wrong(comm):
        return np.zeros(3).reshape(2, 2)

    with pytest.raises(RunFailed, match=f"test_engines_run.py:{wrong.__code__.co_firstlineno + 1} in wrong"):
        cluster.run(wrong)


def test_other_messages_of_one_kind_are_shown_too(cluster):
    def wrong(comm):
        raise ValueError(f"rank {comm.rank} has 3 rows")

    with pytest.raises(
        RunFailed, match=r"ranks 0-3: ValueError: rank 0 has 3 rows\n    and on other ranks: rank 1 has"
    ):
        cluster.run(wrong)


def test_ranks_that_wait_for_one_that_failed_are_told_of_soon(cluster):
    def wrong(comm):
        if comm.rank == 2:
            raise ValueError("no data")
        comm.recv(np.zeros(1), 2)

    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"rank 2: ValueError: no data") as caught:
        cluster.run(wrong, deadline=30)
    assert time.monotonic() - began < 10
    assert list(caught.value.errors) == [2]
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_sys_exit_and_a_raised_keyboard_interrupt_do_not_end_the_engine(cluster):
    with pytest.raises(RunFailed, match="SystemExit: 3"):
        cluster.run(lambda comm: sys.exit(3))
    pids = cluster.run(lambda comm: os.getpid())

    def interrupts_itself(comm):
        raise KeyboardInterrupt

    with pytest.raises(RunFailed, match="ranks 0-3: stopped while running"):
        cluster.run(interrupts_itself)
    assert cluster.run(lambda comm: os.getpid()) == pids


# -- output and rows ----------------------------------------------------------------------------------------------


def test_equal_output_is_said_once(cluster, capsys):
    def speak(comm):
        print("hello")
        print("bye" if comm.rank == 3 else "yes")

    cluster.run(speak)
    out = capsys.readouterr().out
    assert out == "ranks 0-3 say hello\nranks 0-2 say yes\nrank 3 says bye\n"


def test_output_without_newline_and_errors_are_not_lost(cluster, capsys):
    def speak(comm):
        print("no newline", end="")
        print("oh", file=sys.stderr)
        os.write(1, b"from compiled code\n")  # goes to the log, not into the protocol

    cluster.run(speak)
    out, err = capsys.readouterr()
    assert out == "ranks 0-3 say no newline\n" and err == "ranks 0-3 say oh\n"


def test_output_streams_while_the_ranks_run(cluster, monkeypatch):
    heard = []
    monkeypatch.setattr(sys, "stdout", Listener(heard))

    def speak(comm):
        print("first")
        time.sleep(1.5)
        print("second")

    began = time.monotonic()
    cluster.run(speak)
    monkeypatch.undo()
    when = {line.split()[-1]: t - began for t, line in heard if line.strip()}
    assert when["first"] < 1.2 < when["second"]


class Listener:
    """A stand-in for sys.stdout that notes when it heard what."""

    def __init__(self, heard):
        self.heard = heard

    def write(self, text):
        self.heard.append((time.monotonic(), text))

    def flush(self):
        pass


def test_rows_stream_into_this_thread_while_the_ranks_run(cluster):
    def report(comm):
        for step in range(20):
            comm.report(step=step, loss=1 / (step + 1))
            time.sleep(0.05)

    arrived = []
    began = time.monotonic()
    results = cluster.run(
        report, on_row=lambda row: arrived.append((time.monotonic() - began, threading.get_ident(), row))
    )
    took = time.monotonic() - began
    assert {thread for _, thread, _ in arrived} == {threading.get_ident()}
    assert [row for _, _, row in arrived] == results.rows
    assert len(results.rows) == 80 and results.rows[0].keys() == {"rank", "step", "loss"}
    times = [t for t, _, _ in arrived]
    assert times[0] < took - 0.5
    assert max(b - a for a, b in zip(times, times[1:], strict=False)) < 0.5


def test_an_error_in_on_row_stops_the_ranks_and_is_raised(cluster):
    def report(comm):
        comm.report(step=0)
        while True:
            time.sleep(0.01)

    def plot(row):
        raise ZeroDivisionError("in the plot")

    with pytest.raises(ZeroDivisionError, match="in the plot"):
        cluster.run(report, on_row=plot)
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_a_run_inside_on_row_is_refused(cluster):
    def report(comm):
        comm.report(step=0)

    with pytest.raises(EngineError, match="a run is under way"):
        cluster.run(report, on_row=lambda row: cluster.run(rank_of))
    assert cluster.run(rank_of) == [0, 1, 2, 3]


# -- two notebooks ------------------------------------------------------------------------------------------------

OTHER_NOTEBOOK = """
import time
from hpdl_lab.engines.cluster import Cluster
cluster = Cluster.start(4)
assert cluster.attached
def hold(comm):
    time.sleep(1.5)
    return comm.rank
print("running", flush=True)
print(cluster.run(hold), flush=True)
"""


def test_two_notebooks_take_turns(cluster, capsys):
    with subprocess.Popen([sys.executable, "-c", OTHER_NOTEBOOK], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "running\n"
        time.sleep(0.2)
        assert cluster.run(rank_of) == [0, 1, 2, 3]
        assert "Another notebook uses the engines" in capsys.readouterr().out
        assert other.stdout.readline() == "[0, 1, 2, 3]\n"


def test_a_notebook_that_is_killed_while_it_runs_frees_the_engines(cluster):
    pids = cluster.run(lambda comm: os.getpid())
    code = OTHER_NOTEBOOK.replace("time.sleep(1.5)", "time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "running\n"
        time.sleep(0.5)
        other.send_signal(signal.SIGKILL)
    began = time.monotonic()
    assert cluster.run(lambda comm: os.getpid()) == pids
    assert time.monotonic() - began < 5
