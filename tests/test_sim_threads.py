"""Simulated ranks as threads: the same as coroutines, and free to wait inside autograd's backward."""

import itertools
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch

from hpdl_lab.collectives.table import ALGORITHMS
from hpdl_lab.comm import CommTimeout, Deadlock, PerRank, sim
from hpdl_lab.comm.inject import Injection
from hpdl_lab.comm.network import FatTree, Switch
from hpdl_lab.comm.sim import token as baton
from hpdl_lab.zoo import PROGRAMS
from tests.wording import raises

both = pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def told(size, fn, *args, deadline=5, **options):
    """All that one can see of a run: values, events, seconds, rows; or the error with everything that it carries."""
    try:
        results = sim.run(size, fn, *args, deadline=deadline, **options)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return type(error).__name__, str(error), notes, error.reason, error.waits, getattr(error, "rank", None)
    values = [v.tolist() if hasattr(v, "tolist") else v for v in results]
    return values, results.events, results.seconds, results.rows


# -- the same as coroutines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", PROGRAMS, ids=lambda example: example.name)
def test_the_zoo(example):
    for program, deadline in ((example.repaired, 5), (example.broken, example.deadline / 3)):
        coroutines = told(example.ranks, program, deadline=deadline)
        assert told(example.ranks, program, deadline=deadline, threads=True) == coroutines


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_the_collectives(p):
    network, slow = FatTree.of("ethernet_10", hosts_per_leaf=2), Injection(delays={0: 1e-5})
    for algorithm, n in itertools.product(ALGORITHMS, (0, 1, 7 * p)):
        xs = PerRank(list(torch.rand(p, n)))
        coroutines = told(p, algorithm.function, xs, network=network, inject=slow)
        assert told(p, algorithm.function, xs, network=network, inject=slow, threads=True) == coroutines


@both
@pytest.mark.parametrize("outside", [False, True])
def test_inference_mode_belongs_to_the_rank(threads, outside):
    """Tensors that are made in it can never be trained: one rank's evaluation must not make another's."""

    def modes(comm):
        told = []
        with torch.inference_mode(comm.rank == 1):
            for _ in range(3):
                comm.barrier()
                told.append((torch.ones(1).is_inference(), (torch.ones(1, requires_grad=True) * 2).requires_grad))
                with torch.set_grad_enabled(comm.rank == 2):
                    comm.barrier()
                    told.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        comm.barrier()
        return told, torch.ones(1).is_inference()

    with torch.inference_mode(outside):
        results = sim.run(3, modes, threads=threads)
        assert torch.is_inference_mode_enabled() is outside
    told = [[(False, True), (False, False)], [(True, False), (True, False)], [(False, True), (False, True)]]
    assert results == [(told[r] * 3, outside) for r in range(3)]
    assert torch.is_grad_enabled() and not torch.ones(1).is_inference()


def test_ranks_that_are_ended_in_inference_mode_leave_nothing_behind():
    def stuck(comm):
        with torch.inference_mode():
            comm.recv(np.zeros(1), 1 - comm.rank)

    with pytest.raises(Deadlock):
        sim.run(2, stuck)
    assert not torch.ones(1).is_inference() and torch.is_grad_enabled()


@both
def test_what_torch_keeps_per_thread_belongs_to_the_rank(threads):
    x = torch.ones(2, 2)

    def product(comm):
        before = torch.is_grad_enabled(), torch.mm(x, x).dtype
        with torch.autocast("cpu", dtype=torch.float16 if comm.rank else torch.bfloat16):
            with torch.set_grad_enabled(comm.rank == 2):
                comm.barrier()
                inside = torch.is_grad_enabled(), torch.mm(x, x).dtype
                comm.barrier()
        comm.barrier()
        return before, inside, (torch.is_grad_enabled(), torch.mm(x, x).dtype)

    dtypes = [torch.bfloat16, torch.float16, torch.float16]
    with torch.no_grad():  # what is outside is where all ranks begin
        results = sim.run(3, product, threads=threads)
        assert not torch.is_grad_enabled()
    outside = (False, torch.float32)
    assert results == [(outside, (r == 2, dtypes[r]), outside) for r in range(3)]
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


