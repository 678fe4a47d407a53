"""Collectives on real ranks, over a grid of sizes and types as gloo tests its own: every result exact, everywhere."""

import itertools

import numpy as np
import pytest
import torch

from hpdl_lab.collectives import cost, native
from hpdl_lab.comm.buffers import ADDED, DTYPES, ITEMSIZE, TABLE
from hpdl_lab.trace import bytes_sent

COUNTS = (0, 1, 7, 1000, 1001)
LARGE = "large"  # see elements
CHUNK = 1 << 20  # bytes: the longest that goes through the staging area in one piece (csrc/path.h)
COMPILED = (native.ring_all_reduce, native.shm_all_reduce)  # those in Python: test_collective_family.py


def elements(count, dtype):
    """The number of elements that `count` stands for: LARGE is three chunks and a bit, whatever the dtype."""
    return 3 * CHUNK // ITEMSIZE[dtype] + 161 if count == LARGE else count


def values(count, dtype, rank):
    """(count,) small whole numbers, different per rank; sums over some ranks are exact in every dtype."""
    return (torch.arange(count) % 13 + 3 * rank).to(getattr(torch, dtype))


def total(comm, count, dtype):
    return (comm.size * (torch.arange(count) % 13) + 3 * comm.size * (comm.size - 1) // 2).to(getattr(torch, dtype))


def equal(a, b):
    """Of one dtype and shape, with the same bits: torch compares not every dtype."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(x):
    return x.reshape(-1).view(torch.uint8)


def groups(run):
    """Communicators of all ranks, of one less, ... and of rank 0 alone, for those that are in them."""
    world = run()
    yield world
    for size in range(world.size - 1, world.rank, -1):
        yield run(members=range(size))


@pytest.mark.parametrize("function", COMPILED, ids=lambda f: f.__name__)
def test_all_reduce(run, function):
    for comm in groups(run):
        for dtype, count in itertools.product(ADDED, COUNTS):
            x = values(count, dtype, comm.rank)
            assert function(comm, x) is x
            assert torch.equal(x, total(comm, count, dtype)), (comm.size, count, dtype)


@pytest.mark.parametrize("function", [native.mpi_all_reduce, native.gloo_all_reduce], ids=lambda f: f.__name__)
def test_the_rivals_are_right_too(comm, function):
    for dtype, count in itertools.product(["float32", "float64", "int64", "uint8", "int8", "complex64"], COUNTS[1:]):
        x = function(comm, values(count, dtype, comm.rank))
        assert torch.equal(x, total(comm, count, dtype)), (count, dtype)


def test_mpi_does_not_know_16_bit_floats(comm):
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="MPI_Allreduce does not know"):
            native.mpi_all_reduce(comm, torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in ADDED])
def test_what_has_no_sum_says_what_to_do(comm, dtype):
    x = torch.zeros((comm.size, 3)).to(getattr(torch, dtype))
    for add in (comm.all_reduce, comm.reduce, comm.reduce_scatter, comm.ring_all_reduce, comm.mpi_all_reduce):
        with pytest.raises(ValueError) as caught:
            add(x)
        assert f" {dtype}, which has no sum: {TABLE[dtype][1]}" in str(caught.value)
    assert comm.all_reduce(torch.ones(1)) == comm.size  # and on we go


def test_the_remedies_are_right(comm):
    """What the sentences above tell people to call, on each dtype."""
    r, p = comm.rank, comm.size
    x = torch.tensor([r == 0, False, True])
    assert comm.all_gather(x.to(torch.uint8)).amax(0).tolist() == [1, 0, 1]
    x = torch.tensor([60_000, r], dtype=torch.uint16)
    assert comm.all_reduce(x.to(torch.int32)).tolist() == [60_000 * p, p * (p - 1) // 2]
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = torch.tensor([0.5, float(r)]).to(dtype)
        assert comm.all_gather(x).float().sum(0).tolist() == [0.5 * p, p * (p - 1) / 2]


def test_conjugated_views_are_refused_whatever_they_look_like(comm):
    x = torch.ones(5, dtype=torch.complex64) * 1j
    with pytest.raises(ValueError, match="cannot all_reduce a tensor that is a conjugated view: use x.resolve_conj"):
        comm.all_reduce(x.conj())
    assert torch.equal(comm.all_reduce(x.conj().resolve_conj()), torch.ones(5) * -1j * comm.size)


@pytest.mark.parametrize("count", [1001, LARGE])
@pytest.mark.parametrize("dtype", ADDED)
def test_all_reduce_of_memory_from_everywhere(comm, count, dtype):
    """Shared tensors, views of them, others, and ranks of which each does something else."""
    n = elements(count, dtype)
    shared, mine, sums = comm.allocate((n + 100,), dtype), values(n, dtype, comm.rank), total(comm, n, dtype)
    for where in ("shared", "shared, from an offset", "anywhere", "mixed", "at different offsets"):
        private = where == "anywhere" or (where == "mixed" and comm.rank % 2)
        offset = {"shared": 0, "at different offsets": 7 * comm.rank}.get(where, 3)
        shared.zero_()
        x = torch.zeros_like(mine) if private else shared[offset : offset + n]
        x.copy_(mine)
        comm.all_reduce(x)
        assert torch.equal(x, sums), where
        inside = 0 if private else x.to(torch.complex128).sum()
        assert shared.to(torch.complex128).sum() == inside, where  # nothing beside x was written


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("shared", [False, True])
def test_bits_are_the_same_on_every_rank_and_in_every_run(comm, dtype, shared):
    for count in (1000, elements(LARGE, dtype)):
        x = torch.randn(count, generator=torch.Generator().manual_seed(comm.rank)).to(getattr(torch, dtype))
        sums = []
        for _ in range(2):
            y = comm.allocate((count,), dtype) if shared else torch.empty_like(x)
            y.copy_(x)
            comm.all_reduce(y)
            sums.append(y.view(torch.uint8).numpy())
        assert (sums[0] == sums[1]).all()
        assert (comm.all_gather(sums[0]) == sums[0]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", [native.shm_all_reduce, native.ring_all_reduce])
def test_16_bit_floats_are_rounded_once(comm, function, dtype):
    """In 16 bits, 1 + tiny + tiny stays 1 when every step is rounded."""
    kind = getattr(torch, dtype)
    tiny = torch.finfo(kind).eps * 0.4
    x = torch.full((5,), 1.0 if comm.rank == 0 else tiny).to(kind)
    exact = 1.0 + (comm.size - 1) * float(torch.tensor(tiny).to(kind))
    function(comm, x)
    assert torch.equal(x, torch.full((5,), exact).to(kind))


def test_numbers_that_are_none(comm):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([float("inf"), float("nan"), -float("inf"), 65504.0, 1e-7, -0.0]).to(dtype)
        want = x.float() * comm.size
        got = comm.all_reduce(x.clone())
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.allclose(got.float()[~want.isnan()], want.to(dtype).float()[~want.isnan()])


def test_integers_wrap_around(comm):
    x = torch.full((5,), 2**31 - 1, dtype=torch.int32)
    want = (torch.full((5,), 2**31 - 1, dtype=torch.int64) * comm.size).to(torch.int32)
    assert torch.equal(comm.all_reduce(x), want)


@pytest.mark.parametrize("where", ["shared", "mixed", "the root's"])
@pytest.mark.parametrize("count", [1001, 5000, LARGE])
def test_the_others_read_shared_memory_and_leave_it_at_once(comm, count, where):
    p, r, dtype = comm.size, comm.rank, "float32"
    n = elements(count, dtype)
    those = [values(n, dtype, i) for i in range(3 * p)]
    stack, rows, sums = torch.stack(those[:p]), torch.stack(those[r : r + p]), total(comm, n, dtype)
    here = {"shared": True, "mixed": r % 2 == 0, "the root's": r == 1}[where]

    def after(collective, mine, *args):
        shared = comm.allocate(mine.shape, dtype)
        x = shared if here else torch.empty_like(mine)
        x.copy_(mine)
        found = collective(x, *args)
        if found is not x:
            x.fill_(-1)  # whoever still read it would get this
        return found

    assert torch.equal(after(comm.broadcast, those[r], 1), those[1])
    assert torch.equal(after(comm.all_gather, those[r]), stack)
    assert torch.equal(after(comm.reduce_scatter, rows), sums + 3 * p * r)
    assert torch.equal(
        after(comm.all_to_all, torch.stack(those[2 * r : 2 * r + p])), torch.stack(those[r : r + 2 * p : 2])
    )
    gathered, reduced = after(comm.gather, those[r], 1), after(comm.reduce, those[r], 1)
    assert (
        (gathered is None and reduced is None)
        if r != 1
        else torch.equal(gathered, stack) and torch.equal(reduced, sums)
    )
    out = torch.empty(n)
    after(lambda x: comm.scatter(x if r == 1 else None, out, 1), stack)
    assert torch.equal(out, those[r])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_others(comm, dtype):
    p, r = comm.size, comm.rank
    for n in [elements(count, dtype) for count in (*COUNTS, LARGE)]:
        those = [values(n, dtype, i) for i in range(3 * p)]
        for root in range(p):
            assert equal(comm.broadcast(those[r].clone(), root), those[root])
        stack, rows = torch.stack(those[:p]), torch.stack(those[r : r + p])
        assert equal(comm.all_gather(those[r]), stack)
        assert equal(comm.all_to_all(torch.stack(those[2 * r : 2 * r + p])), torch.stack(those[r : r + 2 * p : 2]))
        for root in {0, p - 1}:
            gathered = comm.gather(those[r], root)
            assert equal(gathered, stack) if r == root else gathered is None
            got = comm.scatter(rows if r == root else None, torch.zeros(n).to(rows.dtype), root)
            assert equal(got, those[root + r])
        if dtype not in ADDED:
            continue
        sums = total(comm, n, dtype)
        assert torch.equal(comm.reduce_scatter(rows), sums + 3 * p * r)
        for root in {0, p - 1}:
            reduced = comm.reduce(those[r], root)
            assert torch.equal(reduced, sums) if r == root else reduced is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_floats_are_rounded_once_wherever_they_are_added(comm, dtype):
    kind, p = getattr(torch, dtype), comm.size
    tiny = torch.finfo(kind).eps * 0.4
    x = torch.full((p, 5), 1.0 if comm.rank == 0 else tiny).to(kind)
    want = torch.full((5,), 1.0 + (p - 1) * float(torch.tensor(tiny).to(kind))).to(kind)
    assert torch.equal(comm.reduce_scatter(x), want)
    total = comm.reduce(x[0], p - 1)
    assert total is None if comm.rank != p - 1 else torch.equal(total, want)


@pytest.mark.parametrize("shared", [False, True])
def test_in_place_as_nccl_has_it(comm, shared):
    """x may be its row of the result, or the result the row of x."""
    group, p, r = comm.shared("barrier").group, comm.size, comm.rank
    whole, rows = (comm.allocate((p, 70_000)) if shared else torch.empty((p, 70_000)) for _ in range(2))
    whole.fill_(-1)[r] = r
    group.all_gather(whole[r], whole, 10.0, comm.oversubscribed)
    assert (whole == torch.arange(p)[:, None]).all()
    rows[:] = torch.arange(p)[:, None] + r
    group.all_to_all(rows, rows, 10.0, comm.oversubscribed)
    assert (rows == torch.arange(p)[:, None] + r).all()
    group.reduce_scatter(rows, rows[r], 10.0, comm.oversubscribed)
    assert (rows[r] == p * r + p * (p - 1) / 2).all()
    comm.barrier()
    with pytest.raises(ValueError, match="memory that overlaps"):
        group.all_gather(whole[0, 1:], whole.reshape(-1)[: p * 69_999], 10.0, comm.oversubscribed)
    assert (comm.all_reduce(torch.ones(5)) == p).all()  # and on we go


def test_one_after_the_other_without_a_pause(comm):
    """Every kind after every other, so that no buffer is written before everybody has read it."""
    shared = comm.allocate((70_000,), "float32")
    for i in range(40):
        count = (3, 70_000, 1500, 70_000)[i % 4]
        x = torch.full((count,), float(comm.rank + i))
        want = sum(r + i for r in range(comm.size))
        assert (comm.all_reduce(x.clone()) == want).all()
        shared.fill_(comm.rank + i)
        assert (comm.all_reduce(shared) == want).all()
        assert (comm.broadcast(x.clone(), i % comm.size) == i % comm.size + i).all()
        assert (comm.all_gather(x)[:, 0] == torch.arange(comm.size) + i).all()


def test_an_event_for_each(comm):
    comm.all_reduce(torch.zeros(1000))
    native.mpi_all_reduce(comm, torch.zeros(1000))
    comm.barrier()
    assert [(e.op, e.nbytes) for e in comm.trace.events] == [("all_reduce", 4000), ("all_reduce", 4000), ("barrier", 0)]


@pytest.mark.parametrize("count", [120, 1_200_000])  # divided by most numbers of ranks; the last one in segments
def test_the_compiled_ring_shows_what_it_sends(comm, count):
    native.ring_all_reduce(comm, torch.zeros(count))
    *transfers, whole = comm.trace.events
    want = cost.all_reduce(comm.size, whole.nbytes)
    assert (whole.op, whole.nbytes) == ("all_reduce", 4 * count)
    assert bytes_sent(transfers).get(comm.rank, 0) == want.nbytes
    for op, peer in (("send", (comm.rank + 1) % comm.size), ("recv", (comm.rank - 1) % comm.size)):
        events = [e for e in transfers if e.op == op]
        assert len(events) == want.steps and {e.peer for e in events} <= {peer}
        assert sum(e.nbytes for e in events) == want.nbytes
    assert all(whole.t0_ns <= e.t0_ns <= e.t1_ns <= whole.t1_ns and e.line == whole.line for e in transfers)
    assert [e.step for e in transfers] == list(range(whole.step + 1, whole.step + 1 + len(transfers)))


# -- mistakes: the numbers, on every rank ----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [native.shm_all_reduce, native.ring_all_reduce, native.mpi_all_reduce])
def test_another_count_on_one_rank(comm, function):
    if comm.size == 1:
        return
    for n in (10, 5000, 500_000):
        with pytest.raises(ValueError, match=rf"counts differ: rank.*_reduce of {n:,} elements, .* of {n + 1:,}"):
            function(comm, torch.zeros(n + (comm.rank == comm.size - 1)))
        assert (comm.all_reduce(torch.ones(5)) == comm.size).all()  # and on we go


def test_another_collective_on_one_rank(comm):
    if comm.size == 1:
        return
    comm.barrier()
    with pytest.raises(ValueError, match="rank.* calls? .* where rank.* calls? .*"):
        comm.broadcast(torch.zeros(5)) if comm.rank == 0 else comm.all_reduce(torch.zeros(5))


def test_another_dtype_and_shape_in_allocate(comm):
    if comm.size == 1:
        return
    with pytest.raises(
        ValueError, match="counts and dtypes differ: rank 0 calls allocate of 10 float32, rank.* of 12 int32"
    ):
        comm.allocate(12 if comm.rank else (2, 5), "int32" if comm.rank else "float32")
    with pytest.raises(ValueError, match="cannot allocate dtype uint32"):
        comm.allocate(5, torch.uint32)


def test_rows_that_are_not_ranks(comm):
    for function in (comm.reduce_scatter, comm.all_to_all):
        with pytest.raises(ValueError, match=rf"on {comm.size} ranks needs {comm.size} rows, got {comm.size + 1}"):
            function(torch.zeros(comm.size + 1, 3))


def test_no_such_root(comm):
    for collective in (comm.broadcast, comm.reduce, comm.gather):
        with pytest.raises(ValueError, match=rf"rank {comm.size}: ranks here are 0 to {comm.size - 1}"):
            collective(torch.zeros(3), comm.size)
    with pytest.raises(ValueError, match=rf"rank -1: ranks here are 0 to {comm.size - 1}"):
        comm.scatter(torch.zeros(comm.size, 3), torch.zeros(3), -1)


def test_another_root_on_one_rank(comm):
    if comm.size == 1:
        return
    with pytest.raises(ValueError, match="rank 0 calls gather with root 0, rank.* with root 1"):
        comm.gather(torch.zeros(5), min(comm.rank, 1))


def test_rows_of_a_scatter(comm):
    with pytest.raises(ValueError, match=f"scatter .* needs {comm.size} rows, got {comm.size + 1}"):
        comm.scatter(torch.zeros(comm.size + 1, 3), torch.zeros(3), comm.rank)


def test_what_cannot_be_added(comm):
    with pytest.raises(ValueError, match="cannot all_reduce a non-contiguous tensor"):
        comm.all_reduce(torch.zeros(4, 4).t()[:2])
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        comm.all_reduce(read_only)
