"""Notebook 14: what makes a job slow, in logs of other jobs than the text shows."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from operator import index

from ...performance.nccl_log import FAULTS, NcclJob, diagnose_log, write_log
from ...units import counted
from ..checkers import because
from ..ranks import alone, capital
from ..record import Broken, Exercise, Passed, Reason

HARMLESS = (
    "NCCL_SOCKET_IFNAME set by environment to eth0",
    "NCCL_IB_DISABLE set by environment to 0.",
    "NCCL_SHM_DISABLE set by environment to 0.",
    "NCCL_P2P_LEVEL set by environment to NVL",
    "NCCL_NET_GDR_LEVEL set by environment to PXB",
    "NCCL_IB_HCA set to mlx5",
    "transport/net_ib.cc:600 NCCL WARN NET/IB : Unable to open device mlx5_9",
)
SHOWN = {  # cause: the lines that make a setting at fault, or show its effect
    "none": "$^",
    "socket": r"NCCL_IB_DISABLE set by environment to 1|Socket|GDR 0",
    "shm": r"NCCL_P2P_(DISABLE set by environment to 1|LEVEL set by environment to LOC)|via SHM",
    "gdr": r"GDR_LEVEL set by environment to LOC|NCCL_IB_HCA set to mlx5_|GDR 0|via NET/IB/\d+$|> 0\)"
    r"|Using \[0\]mlx5_\d+:1/RoCE|HCA 0 \(distance 8",
}
INNOCENT = {  # what is in a line that is no sign of a fault: why
    "Plugin:": "plugin: NCCL prints this in every job, and then uses its own network code. How do the data travel?",
    "NCCL WARN": "warning: NCCL cannot open that adapter. Does a channel need it?",
    "     float     sum": "table: The table shows that a job is slow, not why. Small messages are slow in every job.",
    " / HCA": "far: That adapter is far from the GPU. Does a channel use it?",
}


def _jobs() -> Iterator[NcclJob]:
    """Yield jobs with each fault, on all nodes or on one, and jobs in which no setting does harm."""
    rng = random.Random(14)
    yield NcclJob("", 2, ("c301", "c302", "c303"), (), HARMLESS)
    for setting in FAULTS:
        for gpus, hosts in ((4, ("gpu-a", "gpu-b")), (8, ("x1", "x2")), (2, ("dl7", "dl8", "dl9"))):
            everywhere = gpus == 4 or setting in ("NCCL_IB_DISABLE", "NCCL_IB_HCA")
            on = range(len(hosts)) if everywhere else [len(hosts) - 1]
            yield NcclJob(setting, gpus, hosts, tuple(on), tuple(rng.sample(HARMLESS, len(HARMLESS))))
    yield NcclJob("NCCL_P2P_DISABLE", 1, ("n17", "n18"))  # no GPUs of one node exchange anything
    yield NcclJob("NCCL_IB_DISABLE", 8, ("n21",))  # and no nodes
    yield NcclJob("NCCL_IB_DISABLE", 1, ("n17", "n18"), harmless=("NCCL_P2P_DISABLE set by environment to 1",))


def _check_diagnose(fn: Callable[[str], tuple[int, str, str]]) -> Passed:
    cases = [*_jobs()]
    for seed, job in enumerate(cases):
        where = f"in the log of {counted(len(job.hosts), 'node')}, {counted(job.gpus, 'GPU')} per node"
        _check_log(fn, job, write_log(job, seed), where)
    good = sum(job.cause == "none" for job in cases)
    return Passed(f"right in {len(cases)} logs of other jobs; in {good} of them, no setting does harm")


def _check_log(fn: Callable[[str], tuple[int, str, str]], job: NcclJob, log: str, where: str) -> None:
    """Raise Broken unless fn finds in a log what makes the job slow."""
    got, lines = alone(fn, log, where=where), log.splitlines()
    try:
        number, cause, variable = got
        number, cause, variable = index(number), cause.strip().lower(), variable.strip().partition("=")[0]
    except (TypeError, ValueError, AttributeError):
        text = f"returns: {capital(where)}, your function returned {got!r}"
        raise Broken(f"{text}: return (line, cause, variable), a whole number and two texts.") from None
    if cause not in SHOWN:
        raise Broken(f"returns: {capital(where)}, your cause is {cause!r}: return one of {', '.join(SHOWN)}.")
    named = lines[number - 1] if 0 < number <= len(lines) else ""
    text = f"{capital(where)}, you say {cause!r}, line {number}" + (
        f': "{" ".join(named.split()).rstrip(".")}".' if named else "."
    )
    if cause != job.cause:
        raise because(_misread(job, cause, named, lines), text)
    shown = [i for i, line in enumerate(lines, start=1) if re.search(SHOWN[cause], line)] or [0]
    if number not in shown:
        why = _innocent(named) or "line: This line neither makes the setting nor shows its effect."
        if number + 1 in shown:
            why = f"count: Line {number + 1} would be right. Which number has the first line of the log?"
        raise because(
            why if job.setting else "line: No line is at fault: return line 0.", f"{text} The cause is right."
        )
    if variable != (job.setting if cause != "none" else ""):
        raise because(_other(variable, job, log), f"{text} Your variable is {variable!r}.")


def _misread(job: NcclJob, cause: str, named: str, lines: list[str]) -> Reason:
    """Return why a cause is wrong."""
    if not re.search(SHOWN[job.cause], named) and (why := _innocent(named)):
        return why
    ways = [line.partition(" via ")[2] for line in lines if " via " in line]
    if job.cause == "none":
        return f"effect: The log has {len(ways)} lines with 'via'. Do the data travel in this way in any of them?"
    if cause == "none" and len(job.on) < len(job.hosts):
        return f"ranks: Node {job.hosts[job.on[0]]} makes a setting that does harm. Do you read the lines of all ranks?"
    if (cause, job.cause) == ("gdr", "socket"):
        return "order: Over Ethernet, GPUDirect RDMA is always off. Which network do the channels name?"
    slow = [way for way in ways if re.search(SHOWN[job.cause], f"via {way}")]
    return f"cause: {len(slow)} lines show a slow way, such as 'via {slow[0]}'. Which cause has this effect?"


def _innocent(named: str) -> Reason:
    """Return why a line is no sign of a fault, or ""."""
    if named.endswith(HARMLESS[:-1]):
        return "value: This setting has a harmless value. Which value would do harm?"
    return next((why for part, why in INNOCENT.items() if part in named), "")


def _other(variable: str, job: NcclJob, log: str) -> Reason:
    """Return why a variable is not the one that has to change."""
    if job.cause == "none":
        return "variable: No setting does harm, so return an empty text."
    if variable == "NCCL_SOCKET_IFNAME":
        return "variable: It chooses among Ethernet ports. Which setting turns InfiniBand off?"
    if variable and f"{variable} set" in log:
        return "variable: Its value does no harm. Which variable has a value that does?"
    return "variable: The log does not set it. Which variable with this effect does it set?"


EXERCISES = (Exercise("14.7", "read NCCL's log", diagnose_log, 2, _check_diagnose),)
