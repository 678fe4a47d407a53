"""NcclComm on three ranks over tests/fakes/nccl.c: NCCL's functions without a GPU. Tensors of the CPU stand for those
of a GPU; arrays travel through MPI as always. What only a GPU can show is in tests/gpu."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hpdl_lab.comm import CommError, CommTimeout, RankFailed
from hpdl_lab.comm.buffers import DTYPES, is_tensor
from hpdl_lab.comm.nccl_api import Nccl
from hpdl_lab.comm.nccl_ranks import NcclRanks

SOURCE = Path(__file__).parent.parent / "fakes" / "nccl.c"
COUNTS = (0, 1, 7, 5000)  # elements: 5,000 float32 are several of the fake's chunks

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler named cc")


class FakeGpu:
    """The stream of the fake library, in the place of comm/gpu.py's Gpu."""

    name, handle, count = "cpu", 0, 99

    def __init__(self, library, identity):
        self.library, self.identity = library, identity

    def owns(self, x):
        return is_tensor(x)

    def current(self):
        return contextlib.nullcontext()

    def follow(self):
        pass

    def mark(self):
        return FakeEvent(self.library, self.library.fake_ticket())


class FakeEvent:
    def __init__(self, library, ticket):
        self.library, self.ticket = library, ticket

    def query(self):
        return bool(self.library.fake_done(self.ticket))


@pytest.fixture(scope="module")
def library(ranks):
    """Path of the fake, compiled by rank 0, in a folder where its ranks can meet."""
    with ranks.comm(7_000_001, deadline=60.0) as comm:
        folder = tempfile.mkdtemp(prefix="hpdl-nccl-") if comm.rank == 0 else ""
        if comm.rank == 0:
            flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
            subprocess.run(["cc", *flags, SOURCE, "-o", f"{folder}/libnccl.so.2"], check=True, timeout=60)
        folder = comm.agree("folder", note=folder.encode())[0].decode()
    os.environ["FAKE_NCCL_DIR"] = folder
    yield f"{folder}/libnccl.so.2"
    with ranks.comm(7_000_002, deadline=60.0) as comm:
        comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def fake(library):
    """The levers of the fake library."""
    levers = ctypes.CDLL(library)
    levers.fake_ticket.restype = ctypes.c_long
    levers.fake_done.argtypes = [ctypes.c_long]
    levers.fake_aborted.argtypes = [ctypes.c_void_p]
    return levers


@pytest.fixture(scope="module")
def nccl(ranks, library, fake):
    """NcclRanks of which every rank has a GPU of its own."""
    return NcclRanks(ranks, Nccl(library, ranks.rank), FakeGpu(fake, f"gpu-{ranks.rank}"))


@pytest.fixture
def comm(run, nccl):
    return run(make=nccl.comm)


def values(rank, n, dtype):
    """(n,) small whole numbers, different on every rank, which every dtype holds and adds exactly."""
    return ((torch.arange(n) * (rank + 3)) % 29).to(getattr(torch, dtype))


def summed(size, n, dtype):
    return sum(values(rank, n, "int64") for rank in range(size)).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_of_every_dtype(comm, dtype):
    p, r = comm.size, comm.rank
    for n in COUNTS:
        x = values(r, n, dtype)
        everyone = torch.stack([values(rank, n, dtype) for rank in range(p)])
        rows = torch.stack([values(r + 10 * row, n, dtype) for row in range(p)])  # (p, n), different per rank
        assert torch.equal(comm.all_reduce(x.clone()), summed(p, n, dtype))
        assert torch.equal(comm.broadcast(x.clone(), p - 1), values(p - 1, n, dtype))
        assert torch.equal(comm.all_gather(x), everyone)
        gathered, total = comm.gather(x, 1), comm.reduce(x, 1)
        if r == 1:
            assert torch.equal(gathered, everyone) and torch.equal(total, summed(p, n, dtype))
            assert total.dtype == x.dtype
        else:
            assert gathered is None and total is None
        assert torch.equal(comm.scatter(everyone if r == 1 else None, torch.empty_like(x), 1), x)
        column = torch.stack([values(rank + 10 * r, n, dtype) for rank in range(p)])
        assert torch.equal(comm.all_to_all(rows), column)
        assert torch.equal(comm.reduce_scatter(rows), column.long().sum(0).to(x.dtype))


