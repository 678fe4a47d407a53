"""Ranks that die in the midst of a training: by signal 9, as `kill -9` and a machine without memory send it."""

from __future__ import annotations

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

    On real ranks only: simulated ranks share one process, which is the notebook's.
    """

    def __init__(self, rank: int, call: int) -> None:
        self.rank, self.call = rank, call
        self.calls = 0
        self.note = Path(tempfile.gettempdir(), f"hpdl-killed-{uuid.uuid4().hex}")  # when it was

    def __call__(self, comm: Comm, x: Tensor) -> None:
        if comm.simulated:
            raise ValueError("simulated ranks share the process of this notebook, which would be killed: lab.start(4)")
        self.calls += 1
        if comm.rank == self.rank and self.calls == self.call:
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(x)

    def seconds_ago(self) -> float:
        """Return the seconds since the rank died, on this machine; once.

        Raises:  RuntimeError if no rank has died, or somebody has asked before.
        """
        try:
            died = self.note.stat().st_mtime
        except FileNotFoundError:
            text = f"rank {self.rank} has not died in call {self.call}, or this was asked before"
            raise RuntimeError(text) from None
        self.note.unlink()
        return time.time() - died
