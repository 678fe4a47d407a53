"""Why engines did not start or how one ended, in one sentence with the remedy."""

import errno
import os
import re
import signal

from ..comm.errors import name_ranks
from . import session_dir

PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
CONTROLLER_PORTS = 16  # that the controller binds on the loopback interface

NO_PORT = (os.strerror(errno.EADDRINUSE), "select_random_ports")  # in the controller's log

OFTEN = {
    signal.SIGKILL: "kill -9, or the machine ran out of memory",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGBUS: "a crash in compiled code, or /dev/shm is full",
}


def start_failure(path, n, running, seconds):
    """The sentence for a start that failed: `running` are the processes that live, `seconds` what it was given."""
    controller, engines = tail(path, "controller"), tail(path, "engines")
    if "controller" not in running and any(sign in controller for sign in NO_PORT):
        low, high = port_range()
        return (
            f"no free port on 127.0.0.1: the engines' controller needs {CONTROLLER_PORTS}, and all {high - low + 1:,} "
            f"of the system ({low}-{high}) are in use. Close programs that hold connections, or widen {PORT_RANGE}"
        )
    for name, log in (("controller", controller), ("engines", engines)):
        if name not in running:
            return f"the {name} ended at the start: {last_line(log)}. Repair that, then call lab.start({n})"
    started = sum(os.path.exists(session_dir.engine_socket(path, rank)) for rank in range(n))
    return (
        f"{started} of {n} engines answered within {seconds} s. The machine may be overloaded: start fewer engines. "
        f"The last thing they said: {last_line(engines) or 'nothing'}"
    )


def port_range():
    """First and last port that the system hands out."""
    with open(PORT_RANGE) as file:
        low, high = file.read().split()
    return int(low), int(high)


def tail(path, name, nbytes=8000):
    """The end of what process `name` printed."""
    try:
        with open(session_dir.log_file(path, name), errors="replace") as file:
            return file.read()[-nbytes:]
    except OSError:
        return ""


def last_line(log):
    """The last line that says something."""
    lines = [line.strip() for line in log.splitlines() if re.search(r"\w", line)]
    return lines[-1] if lines else ""


def ending(status):
    """How an engine ended, from the exit status that the shell wrote, such as "137"."""
    try:
        code = int(status)
    except ValueError:
        return "ended"
    if code <= 128:
        return f"ended with exit status {code}"
    number = signal.Signals(code - 128)
    hint = f": {OFTEN[number]}" if number in OFTEN else ""
    return f"was killed by signal {number.value} ({number.name}{hint})"


def dead_text(dead):
    """ "rank 2 was killed by signal 9 (SIGKILL: ...)" for {rank: how}."""
    ways = {}
    for rank, how in dead.items():
        ways.setdefault(how, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} {how}" for how, ranks in ways.items())
