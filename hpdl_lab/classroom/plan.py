"""Will a class fit on a node, what hurts first, how long do all wait when all begin at once, and what to paste.

A resource is a line: base + attendees * each <= limit. The one that allows the fewest attendees hurts first.

Times: alone, one attendee takes what was measured alone. When N begin at once, they share the cores, and the hub, which
is one Python process, takes one after the other:

    seconds until the last of N is ready = max(alone, N * processor seconds / cores, N * processor seconds of the hub)
"""

import datetime
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..features import dev_shm

ENGINES = 4  # what `lab.start(4)` in the notebooks starts
SYSTEM_MB = 1500  # left to the system, of memory
LAB_START_SECONDS = 60  # after which lab.start gives up: engines/cluster.py
THREADS = 32768  # kernel.pid_max and the like, where the system does not raise it
HEADROOM = 1.5  # of memory, above what was measured: attendees make mistakes
MOST = {"attendees": 10_000, "cores": 10_000, "gpus": 1_000, "engines": 1_000}  # a typing mistake beyond
STEPS = ("login", "server", "kernel", "engines", "torch", "notebook")  # what all do, in this order; see drill.py
BEYOND = {  # {resource: what happens where there is too little of it, and the remedy}
    "memory": "the system kills processes, or swaps: fewer engines, or another node",
    "cores, at the start": f"lab.start gives up after {LAB_START_SECONDS} s where all call it at once: do it in groups",
    "/dev/shm": "lab.start says so: mount -o remount,size=... /dev/shm; a container: --shm-size",
    "threads": "no process can start: sysctl kernel.pid_max kernel.threads-max, and TasksMax of the hub's service",
    "cores, to compute": "engines take turns when all compute at once: slower, and plots say oversubscribed",
    "GPUs": "NCCL refuses ranks that share a GPU: take turns on them, by Slurm's queue",
}
IN_TURNS = ("cores, to compute", "GPUs")  # a class that wants more of these still works


class Resource(NamedTuple):
    """One thing that runs out: base + N * each, of `limit`, in `unit`."""

    name: str  # in BEYOND
    unit: str
    base: float
    each: float
    limit: float

    @property
    def fits(self):
        """Attendees for whom there is enough."""
        return max(0, math.floor((self.limit - self.base) / self.each + 1e-9))

    def used(self, attendees):
        """Share of the limit that so many attendees use."""
        return (self.base + attendees * self.each) / self.limit


@dataclass(frozen=True)
class Plan:
    """A class on one node. costs: costs.Costs; memory: bytes; engines: of each attendee."""

    costs: object
    attendees: int
    cores: int
    memory: int
    gpus: int = 0
    engines: int = ENGINES

    def __post_init__(self):
        for name, most in MOST.items():
            value, least = getattr(self, name), 0 if name == "gpus" else 1
            if not least <= value <= most:
                raise ValueError(f"{name} is a number from {least} to {most:,}, got {value:,}")
        if self.memory / 1e6 <= SYSTEM_MB + self.once_MB:
            raise ValueError(
                f"{self.memory / 1e9:g} GB of memory are less than system, hub and programs take, about "
                f"{(SYSTEM_MB + self.once_MB) / 1e3:.1f} GB: no attendee fits"
            )

    @property
    def once_MB(self):
        """Memory of the hub and of program files, which all attendees share."""
        return self.costs["hub_MB"] + self.costs["files_MB"]

    def each(self, what, step="notebook"):
        """Of one attendee: "MB" or "threads" after `step`, "cpu_s" (processor seconds) for it."""
        return self.costs[f"{step}_{what}"] + self.engines * self.costs[f"{step}_engine_{what}"]

    def memory_MB(self, step="notebook"):
        """Memory of the hub and all attendees after `step`."""
        return self.once_MB + self.attendees * self.each("MB", step)

    def seconds(self, step):
        """Until the last attendee has done `step`, when all begin at once."""
        shared = self.attendees * self.each("cpu_s", step) / self.cores
        return max(self.costs[f"{step}_s"], shared, self.attendees * self.costs[f"{step}_hub_cpu_s"])

    def resources(self):
        """[Resource], the one that hurts first first."""
        memory_MB, n = self.memory / 1e6, self.engines
        shm_base = dev_shm.LEAST / 1e6 if n > 1 else 0  # what the last `lab.start` wants to see free
        found = [
            Resource("memory", "MB", SYSTEM_MB + self.once_MB, self.each("MB"), memory_MB),
            Resource("cores, at the start", "cores", 0, self.each("cpu_s", "engines") / LAB_START_SECONDS, self.cores),
            Resource("cores, to compute", "cores", 0, n, self.cores),
            Resource("/dev/shm", "MB", shm_base, n * self.costs["shm_MB"], memory_MB / 2),
            Resource("threads", "", 0, self.each("threads"), THREADS),
        ]
        if self.gpus:
            found.append(Resource("GPUs", "", 0, self.gpu_engines, self.gpus))
        return sorted(found, key=lambda resource: (resource.fits, -resource.used(self.attendees)))

    @property
    def gpu_engines(self):
        """Engines that one attendee has on GPUs of their own at a time: two are the fewest that send anything."""
        return min(2, self.engines)

    @property
    def fits(self):
        """Attendees who fit on the node, what is taken in turns apart."""
        return min(resource.fits for resource in self.resources() if resource.name not in IN_TURNS)

    @property
    def nodes(self):
        """Nodes like this one that hold the class; 0 where not even one attendee fits on one."""
        return math.ceil(self.attendees / self.fits) if self.fits else 0

    def most_engines(self):
        """The most engines with which the class still fits on the node; 0 where it does not with one."""
        numbers = range(1, MOST["engines"] + 1)
        return max((n for n in numbers if replace(self, engines=n).fits >= self.attendees), default=0)


