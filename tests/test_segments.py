"""Another account prepares the shared memory that MPI is about to use: nothing is sent through it. Attacks, as root.

They happen in namespaces of their own, with a /dev/shm of their own, or in a folder of the test.
"""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile

import pytest

from hpdl_lab import features
from hpdl_lab.comm.errors import CommError
from hpdl_lab.comm.mpi import library as segments
from tests.wording import raises

ATTACKER = 1002
NBYTES = 64 << 20
IPC_CREAT, IPC_PRIVATE, IPC_RMID = 0o1000, 0, 0

# MPICH names its memory after the number of mpiexec's process, and trusts what has this word in it.
PLANT = """
import os, struct
def fnv(text):
    found = 2166136261
    for byte in text:
        found = (found ^ byte) * 16777619 & 0xffffffff
    return found
if not (child := os.fork()):
    os.setgid({uid}); os.setuid({uid}); os.umask(0)
    for pid in range(2, 300):
        path = f"/dev/shm/mpich_shm_%x_0" % fnv(b"kvs_%d_0" % pid)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, {mode:#o}), "wb") as file:
            file.truncate({nbytes})
            if {nbytes}:
                file.seek(8); file.write(struct.pack("<I", 0x12345678))
    os._exit(0)
os.waitpid(child, 0)
"""
START = """
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines import launch
launch.START_SECONDS = {seconds}
def secret(comm):
    comm.all_gather(__import__("numpy").ones(3))
    return [line.split()[-1] for line in open("/proc/self/maps") if "mpich_shm" in line]
try:
    with Cluster.start(2) as cluster:
        print("works on", cluster.run(secret))
except Exception as error:
    print(type(error).__name__, error)
"""
WORLD = "from hpdl_lab.comm import world; print('works on', world(30).all_gather(__import__('numpy').ones(3)))"

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root plays several accounts")
mpich = pytest.mark.skipif("mpich" not in features.installed_mpi_wheels(), reason="the attack is on names of MPICH")


@pytest.fixture
def beside_an_attacker(no_engines_yet):
    """beside_an_attacker(command, mode, nbytes): what the command says after the attack, where processes count from 1.

    The command runs as this user; the files of the attacker are 298, of `nbytes` and `mode`.
    """

    def run(command, mode=0o666, nbytes=NBYTES):
        plant = PLANT.format(uid=ATTACKER, mode=mode, nbytes=nbytes)
        shell = 'mount --make-rprivate / && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && "$0" -c "$1" && shift && "$@"'
        alone = ["unshare", "-m", "-p", "--fork", "--mount-proc", "sh", "-c", shell, sys.executable, plant]
        probe = subprocess.run([*alone[:5], "true"], capture_output=True, text=True)
        if probe.returncode:
            pytest.skip(f"no namespaces here: {probe.stderr.strip()}")
        environment = {**os.environ, **features.launch_environment()}
        done = subprocess.run([*alone, *command], env=environment, capture_output=True, text=True)
        return done.stdout + done.stderr

    return run


@root
@mpich
def test_engines_do_not_work_on_memory_of_another_account(beside_an_attacker):
    said = beside_an_attacker([sys.executable, "-c", START.format(seconds=60)])
    assert said.startswith("EngineError ranks 0, 1 ended at the start: shared memory /dev/shm/mpich_shm_"), said
    assert f"belongs to user {ATTACKER}" in said and "works on" not in said


@root
@mpich
def test_ranks_of_a_script_do_not_work_on_memory_of_another_account(beside_an_attacker):
    said = beside_an_attacker([f"{features.mpiexec()}.gforker", "-n", "2", sys.executable, "-c", WORLD])
    assert f"belongs to user {ATTACKER}" in said and "CommError" in said and "works on" not in said


@root
@mpich
def test_files_that_keep_mpich_out_are_named(beside_an_attacker):
    said = beside_an_attacker([sys.executable, "-c", START.format(seconds=3)], mode=0o600, nbytes=0)
    assert said.startswith("EngineError 0 of 2 engines") and f"(298 of user {ATTACKER})" in said, said


# -- what is asked of a segment ----------------------------------------------------------------------------------------


@pytest.fixture
def shm():
    """A folder in memory that all accounts may write, as /dev/shm is."""
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
        os.chmod(path, 0o1777)
        yield path


