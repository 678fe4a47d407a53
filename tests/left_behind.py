"""What a run of the tests leaves on the machine: processes, shared memory, files. There should be nothing."""

import contextlib
import os
import secrets
import time
from pathlib import Path

import psutil

from hpdl_lab.features import dev_shm

MARK = "HPDL_TEST_RUN"  # in the environment of all that the run starts
SECONDS = 60  # for processes to end
SHARED = ("/tmp", "/var/tmp", "/dev/shm")
NAMES = ("hpdl", "torchelastic_", "mpich_shm_", "vader_segment", "sem.mp-", "torch_", "__KMP_")  # in those
AT_HOME = (".hpdl", ".ipython", ".jupyter", ".nbgrader", ".local/share/jupyter", ".config/matplotlib")
KEPT = ("pytest-of-", "ompi.")  # in a TMPDIR: the folders that pytest and Open MPI keep there for a user


class Snapshot:
    """What is there before the run. It marks this process, and so all that it starts."""

    def __init__(self) -> None:
        self.mark = os.environ[MARK] = secrets.token_hex(8)
        self.before = present()

    def left(self, *own: Path) -> list[str]:
        """What is there now, and was not. own: temporary directories of the run's own, in which nothing may be left."""
        give_up = time.monotonic() + SECONDS
        while (running := self.processes()) and time.monotonic() < give_up:
            time.sleep(0.2)
        others = in_use()
        files = [str(p) for folder in own for p in folder.iterdir() if not p.name.startswith(KEPT)]
        return [*running, *sorted(present() - self.before - others - in_use()), *sorted(files)]

    def processes(self) -> list[str]:
        """Those that the run has started and that have not ended."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(MARK) == self.mark:
                    found.append(f"process {process.pid}: {' '.join(process.cmdline())[:120]}")
        return found


def in_use() -> set[str]:
    """What belongs to processes that still run: somebody's `make lab`, if none is the run's own."""
    found = dev_shm.mapped()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.add(process.environ().get("HPDL_SESSION", ""))
    return found


def present() -> set[str]:
    """Files of this user in the places that programs share, by names that this package and its libraries give."""
    found = {str(Path.home() / name) for name in AT_HOME if (Path.home() / name).exists()}
    for place in SHARED:
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            mine = (entry for entry in entries if entry.stat(follow_symlinks=False).st_uid == os.getuid())
            found |= {entry.path for entry in mine if entry.name.startswith(NAMES)}
    return found
