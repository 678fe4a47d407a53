"""Communicators of real ranks: parts, fresh ones, shared memory, and what a broken run leaves for the next."""

import contextlib
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpdl_lab import comm as package
from hpdl_lab.comm.errors import CommError, CommTimeout, RankFailed

FREE_RUNS = 20  # see test_many_runs


def test_who_is_here(comm, ranks):
    assert (comm.rank, comm.size, comm.device) == (ranks.rank, ranks.size, "cpu")
    assert (comm.node_rank, comm.node_size) == (comm.rank, comm.size)


def test_tags_are_those_that_every_mpi_has(comm):
    """Whatever is sent: the compiled module refuses a tag above 32,767, and lengths around the limit of small ones."""
    for count in (0, 1, 2047, 2048, 70_000):
        sent = torch.arange(count, dtype=torch.int64).to(torch.uint8)
        received = torch.empty_like(sent)
        work = comm.isend(sent, (comm.rank + 1) % comm.size)
        comm.recv(received, (comm.rank - 1) % comm.size)
        work.wait()
        assert torch.equal(sent, received)


def test_world_is_always_fresh(ranks):
    a, b = package.world(), package.world(deadline=3)
    assert (a.rank, a.size) == (b.rank, b.size)
    assert a.transport.group.comm != b.transport.group.comm
    assert b.waiting.deadline == 3
    a.close()
    b.close()


def test_split_by_color_and_key(comm):
    part = comm.split(comm.rank % 2, key=-comm.rank)
    mine = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
    assert (part.size, part.rank) == (len(mine), mine.index(comm.rank))
    assert part.all_gather(np.array([comm.rank])).reshape(-1).tolist() == mine
    assert part.trace is comm.trace
    named = part.split("all of us")
    assert (named.all_reduce(torch.ones(3)) == part.size).all()


def test_a_part_can_be_closed_before_its_run_ends(comm):
    with comm.split(0) as part:
        assert (part.all_reduce(torch.ones(3)) == comm.size).all()
    with pytest.raises(CommError, match="is closed"):
        part.barrier()
    again = comm.split(0)
    again.close()
    again.close()
    assert (comm.split(0).all_reduce(torch.ones(3)) == comm.size).all(), "the run goes on"
    comm.barrier()


@pytest.mark.parametrize(
    ("color", "key", "why"),
    [
        (lambda rank: rank > 0, lambda rank: rank % 2 or None, "keys of one color that cannot be compared: .*None"),
        (lambda rank: float("nan") if rank == 1 else 0, lambda rank: 0, "color nan of rank 1 does not equal itself"),
    ],
)
def test_a_split_that_one_part_cannot_make_is_refused_on_every_rank(comm, color, key, why):
    """No rank may go on alone into MPI_Comm_split, where neither a deadline nor an interrupt would reach it."""
    if comm.size < 3:
        return
    with pytest.raises(ValueError, match=f"rank 0 cannot split: {why}"):
        comm.split(color(comm.rank), key(comm.rank))
    assert comm.split(0).size == comm.size  # the ranks are still in step


def test_events_of_parts_name_peers_as_the_run_does(comm):
    if comm.size < 3:
        return
    part = comm.split(comm.rank > 0)
    if comm.rank == 1:
        part.send(np.zeros(3), 1)
    elif comm.rank == 2:
        part.recv(np.zeros(3), 0)
    peers = [e.peer for e in comm.trace.events if e.op in ("send", "recv")]
    assert peers == {1: [2], 2: [1]}.get(comm.rank, [])


def test_ranks_of_different_machines_exchange_messages(run, ranks, monkeypatch):
    monkeypatch.setattr(ranks, "hosts", [f"machine {r // 2}" for r in range(ranks.size)])
    comm = run()
    last = comm.size - 1 if comm.size % 2 else -1  # alone on its machine
    assert (comm.node_rank, comm.node_size) == ((0, 1) if comm.rank == last else (comm.rank % 2, 2))
    comm.barrier()
    z = comm.allocate((1000,)).fill_(comm.rank)
    assert (comm.all_reduce(z) == sum(range(comm.size))).all()
    assert comm.all_gather(np.array([comm.rank])).reshape(-1).tolist() == list(range(comm.size))
    assert (comm.broadcast(np.full(3, comm.rank), comm.size - 1) == comm.size - 1).all()
    assert (comm.reduce_scatter(np.ones((comm.size, 5))) == comm.size).all()
    here = comm.split(ranks.hosts[ranks.rank])
    assert here.size == comm.node_size
    assert (here.all_reduce(torch.ones(3)) == here.size).all()
    if comm.size > 2:
        with pytest.raises(ValueError, match="counts differ: rank 0 calls .*all_reduce of 11 elements, rank.* of 10"):
            comm.all_reduce(torch.zeros(10 + (comm.rank == 0)))


