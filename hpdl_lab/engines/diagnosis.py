"""Why engines did not start or how one ended, in one sentence with the remedy."""

import os
import re
import signal

from ..comm.errors import name_ranks
from ..features import dev_shm
from ..symptoms import TABLE, told_by
from . import session_dir

OFTEN = {
    signal.SIGKILL: "kill -9, or the machine ran out of memory",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGBUS: "a crash in compiled code, or /dev/shm is full",
}


def start_failure(path, n, gone, seconds):
    """The sentence for a start that failed: `gone` are the processes that have ended, `seconds` what it was given."""
    if "hosts" in gone:
        return last_line(tail(path, "hosts")) or "the process that holds the emulated hosts was killed: lab.restart()"
    for name in gone:
        return f"the {name} ended at the start: {cause(tail(path, name))}. Repair that, then call lab.start({n})"
    engines = tail(path, "engines")
    ended = [rank for rank in range(n) if os.path.exists(session_dir.exit_file(path, rank))]
    others = f". {dev_shm.of_others()}".removesuffix(". ")
    if ended:
        why = cause(engines) + (others if "MPIDI_POSIX" in engines else "")
        return f"{name_ranks(ended)} ended at the start: {why}. Repair that, then call lab.start({n})"
    started = sum(os.path.exists(session_dir.engine_socket(path, rank)) for rank in range(n))
    return (
        f"{started} of {n} engines answered within {seconds} s. The machine may be overloaded: start fewer engines. "
        f"The last thing they said: {cause(engines) or 'nothing'}{others}"
    )


def cause(log):
    """The symptom of which the log tells, with its fix, as `hpdl doctor` says it; else the last thing it says."""
    known = told_by(TABLE, log)
    return str(known[0]) if known else last_line(log)


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
        return status.strip() or "ended"  # what the relay says of an engine that could not say it itself
    if code - 128 not in set(signal.Signals):
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