def test_16_bit_sums_round_once(comm):
    """1 + 2^-9 + ... in bfloat16 stays 1 when every addition rounds; in float32 it grows."""
    x = torch.full((3,), 1.0 if comm.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    comm.all_reduce(x)
    assert x.tolist() == torch.full((3,), 1.0 + 2 * 2.0**-9).to(torch.bfloat16).tolist()
    y = torch.full((3,), 1.0 if comm.rank == 0 else 2.0**-8 * 0.75, dtype=torch.bfloat16)
    assert comm.all_reduce(y)[0] == 1.0 + 2.0**-7


@pytest.mark.parametrize("n", COUNTS)
def test_messages_around_a_ring(comm, n):
    p, r = comm.size, comm.rank
    y = torch.empty(n)
    assert torch.equal(
        comm.sendrecv(values(r, n, "float32"), (r + 1) % p, y, (r - 1) % p), values((r - 1) % p, n, "float32")
    )
    ops = [(e.op, e.peer, e.nbytes) for e in comm.trace.events]
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


def test_messages_between_two_ranks_keep_their_order(comm):
    if comm.rank == 0:
        for n in (5, 0, 2000):
            comm.send(torch.full((n,), float(n)), 1)
    elif comm.rank == 1:
        for n in (5, 0, 2000):
            assert comm.recv(torch.empty(n), 0).tolist() == [float(n)] * n


def test_a_posted_message_leaves_before_a_collective(comm):
    if comm.rank == 0:
        work = comm.isend(torch.ones(3000), 1)
    if comm.rank == 1:
        assert comm.recv(torch.zeros(3000), 0).sum() == 3000
    assert comm.all_reduce(torch.ones(1)) == comm.size
    if comm.rank == 0:
        work.wait()


def test_a_work_can_be_asked(comm):
    if comm.rank == 0:
        work = comm.irecv(x := torch.zeros(4), 1)
        assert not work.test()
        comm.barrier()
        end = time.monotonic() + 10
        while not work.test():
            assert time.monotonic() < end
        assert x.sum() == 4
    else:
        comm.barrier()
        if comm.rank == 1:
            comm.send(torch.ones(4), 0)


def test_arrays_go_through_mpi(comm):
    assert comm.all_reduce(np.full(3, 2.0)).tolist() == [2.0 * comm.size] * 3
    if comm.rank == 0:
        comm.send(np.arange(4), 1)
    elif comm.rank == 1:
        assert comm.recv(np.empty(4, int), 0).tolist() == [0, 1, 2, 3]


def test_staged_through_the_host(comm):
    x = values(comm.rank, 1000, "float32")
    assert torch.equal(comm.ring_all_reduce(x.clone()), summed(comm.size, 1000, "float32"))
    assert torch.equal(comm.mpi_all_reduce(x.clone()), summed(comm.size, 1000, "float32"))


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


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (torch.zeros(1001), "rank 1 expects 1,001 float32 from rank 0, which sent 1,000 float32"),
        (torch.zeros(1000, dtype=torch.int32), "rank 1 expects 1,000 int32 from rank 0, which sent 1,000 float32"),
    ],
)
def test_ends_that_disagree(run, nccl, mine, message):
    with run(make=nccl.comm, deadline=2.0) as comm:
        name = comm.clique.name
        if comm.rank == 1:
            with pytest.raises(ValueError, match=message):
                comm.recv(mine, 0)
            comm.close(ValueError())
        elif comm.rank == 0:
            with contextlib.suppress(CommTimeout, RankFailed):  # a send may have ended before anybody compared
                comm.send(torch.zeros(1000), 1)
    after = run(make=nccl.comm)
    assert after.clique.name != name and after.all_reduce(torch.ones(5)).tolist() == [3.0] * 5


def test_ranks_that_disagree_about_a_collective(run, nccl):
    with run(make=nccl.comm) as comm:
        with pytest.raises(ValueError, match="disagree|differ"):
            comm.all_reduce(torch.ones(1000 + comm.rank))
        assert comm.all_reduce(torch.ones(1)) == 3  # nothing had reached the GPU


def test_nobody_answers(run, nccl, fake):
    """A deadline ends what hangs on the GPU, says who waits, and the next run works."""
    comm = run(make=nccl.comm, deadline=1.0)
    clique = comm.clique
    begin = time.monotonic()
    if comm.rank == 0:
        with pytest.raises(CommTimeout, match="rank 0 waits in recv from rank 1"):
            comm.recv(torch.zeros(10), 1)
        assert fake.fake_aborted(clique.handle) and clique.broken == "recv"
        with pytest.raises(CommError, match="an earlier recv did not complete, and NCCL was aborted"):
            comm.send(torch.zeros(10), 1)
    assert time.monotonic() - begin < 10
    comm.close()
    with run(make=nccl.comm) as after:
        assert after.clique.name != clique.name and after.all_reduce(torch.ones(3)).tolist() == [3.0] * 3


