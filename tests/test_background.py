"""`Comm.background` on simulated ranks: time, order, errors, reports. On real ranks: tests/mpi."""

import re

import numpy as np
import pytest
import torch

from hpdl_lab.collectives import ring
from hpdl_lab.comm import CommTimeout, Deadlock, PerRank, sim
from hpdl_lab.comm.base import Comm
from hpdl_lab.comm.errors import ForgottenWait
from hpdl_lab.comm.network import Switch
from tests.wording import raises

ALPHA, BETA = 1e-3, 1e-6  # s, s per byte
NETWORK = Switch(alpha=ALPHA, beta=BETA)
N = 1200
RING = 2 * 3 * (ALPHA + N / 4 * 8 * BETA)  # s: an all-reduce of N float64 on 4 ranks


def default(comm, x):
    return comm.all_reduce(x)


class Alone(Comm):
    """A back end of one rank that has nothing of its own."""

    def isend(self, x, dst):
        raise NotImplementedError

    irecv = barrier = split = allocate = isend


def test_where_nothing_runs_beside_a_rank_it_is_done_at_once():
    seen = []

    def note(comm, word):
        seen.append((comm, word))
        return word * 2

    comm = Alone(0, 1, trace=None)
    work = comm.background(note, "ab")
    assert seen == [(comm, "ab")] and work.test()
    assert work.wait() == work.wait() == "abab"


def test_what_it_raises_comes_at_wait():
    def fails(comm):
        raise KeyError("lost")

    work = Alone(0, 1, trace=None).background(fails)
    with pytest.raises(KeyError, match="lost"):
        work.wait()


def test_what_cannot_be_called_is_refused_at_once():
    for comm in (Alone(0, 1, trace=None), sim.run(1, lambda comm: comm)[0]):
        with raises(TypeError):
            comm.background(3)


# -- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("share", [0.25, 1.0, 3.0])
def test_computing_beside_an_all_reduce_takes_the_longer_of_the_two(share, threads):
    def step(comm, x):
        work = comm.background(ring.all_reduce, x)
        comm.compute(seconds=share * RING)
        work.wait()
        return x

    results = sim.run(4, step, np.ones(N), network=NETWORK, threads=threads)
    assert results.seconds == pytest.approx(max(share, 1.0) * RING, rel=1e-12)
    assert all((x == 4).all() for x in results)
    waits = [e for e in results.events if e.op == "wait"]
    assert [(e.rank, e.lane) for e in waits] == [(r, "") for r in range(4)]
    for e in waits:
        assert e.t1_ns - e.t0_ns == pytest.approx(max(0.0, 1 - share) * RING * 1e9, abs=2)


def test_three_buckets_are_pipelined():
    """Gradients of three layers become ready one after the other: only what is left of the last all-reduce shows."""

    def step(comm, buckets, seconds):
        works = []
        for x in buckets:
            comm.compute(seconds=seconds)
            works.append(comm.background(ring.all_reduce, x))
        for work in works:
            work.wait()

    buckets = [np.ones(N), np.ones(N), np.ones(N)]
    for seconds, total in ((2 * RING, 7 * RING), (0.5 * RING, 3.5 * RING)):  # bound by computing, by the network
        results = sim.run(4, step, buckets, seconds, network=NETWORK)
        assert results.seconds == pytest.approx(total, rel=1e-12)
    starts = sorted({e.t0_ns for e in results.events if e.op == "send" and e.rank == 0})
    assert len(starts) == 3 * 6 and {e.lane for e in results.events if e.op == "send"} == {"background"}


def test_the_background_starts_at_the_time_of_the_call_and_shares_the_ports_of_its_rank():
    def both(comm, x):
        comm.compute(seconds=1.0)
        work = comm.background(exchange, x)
        exchange(comm, x)
        work.wait()

    def exchange(comm, x):
        comm.sendrecv(x, 1 - comm.rank, np.empty_like(x), 1 - comm.rank)

    results = sim.run(2, both, np.ones(125), network=NETWORK)
    assert results.seconds == pytest.approx(1.0 + 2 * (ALPHA + 1000 * BETA))  # one after the other through one port


# -- order and separation --------------------------------------------------------------------------------------------


