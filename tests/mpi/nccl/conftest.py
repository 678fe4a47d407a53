"""Ranks with GPUs that are none: NCCL's functions from tests/fakes/nccl.c, tensors of the CPU as those of the GPU.

Arrays travel through MPI as always. What only a GPU can show is in tests/gpu.
"""

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hpdl_lab.comm.buffers import DTYPES, is_tensor
from hpdl_lab.comm.nccl_api import Nccl
from hpdl_lab.comm.nccl_ranks import NcclRanks

SOURCE = Path(__file__).parent.parent.parent / "fakes" / "nccl.c"


class FakeGpu:
    """The stream of the fake library, in the place of comm/gpu.py's Gpu."""

    name, handle, count, index = "cpu", 0, 99, 0

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

    mark_computed = mark

    def tensor(self, memory):
        return torch.frombuffer(memory.map, dtype=torch.uint8)


class FakeEvent:
    def __init__(self, library, ticket):
        self.library, self.ticket = library, ticket

    def query(self):
        return bool(self.library.fake_done(self.ticket))


class FakeCuda:
    """Memory in files that all ranks map, in the place of the compiled module hpdl_lab._cuda."""

    class DeviceMemory:
        def __init__(self, device, nbytes):
            self.file = tempfile.NamedTemporaryFile(dir=os.environ["FAKE_NCCL_DIR"])
            self.file.truncate(nbytes)
            self.map, self.nbytes = mmap.mmap(self.file.fileno(), nbytes), nbytes
            self.address = np.frombuffer(self.map, np.uint8).ctypes.data

        def handle(self):
            return os.path.basename(self.file.name).encode()

    class PeerMemory:
        def __init__(self, device, handle):
            with open(os.path.join(os.environ["FAKE_NCCL_DIR"], handle.decode()), "r+b") as file:
                self.map = mmap.mmap(file.fileno(), 0)
            self.address = np.frombuffer(self.map, np.uint8).ctypes.data

    def one_pass(self, tensors, first, count, dtype, stream):
        kind = getattr(torch, DTYPES[dtype])
        size = torch.empty(0, dtype=kind).element_size()
        raw = [(ctypes.c_char * (count * size)).from_address(t + first * size) for t in tensors]
        slices = [torch.frombuffer(memory, dtype=kind) for memory in raw if count]
        if slices:
            wide = torch.float32 if kind in (torch.bfloat16, torch.float16) else kind
            total = sum(x.to(wide) for x in slices).to(kind)
            for x in slices:
                x.copy_(total)


@pytest.fixture(scope="module")
def library(ranks):
    """Path of the fake, compiled by rank 0, in a folder where its ranks can meet."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler named cc")
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
        shutil.rmtree(folder, ignore_errors=True)  # the fakes of other ranks may still remove theirs


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
    return NcclRanks(ranks, Nccl(library, ranks.rank), FakeGpu(fake, f"gpu-{ranks.rank}"), FakeCuda())


@pytest.fixture(scope="module")
def staged(ranks, library, fake):
    """NcclRanks that share one GPU under an old NCCL, which refuses that: their tensors go through the host."""
    fake.fake_version(22105)
    old = Nccl(library, ranks.rank)
    fake.fake_version(23203)
    return NcclRanks(ranks, old, FakeGpu(fake, "gpu-0"), FakeCuda())


@pytest.fixture(params=["NCCL", "staged"])
def either(request, run, nccl, staged):
    """A communicator whose tensors go through NCCL, or through the host where NCCL refuses."""
    return run(make=(nccl if request.param == "NCCL" else staged).comm)


@pytest.fixture
def ranks_on(ranks, library, fake):
    """ranks_on("gpu-0", count=1): NcclRanks of which this one uses the GPU of that name, of `count` on this host."""

    def make(identity, count=99):
        gpu = FakeGpu(fake, identity)
        gpu.count = count
        return NcclRanks(ranks, Nccl(library, ranks.rank), gpu, FakeCuda())

    return make


@pytest.fixture
def failing_cuda(monkeypatch, nccl):
    """On rank 1 the memory of other processes cannot be opened."""

    def refuse(self, device, handle):
        raise RuntimeError("cudaIpcOpenMemHandle failed: cudaErrorInvalidDevice")

    if nccl.api.rank == 1:
        monkeypatch.setattr(FakeCuda.PeerMemory, "__init__", refuse)


@pytest.fixture
def comm(run, nccl):
    return run(make=nccl.comm)
