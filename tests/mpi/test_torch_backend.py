"""The backend "hpdl" of torch.distributed: what torch asks for, on MPI ranks and on those of torchrun."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpdl_lab.comm.errors import CommError, Mismatch
from hpdl_lab.torch_backend import HpdlGroup, process_group
from hpdl_lab.torch_backend.group import tell_torch_of_mpiexec


@pytest.fixture
def group(comm):
    with process_group(comm, "hpdl") as group:
        yield group


def test_the_group_is_of_the_communicator(comm, group):
    assert isinstance(group, HpdlGroup) and group.comm is comm and dist.get_backend() == "hpdl"
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)


@pytest.mark.parametrize("wait", ["at once", "work", "future"])
def test_sums(comm, group, wait):
    r, p, later = comm.rank, comm.size, wait != "at once"
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.full((1001,), r + 1, dtype=dtype)
        ended(dist.all_reduce(x, async_op=later), wait)
        assert (x == p * (p + 1) // 2).all(), dtype
        y = torch.zeros(3, dtype=dtype)
        rows = torch.arange(3 * p, dtype=dtype)
        ended(reduce_scatter_single(y, rows, async_op=later), wait)
        assert torch.equal(y, p * rows[3 * r : 3 * r + 3]), dtype
        z = torch.zeros(2, dtype=dtype)
        ended(dist.reduce_scatter(z, [torch.full((2,), s, dtype=dtype) for s in range(p)], async_op=later), wait)
        assert (z == r * p).all(), dtype
        t = torch.full((2, 2), r, dtype=dtype)
        dist.reduce(t, p - 1)
        assert (t == (p * (p - 1) // 2 if r == p - 1 else r)).all(), dtype


def test_the_smallest_the_largest_and_the_product(comm, group):
    r, p, op = comm.rank, comm.size, dist.ReduceOp
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        rows = torch.stack([torch.tensor([s + 1, p - s, 2, (s * 5) % 7]) for s in range(p)]).to(dtype)
        for name, want in ((op.MIN, rows.amin(0)), (op.MAX, rows.amax(0)), (op.PRODUCT, rows.prod(0).to(dtype))):
            x, strided = rows[r].clone(), torch.zeros(4, 2, dtype=dtype)
            strided[:, 0] = rows[r]
            dist.all_reduce(x, op=name)
            work = dist.all_reduce(strided[:, 0], op=name, async_op=True)
            work.wait()
            assert torch.equal(x, want) and torch.equal(strided[:, 0], want), (dtype, name)
        empty = torch.zeros(0, dtype=dtype)
        dist.all_reduce(empty, op=op.MAX)


@pytest.mark.parametrize("wait", ["at once", "work", "future"])
def test_copies(comm, group, wait):
    """Of every dtype, and of tensors that are not contiguous."""
    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64, torch.uint32):
        copies_are_right(comm, dtype, wait)


def copies_are_right(comm, dtype, wait):
    r, p, later = comm.rank, comm.size, wait != "at once"

    def mine(rank, *shape):
        return torch.arange(rank, rank + torch.Size(shape).numel()).view(shape).remainder(2 + rank).to(dtype)

    x = mine(r, 4, 3).t()
    ended(dist.broadcast(x, p - 1, async_op=later), wait)
    assert torch.equal(x, mine(p - 1, 4, 3).t())
    rows = [torch.empty(3, 2, dtype=dtype) for _ in range(p)]
    ended(dist.all_gather(rows, mine(r, 3, 2), async_op=later), wait)
    assert all(torch.equal(row, mine(s, 3, 2)) for s, row in enumerate(rows))
    whole = torch.empty(3 * p, 2, dtype=dtype)
    ended(all_gather_single(whole, mine(r, 3, 2), async_op=later), wait)
    assert torch.equal(whole, torch.cat([mine(s, 3, 2) for s in range(p)]))
    out = torch.empty(p, 2, dtype=dtype)
    ended(dist.all_to_all_single(out, mine(r, p, 2), async_op=later), wait)
    assert torch.equal(out, torch.stack([mine(s, p, 2)[r] for s in range(p)]))
    sizes = [s + 1 for s in range(p)]  # rank r sends s + 1 rows to rank s, and gets r + 1 from each
    out = torch.empty((r + 1) * p, 2, dtype=dtype)
    ended(dist.all_to_all_single(out, mine(r, sum(sizes), 2), [r + 1] * p, sizes, async_op=later), wait)
    assert torch.equal(out, torch.cat([mine(s, sum(sizes), 2).split(sizes)[r] for s in range(p)]))
    rows = [torch.empty(2, dtype=dtype) for _ in range(p)] if r == 0 else None
    dist.gather(mine(r, 2), rows, dst=0)
    assert r != 0 or all(torch.equal(row, mine(s, 2)) for s, row in enumerate(rows))
    out = torch.empty(2, dtype=dtype)
    dist.scatter(out, [mine(s, 2) for s in range(p)] if r == 0 else None, src=0)
    assert torch.equal(out, mine(r, 2))


def ended(work, wait):
    if wait == "work":
        assert work.wait() and work.is_completed() and work.is_success()
    elif wait == "future":
        work.get_future().wait()


def test_messages_and_meetings(comm, group):
    r, p = comm.rank, comm.size
    dist.barrier()
    if p > 1:
        x, y = torch.full((5,), r), torch.zeros(5, dtype=torch.int64)
        works = [dist.irecv(y, (r - 1) % p), dist.isend(x, (r + 1) % p)]
        for work in works:
            work.wait()
        assert (y == (r - 1) % p).all()
        with pytest.raises(NotImplementedError, match="has no future: use its wait"):
            works[0].get_future()
        with pytest.raises(NotImplementedError, match="have no tags, got tag=3; or use gloo for this: dist.new_group"):
            dist.send(x, (r + 1) % p, tag=3)
        with pytest.raises(NotImplementedError, match="receives from one rank"):
            dist.recv(y)
    everybody = [None] * p
    dist.all_gather_object(everybody, {"rank": r})
    assert everybody == [{"rank": s} for s in range(p)]


def test_what_it_does_not_know_names_what_to_use(comm, group):
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.AVG):
        told = rf"adds \(ReduceOp.SUM\), and MIN, MAX, PRODUCT; it has no {str(op).rpartition('.')[2]}: use gloo"
        with pytest.raises(NotImplementedError, match=told):
            dist.all_reduce(torch.ones(3), op=op)
    with pytest.raises(NotImplementedError, match=r"reduce of the .* adds \(ReduceOp.SUM\); it has no MAX: use"):
        dist.reduce(torch.ones(3), 0, op=dist.ReduceOp.MAX)
    with pytest.raises(ValueError, match="all_reduce adds float32, .*, not bool: use gloo for this: dist.new_group"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="it has no PREMUL_SUM: multiply first, and add"):
        dist.all_reduce(torch.ones(3), op=dist._make_nccl_premul_sum(2.0))
    for dtype, near in ((torch.uint16, "int64"), (torch.float8_e4m3fn, "float32")):
        with pytest.raises(ValueError, match=rf"nor does gloo; convert it, x\.to\(torch\.{near}\)"):
            dist.all_reduce(torch.ones(3).to(dtype))
    assert comm.all_reduce(torch.ones(1)) == comm.size


def test_gloo_adds_what_the_sentences_above_send_to_it_and_nothing_else(comm):
    with process_group(comm):
        for dtype in (torch.bool, torch.uint16, torch.float8_e4m3fn):
            x = torch.ones(3).to(dtype)
            if dtype == torch.bool:
                dist.all_reduce(x)
                assert (x == torch.ones(3).mul(comm.size).to(dtype)).all(), dtype
            else:
                with pytest.raises(RuntimeError, match="Invalid scalar type"):
                    dist.all_reduce(x)


@pytest.mark.parametrize("later", [False, True])
def test_ranks_that_disagree_are_found_in_the_work_and_by_the_future(comm, group, later):
    if comm.size == 1:
        return
    x = torch.ones(3 + (comm.rank == 0))
    with pytest.raises(Mismatch, match="counts differ: rank"):
        work = dist.all_reduce(x, async_op=later)
        work.wait()
    if later:
        with pytest.raises(Exception, match="counts differ: rank"):
            work.get_future().wait()
    assert comm.all_reduce(torch.ones(1)) == comm.size


def test_one_rank_may_wait_at_once_and_another_later(comm, group):
    """As DDP's join does."""
    x, y = torch.ones(3), torch.ones(4)
    for tensor in (x, y):
        work = dist.all_reduce(tensor, async_op=comm.rank == 0)
        if work is not None:
            work.wait()
    assert (x == comm.size).all() and (y == comm.size).all()


