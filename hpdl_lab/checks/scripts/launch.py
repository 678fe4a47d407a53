"""Launch a training script under observation, by torchrun or on one rank, and read what its ranks did."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil

STALL = 3.0  # s in which no rank computes and none moves to another line: they wait for each other
RENDEZVOUS_STALL = 30.0  # s, in init_process_group: the launcher works for them there, which a busy machine may delay
WHERE_RANKS_MEET = "init_process_group"
LIMIT = 90.0  # s for a whole run, of which most is the import of torch
IDLE = 0.03  # of a core: a rank that waits takes 0.005 for the look at itself, one that computes more
SAVED = "gpt.pt"
LOSS = re.compile(r"^(step \d+|test) loss (\S+)", re.M)


@dataclass
class Rank:
    """What one rank did.

    events:  as observe.py notes them, in order; place: (line, its text) where it was last seen in the script.
    printed: its output; files: what it left in its folder.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    place: tuple[int, str] | None = None
    printed: str = ""
    files: list[str] = field(default_factory=list)

    def all(self, what: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["what"] == what]

    def first(self, what: str) -> dict[str, Any]:
        return next(iter(self.all(what)), {})

    @property
    def losses(self) -> dict[str, str]:
        """{"step 0": "4.492", ..., "test": "3.162"} as printed."""
        return dict(LOSS.findall(self.printed))

    @property
    def batches(self) -> list[list[int]]:
        """For each step of the optimizer, the examples that the model saw for it, as numbers that tell them apart."""
        found: list[list[int]] = [[]]
        for event in self.events:
            if event["what"] == "forward" and event["training"]:
                found[-1] += event["rows"]
            elif event["what"] == "step":
                found.append([])
        return found[:-1]


@dataclass
class Run:
    """Ranks after a run. stalled: they waited for each other; late: they still ran after LIMIT; both were ended.

    state: what rank 0 has saved as SAVED, or the error of reading it, or None.
    """

    ranks: list[Rank]
    stalled: bool
    late: bool
    seconds: float
    output: str
    state: Any = None


class Launcher:
    """A process that has imported torch and starts ranks of scripts by forking; it ends with the `with` block."""

    def __enter__(self) -> "Launcher":
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

    def launch(self, script: Path, ranks: int) -> Run:
        """Run a script on so many ranks; it ends within LIMIT, and some seconds after all ranks wait for each other.

        Ranks that never met in init_process_group are launched a second time: on a busy machine that happened once in
        some hundred launches of right scripts, for a reason that is not known.
        """
        run = self._launch(script, ranks)
        unmet = run.stalled and all(rank.place and WHERE_RANKS_MEET in rank.place[1] for rank in run.ranks)
        return self._launch(script, ranks) if unmet else run

    def _launch(self, script: Path, ranks: int) -> Run:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hpdl-script-") as name:
            folder = Path(name)
            with self._lock:
                print(json.dumps([str(script), name, ranks]), file=self._process.stdin, flush=True)
                pid = int(self._process.stdout.readline())  # type: ignore[union-attr]
            try:
                stalled, late = wait(pid, folder, ranks, began)
                found = [read(folder, rank) for rank in range(ranks)]  # before they are ended, one after the other
            finally:
                end(pid, folder, ranks)
            out = folder / "torchrun.out"
            output = out.read_text(errors="replace") if out.exists() else ""
            return Run(found, stalled, late, time.monotonic() - began, output, saved(folder / "0" / SAVED))


def wait(pid: int, folder: Path, ranks: int, began: float) -> tuple[bool, bool]:
    """Wait for the end of the launcher `pid`. Returns (whether ranks wait for each other, whether the time is up)."""
    since: dict[int, Any] = {}
    while psutil.pid_exists(pid):
        if time.monotonic() - began > LIMIT:
            return False, True
        live = [rank for rank in range(ranks) if not read(folder, rank).first("ended")]
        now = {rank: look(folder, rank) for rank in live}
        for rank, beat in now.items():
            known = since.get(rank)
            if beat is None or known is None or moved(known, beat):
                since[rank] = beat
        beats = [(since.get(rank), now[rank]) for rank in live]
        if beats and all(old and new and new["time"] - old["time"] > patience(new["place"]) for old, new in beats):
            return True, False
        time.sleep(0.1)
    return False, False


def patience(place: tuple[int, str]) -> float:
    """Return the seconds without progress, at this (line, its text), after which ranks count as stuck."""
    return RENDEZVOUS_STALL if WHERE_RANKS_MEET in place[1] else STALL


def moved(old: Any, new: Any) -> bool:
    """Whether a rank has come to another line, or has computed or waited for a core."""
    return old["place"] != new["place"] or new["cpu"] - old["cpu"] > IDLE * max(new["time"] - old["time"], 0.5)


def look(folder: Path, rank: int) -> Any:
    """Where a rank is: a dict of place, cpu and time; None if it has not come to the script."""
    try:
        beat = json.loads((folder / f"{rank}.now").read_text())
    except FileNotFoundError:
        return None
    return beat if beat["place"] else None


def read(folder: Path, rank: int) -> Rank:
    """What there is to know about a rank."""
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in paths(folder, rank)]
    events = [json.loads(line) for line in texts[0].split("\n")[:-1]]
    beat, place = look(folder, rank), None
    if beat:
        place = tuple(beat["place"])
    works_in = folder / str(rank)
    files = sorted(path.name for path in works_in.iterdir() if path.is_file()) if works_in.exists() else []
    return Rank(events, place, texts[1], files)


def paths(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"{rank}.jsonl", folder / f"{rank}.out"


def end(pid: int, folder: Path, ranks: int) -> None:
    """End the launcher `pid` and its ranks, whatever they do."""
    if psutil.pid_exists(pid):
        for member in [read(folder, rank).first("began").get("pid") for rank in range(ranks)]:
            if member:
                kill(os.kill, member)
        kill(os.killpg, pid)
        while psutil.pid_exists(pid):
            time.sleep(0.01)


def kill(how: Any, pid: int) -> None:
    try:
        how(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def saved(path: Path) -> Any:
    """{name: tensor} of a file of torch.save, None if there is none; the exception where it cannot be read."""
    if not path.exists():
        return None
    import torch

    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        return error
