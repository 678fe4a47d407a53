"""What runs beside a rank: in order, apart from the foreground, really at the same time, and never for ever."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from hpdl_lab.collectives import ring
from hpdl_lab.collectives.native import shm_all_reduce
from hpdl_lab.comm.background import CompiledWork, FunctionWork
from hpdl_lab.comm.errors import CommError, CommTimeout, ForgottenWait, Mismatch

HERE = os.path.basename(__file__)


def line_of(function, offset=1):
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


def nothing(comm):
    """The first thing in the background: then comm' is there."""


def shown(comm, rank=None):
    """What the status table shows of `rank`, or of this one."""
    return comm.waiting.status.slot(comm.rank if rank is None else rank)


def lose_patience(*waitings):
    """The waits of these end soon."""
    for waiting in waitings:
        waiting.deadline = 0.1


def wait_until(condition, seconds=30):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hpdl-background"]


@pytest.fixture(params=["one host", "hosts"])
def any_comm(request, run, ranks, monkeypatch):
    """A communicator of ranks that share memory, or of ranks that do not."""
    if request.param == "hosts":
        monkeypatch.setattr(ranks, "hosts", [f"machine {r // 2}" for r in range(ranks.size)])
    return run()


@pytest.mark.parametrize("function", [shm_all_reduce, ring.all_reduce])
def test_what_it_returns_is_what_the_function_returns(any_comm, function):
    comm = any_comm
    for count in (0, 1, 1000, 200_001):
        comm.background(nothing).wait()
        tensors = [
            torch.full((count,), 2.0),
            np.full(count, comm.rank, np.float32),
            torch.ones(count, dtype=torch.bfloat16),
        ]
        works = [comm.background(function, x) for x in tensors]
        sums = [2 * comm.size, sum(range(comm.size)), comm.size]
        for work, x, total in zip(works, tensors, sums, strict=True):
            assert type(work) is (CompiledWork if function is shm_all_reduce else FunctionWork)
            out = work.wait()
            assert type(out) is type(x) and (out == total).all()
            assert work.wait() is out and work.test()
        comm.require_no_forgotten_wait()


def test_everything_runs_in_the_order_in_which_it_was_given(any_comm):
    comm, x, order = any_comm, np.ones(100_000), []

    def double(comm, x):
        order.append(len(order))
        x *= 2

    for _ in range(2):  # at first all of it waits for comm'
        x[:] = 1
        works = []
        for _ in range(4):
            works += [
                comm.background(shm_all_reduce, x),
                comm.background(double, x),
                comm.background(shm_all_reduce, x),
            ]
        works[-1].wait()
        assert (x == (2 * comm.size**2) ** 4).all()
        for work in works:
            work.wait()
    assert order == list(range(8))


def test_its_messages_never_meet_those_of_the_foreground(any_comm):
    comm = any_comm
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def pass_on(comm, start, rounds):
        x, y = np.full(600, start + comm.rank, np.float64), np.zeros(600)
        for _ in range(rounds):
            comm.sendrecv(x, after, y, before)
            x, y = y, x
            comm.barrier()
        return float(x[0])

    work = comm.background(pass_on, 1000, 40)
    here = pass_on(comm, 0, 25)
    assert here == (comm.rank - 25) % comm.size
    assert work.wait() == 1000 + (comm.rank - 40) % comm.size


def test_ranks_may_begin_it_at_different_times(run):
    """Also the first time, which makes a communicator: whatever the foreground does, it does not wait for that."""
    for last in (False, True):  # rank 0, which makes what they share, comes late, or another
        comm, x = run(), np.ones(50_000)
        late = comm.size - 1 if last else 0
        if comm.rank != late:
            work = comm.background(shm_all_reduce, x)
        comm.barrier()
        part = comm.split(comm.rank % 2)
        y = part.all_reduce(np.ones(10))
        if comm.rank == late:
            work = comm.background(shm_all_reduce, x)
        assert (work.wait() == comm.size).all() and (y == part.size).all()