def test_some_of_the_ranks(comm, group):
    """A subgroup has a communicator of its own: in shared memory, with messages of gloo."""
    p = comm.size
    even = dist.new_group(range(0, p, 2))
    if comm.rank % 2 == 0:
        x = torch.ones(1001)
        dist.all_reduce(x, group=even)
        assert (x == (p + 1) // 2).all() and even.comm is not comm
        dist.destroy_process_group(even)
    assert comm.all_reduce(torch.ones(1)) == p


def test_a_group_can_follow_another(comm):
    for backend in ("hpdl", "gloo", "hpdl"):
        with process_group(comm, backend):
            x = torch.ones(3)
            dist.all_reduce(x)
            assert (x == comm.size).all()
            with pytest.raises(RuntimeError, match="has a default process group already"), process_group(comm):
                pass
        assert not dist.is_initialized()


def test_a_program_of_mpiexec_needs_no_more_than_torchs_two_lines(ranks, meet, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)  # of the first import, long ago: the port may be somebody else's now
    tell_torch_of_mpiexec()  # as `import hpdl_lab.torch_backend` does
    for _ in range(2):  # also after another, when rank 0 has closed the store of that
        dist.init_process_group("hpdl")
        x = torch.full((1001,), float(dist.get_rank()))
        dist.all_reduce(x)
        assert (x == sum(range(ranks.size))).all() and dist.get_backend() == "hpdl"
        assert type(dist.group.WORLD.comm).__name__ == "RealComm" and dist.get_world_size() == ranks.size
        dist.destroy_process_group()
        meet()


def test_another_rank_than_the_communicators_is_refused(comm, group):
    if comm.size > 1:
        ranks = list(range(comm.size - 1))
        if comm.rank in ranks:
            with pytest.raises(ValueError, match=f"of {comm.size - 1} was asked for, but this is rank"):
                dist.new_group(ranks, backend="hpdl", pg_options=comm)
    comm.barrier()


# -- DDP -------------------------------------------------------------------------------------------------------------


def trained(comm, backend, steps=4, **options):
    """The parameters (N,) after DDP has taken some steps: several buckets, tied weights, batch norm's buffers."""
    torch.manual_seed(comm.rank)
    first, hidden = torch.nn.Linear(300, 300), [torch.nn.Linear(300, 300) for _ in range(4)]
    net = torch.nn.Sequential(
        first, torch.nn.BatchNorm1d(300), *hidden, torch.nn.ReLU(), first, torch.nn.Linear(300, 4)
    )
    with process_group(comm, backend):
        model = DistributedDataParallel(net, bucket_cap_mb=0.3, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(8, 300)), torch.randint(0, 4, (8,))).backward()
            optimizer.step()
        if backend == "hpdl":  # what DDP asked for has run beside backward
            events = [e for e in comm.trace.events if e.op == "all_reduce"]
            assert {e.lane for e in events} == {"background"} and len(events) >= 2 * steps
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("static", [False, True])
def test_ddp_comes_to_what_it_comes_to_on_gloo(comm, static):
    """Of a static graph DDP sends the buckets of the first step at the end of backward."""
    ours, gloos = (trained(comm, backend, static_graph=static) for backend in ("hpdl", "gloo"))
    assert torch.equal(ours, comm.broadcast(ours.clone()))
    assert torch.equal(ours, gloos) if comm.size == 2 else torch.allclose(ours, gloos, rtol=1e-5, atol=1e-6)