def test_some_of_the_ranks(run, ranks):
    if ranks.size < 3:
        return
    if ranks.rank not in (0, 2):
        with pytest.raises(ValueError, match=f"rank {ranks.rank} is not one of the ranks"):
            ranks.comm(5_000, [2, 0])
        return
    comm = run(members=[2, 0])
    assert (comm.rank, comm.size) == ((ranks.rank == 0) + 0, 2)
    assert (comm.all_reduce(torch.ones(4)) == 2).all()


def test_wrong_ranks(ranks):
    for wrong in ([0, 0], [0, 99], [-1]):
        with pytest.raises(ValueError, match="each of them once"):
            ranks.comm(6_000, wrong)


def test_shared_tensors(comm):
    x = comm.allocate((3, 4), torch.float64)
    assert (x.shape, x.dtype, x.sum()) == ((3, 4), torch.float64, 0)
    assert comm.allocate(0).shape == (0,)
    assert comm.allocate(5, "bfloat16").dtype == torch.bfloat16
    comm.barrier()
    x.fill_(comm.rank)  # one's own
    comm.barrier()
    assert (x == comm.rank).all()
    assert [set(view[1:].flatten().tolist()) for view in comm.views(x)] == [{rank} for rank in range(comm.size)]
    assert [view.shape for view in comm.views(x[1:])] == [(2, 4)] * comm.size
    assert [len(view) for view in comm.views(x[3:])] == [0] * comm.size
    comm.barrier()
    with pytest.raises(ValueError, match="make it with comm.allocate"):
        comm.views(torch.ones(3))


def test_a_shared_tensor_outlives_its_communicator(run):
    comm = run()
    x = comm.allocate((1000,)).fill_(comm.rank)
    comm.close()
    assert (x == comm.rank).all()


