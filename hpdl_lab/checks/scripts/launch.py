"""Launch a training script under observation, by torchrun or on one rank, and read what its ranks did."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING

import psutil

from ...watch import records
from ...watch.launch import Stall
from ...watch.records import Event
from ...watch.records import RankRecord as Observed

if TYPE_CHECKING:
    pass


STALL = 3.0  # s in which no rank computes and none moves to another line: they wait for each other
LIMIT = 90.0  # s for a whole run, mostly the import of torch
SAVED, SHARED = "gpt.pt", "checkpoint"  # a file of one rank; a folder of all ranks
LOSS = re.compile(r"^(step \d+|test) loss (\S+)", re.M)


@dataclass
class ScriptRank(Observed):
    """A rank of a script. printed: its output; files: what it left in its folder."""

    printed: str = ""
    files: list[str] = field(default_factory=list)

    @property
    def losses(self) -> dict[str, str]:
        """{"step 0": "4.492", ..., "test": "3.162"} as printed."""
        return dict(LOSS.findall(self.printed))

    @property
    def optimizer_steps(self) -> list[Event]:
        """The events of the optimizer, one per step."""
        return self.all("optimizer")

    @property
    def batches(self) -> list[list[int]]:
        """Examples that the model saw for each step of the optimizer, as numbers that tell them apart."""
        found: list[list[int]] = [[]]
        for event in self.events:
            if event["what"] == "forward" and event["training"]:
                found[-1] += event["rows"]
            elif event["what"] == "optimizer":
                found.append([])
        return [rows for rows in found[:-1] if rows]  # get_state_dict steps without examples, if no step was taken

    @property
    def weights(self) -> dict[str, Event]:
        """{name: what this rank holds of a parameter} when the model was called first; {} if none was."""
        return dict(self.first("model").get("parameters", {}))


@dataclass
class ScriptRun:
    """Ranks after a run. stalled: they waited for each other; late: they still ran after LIMIT; both were ended.

    state:  what rank 0 has saved as SAVED, or the error of reading it, or None.
    shared: {name: tensor} of the checkpoint in SHARED, or the error of reading it, or None.
    wrote:  {file: bytes} in SHARED.
    """

    ranks: list[ScriptRank]
    stalled: bool
    late: bool
    seconds: float
    output: str
    state: object = None
    shared: object = None
    wrote: dict[str, int] = field(default_factory=dict)


class ScriptLauncher:
    """A process that has imported torch and starts ranks of scripts by forking; it ends with the `with` block."""

    def __enter__(self) -> ScriptLauncher:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "20000"}
        self._lock = threading.Lock()
        command = [sys.executable, "-m", f"{__package__}.observe"]
        self._process = subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def launch(self, script: Path, ranks: int) -> ScriptRun:
        """Run a script on so many ranks; it ends within LIMIT, and some seconds after all ranks wait for each other.

        Ranks that never met in init_process_group are launched a second time: on a busy machine that happened once in
        some hundred launches of right scripts, for a reason that is not known.
        """
        run = self._launch(script, ranks)
        unmet = run.stalled and not any(rank.first("met") for rank in run.ranks)
        return self._launch(script, ranks) if unmet else run

    def _launch(self, script: Path, ranks: int) -> ScriptRun:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hpdl-script-") as name:
            folder = Path(name)
            with self._lock:
                print(json.dumps([str(script), name, ranks]), file=self._process.stdin, flush=True)
                pid = int(self._process.stdout.readline())  # pyrefly: ignore[missing-attribute]
            stall, stalled, late = Stall(folder, STALL, pid), False, False
            try:
                while psutil.pid_exists(pid) and not (stalled or late):
                    stalled, late = stall.stuck(), time.monotonic() - began > LIMIT
                    time.sleep(0.1)
                found = read_script_ranks(folder, ranks)  # before they are ended, one after the other
            finally:
                if psutil.pid_exists(pid):
                    for member in records.pids(folder):
                        _kill(os.kill, member)
                    _kill(os.killpg, pid)
                    while psutil.pid_exists(pid):
                        time.sleep(0.01)
            out = folder / "torchrun.out"
            output = out.read_text(errors="replace") if out.exists() else ""
            wrote = {path.name: path.stat().st_size for path in (folder / SHARED).glob("*.distcp")}
            saved = _saved(folder / "0" / SAVED), _checkpoint(folder / SHARED), wrote
            return ScriptRun(found, stalled, late, time.monotonic() - began, output, *saved)


def read_script_ranks(folder: Path, ranks: int) -> list[ScriptRank]:
    """Read what there is to know about all ranks."""
    seen = {rank.number: rank for rank in records.read_ranks(folder, alone=ranks == 1)[0]}
    return [_read_rank(folder, number, seen.get(number)) for number in range(ranks)]


def _read_rank(folder: Path, number: int, seen: Observed | None) -> ScriptRank:
    out, works_in = folder / f"{number}.out", folder / str(number)
    printed = out.read_text(errors="replace") if out.exists() else ""
    files = sorted(path.name for path in works_in.iterdir() if path.is_file()) if works_in.exists() else []
    pid, events, now = (seen.pid, seen.events, seen.now) if seen else (0, [], {})
    return ScriptRank(number, pid, events, now, printed=printed, files=files)


def _kill(how: Callable[[int, int], None], pid: int) -> None:
    try:
        how(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _saved(path: Path) -> object:
    """Return {name: tensor} of a file of torch.save, None if there is none, or the exception if it cannot be read."""
    if not path.exists():
        return None
    import torch

    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        return error


def _checkpoint(folder: Path) -> object:
    """Return {name: whole tensor} of a checkpoint of torch's DCP, None if there is none, or the error of reading it."""
    if not (folder / ".metadata").exists():
        return None
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        reader = dcp.FileSystemReader(folder)
        kept = reader.read_metadata().state_dict_metadata.items()
        state = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in kept
            if isinstance(about, TensorStorageMetadata)
        }
        with warnings.catch_warnings(action="ignore"):  # of one process, without a process group
            dcp.load(state, storage_reader=reader, no_dist=True)
        return state
    except Exception as error:
        return error