def joined(comm, backend):
    """The parameters after steps of DDP of which rank r has r + 1: those who end early join the others."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)).double()
    with process_group(comm, backend):
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step in range(comm.rank + 1):
                optimizer.zero_grad()
                model(torch.full((2, 6), 1.0 + step, dtype=torch.float64)).square().sum().backward()
                optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def test_ranks_that_run_out_of_batches_join_the_others(comm):
    """DDP asks for the largest rank that is still there: all_reduce with MAX."""
    ours, gloos = joined(comm, "hpdl"), joined(comm, "gloo")
    assert torch.equal(ours, comm.broadcast(ours.clone())) and torch.allclose(ours, gloos, atol=1e-12)


def test_ddp_of_two_ranks_has_the_bits_of_gloo(run, ranks):
    if ranks.size < 2 or ranks.rank > 1:
        return
    comm = run(members=[0, 1])
    ours = trained(comm, "hpdl")
    assert torch.equal(ours, trained(comm, "gloo")) and ours.abs().max() > 0


@pytest.mark.parametrize("static", [False, True])
def test_a_rank_that_stays_away_ends_backward_of_the_others(run, meet, static):
    comm = run()
    if comm.size == 1:
        return
    torch.manual_seed(0)
    with process_group(comm, "hpdl"):
        model = DistributedDataParallel(torch.nn.Linear(4, 4), static_graph=static)
        if not static:
            model(torch.ones(2, 4)).sum().backward()
        comm.barrier()
        comm.waiting.deadline = 0.7  # only now: a slow machine needs longer to come so far
        if comm.rank != 0:
            begin = time.monotonic()
            with pytest.raises(CommError, match="rank 0|ranks? .*0"):
                model(torch.ones(2, 4)).sum().backward()
            assert time.monotonic() - begin < 10.0
        meet()


def test_an_interrupt_reaches_a_rank_that_waits_in_backward(run, meet, once):
    comm = run(deadline=60.0)
    if comm.size == 1:
        return
    torch.manual_seed(0)
    with process_group(comm, "hpdl"):
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        if comm.rank != 0:
            waiting = comm.waiting
            waits = lambda: waiting.status.slot(comm.rank).state == "waiting"  # noqa: E731
            once(waits, lambda: os.kill(os.getpid(), signal.SIGINT))
            begin = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(2, 4)).sum().backward()
            assert time.monotonic() - begin < 20.0
        meet()


# -- what torch before 2.13 calls otherwise ----------------------------------------------------------------------------


def all_gather_single(*args, **options):
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(*args, **options)


def reduce_scatter_single(*args, **options):
    return getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(*args, **options)
