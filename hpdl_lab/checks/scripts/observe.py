"""The ranks of training scripts under observation: python -m hpdl_lab.checks.scripts.observe

It imports torch once, and forks a process for each line [SCRIPT, FOLDER, RANKS] of its input, whose number it prints.
The script is left as it is, and runs as `__main__`, observed as by `hpdl watch` (hpdl_lab/watch/observer.py). Each rank
works in a folder of its own, so that two ranks that save the same file are seen.

    FOLDER/torchrun.out what the launcher of the ranks printed
    FOLDER/0/           where rank 0 works
    FOLDER/0.out        what it printed
    FOLDER/checkpoint/  a folder of all ranks, "checkpoint" for each
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from ...features.freed_memory import uncollected
from ...watch.observer import NAMED, Observer
from ...watch.training import install
from .launch import SHARED

IMPORTED = (  # what a rank may need, and what takes it longest
    "hpdl_lab.data.text",
    "hpdl_lab.models.gpt",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)


def _serve() -> None:
    """Fork a process for each line of input, until there is no more."""
    with uncollected():
        for module in IMPORTED:
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # not waited for: they are gone when they have ended
    for line in sys.stdin:
        if pid := os.fork():
            print(pid, flush=True)
        else:
            script, folder, ranks = json.loads(line)
            return _main(Path(script), Path(folder), ranks)


def _main(script: Path, folder: Path, ranks: int) -> None:
    """Run the script on one rank, here, or on several, by what torchrun is made of, in a session of its own.

    torchrun starts each rank as a new Python, which imports torch; these are forked from this process, which has.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with open(os.devnull) as nothing, open(folder / "torchrun.out", "wb") as out:
        for descriptor, file in enumerate((nothing, out, out)):
            os.dup2(file.fileno(), descriptor)
    if ranks == 1:
        sys.exit(_run_rank(script, folder))
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),  # by itself it leaves a folder in TMPDIR
    )
    elastic_launch(config, _run_rank)(script, folder)


def _run_rank(script: Path, folder: Path) -> int:
    """Run the script as this rank, under observation; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # at once, also in the midst of a collective
    rank = int(os.environ.get("RANK", "0"))
    (folder / str(rank)).mkdir(exist_ok=True)
    os.chdir(folder / str(rank))
    (folder / SHARED).mkdir(exist_ok=True)
    os.symlink(folder / SHARED, SHARED)  # a checkpoint that all ranks write has one folder, as on a shared file system
    with open(folder / f"{rank}.out", "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ[NAMED] = "1"
    observer = install(folder).observer
    observer.begin()
    sys.argv, sys.path[0] = [str(script)], str(script.parent)
    status = _observed(observer, script)
    sys.stdout.flush()
    if status and "RANK" in os.environ:
        sys.exit(status)  # elastic_launch ends the other ranks
    return status


def _observed(observer: Observer, script: Path) -> int:
    """Run the script to its end; note and print what it raises, from its own lines on. Returns the exit status."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    except BaseException as error:
        observer.raised(error)
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace or error.__traceback__))
        return 1
    observer.end()
    return 0


if __name__ == "__main__":
    _serve()
