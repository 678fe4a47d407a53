"""The costs of one attendee: constants of the plan, each with its unit, measured by `hpdl plan --measure`.

costs.json in this folder is used until ~/.hpdl/costs.json, or $HPDL_HOME/costs.json, was measured on the machine.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import system
from .plan import STEPS

SHIPPED = Path(__file__).with_suffix(".json")
COLUMNS = {  # of each step, for one attendee who is alone: {name: what it is}; memory and threads are those afterwards
    "s": "seconds",
    "hub_cpu_s": "hub's process (s)",  # one core does this for all
    "cpu_s": "processor (s)",
    "engine_cpu_s": "+ an engine (s)",
    "MB": "memory (MB)",
    "engine_MB": "+ an engine (MB)",
    "threads": "threads",
    "engine_threads": "+ an engine",
}
ONCE = {"hub_MB": "hub and proxy", "files_MB": "program files, once for all", "shm_MB": "/dev/shm, for each engine"}
COSTS = (*ONCE, *(f"{step}_{column}" for step in STEPS for column in COLUMNS))


@dataclass(frozen=True)
class ClassroomCosts:
    """Constants and where they come from: `costs["server_MB"]`.

    values: {name in COSTS: number}; engines: of the attendee who was measured; notebook: its name; command, machine,
    versions ("torch 2.13.0, ..."), date: texts; path: of the file, "" if they were just measured.
    """

    values: dict[str, float]
    engines: int
    notebook: str
    command: str
    machine: str
    versions: str
    date: str
    path: str = ""

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def json(self) -> str:
        """Return the text of the file that `read_costs` takes."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "path"}, indent=1) + "\n"


def own_path() -> str:
    """Return the path of this machine's own constants: ~/.hpdl/costs.json."""
    return str(system.home() / "costs.json")


def load_costs() -> ClassroomCosts:
    """Return the Costs of this machine if they were measured, else the package's."""
    return read_costs(own_path() if os.path.exists(own_path()) else str(SHIPPED))


def read_costs(path: str) -> ClassroomCosts:
    """Return the Costs in a file. Raises OSError; ValueError with the fault and the remedy."""
    try:
        said = json.loads(Path(path).read_text())
        said["path"] = path
        costs = ClassroomCosts(**said)
        missing = [name for name in COSTS if not isinstance(costs.values.get(name), int | float)]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no constants ({error}): write it again with `hpdl plan --measure`") from None
    if missing:
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ValueError(f"{path} lacks {names}: write it again with `hpdl plan --measure`")
    return costs
