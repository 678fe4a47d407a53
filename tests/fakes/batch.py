"""A batch system of this machine: PBS or LSF, by the name of the command, such as qsub or bkill.

    batch.py FOLDER serve              starts jobs, as a daemon of the system does
    batch.py FOLDER NAME ARGUMENTS     a command

While FOLDER/hold is there, jobs wait in the queue; FOLDER/calls has a line for each call. As the real ones do, it
refuses what it does not know, and copies a job's output when that has ended; PBS hands on none of the environment, and
starts the job in the home directory.
"""

import contextlib
import json
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
RESOURCES = r"select=\d+:ncpus=\d+:mpiprocs=\d+(:ngpus=\d+)?|place=scatter|walltime=\d+:\d\d:\d\d"
PBS = {"-N": r"\w{1,15}", "-j": "oe", "-o": "/.+", "-l": RESOURCES, "-q": ".+", "-A": r"\w+"}
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
    (HERE / f"{number}.options").write_text(json.dumps(options))
    job = {"output": options["-o"], "environment": dict(environment), "folder": folder}
    (HERE / f"{number}.new").write_text(json.dumps(job))
    (HERE / f"{number}.new").rename(HERE / f"{number}.waits")
    return number


def serve():
    jobs = {}  # number -> (process, file for its output)
    while True:
        for file in [] if (HERE / "hold").exists() else HERE.glob("*.waits"):
            job, number, spool = json.loads(file.read_text()), file.stem, HERE / f"{file.stem}.spool"
            how = {"env": job["environment"], "cwd": job["folder"], "start_new_session": True}
            with open(spool, "wb") as output:
                command = ["/bin/sh", HERE / f"{number}.script"]
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, **how
                )
            jobs[number] = process, job["output"]
            (HERE / f"{number}.runs").write_text(str(process.pid))
            file.unlink()
        for number, (process, output) in list(jobs.items()):
            if process.poll() is not None:
                (HERE / f"{number}.runs").unlink()
                del jobs[number]
                with contextlib.suppress(OSError):
                    shutil.copyfile(HERE / f"{number}.spool", output)
        time.sleep(0.02)


def kill(number):
    """End its processes as a node does: asked first."""
    with contextlib.suppress(FileNotFoundError):
        return (HERE / f"{number}.waits").unlink()
    job = psutil.Process(int((HERE / f"{number}.runs").read_text()))
    processes = [*job.children(recursive=True), job]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        processes = psutil.wait_procs(processes, timeout=3)[1]
    return None


def main():
    name, arguments = NAME, sys.argv[3:]
    if name == "serve":
        serve()
    with open(HERE / "calls", "a") as calls:
        print(name, *arguments, file=calls)
    number = arguments[-1] if arguments else ""
    there = any((HERE / f"{number}.{state}").exists() for state in ("waits", "runs"))
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
        if not there:
            sys.exit(f"{name}: Unknown Job Id {number}")
        kill(number)
    elif name == "qstat":
        sys.exit(0 if there else 35)
    elif name == "bjobs":
        print("RUN" if there else "EXIT")


main()
