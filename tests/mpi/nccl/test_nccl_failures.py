"""NcclComm on three ranks: what does not end well, and that the next run works all the same."""

import contextlib
import os
import time

import pytest
import torch

from hpdl_lab.comm import CommError, CommTimeout, RankFailed, mpi, nccl_ranks, world
from hpdl_lab.comm.nccl_api import Nccl


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (torch.zeros(1001), "counts differ: rank 0 sends 1,000 elements, rank 1 expects 1,001"),
        (torch.zeros(1000, dtype=torch.int32), "dtypes differ: rank 0 sends float32, rank 1 expects int32"),
    ],
)
def test_ends_that_disagree(run, nccl, mine, message):
    with run(make=nccl.comm) as comm:
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
    comm = run(make=nccl.comm)
    comm.waiting.deadline = 1.0
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
    comm = run(make=nccl.comm)
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
    comm = run(make=nccl.comm)
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
        run(make=nccl.comm)
    assert run(make=nccl.comm).all_reduce(torch.ones(1)) == 3


def test_one_gpu_and_an_old_nccl(run, staged, capfd):
    staged.refusal = ""
    for _ in range(2):  # said once
        comm = run(make=staged.comm)
    assert comm.clique is None and comm.all_reduce(torch.ones(1)) == 3
    said = capfd.readouterr().out
    sentence = "ranks 0-2 share a GPU. NCCL 2.21.5 runs one rank on each GPU, 2.30.0 and newer several: pip install"
    assert said.count(sentence) == (1 if comm.rank == 0 else 0)
    with pytest.raises(CommError, match="share a GPU"):
        comm.nccl_all_reduce(torch.ones(1))


def test_one_gpu_and_a_new_nccl(run, ranks_on, monkeypatch):
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    new = ranks_on("gpu-0", count=1)
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert run(make=new.comm).all_reduce(torch.ones(1)) == 3


def test_nccl_says_that_ranks_share_a_gpu(library, fake, ranks):
    """Where ranks cannot tell by themselves, as in containers that give every GPU another name."""
    fake.fake_fail(b"ncclGetUniqueId", 5, b"Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")
    with pytest.raises(
        CommError, match="Duplicate GPU.*Start one rank for each GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1"
    ):
        Nccl(library, ranks.rank).unique_id()


def test_ranks_with_different_versions(ranks, run, ranks_on, fake):
    fake.fake_version(23203 if ranks.rank else 22703)
    try:
        mixed = ranks_on(f"gpu-{ranks.rank}")
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


def test_the_world_of_a_script_on_gpus(monkeypatch, nccl, library):
    """`comm.world(device="cuda")`: what a script and an engine get where there are GPUs."""
    monkeypatch.setattr(nccl_ranks, "gpu_of", lambda session: nccl.gpu)
    monkeypatch.setattr(nccl_ranks.nccl, "find", lambda: nccl_ranks.nccl.Found(library, "here", 23203))
    mpi.nccl_ranks.cache_clear()
    try:
        with world(20.0, device="cuda") as comm:
            assert comm.device == nccl.gpu.name and comm.all_reduce(torch.ones(4)).tolist() == [3.0] * 4
    finally:
        mpi.nccl_ranks.cache_clear()


def test_memory_is_freed_when_all_have_closed_it(run, nccl):
    comm = run(make=nccl.comm)
    comm.allocate(1000)
    members = comm.members
    comm.close()
    assert len(nccl.retired[members]) == 1
    run(make=nccl.comm)
    assert members not in nccl.retired