# -- what is printed ---------------------------------------------------------------------------------------------------


def text(plan):
    """The whole report, without the constants."""
    gpus = f" and {count(plan.gpus, 'GPU')}" if plan.gpus else ""
    head = (
        f"{count(plan.attendees, 'attendee')}, {count(plan.engines, 'engine')} each, on a node of "
        f"{count(plan.cores, 'core')}, {plan.memory / 1e9:,.0f} GB{gpus}"
    )
    parts = [head, resources(plan), times(plan), verdict(plan)]
    if plan.fits:  # else there is no class to paste anything for
        parts += [settings(plan), reservation(plan)]
    return "\n\n".join(parts)


def count(n, word):
    return f"{n:,} {word}{'s' * (n != 1)}"


def table(columns, rows, left=(0,)):
    """A Markdown table of texts that reads well in a terminal. left: columns of words, the others are numbers."""
    widths = [max(3, *map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = [f":{'-' * (w - 1)}" if i in left else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    pads = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    cells = ([pad(c, w) for pad, c, w in zip(pads, row, widths, strict=True)] for row in (columns, rule, *rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def resources(plan):
    """The table of what runs out, the first to hurt first."""
    rows = []
    for r in plan.resources():
        each, limit = (f"{v:,.{int(v < 100 and v != int(v))}f} {r.unit}".rstrip() for v in (r.each, r.limit))
        rows.append([r.name, each, limit, f"{r.fits:,}", f"{r.used(plan.attendees):.0%}", BEYOND[r.name]])
    return table(("resource", "one attendee", "the node", "fit", f"at {plan.attendees:,}", "beyond that"), rows, (0, 5))


def times(plan):
    """Seconds of each step, one alone and all at once."""
    rows = [[step, f"{plan.costs[f'{step}_s']:.1f} s", f"{plan.seconds(step):.1f} s"] for step in STEPS]
    rows.insert(-1, ["all until torch", "", f"{sum(plan.seconds(step) for step in STEPS[:-1]):.1f} s"])
    return table(("when all at once", "one alone", f"the last of {plan.attendees:,}"), rows)


def verdict(plan):
    """Who fits, what hurts first, engines per person: sentences."""
    hurts = []
    for row in plan.resources():
        limited = f"{row.name}, beyond {count(row.fits, 'attendee')}"
        if row.name not in IN_TURNS:
            hurts.append(f"{limited}: {BEYOND[row.name]}")
            break
        none = f"{row.name}: even one attendee has fewer than wanted"
        hurts.append(f"{limited}, who then take turns" if row.fits else none)
    said = [
        f"What hurts first: {'; then '.join(hurts)}.",
        f"Memory: {plan.each('MB') / 1e3:.2f} GB an attendee, {plan.memory_MB() / 1e3:.1f} GB in all.",
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
        said.append(f"GPUs: {shared_gpus(plan, plan.gpu_engines)}.")
    return "\n".join(said)


def shared_gpus(plan, each):
    """How a class shares its GPUs. each: engines that one attendee has on them."""
    idle, at_once = plan.gpus - plan.attendees * each, plan.gpus // each
    if at_once == 0:
        return f"one for {each} engines, which NCCL refuses to share: use it for lab.start(1) alone"
    said = f"one for each of {each} engines, so {count(at_once, 'attendee')} at a time"
    if idle > 0:
        return f"{said}, which is all of them; {count(idle, 'GPU')} stay idle"
    turns = count(math.ceil(plan.attendees / at_once), "turn")
    return f"{said}, {turns} for all: memory of engines on GPUs was not measured"


def settings(plan):
    """The hub's settings to paste, as arguments and as lines of a configuration."""
    limit = math.ceil(plan.each("MB") * HEADROOM / 100) * 10**8  # bytes, a round number
    seconds = max(60, 10 * math.ceil(3 * plan.seconds("server") / 10))  # for a server to start while all start
    here = min(plan.attendees, plan.fits)
    lines = [
        "the hub, to paste",
        f"  hpdl hub --users {here} --engines {plan.engines} --memory {limit / 1e9:g}GB --start-timeout {seconds}",
        "or, in a jupyterhub_config.py of yours",
        f"  c.JupyterHub.active_server_limit = {here}",
        f"  c.JupyterHub.concurrent_spawn_limit = {here}  # beyond it, browsers are told to try again",
        f"  c.Spawner.start_timeout = {seconds}",
        f"  c.Spawner.http_timeout = {seconds}",
        f"  c.Spawner.mem_limit = {limit}  # bytes",
        f"  c.Spawner.cpu_limit = {min(plan.engines, plan.cores)}",
    ]
    if here * limit > plan.memory:
        lines.append(
            f"  {here} limits of {limit / 1e9:g} GB are more than the node has: good for all who work as measured, "
            "not for all who use up their limit"
        )
    return "\n".join(lines)


def reservation(plan, start=None):
    """Slurm's reservation to paste. start: datetime; default tomorrow at 9."""
    start = start or datetime.datetime.combine(datetime.date.today() + datetime.timedelta(days=1), datetime.time(9))
    whole = "; whole nodes, with their GPUs: PartitionName=... names where those are" if plan.gpus else ""
    return (
        f"Slurm, to paste; day, hours and the file with the attendees' accounts are yours to change{whole}\n"
        f"  scontrol create reservation ReservationName=hpdl StartTime={start:%Y-%m-%dT%H:%M:%S} Duration=08:00:00 "
        f"Users=$(paste -sd, attendees.txt) NodeCnt={plan.nodes}\n"
        f'  lab.start({plan.engines}, where="slurm", reservation="hpdl")'
    )