def test_too_much_memory_is_refused_on_every_rank(comm):
    for nbytes in (1 << 40, 1 << 62):
        with pytest.raises(
            MemoryError, match=r"allocate of [0-9,]+ bytes for .* ranks: rank 0 cannot take it: .* avail"
        ):
            comm.allocate((nbytes // comm.size,), "uint8")
    assert (comm.all_reduce(torch.ones(3)) == comm.size).all()


def test_shared_memory_never_has_a_name(comm):
    before = set(os.listdir("/dev/shm"))
    comm.allocate((100_000,))
    comm.all_reduce(torch.zeros(100_000))
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "hpdl" in name]


def test_a_closed_communicator_says_so(run):
    comm = run()
    comm.close()
    comm.close()
    with pytest.raises(CommError, match="closed"):
        comm.barrier()


# -- the next run --------------------------------------------------------------------------------------------------


def test_what_nobody_received_delays_closing_once(run):
    comm = run()
    if comm.size == 1:
        return
    works = [comm.isend(np.zeros(10_000), (comm.rank + 1) % comm.size) for _ in range(100)]
    begin = time.monotonic()
    comm.close()
    assert time.monotonic() - begin < 10  # 0.2 s for all hundred, not for each
    stored = MPI.Get_library_version().startswith("Intel")  # which takes what is sent, also where nobody receives it
    assert stored or all(work in comm.session.pending_sends for work in works)


@pytest.mark.parametrize("count", [3, 100_000])
def test_stale_messages_do_not_reach_the_next_runs(run, count):
    for i in range(5):
        comm = run()
        if comm.size == 1:
            return
        comm.isend(np.full(count, -1), (comm.rank + 1) % comm.size)
        comm.close()
        comm = run()
        y = np.zeros(count)
        comm.sendrecv(np.full(count, float(i)), (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)
        assert (y == i).all()
        comm.close()


def test_many_runs(run, ranks):
    """More than an MPI library has numbers for communicators, which it would notice if they were not given back.

    MPICH has 2,048, of which a run takes two; others take most of them first.
    """
    taken = []
    with contextlib.suppress(ranks.MPI.Exception):
        for _ in range(3000):
            taken.append(ranks.MPI.COMM_SELF.Dup())
    for comm in taken[: 2 * FREE_RUNS]:
        comm.Free()
    try:
        for _ in range(3 * FREE_RUNS):
            run().close()
    finally:
        for comm in taken[2 * FREE_RUNS :]:
            comm.Free()


def test_deadline(run, meet):
    comm = run()
    if comm.size == 1:
        return
    comm.waiting.deadline = 0.4
    begin = time.monotonic()
    with pytest.raises(CommTimeout, match=r"no answer within 0.4 s: rank . waits in recv from rank") as caught:
        comm.recv(np.zeros(10, np.float32), (comm.rank + 1) % comm.size)
    assert 0.4 <= time.monotonic() - begin < 10
    mine = caught.value.waits[comm.rank]
    assert (mine.state, mine.op, mine.peers, mine.nbytes) == ("waiting", "recv", ((comm.rank + 1) % comm.size,), 40)
    assert mine.line.startswith("test_communicators.py:")
    assert 0.4 <= mine.seconds < 10
    meet()
    run().barrier()


def test_a_collective_names_who_is_missing(run, meet, once):
    comm = run()
    if comm.size == 1:
        return
    comm.barrier()
    if comm.rank != comm.size - 1:
        waiting = comm.waiting
        last_missing = lambda: waiting.status.slot(comm.rank).peers == (comm.size - 1,)  # noqa: E731
        once(last_missing, lambda: setattr(waiting, "deadline", 0.1))
        with pytest.raises(CommTimeout, match=f"waits in all_reduce with rank {comm.size - 1}"):
            comm.all_reduce(torch.zeros(100))
        with pytest.raises(CommError, match="an earlier all_reduce did not complete"):
            comm.all_reduce(torch.zeros(100))
    meet()
    comm.close()
    assert (run().all_reduce(torch.ones(3)) == comm.size).all()


def test_a_slow_rank_is_waited_for(run):
    """The deadline is of one wait, not of the run."""
    comm = run(deadline=3.0)
    for _ in range(4):
        time.sleep(0.8 * (comm.rank == 0))
        comm.barrier()


def test_a_rank_that_could_not_look_has_not_waited(comm):
    """Its process was stopped, or got no core: what came meanwhile is there, or may come when all go on."""
    looks = []

    def wait(*_):
        looks.append(time.sleep(0.8) if len(looks) == 3 else None)
        return len(looks) == 9

    comm.waiting.deadline = 0.7
    comm.waiting.finish(SimpleNamespace(wait=wait, progress=0), "recv", comm.others)
    assert len(looks) == 9


def test_a_rank_that_failed_is_not_waited_for_until_the_deadline(run, meet):
    comm = run(deadline=15)
    if comm.size == 1:
        return
    begin = time.monotonic()
    if comm.rank == comm.size - 1:
        comm.close(ZeroDivisionError(), line="cell:7")
    else:
        with pytest.raises(RankFailed, match=f"rank {comm.size - 1} failed and will not answer") as caught:
            comm.recv(np.zeros(3), comm.size - 1)
        assert caught.value.waits[-1].state == "failed"
        assert caught.value.waits[-1].line == "cell:7"
        assert time.monotonic() - begin < 12
    meet()  # a slot in the table is that of the next run then


def test_nor_is_one_that_has_finished(run):
    comm = run(deadline=15)
    if comm.size == 1:
        return
    if comm.rank == comm.size - 1:
        comm.close()
    else:
        with pytest.raises(CommTimeout, match=f"rank {comm.size - 1} left the run and will not answer"):
            comm.recv(np.zeros(3), comm.size - 1)


def test_a_run_for_which_not_all_come(run, ranks, meet):
    if ranks.size == 1:
        return
    if ranks.rank != ranks.size - 1:
        with pytest.raises(CommTimeout, match="waits in start with rank"):
            ranks.comm(7_000, deadline=0.5)
    meet()
    run().barrier()