@both
def test_autocast_forgets_its_casts_while_another_rank_is_inside(threads):
    """Rank 1 changes its weights between two forward passes, while rank 0 waits inside an autocast of its own."""

    def forward_twice(comm):
        w = torch.ones(2, 2, requires_grad=True)
        with torch.autocast("cpu") if comm.rank == 0 else torch.no_grad():
            comm.barrier()
            if comm.rank == 0:
                return comm.barrier()
        outputs = []
        for _ in range(2):
            with torch.autocast("cpu"):
                outputs.append((w @ torch.ones(2, 1)).sum().item())
            with torch.no_grad():
                w += 1
        comm.barrier()
        return outputs

    assert sim.run(2, forward_twice, threads=threads)[1] == [4, 8]


# -- inside backward -------------------------------------------------------------------------------------------------


def gradients_summed_in_hooks(comm, seconds=0.0):
    """Every gradient of a real network is summed over ranks by a hook, while backward goes on; returns them flat."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3), torch.nn.LayerNorm(3))

    def summed(param):
        comm.compute(seconds=seconds)
        comm.all_reduce(param.grad)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(summed)
    shard = torch.arange(32.0).reshape(8, 4)[comm.rank :: comm.size] / 32
    (model(shard) ** 3).sum().backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def test_a_rank_may_wait_inside_backward():
    one = sim.run(1, gradients_summed_in_hooks)[0]
    results = sim.run(4, gradients_summed_in_hooks, 1e-3, threads=True)
    assert all(torch.equal(results[0], other) for other in results[1:])
    torch.testing.assert_close(results[0], one, rtol=1e-5, atol=1e-6)
    assert results.seconds > 6e-3 and results.events == sim.run(4, gradients_summed_in_hooks, 1e-3, threads=True).events


def test_a_coroutine_that_would_wait_inside_backward_is_told_of_threads():
    with pytest.raises(ValueError) as caught:
        sim.run(4, gradients_summed_in_hooks)
    line = gradients_summed_in_hooks.__code__.co_firstlineno + 7
    assert str(caught.value) == (
        f"rank 0 waits for other ranks inside autograd's backward (test_sim_threads.py:{line}), "
        "where a coroutine cannot pause: use threads=True"
    )


def test_a_deadlock_inside_backward_is_told_and_unwound():
    def one_is_missing(comm):
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: comm.all_reduce(grad.clone()))
        if comm.rank != 1:
            y.sum().backward()

    with raises(Deadlock, "rank 1", "all_reduce"):
        sim.run(3, one_is_missing, threads=True)


def test_ranks_that_share_a_model_are_told():
    x = torch.ones(3, requires_grad=True)

    def shared(comm):
        x.register_hook(lambda grad: comm.barrier())
        (x * 2).sum().backward()

    with raises(ValueError, "rank 0", "test_sim_threads"):
        sim.run(3, shared, threads=True)


def overlapped(comm, seconds):
    """Hooks that compute and start background work, and wait only after backward."""
    x = torch.ones(4, requires_grad=True)
    y, works = x, []

    def ready(grad):
        comm.compute(seconds=seconds)
        works.append(comm.background(lambda beside, g: beside.all_reduce(g), grad.clone()))

    for _ in range(3):
        y = y * 2
        y.register_hook(ready)
    y.sum().backward()
    comm.barrier()  # at the time when backward ends, which no coroutine has seen pass
    totals = [work.wait() for work in works]
    return [total.tolist() for total in totals], comm.rank


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 1e-3])
def test_computing_and_background_inside_backward_are_the_same_on_both(seconds):
    coroutines, threads = sim.run(4, overlapped, seconds), sim.run(4, overlapped, seconds, threads=True)
    assert coroutines == threads == [([[4.0] * 4, [8.0] * 4, [16.0] * 4], r) for r in range(4)]
    assert coroutines.seconds == threads.seconds > 3 * seconds
    assert sorted(coroutines.events) == sorted(threads.events)


def barrier(comm, x, early, work):
    comm.barrier()


def all_reduce(comm, x, early, work):
    comm.all_reduce(x)


def zero_sends(comm, x, early, work):
    comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)


def zero_receives(comm, x, early, work):
    comm.recv(x, 1) if comm.rank == 0 else comm.send(x, 0)


def zero_has_received(comm, x, early, work):
    comm.send(x, 0) if comm.rank else early.wait()


def zero_polls(comm, x, early, work):
    message = comm.irecv(x, 1) if comm.rank == 0 else comm.isend(x, 0)
    while not message.test():
        pass
    message.wait()


def background_is_done(comm, x, early, work):
    work.wait()


@both
@pytest.mark.parametrize(
    ("meet", "clocks"),
    [  # s, of the two ranks: a message takes 0.25 s
        (barrier, (5.25, 5.25)),
        (all_reduce, (5.5, 5.5)),
        (zero_sends, (5.25, 5.25)),
        (zero_receives, (5.25, 5.25)),
        (zero_has_received, (5.0, 0.25)),
        (zero_polls, (5.25, 5.25)),
        (background_is_done, (5.0, 0.25)),
    ],
)
def test_whoever_has_run_ahead_meets_the_others_at_its_own_time(meet, clocks, threads):
    def ahead(comm):
        early = comm.irecv(np.ones(1), 1) if meet is zero_has_received and comm.rank == 0 else None
        work = comm.background(lambda beside: beside.barrier())
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: comm.compute(seconds=5.0 * (comm.rank == 0)))
        y.backward()
        meet(comm, np.ones(1), early, work)
        now = comm.trace.clock() / 1e9
        work.wait()
        return now

    assert tuple(sim.run(2, ahead, network=Switch(alpha=0.25, beta=0.0), threads=threads)) == clocks


# -- the end ---------------------------------------------------------------------------------------------------------


@both
def test_finally_clauses_of_stuck_ranks_run_and_nothing_is_left(threads):
    closed = []

    def stuck(comm):
        try:
            comm.barrier()
        finally:
            closed.append(comm.rank)

    with pytest.raises(Deadlock):
        sim.run(3, lambda comm: stuck(comm) if comm.rank else None, threads=threads)
    assert closed == [1, 2]


@both
@pytest.mark.parametrize("what", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_program_ends_the_run(what, threads):
    def leave(comm):
        comm.barrier()
        if comm.rank == 1:
            raise what("now")
        comm.barrier()

    with pytest.raises(what, match="now"):
        sim.run(3, leave, threads=threads)


@both
def test_an_endless_loop_ends_at_the_deadline_and_is_located(threads):
    def spin(comm):
        while comm.rank == 1:
            pass
        comm.barrier()

    used = time.process_time()
    with raises(CommTimeout, "0.3 s", "test_sim_threads.py") as caught:
        sim.run(2, spin, deadline=0.3, threads=threads)
    assert time.process_time() - used < 10  # 0.4 s on a quiet machine
    assert caught.value.waits[0].op == "barrier"
    assert "rank 1 is still computing (test_sim_threads.py:" in caught.value.reason


def test_an_interrupt_while_a_thread_runs_ends_it():
    def spin(comm):
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass

    with pytest.raises(KeyboardInterrupt):
        sim.run(2, spin, threads=True)


@pytest.mark.parametrize(("size", "workers"), [(4, 3), (100, 1)])
def test_many_threads_do_not_have_many_workers_each(size, workers):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert sim.run(size, lambda comm: torch.get_num_threads(), threads=True) == [workers] * size
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_machine_without_threads_is_told(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(baton.threading.Thread, "start", refuse)
    with raises(RuntimeError, "rank 0"):
        sim.run(2, lambda comm: None, threads=True)


@pytest.mark.parametrize(("size", "loaded"), [(1024, True), (200, False)])
def test_a_thousand_threads_and_some_without_torch(size, loaded, monkeypatch):
    if not loaded:
        monkeypatch.setitem(sys.modules, "torch", None)

    def around(comm):
        seen = threading.active_count()
        comm.barrier()
        total = comm.background(lambda beside: beside.barrier())
        y = np.empty(1)
        comm.sendrecv(np.full(1, float(comm.rank)), (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)
        total.wait()
        return y[0], seen

    results = sim.run(size, around, threads=True)
    assert [y for y, _ in results] == [size - 1, *range(size - 1)]
    assert max(seen for _, seen in results) > size
