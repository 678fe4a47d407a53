"""What `hpdl plan` prints: what runs out, how long all wait, and what to paste."""

import datetime
import math
import re

from .plan import ENGINES, STEPS

UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
HEADROOM = 1.5  # of memory, above what was measured: attendees make mistakes
WORDS = {
    "login": "log in",
    "server": "start a server",
    "kernel": "open a notebook",
    "engines": "start engines",
    "torch": "import torch on them",
    "notebook": "run the notebook",
}


def memory(text):
    """Bytes of "256GB" (10^9) or "12GiB" (2^30). Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?[bB])", str(text).strip())
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"memory is a number with its unit, such as 256GB (10^9 bytes) or 12GiB (2^30), got {text!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])


def text(plan):
    """The whole report, without the constants."""
    parts = [head(plan), resources(plan), times(plan), verdict(plan)]
    if plan.fits:  # else there is no class to paste anything for
        parts += [settings(plan), reservation(plan)]
    return "\n\n".join(parts)


def head(plan):
    gpus = f" and {plan.gpus} GPU{'s' * (plan.gpus > 1)}" if plan.gpus else ""
    return (
        f"{count(plan.attendees, 'attendee')}, {count(plan.engines, 'engine')} each, on a node of "
        f"{count(plan.cores, 'core')}, {plan.memory / 1e9:,.0f} GB{gpus}"
    )


def count(n, word):
    return f"{n:,} {word}{'s' * (n != 1)}"


def resources(plan):
    """The table of what runs out, the first to hurt first."""
    lines = [
        f"{'resource':<20}{'one attendee':>16}{'the node':>16}{'fit':>8}{f'at {plan.attendees:,}':>10}  beyond that"
    ]
    for r in plan.resources():
        each, limit = (f"{value:,.{digits(value)}f} {r.unit}".rstrip() for value in (r.each, r.limit))
        used = f"{r.used(plan.attendees):.0%}"
        lines.append(f"{r.name:<20}{each:>16}{limit:>16}{r.fits:>8,}{used:>10}  {r.beyond}")
    return "\n".join(lines)


def digits(value):
    return 1 if value < 100 and value != int(value) else 0


def times(plan):
    """Seconds of each step, one alone and all at once."""
    lines = [f"{'when all at once':<24}{'one alone':>12}{f'the last of {plan.attendees:,}':>18}"]
    for step in STEPS:
        lines.append(f"{WORDS[step]:<24}{plan.costs[f'{step}_s']:>10.1f} s{plan.seconds(step):>16.1f} s")
    lines.append(f"{'all of it, with torch':<24}{'':>12}{plan.start_s:>16.1f} s")
    return "\n".join(lines)


def verdict(plan):
    """Who fits, what hurts first, engines per person: sentences."""
    rows = plan.resources()
    hard = next(row for row in rows if not row.turns)
    hurts = [turns(row) for row in rows[: rows.index(hard)]]
    hurts.append(f"{hard.name}, beyond {count(hard.fits, 'attendee')}: {hard.beyond}")
    said = [
        f"What hurts first: {'; then '.join(hurts)}.",
        f"Memory: {plan.attendee_MB() / 1e3:.2f} GB an attendee, {plan.memory_MB() / 1e3:.1f} GB in all. "
        f"Engines that do nothing keep {plan.attendees * plan.costs['idle_cores']:.1f} cores busy.",
    ]
    most = plan.most_engines()
    if plan.fits >= plan.attendees:
        said.append(f"Engines per person: {plan.engines}; up to {most} would fit.")
    else:
        less = f", or {count(most, 'engine')} each" if most else ""
        more = f"{plan.nodes} such nodes" if plan.nodes else "a larger node: no attendee fits on this one"
        said.append(f"Engines per person: {plan.engines} fit {plan.fits:,} of {plan.attendees:,}: take {more}{less}.")
    if plan.engines < ENGINES:
        said.append(f"The notebooks call lab.start({ENGINES}): attendees have to write lab.start({plan.engines}).")
    if plan.gpus:
        said.append(gpu_sentence(plan))
    return "\n".join(said)


def turns(row):
    """How a resource that can be shared hurts."""
    if row.fits == 0:
        return f"{row.name}: even one attendee has fewer than wanted"
    return f"{row.name}, beyond {count(row.fits, 'attendee')}, who then take turns"


def gpu_sentence(plan):
    """How a class shares its GPUs."""
    at_once = plan.gpus // plan.gpu_engines
    idle = plan.gpus - plan.attendees * plan.gpu_engines
    if at_once == 0:
        return f"GPUs: one for {plan.gpu_engines} engines, which NCCL refuses to share: use it for lab.start(1) alone."
    turns = math.ceil(plan.attendees / at_once)
    said = f"GPUs: one for each of {plan.gpu_engines} engines, so {count(at_once, 'attendee')} at a time"
    if idle > 0:
        return f"{said}, which is all of them; {count(idle, 'GPU')} stay idle."
    return f"{said}, {count(turns, 'turn')} for all: memory of engines on GPUs was not measured."


def memory_limit(plan):
    """Bytes for `hpdl hub --memory`: a round number above what was measured."""
    return math.ceil(plan.attendee_MB() * HEADROOM / 100) * 10**8


def start_timeout(plan):
    """Seconds for a server to start while all start."""
    return max(60, 10 * math.ceil(3 * plan.seconds("server") / 10))


def settings(plan):
    """The hub's settings to paste, as arguments and as lines of a configuration."""
    gb, seconds = memory_limit(plan) / 1e9, start_timeout(plan)
    here = min(plan.attendees, plan.fits)
    lines = [
        "the hub, to paste",
        f"  hpdl hub --users {here} --engines {plan.engines} --memory {gb:g}GB --start-timeout {seconds}",
        "or, in a jupyterhub_config.py of yours",
        f"  c.JupyterHub.active_server_limit = {here}",
        f"  c.JupyterHub.concurrent_spawn_limit = {here}  # beyond it, browsers are told to try again",
        f"  c.Spawner.start_timeout = {seconds}",
        f"  c.Spawner.http_timeout = {seconds}",
        f"  c.Spawner.mem_limit = {memory_limit(plan)}  # bytes",
        f"  c.Spawner.cpu_limit = {min(plan.engines, plan.cores)}",
    ]
    if here * memory_limit(plan) > plan.memory:
        lines.append(
            f"  {here} limits of {gb:g} GB are more than the node has: good for all who work as measured, "
            "not for all who use up their limit"
        )
    return "\n".join(lines)


def reservation(plan, start=None):
    """Slurm's reservation to paste. start: datetime; default tomorrow at 9."""
    start = start or datetime.datetime.combine(datetime.date.today() + datetime.timedelta(days=1), datetime.time(9))
    whole = "; whole nodes, with their GPUs: PartitionName=... names where those are" if plan.gpus else ""
    return "\n".join(
        [
            f"Slurm, to paste; day, hours and the file with the attendees' accounts are yours to change{whole}",
            f"  scontrol create reservation ReservationName=hpdl StartTime={start:%Y-%m-%dT%H:%M:%S} Duration=08:00:00 "
            f"Users=$(paste -sd, attendees.txt) NodeCnt={plan.nodes}",
            f'  lab.start({plan.engines}, where="slurm", reservation="hpdl")',
        ]
    )
