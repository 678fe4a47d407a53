"""NcclComm on three ranks: every operation, every dtype, against plain sums."""

import time

import numpy as np
import pytest
import torch

from hpdl_lab.comm.buffers import DTYPES

COUNTS = (0, 1, 7, 5000)  # elements: 5,000 float32 are more than one of the chunks that the fake moves


def values(rank, n, dtype):
    """(n,) small whole numbers, different on every rank, which every dtype holds and adds exactly."""
    return ((torch.arange(n) * (rank + 3)) % 29).to(getattr(torch, dtype))


def summed(size, n, dtype):
    return sum(values(rank, n, "int64") for rank in range(size)).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_of_every_dtype(either, dtype):
    p, r = either.size, either.rank
    for n in COUNTS:
        x = values(r, n, dtype)
        everyone = torch.stack([values(rank, n, dtype) for rank in range(p)])
        rows = torch.stack([values(r + 10 * row, n, dtype) for row in range(p)])  # (p, n), different per rank
        assert torch.equal(either.all_reduce(x.clone()), summed(p, n, dtype))
        assert torch.equal(either.broadcast(x.clone(), p - 1), values(p - 1, n, dtype))
        assert torch.equal(either.all_gather(x), everyone)
        gathered, total = either.gather(x, 1), either.reduce(x, 1)
        if r == 1:
            assert torch.equal(gathered, everyone) and torch.equal(total, summed(p, n, dtype))
            assert total.dtype == x.dtype
        else:
            assert gathered is None and total is None
        assert torch.equal(either.scatter(everyone if r == 1 else None, torch.empty_like(x), 1), x)
        column = torch.stack([values(rank + 10 * r, n, dtype) for rank in range(p)])
        assert torch.equal(either.all_to_all(rows), column)
        assert torch.equal(either.reduce_scatter(rows), column.long().sum(0).to(x.dtype))


def test_16_bit_sums_round_once(either):
    """1 + 2^-9 + ... in bfloat16 stays 1 when every addition rounds; in float32 it grows."""
    x = torch.full((3,), 1.0 if either.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    either.all_reduce(x)
    assert x.tolist() == torch.full((3,), 1.0 + 2 * 2.0**-9).to(torch.bfloat16).tolist()
    y = torch.full((3,), 1.0 if either.rank == 0 else 2.0**-8 * 0.75, dtype=torch.bfloat16)
    assert either.all_reduce(y)[0] == 1.0 + 2.0**-7


@pytest.mark.parametrize("n", COUNTS)
def test_messages_around_a_ring(either, n):
    p, r = either.size, either.rank
    y = torch.empty(n)
    assert torch.equal(
        either.sendrecv(values(r, n, "float32"), (r + 1) % p, y, (r - 1) % p), values((r - 1) % p, n, "float32")
    )
    ops = [(e.op, e.peer, e.nbytes) for e in either.trace.events]
    assert sorted(ops) == [("recv", (r - 1) % p, 4 * n), ("send", (r + 1) % p, 4 * n)]


def test_what_is_posted_together_moves_together(comm):
    """Everybody sends to everybody, in an order that would block where a send waited for its receiver."""
    others = [r for r in range(comm.size) if r != comm.rank]
    outs = {r: torch.empty(5000) for r in others}
    works = [comm.isend(values(comm.rank, 5000, "float32"), r) for r in others]
    works += [comm.irecv(outs[r], r) for r in others]
    for work in works:
        work.wait()
    for r in others:
        assert torch.equal(outs[r], values(r, 5000, "float32"))


def test_messages_between_two_ranks_keep_their_order(either):
    if either.rank == 0:
        for n in (5, 0, 2000):
            either.send(torch.full((n,), float(n)), 1)
    elif either.rank == 1:
        for n in (5, 0, 2000):
            assert either.recv(torch.empty(n), 0).tolist() == [float(n)] * n


def test_a_posted_message_leaves_before_a_collective(either):
    if either.rank == 0:
        work = either.isend(torch.ones(3000), 1)
    if either.rank == 1:
        assert either.recv(torch.zeros(3000), 0).sum() == 3000
    assert either.all_reduce(torch.ones(1)) == either.size
    if either.rank == 0:
        work.wait()


def test_a_work_can_be_asked(either):
    if either.rank == 0:
        work = either.irecv(x := torch.zeros(4), 1)
        assert not work.test()
        either.barrier()
        end = time.monotonic() + 10
        while not work.test():
            assert time.monotonic() < end
        assert x.sum() == 4
    else:
        either.barrier()
        if either.rank == 1:
            either.send(torch.ones(4), 0)


def test_arrays_go_through_mpi(either):
    assert either.all_reduce(np.full(3, 2.0)).tolist() == [2.0 * either.size] * 3
    if either.rank == 0:
        either.send(np.arange(4), 1)
    elif either.rank == 1:
        assert either.recv(np.empty(4, int), 0).tolist() == [0, 1, 2, 3]


def test_staged_through_the_host(either):
    x = values(either.rank, 1000, "float32")
    assert torch.equal(either.ring_all_reduce(x.clone()), summed(either.size, 1000, "float32"))
    assert torch.equal(either.mpi_all_reduce(x.clone()), summed(either.size, 1000, "float32"))


def test_a_part_is_of_the_same_kind(comm):
    part = comm.split(comm.rank == 1, key=-comm.rank)
    assert type(part) is type(comm) and part.clique.name != comm.clique.name
    assert part.all_reduce(torch.ones(2000)).tolist() == [float(part.size)] * 2000
    assert comm.all_reduce(torch.ones(1)) == comm.size


def test_the_next_run_takes_the_same_communicator(run, nccl):
    first = run(make=nccl.comm)
    name = first.clique.name
    first.close()
    assert run(make=nccl.comm).clique.name == name
