"""The launch of a script as its author would, under observation, until it has ended or its ranks are stuck."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from .. import features
from ..comm.errors import name_ranks
from ..features import dev_shm
from .records import SILENT, Beat, WatchedRun, code_of, line_name, pids, read_beat, read_ranks

PATIENCE = 15.0  # s in which no rank computes and none moves to another line: they wait for each other
IDLE = 0.03  # of a core: a rank that waits takes 0.01 for the look at itself, one that computes more
POLL, SHOW = 0.1, 1.0  # s
MONITOR = 1  # s between two looks of torchrun at its ranks
ANSWER = 3.0  # s for ranks to note their collectives
LAST = 10.0  # s for processes to end after a signal
MEETING = ("init_process_group", "init_device_mesh")
MEETING_PATIENCE = 30.0  # s, while the launcher works for ranks that meet: a busy machine may delay it
OPTIONS_WITH_VALUES = re.compile(  # options of torchrun and of ours that take the next word
    r"^(--(nproc[-_]per[-_]node|nnodes|node[-_]rank|master[-_](addr|port)|rdzv[-_](backend|endpoint|id|conf)|max[-_]restarts"
    r"|monitor[-_]interval|start[-_]method|role|log[-_]dir|redirects|tee|local[-_](addr|ranks[-_]filter)|event[-_]log[-_]handler"
    r"|json|trace|patience|logs[-_]specs|numa[-_]binding|signals[-_]to[-_]handle|virtual[-_]local[-_]rank)|-[rtn])$"
)
SITE = Path(__file__).parent / "site"
LAUNCHERS = ("mpiexec", "mpirun", "srun")  # in front of a script they run as typed: their ranks inherit the environment


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split torchrun's command line into (its options, the script or module and its arguments)."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        if rest[0] in ("-m", "--module"):
            return options, rest
        options.append(rest.pop(0))
        if OPTIONS_WITH_VALUES.match(options[-1]) and rest:
            options.append(rest.pop(0))
    return options, rest


def command_of(words: list[str], mpi: bool = False) -> tuple[list[str], str]:
    """Return (the command that launches it, the name of the script).

    Without options of torchrun the script runs as `python SCRIPT`, and starts its ranks itself, as mp.spawn does; with
    one of LAUNCHERS in front of it, or torchrun, as typed.
    """
    options, script = split(words)
    if script and not options and script[0] == "torchrun":
        return command_of(script[1:])
    if script and not options and Path(script[0]).name in LAUNCHERS:
        return script, next((word for word in script if word.endswith(".py")), script[-1])
    module = bool(script) and script[0] in ("-m", "--module")
    if not script or module and len(script) < 2:
        raise ValueError("which script? hpdl watch --nproc-per-node 4 train.py")
    name = script[1] if module else script[0]
    if not module and not Path(name).is_file():
        raise FileNotFoundError(f"{name} is not there: hpdl watch [OPTIONS OF torchrun] SCRIPT [ITS ARGUMENTS]")
    program = ["-m", *script[1:]] if module else script
    if mpi:
        return [str(features.mpiexec()), *options, sys.executable, "-u", *program], name
    if not options:
        return [sys.executable, "-u", *program], name
    alone = not re.search(r"--(standalone|nnodes|rdzv|master|node)", " ".join(options))
    options = ["--standalone", *options] if alone else options
    if not any(option.startswith(("--monitor-interval", "--monitor_interval")) for option in options):
        options = [f"--monitor-interval={MONITOR}", *options]  # meanwhile ranks that need a dead one report it
    return [sys.executable, "-m", f"{__package__}.torchrun", *options, *program], name


def observing_environment(folder: Path, words: list[str]) -> dict[str, str]:
    """Return the environment in which every Python observes itself, and notes that in `folder`."""
    path = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {"TORCH_FR_BUFFER_SIZE": "5000", **os.environ, "HPDL_WATCH": str(folder), "PYTHONPATH": path}
    several = re.search(r"--nproc[-_]per[-_]node[= ](?!1\b)\d", " ".join(words))
    return {"OMP_NUM_THREADS": "1", **given} if several else given  # as torchrun, which warns of it at length


def run_watched(
    words: list[str],
    mpi: bool = False,
    patience: float = PATIENCE,
    say: Callable[[str], None] = lambda text: None,
    output: IO[str] | IO[bytes] | int | None = None,
) -> WatchedRun:
    """Run a script under observation until it ends, it is stuck, or Ctrl-C.

    Args:    words: options of torchrun (of mpiexec), the script, its arguments. patience: s without any progress after
             which ranks that wait for each other are ended. say: called with a line about the running script, once in a
             second. output: of the script, a file; None: as it is.
    Returns: Run. Raises: ValueError, FileNotFoundError.
    """
    command, name = command_of(words, mpi)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hpdl-watch-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        process = subprocess.Popen(
            command,
            env=observing_environment(folder, words),
            stdout=output,
            stderr=output and subprocess.STDOUT,
            start_new_session=True,
        )
        several_hosts = bool(re.search(r"--nnodes[= ](?!1\b)", " ".join(words)))
        stalled = interrupted = False
        seen = None
        with _interruptible() as interrupts, _ended_at_last(process):
            stall = Stall(folder, patience, process.pid)
            shown = 0.0
            while process.poll() is None:
                if interrupts:
                    interrupted = True
                    break
                if stall.stuck() and not several_hosts:
                    stalled = True
                    break
                if time.monotonic() - shown > SHOW:
                    shown = time.monotonic()
                    say(stall.line())
                time.sleep(POLL)
            if process.poll() is None:
                request_collectives(folder, _living(folder))
                seen = read_ranks(folder)  # before they get the signal
                _end(process, signal.SIGINT if interrupted else signal.SIGTERM)
        code = process.wait()
        ranks, others = seen or read_ranks(folder)
        failures = folder / "failures.json"
        failed = [(r, pid, code) for r, pid, code in json.loads(failures.read_text())] if failures.exists() else []
    seconds = time.monotonic() - began
    return WatchedRun(name, ranks, others, seconds, code if code >= 0 else 128 - code, stalled, interrupted, failed)


@contextmanager
def _ended_at_last(process: subprocess.Popen[bytes]) -> Generator[None]:
    """End the launcher at the end of the block if it still runs, whatever has happened."""
    try:
        yield
    finally:
        if process.poll() is None:
            _end(process, signal.SIGTERM)


@contextmanager
def _interruptible() -> Generator[list[int]]:
    """Keep Ctrl-C and SIGTERM in the list that it yields: the script's processes get them later."""
    found: list[int] = []
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        try:
            before[number] = signal.signal(number, lambda number, frame: found.append(number))
        except ValueError:  # not in the main thread: there Ctrl-C does not arrive either
            break
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _living(folder: Path) -> list[int]:
    """Return the processes that are observed and have not ended."""
    return [pid for pid in pids(folder) if _is_running(pid)]


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def request_collectives(folder: Path, members: list[int]) -> None:
    """Have processes note their collectives, and wait until they have, or for some seconds."""
    asked = folder / "ask"
    asked.touch()
    when, began = str(asked.stat().st_mtime_ns), time.monotonic()

    def answered(pid: int) -> bool:
        path = folder / f"{pid}.answered"
        return path.exists() and path.read_text() >= when

    while time.monotonic() - began < ANSWER and not all(answered(pid) for pid in members):
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """End the launcher and all that it has started: by a signal, and after some seconds by force."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    shared = dev_shm.mapped(member.pid for member in family)
    for member in reversed(family):  # ranks first: stuck in C++ they would not react to their launcher
        with suppress(psutil.NoSuchProcess):
            member.send_signal(number)
    began = time.monotonic()
    while time.monotonic() - began < LAST and any(_is_running(member.pid) for member in family):
        if process.poll() is not None and time.monotonic() - began > 2:
            break
        time.sleep(POLL)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    for path in shared:  # MPICH leaves its files behind when its ranks are ended
        if "/mpich_shm_" in path and Path(path).exists():
            Path(path).unlink()


class Stall:
    """A search for ranks that wait for each other: none computes, none moves, and at least one is in communication."""

    def __init__(self, folder: Path, patience: float, launcher: int) -> None:
        self.folder, self.patience, self.launcher = folder, patience, launcher
        self.since: dict[int, Beat] = {}
        self.gone: set[int] = set()
        self.waiting = ""
        self.shown = (0.0, 0)  # (s, examples) of the last line

    def stuck(self) -> bool:
        """Return True if all ranks are stuck, after a look at each."""
        self.waiting = ""
        now: dict[int, Beat] = {}
        for pid in pids(self.folder):
            beat: Beat = {} if pid in self.gone else read_beat(self.folder, pid)
            if pid not in self.gone and not _is_running(pid):
                self.gone.add(pid)
            elif beat and (beat.get("place") or beat.get("call")):
                now[pid] = beat
        for pid, beat in now.items():
            known = self.since.get(pid)
            if known is None or moved(known, beat):
                self.since[pid] = beat
        idle = {pid: beat for pid, beat in now.items() if self.idle_s(pid, beat) > self.limit(beat)}
        if not now or len(idle) < len(now):
            return False
        return self.judged(now)

    def idle_s(self, pid: int, beat: Beat) -> float:
        silent = time.monotonic() - beat["time"]  # C++ may keep Python's lock, and then there is no beat
        return float(beat["time"] - self.since[pid]["time"]) + (silent if silent > SILENT else 0.0)

    def limit(self, beat: Beat) -> float:
        """Return the s without progress after which a rank at this place counts as stuck."""
        meets = beat.get("place") and any(name in beat["place"][2] for name in MEETING)
        patience = 4 * self.patience if beat.get("spins") else self.patience  # kernels may take long
        return max(patience, MEETING_PATIENCE) if meets else patience

    def judged(self, now: dict[int, Beat]) -> bool:
        """Return True if ranks that do nothing wait for each other: anything else may end by itself."""
        request_collectives(self.folder, [*now])
        ranks, _ = read_ranks(self.folder)
        members = [rank for rank in ranks if rank.pid in now]
        waits = [rank for rank in members if rank.now.get("call") or rank.pending or rank.silent]
        elsewhere = [rank for rank in members if rank not in waits]
        if waits and not elsewhere and not self.coming():
            return True
        if waits:
            where = ", ".join(f"rank {rank.number} is in {code_of(rank.place)}" for rank in elsewhere)
            who = name_ranks([rank.number for rank in waits])
            self.waiting = f"{who} wait in {line_name(waits[0].place)}, {where}: Ctrl-C ends it with a report"
        for pid, beat in now.items():
            self.since[pid] = beat
        return False

    def coming(self) -> bool:
        """Return True if the launcher has a Python that is not observed yet: a rank before its process group."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.launcher).children():
                words = " ".join(child.cmdline())
                seen = (self.folder / f"{child.pid}.jsonl").exists() or not _is_running(child.pid)
                if not seen and "python" in words and "resource_tracker" not in words:
                    return True
        return False

    def line(self) -> str:
        """Return the step, the speed and the memory of the script, in a line."""
        beats = [read_beat(self.folder, pid) for pid in pids(self.folder) if pid not in self.gone]
        working = [beat for beat in beats if beat.get("step")]
        if self.waiting or not working:
            return self.waiting
        beat = working[0]
        now, done = beat["time"], sum(b.get("examples", 0) for b in working)
        per_second = (done - self.shown[1]) / max(now - self.shown[0], 0.1)
        speed = f"{per_second:,.0f} examples/s | " if self.shown[0] else ""
        self.shown = (now, done)
        exposed = beat.get("ns", {}).get("exposed", 0) / max(1, beat.get("step_ns", 1))
        memory = max(b.get("memory", 0) for b in working)
        return f"step {beat['step']:,} | {speed}exposed communication {exposed:.0%} | {memory / 1e9:.2f} GB a rank"


def moved(old: Beat, new: Beat) -> bool:
    """Return True if a rank has come to another line, or has computed or waited for a core."""
    if (old.get("place"), old.get("top")) != (new.get("place"), new.get("top")):
        return True
    call = (old.get("call") or {}).get("number")
    if new.get("spins") or call is not None and call == (new.get("call") or {}).get("number"):
        return False  # CUDA, or one call of MPI, asks again and again whether the others have come
    return bool(new["cpu"] - old["cpu"] > IDLE * max(new["time"] - old["time"], 0.5))