def test_work_is_done_in_the_order_given_and_returns_its_value():
    def many(comm):
        order = []

        def note(comm, i):
            comm.barrier()
            order.append(i)
            return i * 10 + comm.rank

        works = [comm.background(note, i) for i in range(5)]
        values = [work.wait() for work in reversed(works)][::-1]
        return values, order

    assert sim.run(3, many) == [([r, 10 + r, 20 + r, 30 + r, 40 + r], [0, 1, 2, 3, 4]) for r in range(3)]


def test_messages_of_the_background_never_meet_those_of_the_foreground():
    def crossed(comm):
        x, y = np.full(1, 1.0), np.full(1, 2.0)
        if comm.rank == 0:
            work = comm.background(lambda beside: beside.send(x, 1))
            comm.send(y, 1)
        else:
            work = comm.background(lambda beside: beside.recv(x, 0))
            comm.recv(y, 0)
        work.wait()
        return x[0], y[0]

    assert sim.run(2, crossed) == [(1.0, 2.0)] * 2


def test_parts_and_the_background_have_backgrounds_of_their_own():
    def nested(comm):
        row = comm.split(comm.rank // 2)
        mine, rows = np.ones(4), np.ones(4)
        works = [comm.background(default, mine), row.background(default, rows)]
        deep = comm.background(lambda beside: beside.background(default, np.ones(2)).wait()[0])
        for work in works:
            work.wait()
        return mine[0], rows[0], deep.wait()

    results = sim.run(4, nested)
    assert results == [(4, 2, 4)] * 4
    keys = [(e.rank, e.step) for e in results.events]
    assert len(set(keys)) == len(keys)


def test_test_says_when_it_is_done():
    def poll(comm):
        work = comm.background(lambda beside: beside.compute(seconds=1.0))
        looks = 0
        while not work.test():
            looks += 1
            comm.compute(seconds=0.3)
        work.wait()
        return looks

    assert sim.run(2, poll, network=NETWORK) == [4, 4]


def test_a_line_of_the_library_stands_for_the_line_of_the_call():
    results = sim.run(2, beside_the_library)
    assert {e.line for e in results.events} == {f"test_background.py:{beside_the_library.__code__.co_firstlineno + 1}"}


def beside_the_library(comm):
    return comm.background(lambda beside: beside.background(ring.all_reduce, np.ones(4)).wait()).wait()


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_an_error_in_the_background_reaches_its_rank_at_wait():
    def fails(comm):
        if comm.rank == 1:
            raise KeyError("lost")
        return comm.rank

    def caught(comm):
        first, second = comm.background(fails), comm.background(default, np.ones(1))
        assert second.wait()[0] == 3
        if comm.rank == 1:
            with pytest.raises(KeyError, match="lost"):
                first.wait()
        else:
            first.wait()

    sim.run(3, caught)
    with pytest.raises(KeyError, match="lost") as error:
        sim.run(3, lambda comm: comm.background(fails).wait())
    assert error.value.rank == 1 and "simulated rank 1 of 3, at test_background.py:" in error.value.__notes__[0]


def test_a_rank_that_ends_without_waiting_is_told():
    with raises(ForgottenWait, "rank 0", "test_background.py"):
        sim.run(2, lambda comm: comm.background(default, np.ones(3)) and None)


def test_a_receive_that_a_function_in_the_background_forgets_is_told():
    def forgets(comm):
        if comm.rank:
            comm.irecv(np.ones(1), 0)
        else:
            comm.send(np.ones(1), 1)

    with raises(ForgottenWait, "rank 1", "rank 0"):
        sim.run(2, lambda comm: comm.background(forgets).wait())


def test_a_deadlock_in_the_background_is_told_with_the_wait_of_the_background():
    def receives(comm):
        comm.recv(np.empty(5), (comm.rank + 1) % comm.size)

    with raises(Deadlock, "ranks 0-2") as caught:
        sim.run(3, lambda comm: comm.background(receives).wait())
    waits = caught.value.waits
    assert [(w.rank, w.op, w.peers, w.comm) for w in waits] == [
        (r, "recv", ((r + 1) % 3,), "background") for r in range(3)
    ]
    assert "cycle: 0 -> 1 -> 2 -> 0" in str(caught.value) and "recv on background" in str(caught.value)


def test_a_deadlock_tells_of_a_background_beside_a_rank_that_waits_elsewhere():
    def crossed(comm):
        work = comm.background(default, np.ones(7)) if comm.rank == 0 else None
        comm.recv(np.empty(1), 1) if comm.rank == 0 else comm.barrier()
        work.wait()

    with pytest.raises(Deadlock) as caught:
        sim.run(2, crossed)
    zero = caught.value.waits[0]
    assert (zero.op, zero.comm) == ("recv", "") and [(w.collective, w.comm) for w in zero.background] == [
        ("all_reduce", "background")
    ]
    assert re.search(r"background +all_reduce on background \(recv\)", str(caught.value))


@pytest.mark.parametrize("threads", [False, True])
def test_work_in_another_order_on_another_rank_is_diagnosed(threads):
    def swapped(comm, give):
        for work in [comm.background(give[n], np.ones(n)) for n in (give if comm.rank else reversed(give))]:
            work.wait()

    with pytest.raises(ValueError) as caught:
        sim.run(3, swapped, {10: ring.all_reduce, 20: ring.all_reduce}, threads=threads)
    assert "counts differ: " in caught.value.reason and "same order on every rank?" in caught.value.reason
    assert "sent at test_background.py:" in str(caught.value)

    def broadcast(comm, x):
        return comm.broadcast(x)

    with pytest.raises(Deadlock) as caught:
        sim.run(3, swapped, {10: default, 11: broadcast}, threads=threads)
    assert "in the background: is it given the same work" in caught.value.reason


def test_the_communicator_of_the_foreground_cannot_be_used_in_the_background():
    def wrong(comm):
        comm.background(lambda beside: comm.barrier()).wait()

    with raises(ValueError, "rank 0", "test_backgr"):
        sim.run(2, wrong)


def test_an_endless_background_ends_at_the_deadline_and_is_located():
    def spin(comm):
        while True:
            pass

    with raises(CommTimeout, "0.1 s", "test_background.py"):
        sim.run(2, lambda comm: comm.background(spin).wait(), deadline=0.1)


def test_nothing_is_left_of_a_background_that_nobody_ends():
    closed = []

    def stuck(comm):
        try:
            comm.recv(np.empty(1), 1)
        finally:
            closed.append(comm.rank)

    with pytest.raises(Deadlock):
        sim.run(2, lambda comm: comm.background(stuck).wait() if comm.rank == 0 else comm.recv(np.empty(1), 0))
    assert closed == [0]


def test_a_background_is_the_same_in_every_run():
    def step(comm, x):
        work = comm.background(ring.all_reduce, x)
        comm.all_reduce(np.ones(3))
        return work.wait()

    xs = PerRank([torch.rand(100) for _ in range(5)])
    one, two = sim.run(5, step, xs), sim.run(5, step, xs, threads=True)
    assert one.events == two.events and one.seconds == two.seconds
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_work_begins_behind_works_of_other_communicators():
    def chained(comm):
        parts, ended = [comm.split(comm.rank) for _ in range(3)], []

        def spend(comm, seconds):
            comm.compute(seconds)
            ended.append(round(comm.trace.clock() / 1e9 - begun, 6))

        begun = comm.trace.clock() / 1e9
        slow, quick = (part.background(spend, seconds) for part, seconds in zip(parts, (4.0, 1.0), strict=False))
        last = [part.background(spend, 1.0, after=(quick, slow)) for part in (parts[1], parts[2])]
        for work in (*last, quick, slow):
            work.wait()
        return ended

    for found in sim.run(2, chained, network=NETWORK):
        assert found == [1.0, 4.0, 5.0, 5.0]


def test_after_takes_what_runs_in_the_background_only():
    def sends_first(comm):
        x = torch.zeros(1)
        sent = comm.isend(x, 1 - comm.rank)
        got = comm.irecv(torch.zeros(1), 1 - comm.rank)
        try:
            comm.background(ring.all_reduce, x, after=[sent])
        finally:
            got.wait()
            sent.wait()

    with raises(TypeError, "comm.background returns"):
        sim.run(2, sends_first)
