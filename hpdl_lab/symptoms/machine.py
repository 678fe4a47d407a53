"""Symptoms of the machine: its shared memory, its GPUs, the home folder."""

from ..features import dev_shm, home, nccl
from .record import Symptom

RANKS = 4  # what lab.start() starts

SYMPTOMS = (
    Symptom(
        "/dev/shm too small",
        look=lambda: dev_shm.require_room(RANKS),
        # mpiexec.gforker; Open MPI; a shell's status; NCCL
        said=r"signaled with Bus error|not enough space for /dev/shm|\bBus error\b|SIGBUS"
        r"|[Ee]rror while (?:creating|attaching to) shared memory segment /dev/shm|/dev/shm.*No space left on device",
        fix=dev_shm.FIX,
    ),
    Symptom("Duplicate GPU", said=r"Duplicate GPU detected", fix=nccl.ONE_RANK_EACH),
    Symptom("home folder", look=home.require_home),
)
