"""DeviceComm on two ranks, on two GPUs or sharing one: every operation and dtype, and deadlines."""

import time

import numpy as np
import pytest
import torch

from hpdl_lab.collectives import native, ring
from hpdl_lab.comm import CommTimeout
from hpdl_lab.comm.buffers import ADDED, DTYPES

COUNTS = (0, 1, 7, 1001, 1_000_003)

pytestmark = pytest.mark.timeout(120)


def values(comm, rank, n, dtype):
    return ((torch.arange(n) * (rank + 3)) % 29).to(getattr(torch, dtype)).to(comm.device)


def equal(a, b):
    """Of one dtype, with the same bits: torch compares not every dtype."""
    return a.dtype == b.dtype and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def test_nccl_serves_these_ranks(comm):
    if comm.goes_through_host:
        pytest.skip("they share a GPU, which this NCCL refuses: the host carries what follows")
    assert comm.nccl_all_reduce(torch.ones(5, device=comm.device)).sum() == 5 * comm.size


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_of_every_dtype(comm, dtype):
    p, r = comm.size, comm.rank
    for n in COUNTS:
        x = values(comm, r, n, dtype)
        everyone = torch.stack([values(comm, rank, n, dtype) for rank in range(p)])
        assert equal(comm.broadcast(x.clone(), p - 1), everyone[p - 1])
        assert equal(comm.all_gather(x), everyone)
        gathered = comm.gather(x, 1)
        assert gathered is None if r != 1 else equal(gathered, everyone)
        assert equal(comm.scatter(everyone if r == 1 else None, torch.empty_like(x), 1), x)
        assert equal(comm.all_to_all(everyone), torch.stack([everyone[r]] * p))
        if dtype not in ADDED:
            continue
        total = everyone.to(torch.complex128).sum(0).to(x.dtype)
        assert equal(comm.all_reduce(x.clone()), total)
        reduced = comm.reduce(x, 1)
        assert reduced is None if r != 1 else equal(reduced, total)
        assert equal(comm.reduce_scatter(everyone), (everyone[r].to(torch.complex128) * p).to(x.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
def test_messages(comm, dtype):
    p, r = comm.size, comm.rank
    for n in COUNTS:
        y = torch.empty(n, dtype=getattr(torch, dtype), device=comm.device)
        got = comm.sendrecv(values(comm, r, n, dtype), (r + 1) % p, y, (r - 1) % p)
        assert equal(got, values(comm, (r - 1) % p, n, dtype))
        assert torch.equal(
            ring.all_reduce(comm, values(comm, r, n, "float32")), sum(values(comm, s, n, "float32") for s in range(p))
        )


def test_computation_before_and_after_is_in_order(comm):
    """A message leaves when its tensor is computed, and what follows sees what has arrived."""
    x = torch.zeros(4_000_000, device=comm.device)
    for _ in range(50):
        x += 1.0
    y = torch.empty_like(x)
    comm.sendrecv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)
    y *= 2
    assert (y == 100).all()


@pytest.mark.parametrize("dtype", ADDED)
def test_the_one_pass_sum_of_shared_memory(comm, cuda, dtype):
    x = comm.allocate(1_000_003, dtype)
    if not comm.segments:
        pytest.skip("the ranks' GPUs do not reach each other's memory")
    for _ in range(3):
        x.copy_(values(comm, comm.rank, len(x), dtype))
        comm.all_reduce(x)
        assert torch.equal(x.cpu(), sum(values(comm, s, len(x), "int64") for s in range(comm.size)).to(x.dtype).cpu())
        comm.barrier()


def test_split_and_arrays_through_mpi(comm):
    part = comm.split(comm.rank)
    assert part.size == 1 and part.all_reduce(torch.ones(3, device=comm.device)).sum() == 3
    assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3


@pytest.mark.parametrize(
    "baseline", [native.ring_all_reduce, native.mpi_all_reduce, native.gloo_all_reduce, native.nccl_all_reduce]
)
def test_the_baselines_of_the_race(comm, baseline):
    x = values(comm, comm.rank, 1001, "float32")
    assert torch.equal(baseline(comm, x), sum(values(comm, s, 1001, "float32") for s in range(comm.size)))


def test_nobody_answers_and_the_next_run_works(run):
    comm = run(deadline=3.0)
    begin = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(CommTimeout, match="rank 0 waits in recv"):
            comm.recv(torch.zeros(10, device=comm.device), 1)
        assert time.monotonic() - begin < 15
    comm.close()
    assert run().all_reduce(torch.ones(5, device=comm.device)).sum() == 5 * comm.size


def test_counts_that_differ(run):
    comm = run(deadline=5.0)
    if comm.rank == 1:
        with pytest.raises(ValueError, match="counts differ: rank 0 sends 1,000 elements, rank 1 expects 1,001"):
            comm.recv(torch.zeros(1001, device=comm.device), 0)
        comm.close(ValueError())
    else:
        try:
            comm.send(torch.zeros(1000, device=comm.device), 1)
        except Exception as error:
            assert "rank 0 waits in send" in str(error)
        comm.close()
    assert run().all_reduce(torch.ones(1, device=comm.device)) == comm.size
