"""Asking Slurm: commands that end in time, and what they say of a job, of its place in the queue, and of its nodes.

Whoever asks is ended by SIGTERM at any time, but never amid what has to be done on the way out (slurm_job.py): the
signal is blocked, and looked at where the process waits.
"""

import os
import signal
import subprocess
import tempfile
import time

SECONDS = 60  # for one command: without an answer they give up by themselves, after 10 to 20 s
LOOK_NOW = signal.SIGUSR1
LOOKED_AT = (signal.SIGTERM, signal.SIGCHLD, LOOK_NOW)


class Ended(Exception):
    """SIGTERM has come."""


def block_signals():
    """From now on signals are looked at where this process waits, in `pause` and `command`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, LOOKED_AT)


def pause(seconds):
    """Wait that long; less when a child ends, or when somebody wants news. Raises Ended."""
    seen = signal.sigtimedwait(LOOKED_AT, seconds)
    if seen is not None and seen.si_signo == signal.SIGTERM:
        raise Ended


def command(argv, text="", hopeless=None):
    """Run a command with `text` as its input: (exit code, what it printed, what it complained of).

    hopeless: words of a complaint after which it is waited for no longer. Raises Ended, when the command is dead.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        process = subprocess.Popen(argv, stdin=given, stdout=out, stderr=err, preexec_fn=unblock_signals)
        give_up = time.monotonic() + SECONDS
        try:
            while process.poll() is None and time.monotonic() < give_up and not (hopeless and hopeless in said(err)):
                pause(0.2)
        finally:
            process.kill()
            process.wait()
        return process.returncode, said(out), said(err)


def unblock_signals():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LOOKED_AT)


def said(file):
    """What a command has written into `file` so far."""
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")


def job(number):
    """What Slurm knows of job `number`: {"JobState": "PENDING", ...}; {} when it does not answer; None: forgotten."""
    code, out, err = command(["scontrol", "--oneliner", "show", "job", number])
    if code == 0:
        return dict(word.split("=", 1) for word in out.split() if "=" in word)
    return None if "Invalid job id" in err else {}


def place(number, partition):
    """How many jobs wait in `partition` before job `number`, as far as this user may see."""
    argv = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--sort=-p,i", "--format=%i"]
    numbers = command(argv)[1].split()
    return numbers.index(number) if number in numbers else 0


def hosts(nodes):
    """["n1", "n2"] for "n[1-2]"."""
    return command(["scontrol", "show", "hostnames", nodes])[1].split() if nodes else []


def failed(nodes):
    """{name of a node: why it is down}, of `nodes` such as "n[1-2]"."""
    states = "--states=DOWN,FAIL,NO_RESPOND,DRAIN"
    argv = ["sinfo", "--noheader", "--Node", f"--nodes={nodes}", states, "--format=%N %E"]
    lines = command(argv)[1].splitlines() if nodes else []
    return dict(line.split(" ", 1) for line in lines)


def partitions():
    """The names of all partitions, such as "gpu, short"."""
    names = command(["sinfo", "--noheader", "--format=%R"])[1].split()
    return ", ".join(dict.fromkeys(names)) or "none that you see"