def test_parts_have_a_background_each(comm):
    part = comm.split(comm.rank % 2)
    x, y = np.ones(100_000), np.ones(100_000)
    works = [c.background(f, z) for f in (nothing_of, shm_all_reduce) for c, z in ((comm, x), (part, y))]
    for work in works:
        work.wait()
    assert (x == comm.size).all() and (y == part.size).all()


def nothing_of(comm, x):
    """See nothing."""


def test_work_begins_behind_works_of_other_communicators(comm):
    part, x, seen = comm.split(comm.rank), np.ones(1000), []

    def late(comm):
        time.sleep(0.05)
        x[:] = 2

    first = part.background(late)
    total = comm.background(shm_all_reduce, x, after=(first,))
    last = part.background(lambda comm: seen.append(x[0]), after=(total,))
    assert not last.test()
    for work in (last, total, first):
        work.wait()
    assert seen == [2 * comm.size]


def test_in_the_background_there_is_no_other(comm):
    def inner(comm):
        assert not comm.has_background and comm.name == "background"
        return comm.background(shm_all_reduce, np.ones(3)), threading.current_thread()

    assert comm.has_background
    work, thread = comm.background(inner).wait()
    assert (work.wait() == comm.size).all() and thread in threads()


def test_where_mpi_is_not_for_several_threads_it_runs_at_once(run, ranks, monkeypatch):
    monkeypatch.setattr(ranks, "threads", False)
    comm, before = run(), threads()
    assert not comm.has_background
    assert (comm.background(shm_all_reduce, np.ones(3)).wait() == comm.size).all() and not {*threads()} - {*before}


def test_memory_of_the_background_is_added_where_it_is(comm):
    x = comm.background(type(comm).allocate, (300_000,)).wait().fill_(comm.rank)
    assert (comm.background(shm_all_reduce, x).wait() == sum(range(comm.size))).all()
    y = comm.allocate(300_000).fill_(comm.rank)  # memory of the foreground is copied
    assert (comm.background(shm_all_reduce, y).wait() == sum(range(comm.size))).all()


def test_it_may_be_called_inside_autograds_hooks(comm):
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 1))
    torch.nn.utils.vector_to_parameters(torch.full((1281,), 0.1), model.parameters())
    works = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: works.append(comm.background(shm_all_reduce, p.grad)))
    for step in range(2):
        model(torch.full((8, 30), float(comm.rank))).sum().backward()
        for work in works[4 * step :]:
            work.wait()
        assert model[0].weight.grad[0, 0] == pytest.approx(8 * 0.1 * sum(range(comm.size)))
        model.zero_grad()


@pytest.mark.parametrize("function", [shm_all_reduce, ring.all_reduce])
def test_it_runs_while_the_rank_does_something_else(comm, function):
    """Sleeping leaves the core to it, as a second core would."""
    comm.background(nothing).wait()
    x = np.ones(1 << 22, np.float32)  # 16 MiB
    comm.barrier()
    work = comm.background(function, x)
    wait_until(work.has_ended)
    begin = time.monotonic()
    work.wait()
    assert (x == comm.size).all()
    beside = [e for e in comm.trace.events if e.lane == "background" and e.nbytes == x.nbytes and not e.peer >= 0]
    (wait,) = [e for e in comm.trace.events if e.op == "wait" and e.t0_ns / 1e9 >= begin]
    assert wait.lane == "" and wait.line.startswith(HERE)
    if function is shm_all_reduce:
        (event,) = beside
        assert event.op == "all_reduce" and event.t0_ns < event.t1_ns < wait.t0_ns
        assert event.line.startswith(HERE)


