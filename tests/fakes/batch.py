"""A batch system of this machine: PBS or LSF, by the name of the command, such as qsub or bkill.

    batch.py FOLDER NAME ARGUMENTS

While FOLDER/hold is there, jobs wait in the queue; FOLDER/calls has a line for each call. As the real ones do, it
refuses what it does not know, and copies a job's output when that has ended; PBS hands on none of the environment, and
starts the job in the home directory.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

HERE, NAME = Path(sys.argv[1]), sys.argv[2]
SELECT = r"select=\d+:ncpus=\d+:mpiprocs=\d+(:ngpus=\d+)?|place=scatter|walltime=\d+:\d\d:\d\d"
PBS = {"-N": r"\w{1,15}", "-j": "oe", "-o": "/.+", "-l": SELECT, "-q": ".+", "-A": r"\w+"}
LSF = {"-J": r"\w+", "-o": "/.+", "-n": r"\d+", "-R": r"span\[ptile=\d+\]", "-q": ".+", "-P": r"\w+"}
LSF |= {"-W": r"(\d+:)?\d+", "-gpu": r"num=\d+/task"}
QUEUE = "x"


def directives(script, mark, known):
    """The options in `script`, by name: those in front of its first command."""
    found = {}
    for line in script.splitlines()[1:]:
        if line and not line.startswith("#"):
            break
        if line.startswith(mark):
            name, value = shlex.split(line.removeprefix(mark))
            if not re.fullmatch(known.get(name, "$"), value):
                sys.exit(f"{NAME}: illegal option or value -- {name} {value}")
            found[name] = f"{found.get(name, '')} {value}".strip()
    return found


def submit(script, options, environment, folder):
    number = str(100 + len(list(HERE.glob("*.script"))))
    (HERE / f"{number}.script").write_text(script)
    (HERE / f"{number}.options").write_text(repr(options))
    command = [sys.executable, __file__, str(HERE), "run", number, options["-o"]]
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    job = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True, **nothing)
    (HERE / f"{number}.pid").write_text(str(job.pid))
    return number


def run(number, output):
    """Wait, and run the job; its output is copied at its end, as from a node."""
    while (HERE / "hold").exists():
        time.sleep(0.05)
    spool = HERE / f"{number}.spool"
    with open(spool, "wb") as written:
        subprocess.run(["/bin/sh", HERE / f"{number}.script"], stdout=written, stderr=subprocess.STDOUT)
    with contextlib.suppress(OSError):
        shutil.copyfile(spool, output)


def running(number):
    with contextlib.suppress(OSError, psutil.Error):
        job = psutil.Process(int((HERE / f"{number}.pid").read_text()))
        return job if job.status() != psutil.STATUS_ZOMBIE else None
    return None


def kill(job):
    """End its processes as a node does: asked first."""
    processes = [*job.children(recursive=True), job]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        processes = psutil.wait_procs(processes, timeout=3)[1]


def main():
    name, arguments = NAME, sys.argv[3:]
    if name == "run":
        return run(*arguments)
    with open(HERE / "calls", "a") as calls:
        print(name, *arguments, file=calls)
    job = running(arguments[-1]) if arguments else None
    if name == "qsub":
        options = directives(script := Path(arguments[0]).read_text(), "#PBS", PBS)
        if options.get("-q", QUEUE) != QUEUE:
            sys.exit("qsub: Unknown queue")
        few = {name: os.environ[name] for name in ("HOME", "PATH", "HPDL_TEST_RUN") if name in os.environ}
        nodes = HERE / "nodefile"
        nodes.write_text(f"{os.uname().nodename}\n" * int(re.search(r"mpiprocs=(\d+)", options["-l"])[1]))
        print(f"{submit(script, options, few | {'PBS_NODEFILE': str(nodes)}, few['HOME'])}.pbs")
    elif name == "bsub":
        options = directives(script := sys.stdin.read(), "#BSUB", LSF)
        if options.get("-q", QUEUE) != QUEUE:
            sys.exit(f"{options['-q']}: No such queue. Job not submitted.")
        own = {"LSB_MCPU_HOSTS": f"{os.uname().nodename} {options['-n']}"}
        print(f"Job <{submit(script, options, os.environ | own, os.getcwd())}> is submitted to queue <{QUEUE}>.")
    elif name in ("qdel", "bkill"):
        if job is None:
            sys.exit(f"{name}: Unknown Job Id {arguments[-1]}")
        kill(job)
    elif name == "qstat":
        sys.exit(None if job else 35)
    elif name == "bjobs":
        print("RUN" if job else "EXIT")
    return None


main()
