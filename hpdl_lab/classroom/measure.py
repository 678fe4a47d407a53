"""`hpdl plan --measure`: the constants of the plan, from a drill of one attendee on this machine."""

import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version

from .. import features
from . import drill
from .census import CLUSTER, census
from .costs import Costs
from .plan import STEPS

IDLE_SECONDS = 5  # in which nothing is done, to see what idle engines take
VERSIONS = ("hpdl_lab", "jupyterhub", "jupyterlab", "ipykernel", "torch", "mpich")


def run(command, say=print):
    """Rehearse with one attendee on this machine; returns Costs.

    Raises: RuntimeError, ValueError, OSError: one sentence where the drill fails, or no hub can be started.
    """
    idle = []
    done = drill.rehearse(1, say=say, between={"torch": lambda hub_pid: idle.append(idle_cores(hub_pid))})
    return costs(done, idle[0] if idle else 0.0, drill.NOTEBOOK, command)


def idle_cores(hub_pid, seconds=IDLE_SECONDS):
    """Cores that the processes below a hub keep busy while nobody does anything."""
    before, t0 = census(hub_pid).total("cpu_s"), time.monotonic()
    time.sleep(seconds)
    return max(0.0, (census(hub_pid).total("cpu_s") - before) / (time.monotonic() - t0))


def costs(done, idle, notebook, command):
    """The Costs of a Drill of one attendee that ended without failure. idle: cores, of `idle_cores`.

    Raises: RuntimeError with the first failure of the drill.
    """
    if any(failure.step in STEPS for failure in done.failures):
        raise RuntimeError(f"nothing was measured: {done.failures[0]}")
    (name,) = (attendee.name for attendee in done.attendees)
    steps, n = done.steps, done.engines
    look = {step: steps[step].census for step in STEPS}

    def private_MB(step, *kinds):
        found = look[step].of(name, *kinds)
        return found.total("private_MB") + found.total("shared_MB")

    hub_of = {step: look[step].of("") for step in STEPS}
    engine_cpu_s = look["engines"].of(name, "engine").total("cpu_s") / n
    fixed, forks = look["torch"].of(name), len(look["torch"].of(name, "mpiexec")) - 1
    others = [process for process in fixed if process.kind not in ("engine", "mpiexec")]
    threads_of_engines = fixed.of(name, "engine").total("threads") + forks
    values = {
        "hub_MB": hub_of["notebook"].total("private_MB"),
        "server_MB": private_MB("server", "server"),
        "bare_kernel_MB": private_MB("kernel", "kernel"),
        "kernel_MB": private_MB("torch", "kernel"),
        "kernel_worked_MB": private_MB("notebook", "kernel"),
        "cluster_MB": private_MB("torch", *CLUSTER),
        "engine_MB": private_MB("engines", "engine") / n,
        "engine_torch_MB": private_MB("torch", "engine") / n,
        "engine_worked_MB": private_MB("notebook", "engine") / n,
        "files_MB": max(census.total("file_MB") for census in look.values()),
        "shm_MB": look["notebook"].of(name).shm_MB() / n,
        "login_cpu_s": steps["login"].cpu_s,
        "hub_cpu_s": steps["server"].hub_cpu_s,
        "server_cpu_s": steps["server"].cpu_s,
        "kernel_cpu_s": steps["kernel"].cpu_s,
        "start_cpu_s": steps["engines"].cpu_s - n * engine_cpu_s,
        "engine_cpu_s": engine_cpu_s,
        "torch_cpu_s": steps["torch"].cpu_s / n,
        "notebook_cpu_s": steps["notebook"].cpu_s,
        "idle_cores": idle,
        **{f"{step}_s": steps[step].seconds[name] for step in STEPS},
        "processes": len(others) + 1,
        "engine_processes": 1 + forks / n,
        "threads": sum(process.threads for process in others) + 1,
        "engine_threads": threads_of_engines / n,
        "hub_files": files(hub_of, "hub"),
        "proxy_files": files(hub_of, "proxy"),
        "ports": look["torch"].of(name).total("listening"),
    }
    return Costs(
        {key: round(value, 3) for key, value in values.items()},
        n,
        notebook,
        command,
        machine(),
        versions(),
        today(),
    )


def files(hub_of, kind):
    """Open files that one attendee with one notebook adds to the hub or to the proxy, 1 at least."""
    counts = {step: census.of("", kind).total("files") for step, census in hub_of.items()}
    return max(1, max(counts.values()) - counts["login"])


def machine():
    return f"{processor()}, {features.cores()} cores"


def versions():
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in VERSIONS)])


def today():
    return datetime.now(UTC).isoformat(timespec="seconds")


def processor():
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