def test_the_trace_of_hosts_has_the_rings_messages(run, ranks, monkeypatch):
    monkeypatch.setattr(ranks, "hosts", [f"machine {r}" for r in range(ranks.size)])
    comm, x = run(), np.ones(999, np.float32)
    comm.background(nothing).wait()
    comm.background(shm_all_reduce, x).wait()
    if comm.size > 1:
        sent = [e for e in comm.trace.events if (e.op, e.lane) == ("send", "background")]
        assert sum(e.nbytes for e in sent) == pytest.approx(2 * x.nbytes * (comm.size - 1) / comm.size, abs=16)
        assert {e.peer for e in sent} == {(comm.rank + 1) % comm.size}


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [True, False])
def test_all_ranks_see_what_they_disagree_about(any_comm, opened):
    comm = any_comm
    if comm.size == 1:
        return
    if opened:
        comm.background(nothing).wait()
    for count in (10, 100_000):
        work = comm.background(shm_all_reduce, np.ones(count + (comm.rank == 0)))
        text = f"counts differ: rank 0 calls all_reduce of {count + 1:,} elements, ranks? 1.* of {count:,} elements"
        with pytest.raises(Mismatch, match=text):
            work.wait()
        assert (comm.background(shm_all_reduce, np.ones(count)).wait() == comm.size).all()  # still in step
    other = comm.background((lambda c, x: c.broadcast(x)) if comm.rank == 0 else shm_all_reduce, np.ones(20_000))
    with pytest.raises(Mismatch, match="rank 0 calls broadcast where ranks? 1.* calls? all_reduce"):
        other.wait()
    assert (comm.all_reduce(np.ones(3)) == comm.size).all()


def test_what_the_function_raises_comes_out_of_wait(comm):
    def wrong(comm):
        raise LookupError(f"of rank {comm.rank}")

    works = [comm.background(wrong) for _ in range(2)]
    for work in works:
        with pytest.raises(LookupError, match=f"of rank {comm.rank}"):
            work.wait()
    for bad, why in (
        (torch.ones(4, 4).t(), "non-contiguous"),
        ("x", "a message is a torch tensor"),
        (None, "NoneType"),
    ):
        with pytest.raises((ValueError, TypeError), match=why):
            comm.background(shm_all_reduce, bad).wait()
    assert (comm.background(shm_all_reduce, torch.ones(4)).wait() == comm.size).all()


def test_a_rank_that_never_begins_it_is_named_by_the_deadline(run, meet, once):
    """The first time, when comm' is not there: tests/test_engines_background.py, since MPI cannot end well then."""
    comm = run()
    if comm.size == 1:
        return
    comm.background(nothing).wait()
    x = np.ones(1000)
    try:
        if comm.rank == 0:
            meet()
            return
        once(lambda: shown(comm).peers == (0,), lambda: lose_patience(comm.waiting))
        with pytest.raises(CommTimeout, match="no answer within 0.1 s: rank") as caught:
            comm.background(shm_all_reduce, x).wait()
        meet()
        mine = caught.value.waits[comm.rank]
        line = line_of(test_a_rank_that_never_begins_it_is_named_by_the_deadline, 13)
        assert (mine.state, mine.line) == ("waiting", line)
        assert (mine.op, mine.comm, mine.count, mine.peers) == ("all_reduce", "background", 1000, (0,))
        with pytest.raises(CommError, match="an earlier all_reduce did not complete"):
            comm.background(shm_all_reduce, x).wait()
    finally:
        comm.close()


def wait_for_nothing(comm):
    comm.recv(np.zeros(7), (comm.rank + 1) % comm.size)


def test_a_wait_inside_the_function_is_what_the_report_shows(run, meet, once):
    comm = run()
    if comm.size == 1:
        return
    work = comm.background(wait_for_nothing)

    def all_wait():
        slots = [shown(comm, rank) for rank in range(comm.size)]
        return all((slot.run, slot.op) == (comm.waiting.run, "recv") for slot in slots)

    once(all_wait, lambda: lose_patience(comm._background.waiting))
    with pytest.raises(CommTimeout, match="cycle: 0 -> 1 -> ") as caught:
        work.wait()
    meet()  # the others read what this rank waited for until it begins another run
    after = (comm.rank + 1) % comm.size
    mine = caught.value.waits[comm.rank]
    assert (mine.state, mine.op, mine.peers, mine.count) == ("waiting", "recv", (after,), 7)
    assert mine.line == line_of(wait_for_nothing)


def test_a_function_may_run_for_longer_than_the_deadline_while_it_communicates(run):
    def talks(comm):
        for _ in range(7):
            time.sleep(0.5)  # far below the deadline: a rank may come later
            comm.barrier()
        return "done"

    comm = run()
    comm.background(nothing).wait()
    comm.waiting.deadline = 3.0
    assert comm.background(talks).wait() == "done"


