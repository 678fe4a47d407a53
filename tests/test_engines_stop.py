"""Stopping: the stop button, the deadline, ranks that compute on, compiled code that ignores interrupts, kill -9."""

import ctypes
import os
import re
import signal
import threading
import time
from functools import partial

import numpy as np
import psutil
import pytest

from hpdl_lab.comm.errors import CommError, CommTimeout, RankFailed
from hpdl_lab.comm.status.table import Slot
from hpdl_lab.engines import client, run
from hpdl_lab.engines.errors import EngineError, RunFailed, RunStopped
from hpdl_lab.engines.run import States
from tests.onlooker import Onlooker, StopButton, computing, waiting


def rank_of(comm):
    return comm.rank


def pid_of(comm):
    return os.getpid()


def receive_in_a_circle(comm):
    comm.recv(np.zeros(1000, "float32"), (comm.rank + 1) % comm.size)


def rank_1_computes_for_ever(comm):
    comm.report()
    while comm.rank == 1:
        pass
    if comm.rank != 1:
        comm.recv(np.zeros(1), 1)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The notebook hears of every rank, however late its answer: without one, a rank is said to compute."""
    monkeypatch.setattr(run, "ANSWER", 40.0)


def test_the_stop_button_ends_a_blocked_receive_and_says_who_waits_for_whom(cluster, within):
    pids = cluster.run(pid_of)
    with StopButton(cluster, waiting("recv")) as button, pytest.raises(RunStopped) as caught:
        cluster.run(receive_in_a_circle, deadline=60)
    assert button.seconds < within(2)
    text, line = str(caught.value), receive_in_a_circle.__code__.co_firstlineno + 1
    assert re.search(rf"2 +waiting +recv +from rank 3 +4,000 .* test_engines_stop.py:{line}$", text, re.M)
    assert "cycle: 0 -> 1 -> 2 -> 3 -> 0" in text
    assert [(w.rank, w.state, w.op, w.peers) for w in caught.value.waits] == [
        (r, "waiting", "recv", ((r + 1) % 4,)) for r in range(4)
    ]
    assert isinstance(caught.value, KeyboardInterrupt)  # "run all cells" ends here
    assert cluster.run(pid_of) == pids


def test_an_engine_that_tells_late_what_it_does_is_not_taken_for_one_that_computes(cluster):
    def hinder(comm, seconds):
        from hpdl_lab.engines import task

        own_state = task.own_state

        def late(*args):
            time.sleep(seconds)
            return own_state(*args)

        if comm.rank == 2:
            task.own_state = late

    cluster.run(hinder, 0.5)
    with StopButton(cluster, waiting("recv")), pytest.raises(RunStopped) as caught:
        cluster.run(receive_in_a_circle, deadline=60)
    assert [w.state for w in caught.value.waits] == ["waiting"] * 4
    cluster.run(hinder, 0)


def test_another_thread_starts_a_run_and_this_one_ends_it(cluster, within):
    """What a button of the picker does: meanwhile a second run is refused in one sentence."""
    pids, all_wait, ended = cluster.run(pid_of), threading.Event(), []

    def press():
        try:
            with Onlooker(cluster.path, range(4), waiting("recv"), all_wait.set):
                cluster.run(receive_in_a_circle, deadline=100)
        except RunStopped as error:
            ended.append(str(error))

    assert not cluster.interrupt(), "nothing is under way"
    thread = threading.Thread(target=press)
    thread.start()
    assert all_wait.wait(50)
    with pytest.raises(EngineError, match="a run is under way in this notebook"):
        cluster.run(pid_of)
    begin = time.monotonic()
    assert cluster.interrupt()
    thread.join()
    assert time.monotonic() - begin < within(2) and "cycle: 0 -> 1 -> 2 -> 3 -> 0" in ended[0]
    assert cluster.run(pid_of) == pids


def test_the_stop_button_ends_a_loop_that_never_communicates(cluster, within):
    pids = cluster.run(pid_of)
    with StopButton(cluster, computing(1)) as button, pytest.raises(RunStopped) as caught:
        cluster.run(rank_1_computes_for_ever, deadline=60, on_row=button.on_row)
    assert button.seconds < within(2)
    line = rank_1_computes_for_ever.__code__.co_firstlineno + 2
    assert caught.value.waits[1].state == "running"
    assert caught.value.waits[1].line in (f"test_engines_stop.py:{line}", f"test_engines_stop.py:{line + 1}")
    assert cluster.run(pid_of) == pids


def test_the_stop_button_also_ends_a_loop_that_swallows_interrupts(cluster, within):
    def stubborn(comm):
        comm.report()
        for _ in range(2):
            try:
                time.sleep(600)
            except:  # noqa: E722
                pass

    with StopButton(cluster, lambda button: len(button.rows) == 4) as button, pytest.raises(RunStopped):
        cluster.run(stubborn, deadline=60, on_row=button.on_row)
    assert button.seconds < within(2.5)
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def all_compute_for_ever(comm):
    while True:
        comm.rank + 1


def test_a_limit_ends_a_run_that_computes_and_names_the_ranks_and_the_line(cluster, within):
    pids, began = cluster.run(pid_of), time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        cluster.run(all_compute_for_ever, limit=1)
    assert time.monotonic() - began < within(1 + 2)
    first = all_compute_for_ever.__code__.co_firstlineno
    text, lines = str(caught.value), set(re.findall(r"test_engines_stop.py:(\d+)", str(caught.value)))
    assert "limit of 1 s" in text and "computing were ranks" in text and "\n" not in text
    assert lines <= {str(first + 1), str(first + 2)} and lines
    assert caught.value._render_traceback_() == [f"CommTimeout: {text}"]
    assert cluster.run(pid_of, limit=30) == pids


def test_a_limit_says_who_waits_where_not_all_compute(cluster):
    with pytest.raises(CommTimeout) as caught:
        cluster.run(rank_1_computes_for_ever, limit=1, deadline=60)
    assert re.search(r"limit of 1 s: still computing was rank 1 in test_engines_stop.py:\d+$", str(caught.value), re.M)
    assert [w.state for w in caught.value.waits] == ["waiting", "running", "waiting", "waiting"]


def test_an_error_before_the_limit_is_the_one_that_is_told(cluster):
    def one_raises(comm):
        if comm.rank == 2:
            raise ValueError("no sum")
        all_compute_for_ever(comm)

    with pytest.raises(RunFailed, match="rank 2: ValueError: no sum"):
        cluster.run(one_raises, limit=0.9)


@pytest.mark.parametrize("limit", [0, -1, "60", True])
def test_a_limit_that_is_none_is_refused(limit, cluster):
    with pytest.raises(ValueError, match=rf"^limit must be a number above 0, got {limit!r}$"):
        cluster.run(rank_of, limit=limit)


def test_the_stop_button_is_free_again_after_a_run(cluster):
    before = signal.getsignal(signal.SIGINT)
    cluster.run(rank_of)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(30)
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_stopping_during_a_slow_on_row_ends_the_run(cluster, within):
    def report(comm):
        while True:
            comm.report(x=1)
            time.sleep(0.1)

    def plot(row):
        begun.append(time.monotonic())
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(50)

    begun = []
    with pytest.raises(RunStopped):
        cluster.run(report, on_row=plot)
    assert len(begun) == 1 and time.monotonic() - begun[0] < within(2)
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_ten_stopped_runs_leave_nothing_for_the_next(cluster):
    def unmatched(comm, k):
        comm.isend(np.full(10, k, "float64"), (comm.rank + 1) % comm.size)
        comm.recv(np.zeros(10), (comm.rank + 2) % comm.size)

    def matched(comm):
        x = np.full(10, -1.0)
        return float(comm.sendrecv(x, (comm.rank + 1) % comm.size, np.zeros(10), (comm.rank - 1) % comm.size)[0])

    for k in range(10):
        with pytest.raises(CommTimeout):
            cluster.run(unmatched, k, deadline=0.1)
        assert cluster.run(matched) == [-1.0] * 4


def states_of(cluster):
    """What each engine says of itself, between two runs."""
    states, engines = States(0, cluster._pool.engines), cluster._pool.engines
    states.ask(range(cluster.n))
    for rank, engine in enumerate(engines):
        for kind, content in engine.receive():
            assert kind == client.STATE
            states.take(rank, content)
    return [states.slots[rank].state for rank in range(cluster.n)]


def engine_session():
    """The comm.mpi.Session of the engine in which this runs."""
    from hpdl_lab.comm.mpi.session import session_of_this_process

    return session_of_this_process()


def test_a_late_answer_to_an_earlier_question_is_not_believed():
    class Engine:
        def send(self, kind, content):
            asked.append(content)

    def answer(question, state):
        slot = Slot(1, 7, state, "", (), 0, 0, 0, "", {})
        asking.take(0, {"slot": tuple(slot), "px": False, "now_ns": 0, "asked": question})

    asked, asking = [], States(7, [Engine()])
    asking.ask([0])
    asking.ask([0])
    answer(asked[0], "running")
    assert not asking.complete() and not asking.slots
    answer(asked[1], "waiting")
    assert asking.complete() and asking.slots[0].state == "waiting"
    answer((6, 2), "running")  # of an earlier run
    assert asking.slots[0].state == "waiting"


def test_an_interrupt_amid_the_start_of_a_run_leaves_nothing_open(cluster):
    def arrange(comm, when):
        session = engine_session()

        def interrupted(*args, **options):
            del session.comm
            if when == "after":
                type(session).comm(session, *args, **options)
            else:
                session.status.publish(session.rank, "running", *args)
            raise KeyboardInterrupt

        if comm.rank == 2:
            session.comm = interrupted

    for when in ("after", "before"):
        cluster.run(arrange, when)
        with pytest.raises((RunFailed, CommError)):
            cluster.run(lambda comm: comm.barrier(), deadline=30)
        assert states_of(cluster)[2] == "failed"
        assert cluster.run(lambda comm: len(engine_session().open)) == [1] * 4  # that of this very run


def test_the_deadline_ends_a_deadlock_with_the_same_report(cluster, within):
    pids = cluster.run(pid_of)
    began = time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        cluster.run(receive_in_a_circle, deadline=2.5)
    assert 2.5 <= time.monotonic() - began < within(5)
    assert "no answer within 2.5 s" in str(caught.value) and "cycle: 0 -> 1 -> 2 -> 3 -> 0" in str(caught.value)
    assert [w.peers for w in caught.value.waits] == [(1,), (2,), (3,), (0,)]
    assert cluster.run(pid_of) == pids


def test_the_deadline_counts_from_the_moment_when_all_ranks_have_come(cluster):
    def comes_late_to_the_next(comm, seconds):
        """The main thread of this engine has something else to do first, as a cell of %px."""
        tasks = next(thread for thread in threading.enumerate() if thread.name == "tasks")
        tasks._target.__self__.submit(partial(time.sleep, seconds))

    cluster.run(comes_late_to_the_next, 3, ranks=[1])
    assert cluster.run(rank_of, deadline=1.5) == [0, 1, 2, 3]


def test_a_run_that_makes_progress_outlives_its_deadline(cluster):
    def slow(comm):
        for _ in range(7):
            time.sleep(0.5)
            comm.barrier()

    cluster.run(slow, deadline=3)


def test_a_rank_that_computes_on_when_the_others_timed_out_is_interrupted_and_named(cluster, within):
    pids = cluster.run(pid_of)
    began = time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        cluster.run(rank_1_computes_for_ever, deadline=2.5)
    assert time.monotonic() - began < within(7)
    line = rank_1_computes_for_ever.__code__.co_firstlineno + 2
    assert re.search(rf"^  1 +running +test_engines_stop.py:({line}|{line + 1})$", str(caught.value), re.M)
    assert re.match(rf"rank 1 is still computing \(test_engines_stop.py:({line}|{line + 1})\b", caught.value.reason)
    assert cluster.run(pid_of) == pids


def test_engines_stuck_in_compiled_code_are_replaced(cluster, capsys, monkeypatch):
    def stuck(comm):
        if comm.rank == 2:
            ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock: no Python code runs, no signal handler
        comm.barrier()

    pids = cluster.run(pid_of)
    monkeypatch.setattr(run, "ANSWER", 1.0)  # rank 2 will give none
    with pytest.raises(CommTimeout):
        cluster.run(stuck, deadline=2)
    assert "rank 2 ignored the interrupt, as compiled code can: replacing the engines." in capsys.readouterr().err
    assert cluster.run(rank_of) == [0, 1, 2, 3]
    assert not set(pids) & set(cluster.run(pid_of))


def test_an_engine_killed_amid_a_collective(cluster, within):
    def die(comm):
        if comm.rank == 2:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    treasure = object()  # what the notebook has made meanwhile
    pids = cluster.run(pid_of)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 2 was killed by signal 9 \(SIGKILL.*lab.restart\(\)") as caught:
        cluster.run(die)
    assert time.monotonic() - began < within(5)
    assert [w.rank for w in caught.value.waits if w.state == "dead"] == [2]
    with pytest.raises(EngineError, match=r"^rank 2 was killed by signal 9 .* lab.restart\(\) for 4 new engines"):
        cluster.run(rank_of)
    began = time.monotonic()
    cluster.restart()
    assert cluster.run(rank_of) == [0, 1, 2, 3]
    assert time.monotonic() - began < within(5)
    assert not set(pids) & set(cluster.run(pid_of)) and treasure is not None


def test_what_the_others_wait_for_is_told_also_when_an_engine_dies_at_once(cluster, monkeypatch):
    def die(comm):
        if comm.rank == 2:
            os._exit(7)
        comm.barrier()

    monkeypatch.setattr(run, "GRACE", 40.0)  # they end by themselves, however late they begin to wait
    with pytest.raises(RankFailed, match="rank 2 ended with exit status 7") as caught:
        cluster.run(die)
    others = [w for w in caught.value.waits if w.rank != 2]
    assert [(w.state, w.op, 2 in w.peers) for w in others] == [("waiting", "barrier", True)] * 3


def test_how_each_engine_ended_is_told(cluster):
    def die(comm):
        if comm.rank == 3:
            os._exit(7)
        if comm.rank < 2:
            os.kill(os.getpid(), (signal.SIGSEGV, signal.SIGTERM)[comm.rank])
            time.sleep(5)

    with pytest.raises(RankFailed) as caught:
        cluster.run(die)
    crash = "rank 0 was killed by signal 11 (SIGSEGV: a crash in compiled code)"
    assert f"{crash}; rank 1 was killed by signal 15 (SIGTERM); rank 3 ended with exit status 7" in str(caught.value)


def test_an_engine_that_died_between_runs_is_named_however_late_its_shell_tells_it(cluster, eventually):
    """Then the others die, all at once."""
    _, pid, *others = pids = cluster.run(pid_of)
    shell = psutil.Process(pid).ppid()
    os.kill(shell, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    threading.Timer(1.0, os.kill, (shell, signal.SIGCONT)).start()
    assert eventually(cluster.fault).startswith("rank 1 was killed by signal 9")
    with pytest.raises(EngineError, match="rank 1 was killed by signal 9"):
        cluster.run(rank_of)
    for other in (pids[0], *others):
        os.kill(other, signal.SIGKILL)
    eventually(cluster.fault)
    with pytest.raises(EngineError, match=r"lab.restart\(\)"):
        cluster.run(rank_of)
    cluster.restart()
    assert cluster.run(rank_of) == [0, 1, 2, 3]


def test_an_error_wins_over_the_timeouts_that_it_causes(cluster, monkeypatch):
    def wrong(comm):
        if comm.rank == 0:
            raise ValueError("the cause")
        comm.recv(np.zeros(1), 0)

    monkeypatch.setattr(run, "GRACE", 40.0)  # all end by themselves, also where rank 0 is late
    with pytest.raises(RunFailed, match=r"rank 0: ValueError: the cause"):
        cluster.run(wrong, deadline=0.7)
