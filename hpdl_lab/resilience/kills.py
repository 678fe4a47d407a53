"""Ranks that die in the midst of a training: by signal 9, as `kill -9` and a machine without memory send it."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
import uuid
from pathlib import Path

from torch import Tensor

from ..comm.base import Comm


class KillAt:
    """An all-reduce that kills one rank: `rank`, in its `call`-th call. For lab.train(all_reduce=...).

        KillAt(rank=2, call=45)
        KillAt(rank=2, after_s=60)      in its first call later than so many seconds after the first call of a run

    On real ranks only: simulated ranks share one process, which is the notebook's.
    """

    def __init__(self, rank: int, call: int | None = None, after_s: float = math.inf) -> None:
        self.rank, self.call, self.after_s = rank, call, after_s
        self.calls, self.begun = 0, 0.0  # of a run: each rank has a copy of its own, which is new in each run
        self.note = Path(tempfile.gettempdir(), f"hpdl-killed-{uuid.uuid4().hex}")  # holds the time of the death

    def __call__(self, comm: Comm, x: Tensor) -> None:
        if comm.simulated:
            raise ValueError("simulated ranks share the process of this notebook, which would be killed: lab.start(4)")
        self.calls += 1
        self.begun = self.begun or time.monotonic()
        late = time.monotonic() - self.begun > self.after_s
        if comm.rank == self.rank and (late or self.calls == self.call):
            self.note.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(x)

    def seconds_ago(self) -> float:
        """Return the seconds since the rank died, on this machine; once.

        Raises:  RuntimeError if no rank has died, or this was asked before.
        """
        try:
            died = float(self.note.read_text())
        except FileNotFoundError:
            when = f"in call {self.call}" if self.call is not None else f"after {self.after_s:g} s"
            raise RuntimeError(f"rank {self.rank} has not died {when}, or this was asked before") from None
        self.note.unlink()
        return time.time() - died
