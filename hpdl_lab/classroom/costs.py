"""What one attendee costs: constants of the plan, each with its unit; all of them measured, by `hpdl plan --measure`.

costs.json beside this file was measured on the machine that it names. `hpdl plan --measure` writes ~/.hpdl/costs.json,
or $HPDL_HOME/costs.json, which is used from then on. measure.py is the measurement.

Memory is proportional (PSS). What it costs once more for each attendee are anonymous pages and shared memory; mapped
program files are there once for all who run the same installation, and count once, as files_MB.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

SHIPPED = Path(__file__).with_suffix(".json")

COSTS = {  # name: (unit, what it is); "alone": while nothing else happens on the machine
    "hub_MB": ("MB", "hub and proxy"),
    "server_MB": ("MB", "single-user server, idle"),
    "bare_kernel_MB": ("MB", "notebook kernel, nothing imported"),
    "kernel_MB": ("MB", "notebook kernel that has started engines"),
    "kernel_worked_MB": ("MB", "notebook kernel after the notebook"),
    "cluster_MB": ("MB", "keeper and mpiexec of one attendee's engines, and %px's controller where it is used"),
    "engine_MB": ("MB", "engine without torch"),
    "engine_torch_MB": ("MB", "engine with torch"),
    "engine_worked_MB": ("MB", "engine after the notebook"),
    "files_MB": ("MB", "program files in memory, once for all attendees"),
    "shm_MB": ("MB", "files in /dev/shm, for each engine"),
    "login_cpu_s": ("s", "processor time of a login, in the hub and the proxy"),
    "hub_cpu_s": ("s", "processor time of the hub for a login and a server's start: one core does this for all"),
    "server_cpu_s": ("s", "processor time of a server's start"),
    "kernel_cpu_s": ("s", "processor time of a kernel's start"),
    "start_cpu_s": ("s", "processor time of the start of engines, but for the engines themselves"),
    "engine_cpu_s": ("s", "processor time of the start of one engine"),
    "torch_cpu_s": ("s", "processor time of one engine to import torch"),
    "notebook_cpu_s": ("s", "processor time of the notebook, all engines together"),
    "idle_cores": ("cores", "that an attendee with idle engines keeps busy"),
    "login_s": ("s", "login, alone"),
    "server_s": ("s", "start of a server, alone"),
    "kernel_s": ("s", "start of a kernel, alone"),
    "engines_s": ("s", "start of the engines to their first answer, alone"),
    "torch_s": ("s", "import of torch on all engines, alone"),
    "notebook_s": ("s", "the notebook, alone"),
    "processes": ("", "processes of an attendee without engines: server, kernel, keeper, mpiexec; %px's controller"),
    "engine_processes": ("", "processes for each engine"),
    "threads": ("", "threads of an attendee without engines"),
    "engine_threads": ("", "threads for each engine"),
    "hub_files": ("", "open files of the hub for each attendee"),
    "proxy_files": ("", "open files of the proxy for each attendee with one notebook"),
    "ports": ("", "TCP ports of 127.0.0.1 on which an attendee's processes listen"),
}


@dataclass(frozen=True)
class Costs:
    """Constants and where they come from: `costs["server_MB"]`.

    values: {name in COSTS: number}; engines: of the attendee who was measured; notebook: its name; command, machine,
    versions ("torch 2.13.0, ..."), date: texts; path: of the file, "" where they were just measured.
    """

    values: dict
    engines: int
    notebook: str
    command: str
    machine: str
    versions: str
    date: str
    path: str = ""

    def __getitem__(self, name):
        return self.values[name]

    def __str__(self):
        lines = [
            f"constants, measured by `{self.command}` with {self.engines} engines and notebook {self.notebook}",
            f"  on {self.machine}; {self.versions}; {self.date}",
            f"  kept in {self.path}",
        ]
        for name, (unit, what) in COSTS.items():
            lines.append(f"  {name:<18}{self[name]:>9,.2f} {unit:<6}{what}")
        return "\n".join(lines)

    def save(self, path):
        """Write it, whole or not at all."""
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        text = json.dumps({name: value for name, value in asdict(self).items() if name != "path"}, indent=1)
        new = f"{path}.{os.getpid()}"
        try:
            Path(new).write_text(text + "\n")
            os.rename(new, path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        finally:
            Path(new).unlink(missing_ok=True)


def own_path():
    """Where constants of this machine are kept: ~/.hpdl/costs.json."""
    return os.path.join(os.environ.get("HPDL_HOME") or os.path.expanduser("~/.hpdl"), "costs.json")


def load():
    """The Costs of this machine where they were measured, else those that come with the package.

    Raises: ValueError where the file is not what `hpdl plan --measure` writes, with the remedy.
    """
    path = own_path() if os.path.exists(own_path()) else str(SHIPPED)
    return read(path)


def read(path):
    """The Costs in a file. Raises OSError; ValueError with the fault and the remedy."""
    try:
        costs = Costs(**{**json.loads(Path(path).read_text()), "path": path})
        missing = [name for name in COSTS if not isinstance(costs.values.get(name), int | float)]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no constants ({error}): write it again with `hpdl plan --measure`") from None
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"{path} lacks {names}: write it again with `hpdl plan --measure`")
    return costs
