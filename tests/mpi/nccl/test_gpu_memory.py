"""Memory that GPUs share, and the sum of it in one pass, on three ranks: who meets whom, and who adds what."""

import pytest
import torch

from hpdl_lab.comm.buffers import DTYPES
from hpdl_lab.comm.gpu_memory import slice_of


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_of_shared_tensors(comm, dtype, fake):
    x = comm.allocate((4, 1001), dtype)
    assert x.shape == (4, 1001) and not x.any() and len(comm.segments) == 1
    before = fake.fake_ticket()
    for part in (x, x[1], x.view(-1)[7:10]):
        x.zero_()
        part.fill_(comm.rank + 1)
        assert comm.all_reduce(part) is part
        assert (part == 6).all() and int(x.double().sum()) == 6 * part.numel()
        comm.barrier()  # all have looked, before anybody writes again
    assert fake.fake_ticket() == before  # nothing went through NCCL
    assert [e.op for e in comm.trace.events].count("all_reduce") == 3


def test_tensors_at_different_places_go_through_nccl(comm, fake):
    x = comm.allocate(1000)
    mine = x[comm.rank : comm.rank + 10].fill_(1.0)
    before = fake.fake_ticket()
    assert (comm.all_reduce(mine) == 3).all()
    elsewhere = torch.ones(10) if comm.rank else x[:10].fill_(1.0)
    assert (comm.all_reduce(elsewhere) == 3).all()
    assert fake.fake_ticket() == before + 2


def test_where_one_rank_cannot_reach_the_others_memory_is_not_shared(comm, failing_cuda):
    x = comm.allocate(1000)
    assert comm.segments == []
    assert (comm.all_reduce(x.fill_(2.0)) == 6).all()


def test_ranks_that_disagree_about_the_sum(comm):
    x = comm.allocate(1000)
    with pytest.raises(ValueError, match="disagree|differ"):
        comm.all_reduce(x[: 100 + comm.rank])
    assert (comm.all_reduce(x.fill_(1.0)) == 3).all()


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1001, 100_000])
def test_slices_cover_the_vector_once(count, size):
    parts = [slice_of(count, rank, size) for rank in range(size)]
    assert [i for first, n in parts for i in range(first, first + n)] == list(range(count))
    assert all(first % 64 == 0 for first, n in parts if n)