@contextlib.contextmanager
def mapped(path, mode=0o600, owner=None, closed=True):
    """The segment that a rank maps: a file at `path`, which the rank keeps open, or not."""
    earlier = segments.shared()
    with open(path, "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        os.fchmod(file.fileno(), mode)
        if owner is not None:
            os.fchown(file.fileno(), owner, owner)
        libc = ctypes.CDLL(None, use_errno=True)  # Python's mmap would keep the file open
        libc.mmap.restype, length = ctypes.c_void_p, ctypes.c_size_t(mmap.PAGESIZE)
        where = ctypes.c_void_p(libc.mmap(None, length, 3, mmap.MAP_SHARED, file.fileno(), ctypes.c_long(0)))
        if closed:
            file.close()
        try:
            yield {key: name for key, name in segments.shared().items() if key not in earlier}
        finally:
            libc.munmap(where, length)


def test_a_segment_of_ones_own_is_used(shm):
    with mapped(f"{shm}/own") as new:
        assert list(new.values()) == [f"{shm}/own"]
        segments.require_own(new)
        os.unlink(f"{shm}/own")  # and nobody holds it open
        segments.require_own(new, unknown=False)
        with raises(CommError):
            segments.require_own(new)


@pytest.mark.parametrize("mode", [0o660, 0o604, 0o602])
def test_a_segment_that_others_may_open_is_not_used(shm, mode):
    with mapped(f"{shm}/open", mode) as new, raises(CommError, f"mode {mode:o}"):
        segments.require_own(new)


@root
@pytest.mark.parametrize("unlinked", [False, True])
def test_a_segment_of_another_account_is_not_used_even_when_it_has_been_removed(shm, unlinked):
    with mapped(f"{shm}/planted", 0o666, ATTACKER, closed=not unlinked) as new:
        if unlinked:
            os.rename(f"{shm}/planted", f"{shm}/ucx_shm_posix_1")
            os.unlink(f"{shm}/ucx_shm_posix_1")
        for unknown in (True, False):
            with raises(CommError, f"user {ATTACKER}"):
                segments.require_own(new, unknown)


@root
def test_another_file_under_the_name_does_not_answer_for_the_segment(shm):
    with mapped(f"{shm}/swapped", 0o666, ATTACKER) as new:
        os.rename(f"{shm}/swapped", f"{shm}/aside")
        with open(f"{shm}/swapped", "wb"):
            pass
        with pytest.raises(CommError, match="shared memory"):
            segments.require_own(new)


@pytest.mark.parametrize(("mode", "why"), [(0o600, ""), (0o666, "is open to other accounts")])
def test_a_removed_segment_is_known_by_the_neighbor_that_holds_it_open(shm, mode, why):
    """UCX removes its segments at once, and only the rank that made one has it open."""
    with mapped(f"{shm}/ucx", mode) as new, open(f"{shm}/ucx") as held:
        neighbor = subprocess.Popen([sys.executable, "-c", "input()"], pass_fds=[held.fileno()], stdin=subprocess.PIPE)
        held.close()
        os.unlink(f"{shm}/ucx")
        with neighbor, pytest.raises(CommError, match=why) if why else contextlib.nullcontext():
            segments.require_own(new)


@pytest.mark.parametrize(("mode", "why"), [(0o600, ""), (0o660, "is open to other accounts")])
def test_memory_of_system_v_is_asked_as_well(mode, why):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    number = libc.shmget(IPC_PRIVATE, ctypes.c_size_t(mmap.PAGESIZE), IPC_CREAT | mode)
    if number < 0:
        pytest.skip(f"no memory of System V here: {os.strerror(ctypes.get_errno())}")
    earlier = segments.shared()
    where = ctypes.c_void_p(libc.shmat(number, None, 0))
    try:
        new = {key: path for key, path in segments.shared().items() if key not in earlier}
        assert [path.startswith("/SYSV") for path in new.values()] == [True]
        with pytest.raises(CommError, match=why) if why else contextlib.nullcontext():
            segments.require_own(new)
    finally:
        libc.shmdt(where)
        libc.shmctl(number, IPC_RMID, None)


def test_memory_without_a_name_is_nobody_elses():
    """Ours is of memfd_create; a parent's and its child's is of MAP_ANONYMOUS."""
    earlier = segments.shared()
    with open(os.memfd_create("hpdl"), "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), 0), mmap.mmap(-1, mmap.PAGESIZE):
            new = {key: path for key, path in segments.shared().items() if key not in earlier}
            assert len(new) == 2
            segments.require_own(new)


def test_engines_share_nothing_that_others_may_open(cluster):
    def perms(comm):
        return list(segments.shared().values()), segments.require_own(segments.shared(), unknown=False)

    for paths, _ in cluster.run(perms):
        assert paths and not [path for path in paths if path.startswith("/SYSV")]


@mpich
def test_ranks_of_a_script_share_nothing_with_the_group_of_their_user(monkeypatch):
    """UCX would make memory of System V with mode 660, which any account of the same group may write."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    script = (
        "from hpdl_lab.comm import world; from hpdl_lab.comm.mpi import library; world(30); "
        "print(*library.shared().values(), sep='\\n')"
    )
    command = [features.mpiexec(), "-n", "2", sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert "mpich_shm_" in said and "SYSV" not in said