def test_a_message_that_nobody_receives_ends_with_the_run(run, nccl):
    comm = run(make=nccl.comm)
    name = comm.clique.name
    if comm.rank == 0:
        comm.isend(torch.ones(3), 1)
    comm.close()
    with run(make=nccl.comm) as after:
        assert after.clique.name != name and after.all_reduce(torch.ones(3)).tolist() == [3.0] * 3


def test_an_error_of_nccl_has_its_words_and_the_rank(run, nccl, fake):
    comm = run(make=nccl.comm, deadline=2.0)
    if comm.rank == 2:
        fake.fake_fail(b"ncclAllReduce", 2, b"no space left on the moon")
    words = r"ncclAllReduce failed on rank 2: unhandled system error \(no space left on the moon\)"
    with pytest.raises(CommError, match=words if comm.rank == 2 else "all_reduce"):
        try:
            comm.all_reduce(torch.ones(10))
        except CommError as error:
            comm.close(error)
            raise
    assert run(make=nccl.comm).all_reduce(torch.ones(2)).tolist() == [3.0] * 2


def test_an_error_that_comes_later(run, nccl, fake):
    """As of a network: the call succeeds, the communicator says afterwards that it has failed."""
    comm = run(make=nccl.comm, deadline=2.0)
    if comm.rank == 0:
        work = comm.irecv(torch.zeros(4), 1)
        assert not work.test()
        fake.fake_fail(b"ncclCommGetAsyncError", 6, b"peer closed")
        with pytest.raises(CommError, match=r"ncclRecv failed on rank 0: remote process exited .* \(peer closed\)"):
            work.wait()


def test_rank_0_cannot_make_an_id(run, nccl, fake):
    nccl.kept.clear()
    if nccl.api.rank == 0:
        fake.fake_fail(b"ncclGetUniqueId", 2, b"no network interface")
    with pytest.raises(CommError, match=r"ncclGetUniqueId failed on rank 0: unhandled system error"):
        run(make=nccl.comm, deadline=5.0)
    assert run(make=nccl.comm).all_reduce(torch.ones(1)) == 3


def test_one_gpu_and_an_old_nccl(ranks, run, library, fake):
    fake.fake_version(22105)
    try:
        old = NcclRanks(ranks, Nccl(library, ranks.rank), FakeGpu(fake, "gpu-0" if ranks.rank < 2 else "gpu-2"))
        sentence = (
            "ranks 0, 1 share a GPU. NCCL 2.21.5 runs one rank on each GPU, 2.30.0 and newer several: pip install"
        )
        with pytest.raises(CommError, match=sentence):
            run(make=old.comm)
    finally:
        fake.fake_version(23203)


def test_one_gpu_and_a_new_nccl(ranks, run, library, fake, monkeypatch):
    monkeypatch.setattr(FakeGpu, "count", 1)
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    new = NcclRanks(ranks, Nccl(library, ranks.rank), FakeGpu(fake, "gpu-0"))
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert run(make=new.comm).all_reduce(torch.ones(1)) == 3


def test_nccl_says_that_ranks_share_a_gpu(library, fake, ranks):
    """Where ranks cannot tell by themselves, as in containers that give every GPU another name."""
    fake.fake_fail(b"ncclGetUniqueId", 5, b"Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")
    with pytest.raises(
        CommError, match="Duplicate GPU.*Start one rank for each GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1"
    ):
        Nccl(library, ranks.rank).unique_id()


def test_ranks_with_different_versions(ranks, run, library, fake):
    fake.fake_version(23203 if ranks.rank else 22703)
    try:
        mixed = NcclRanks(ranks, Nccl(library, ranks.rank), FakeGpu(fake, f"gpu-{ranks.rank}"))
        sentence = "different versions of NCCL: rank 0 has 2.27.3, rank 1 has 2.32.3, rank 2 has 2.32.3"
        with pytest.raises(CommError, match=sentence):
            run(make=mixed.comm)
    finally:
        fake.fake_version(23203)


def test_refused_before_anything_is_sent(comm):
    with pytest.raises(ValueError, match="cannot send dtype bool"):
        comm.isend(torch.zeros(3, dtype=torch.bool), (comm.rank + 1) % 3)
    with pytest.raises(ValueError, match="non-contiguous"):
        comm.all_reduce(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="needs 3 rows, got 2"):
        comm.reduce_scatter(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="ranks here are 0 to 2"):
        comm.broadcast(torch.zeros(2), 3)
