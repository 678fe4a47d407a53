"""The plan of a class on a node: whether it fits, what runs out first, and how long all wait when all begin at once.

A resource is a line: base + attendees * each <= limit. The one that allows fewest attendees runs out first. When all
begin at once, they share the cores, and the hub, which is one Python process, takes one after the other:

    seconds until the last of N is ready = max(alone, N * processor seconds / cores, N * processor seconds of the hub)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ..features import dev_shm

ENGINES = 4  # what `lab.start(4)` in the notebooks starts
SYSTEM_MB = 1500  # left to the system, of memory
LAB_START_SECONDS = 60  # after which lab.start gives up: engines/cluster.py
THREADS = 32768  # kernel.pid_max and the like, unless the system raises it
MOST = {"attendees": 10_000, "cores": 10_000, "gpus": 1_000, "engines": 1_000}  # a typing mistake beyond
STEPS = ("login", "server", "kernel", "engines", "torch", "notebook")  # what all do, in this order; see drill.py
BEYOND = {  # {resource: what happens if there is too little of it, and the remedy}
    "memory": "the system kills processes, or swaps: fewer engines, or another node",
    "cores, at the start": f"lab.start gives up after {LAB_START_SECONDS} s if all call it at once: do it in groups",
    "/dev/shm": "lab.start says so: mount -o remount,size=... /dev/shm; a container: --shm-size",
    "threads": "no process can start: sysctl kernel.pid_max kernel.threads-max, and TasksMax of the hub's service",
    "cores, to compute": "engines take turns when all compute at once: slower, and plots say oversubscribed",
    "GPUs": "ranks that share a GPU need NCCL 2.30, or go through the host: take turns on them, by Slurm's queue",
}
IN_TURNS = ("cores, to compute", "GPUs")  # a class that wants more of these still works


class Constants(Protocol):
    """Measured constants by their names: a costs.ClassroomCosts."""

    @property
    def notebook(self) -> str: ...

    def __getitem__(self, name: str) -> float: ...


class Resource(NamedTuple):
    """A thing that runs out: base + N * each, out of `limit`, in `unit`."""

    name: str  # in BEYOND
    unit: str
    base: float
    each: float
    limit: float

    @property
    def fits(self) -> int:
        """Attendees for whom there is enough."""
        return max(0, math.floor((self.limit - self.base) / self.each + 1e-9))

    def used(self, attendees: int) -> float:
        """Return the share of the limit that so many attendees use."""
        return (self.base + attendees * self.each) / self.limit


@dataclass(frozen=True)
class ClassPlan:
    """A class on one node. memory: bytes; engines: of each attendee."""

    costs: Constants
    attendees: int
    cores: int
    memory: int
    gpus: int = 0
    engines: int = ENGINES

    def __post_init__(self) -> None:
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
    def once_MB(self) -> float:
        """Memory of the hub and of program files, which all attendees share."""
        return self.costs["hub_MB"] + self.costs["files_MB"]

    def each(self, what: str, step: str = "notebook") -> float:
        """Return what one attendee takes: "MB" or "threads" after `step`, "cpu_s" (processor seconds) for it."""
        return self.costs[f"{step}_{what}"] + self.engines * self.costs[f"{step}_engine_{what}"]

    def memory_MB(self, step: str = "notebook") -> float:
        """Return the memory of the hub and all attendees after `step`."""
        return self.once_MB + self.attendees * self.each("MB", step)

    def seconds(self, step: str) -> float:
        """Return the time until the last attendee has done `step`, when all begin at once."""
        shared = self.attendees * self.each("cpu_s", step) / self.cores
        return max(self.costs[f"{step}_s"], shared, self.attendees * self.costs[f"{step}_hub_cpu_s"])

    def resources(self) -> list[Resource]:
        """Return all resources, in the order in which they run out."""
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
    def gpu_engines(self) -> int:
        """Engines that one attendee has on GPUs of their own at a time: two are the fewest that send anything."""
        return min(2, self.engines)

    @property
    def fits(self) -> int:
        """Attendees who fit on the node, what is taken in turns apart."""
        return min(resource.fits for resource in self.resources() if resource.name not in IN_TURNS)

    @property
    def nodes(self) -> int:
        """Nodes like this one that hold the class; 0 if not even one attendee fits on one."""
        return math.ceil(self.attendees / self.fits) if self.fits else 0

    def most_engines(self) -> int:
        """Return the most engines with which the class still fits on the node; 0 if it does not fit with one."""
        numbers = range(1, MOST["engines"] + 1)
        return max((n for n in numbers if replace(self, engines=n).fits >= self.attendees), default=0)