def test_a_function_that_neither_ends_nor_communicates_has_the_deadline_of_a_wait(run):
    over = threading.Event()

    def sleeps(comm):
        over.wait(30)

    comm = run()
    comm.background(nothing).wait()
    comm.waiting.deadline = 0.5
    work = comm.background(sleeps)
    with pytest.raises(CommTimeout, match=f"rank {comm.rank} waits for sleeps in the background, which has neither"):
        work.wait()
    assert not work.has_ended()
    over.set()


def test_while_the_background_computes_the_rank_is_said_to(run, meet, once):
    comm = run()
    if comm.size == 1:
        return
    comm.background(nothing).wait()
    meet()
    work = comm.background(lambda comm: meet() if comm.rank == 0 else None)
    if comm.rank == 0:
        work.wait()
        return
    once(lambda: shown(comm, 0).line.startswith(HERE), lambda: lose_patience(comm.waiting))
    with pytest.raises(CommTimeout) as caught:
        comm.recv(np.zeros(3), 0)
    meet()
    assert (caught.value.waits[0].state, caught.value.waits[0].line[: len(HERE)]) == ("running", HERE)
    work.wait()


def test_forgotten_work_is_named(comm):
    works = [comm.background(function, np.ones(3)) for function in (nothing_of, shm_all_reduce)]
    with pytest.raises(
        ForgottenWait, match=rf"rank {comm.rank} never waited for nothing_of in the background \({HERE}"
    ):
        comm.require_no_forgotten_wait()
    works[0].wait()
    while not works[1].test():
        time.sleep(0.001)
    comm.require_no_forgotten_wait()


# -- the end -----------------------------------------------------------------------------------------------------------


def hold_out(comm):
    while True:
        try:
            time.sleep(0.01)
        except ValueError:
            pass


@pytest.mark.parametrize("function", [wait_for_nothing, hold_out, shm_all_reduce])
def test_closing_ends_what_runs_in_the_background(run, function):
    comm = run()
    comm.background(nothing).wait()
    if comm.size > 1 or function is hold_out:
        arguments = [np.ones(1000)] if function is shm_all_reduce else []
        if comm.rank == 0 or function is not shm_all_reduce:
            comm.background(function, *arguments)
        comm.background(nothing)
        time.sleep(0.1)
    begin = time.monotonic()
    comm.close()
    assert time.monotonic() - begin < 10  # at the deadline of 20 s it would end by itself
    wait_until(lambda: not threads())
    with run() as comm:
        assert (comm.background(shm_all_reduce, np.ones(3)).wait() == comm.size).all()


def test_an_interrupt_ends_the_wait_and_the_thread(run, once):
    comm = run()
    if comm.size == 1:
        return
    comm.background(nothing).wait()
    work = comm.background(wait_for_nothing)
    main = threading.main_thread().ident
    once(lambda: shown(comm).op == "recv", lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:
        work.wait()
    mine = caught.value.waits[comm.rank]
    assert (mine.state, mine.op, mine.line) == ("waiting", "recv", line_of(wait_for_nothing))
    comm.close(caught.value)
    wait_until(lambda: not threads())


def test_a_process_that_was_forked_says_that_it_cannot(comm):
    comm.background(nothing).wait()
    comm.background(shm_all_reduce, np.ones(3)).wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            comm._background.progress.all_reduce_in_memory(comm._background.double._shared.group, np.ones(3))
        except RuntimeError as error:
            code = 7 if "a process that was forked cannot communicate" in str(error) else 2
        comm._background.progress.stop()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (comm.background(shm_all_reduce, np.ones(3)).wait() == comm.size).all()


def test_many_runs_leave_nothing_behind(run, ranks):
    before, unfreed = threading.active_count(), len(ranks.unfreed)
    for _ in range(12):
        with run() as comm:
            x = np.ones(5000)
            works = [comm.background(f, x) for f in (shm_all_reduce, ring.all_reduce, shm_all_reduce)]
            works[-1].wait()
            assert (x == comm.size**3).all()
    wait_until(lambda: threading.active_count() <= before)
    assert len(ranks.unfreed) == unfreed
