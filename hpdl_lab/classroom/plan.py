"""Will a class fit on a node, what hurts first, and how long do all wait when all begin at once?

A resource is a line: base + attendees * each <= limit. The one that allows the fewest attendees hurts first.

Times: alone, one attendee takes what was measured alone. When N begin at once, they share the cores, and the hub, which
is one Python process, takes one after the other:

    seconds until the last of N is ready = max(alone, N * processor seconds / cores, N * processor seconds of the hub)
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..features import dev_shm

ENGINES = 4  # what `lab.start(4)` in the notebooks starts
SYSTEM_MB = 1500  # left to the system, of memory
LAB_START_SECONDS = 60  # after which lab.start gives up: engines/cluster.py
FILES = 1024  # open files of one process, ulimit -n of most systems
THREADS = 32768  # kernel.pid_max and the like, where the system does not raise it
PORTS = 28232  # net.ipv4.ip_local_port_range, 32768 to 60999
ENGINES_PER_GPU = 1  # NCCL's own rule; from 2.30 on it can be told to serve more
MOST = {"attendees": 10_000, "cores": 10_000, "gpus": 1_000, "engines": 1_000}  # a typing mistake beyond
STEPS = ("login", "server", "kernel", "engines", "torch", "notebook")  # what all do, in this order; see drill.py


class Resource(NamedTuple):
    """One thing that runs out: base + N * each, of `limit`, in `unit`. beyond: what happens then, and the remedy."""

    name: str
    unit: str
    base: float
    each: float
    limit: float
    beyond: str
    turns: bool = False  # it can be taken in turns: a class that wants more of it still works

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
        if self.memory / 1e6 <= SYSTEM_MB + self.costs["hub_MB"] + self.costs["files_MB"]:
            raise ValueError(
                f"{self.memory / 1e9:g} GB of memory are less than system, hub and programs take, about "
                f"{(SYSTEM_MB + self.costs['hub_MB'] + self.costs['files_MB']) / 1e3:.1f} GB: no attendee fits"
            )

    # -- what one attendee takes --------------------------------------------------------------------------------------

    def attendee_MB(self, step="notebook"):
        """Memory of one attendee after `step`, program files apart."""
        c, n = self.costs, self.engines
        before = {"login": 0, "server": c["server_MB"], "kernel": c["server_MB"] + c["bare_kernel_MB"]}
        if step in before:
            return before[step]
        started = c["server_MB"] + c["cluster_MB"]
        kernel = c["kernel_worked_MB" if step == "notebook" else "kernel_MB"]
        engine = {"engines": "engine_MB", "torch": "engine_torch_MB", "notebook": "engine_worked_MB"}[step]
        return started + kernel + n * c[engine]

    def memory_MB(self, step="notebook"):
        """Memory of the hub and all attendees after `step`."""
        return self.costs["hub_MB"] + self.costs["files_MB"] + self.attendees * self.attendee_MB(step)

    def each(self, name):
        """Processes, threads, ... of one attendee: costs[name] and costs["engine_" + name] for each engine."""
        return self.costs[name] + self.engines * self.costs[f"engine_{name}"]

    def cpu_s(self, step):
        """Processor seconds of one attendee for `step`."""
        c, n = self.costs, self.engines
        if step == "engines":
            return c["start_cpu_s"] + n * c["engine_cpu_s"]
        if step == "torch":
            return n * c["torch_cpu_s"]
        return c[f"{step}_cpu_s"] * (n / c.engines if step == "notebook" else 1)

    def seconds(self, step):
        """Until the last attendee has done `step`, when all begin at once."""
        on_one_core = {"login": self.costs["login_cpu_s"], "server": self.costs["hub_cpu_s"]}.get(step, 0)
        shared = self.attendees * self.cpu_s(step) / self.cores
        return max(self.costs[f"{step}_s"], shared, self.attendees * on_one_core)

    @property
    def start_s(self):
        """Until the last attendee has engines with torch, when all log in at once."""
        return sum(self.seconds(step) for step in STEPS[:-1])

    # -- what runs out ------------------------------------------------------------------------------------------------

    def resources(self):
        """[Resource], the one that hurts first first."""
        c, memory_MB = self.costs, self.memory / 1e6
        shm_most = dev_shm.LEAST / 1e6 if self.engines > 1 else 0  # what the last `lab.start` wants to see free
        found = [
            Resource(
                "memory",
                "MB",
                SYSTEM_MB + c["hub_MB"] + c["files_MB"],
                self.attendee_MB(),
                memory_MB,
                "the system kills processes, or swaps: fewer engines, or another node",
            ),
            Resource(
                "cores, at the start",
                "cores",
                0,
                self.cpu_s("engines") / LAB_START_SECONDS,
                self.cores,
                f"lab.start gives up after {LAB_START_SECONDS} s where all call it at once: let them do so in groups",
            ),
            Resource(
                "cores, to compute",
                "cores",
                0,
                self.engines,
                self.cores,
                "engines of all take turns when all compute at once: slower, and plots say oversubscribed",
                turns=True,
            ),
            Resource(
                "/dev/shm",
                "MB",
                shm_most,
                self.engines * c["shm_MB"],
                memory_MB / 2,
                "lab.start says that it is too small: mount -o remount,size=... /dev/shm; a container: --shm-size",
            ),
            Resource(
                "threads",
                "",
                0,
                self.each("threads"),
                THREADS,
                "no process can start: sysctl kernel.pid_max kernel.threads-max, and TasksMax of the hub's service",
            ),
            Resource(
                "files of the hub",
                "",
                64,
                c["hub_files"],
                FILES,
                "the hub stops answering: ulimit -n, or LimitNOFILE of its service",
            ),
            Resource(
                "files of the proxy",
                "",
                64,
                c["proxy_files"],
                FILES,
                "the proxy refuses connections: ulimit -n, or LimitNOFILE of its service",
            ),
            Resource(
                "ports",
                "",
                0,
                c["ports"],
                PORTS,
                "kernels and servers find no port: sysctl net.ipv4.ip_local_port_range",
            ),
        ]
        if self.gpus:
            found.append(
                Resource(
                    "GPUs",
                    "",
                    0,
                    self.gpu_engines / ENGINES_PER_GPU,
                    self.gpus,
                    "NCCL refuses ranks that share a GPU: take turns on them, by Slurm's queue",
                    turns=True,
                )
            )
        return sorted(found, key=lambda resource: (resource.fits, -resource.used(self.attendees)))

    @property
    def gpu_engines(self):
        """Engines that one attendee has on GPUs at a time: two are the fewest that send anything."""
        return min(2, self.engines)

    @property
    def fits(self):
        """Attendees who fit on the node, what is taken in turns apart."""
        return min(resource.fits for resource in self.resources() if not resource.turns)

    @property
    def nodes(self):
        """Nodes like this one that hold the class; 0 where not even one attendee fits on one."""
        return math.ceil(self.attendees / self.fits) if self.fits else 0

    def most_engines(self):
        """The most engines with which the class still fits on the node; 0 where it does not with one."""
        most = 0
        for n in range(1, MOST["engines"] + 1):
            if Plan(self.costs, self.attendees, self.cores, self.memory, 0, n).fits < self.attendees:
                break
            most = n
        return most
