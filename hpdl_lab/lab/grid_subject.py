"""What a grid is picked for: a model, or only its spec, so many ranks, a batch, a limit of memory, a machine."""

import re
from dataclasses import dataclass, field, replace

from ..comm import sim
from ..parallel.grid.machine import MACHINES, Machine
from ..parallel.grid.measure import measured, spec_of
from ..parallel.grid.spec import SPECS, Spec
from .choice import model_and_data
from .cluster import run, running
from .grid_setting import require_whole
from .ranks import DEFAULT_RANKS

FEW = 8  # examples with which the machine is measured
BATCHES = {"gpt3": 1536}  # sequences: NVIDIA, Megatron-LM, examples/pretrain_gpt3_175B.sh
PUBLISHED_RANKS, PUBLISHED_MACHINE = 1024, "dgx_a100"
MOST_RANKS = 2**20  # whose grids are listed in a tenth of a second
PER_RANK = 8  # examples of a batch, where nothing is said
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True)
class Subject:
    """spec: of the model; limit: bytes per rank; model, x, y: what really runs, None where there is only a spec."""

    spec: Spec
    ranks: int
    batch: int
    limit: int
    machine: Machine
    model: object = field(default=None, repr=False, compare=False)
    x: object = field(default=None, repr=False, compare=False)
    y: object = field(default=None, repr=False, compare=False)

    def __str__(self):
        return f"{self.spec.name}, {self.ranks:,} ranks, batch of {self.batch:,}"


def subject_of(model="gpt", data=None, size="tiny", ranks=None, batch=None, limit=None, machine=None):
    """The Subject that is meant.

    Args:    model: a name of grid.spec.SPECS, a Spec; or a name of models.MODELS, or an nn.Module, which can run.
             machine: a name of MACHINES, a Machine; by default this machine, measured, or DGX nodes for a mere spec.
    Raises:  ValueError, TypeError, LookupError in one sentence.
    """
    for name, value in (("ranks", ranks), ("batch", batch)):
        if value is not None:
            require_whole(value, name)
    if ranks is not None and ranks > MOST_RANKS:
        raise ValueError(f"{ranks:,} ranks: grids of at most {MOST_RANKS:,} are looked at here")
    limit = asked_bytes(limit)
    if isinstance(machine, str) and machine not in MACHINES:
        raise ValueError(f"no machine is called {machine!r}: {', '.join(MACHINES)}")
    if machine is not None and not isinstance(machine, str | Machine):
        raise TypeError(f"machine={machine!r}: a name ({', '.join(MACHINES)}) or a Machine is needed")
    machine = MACHINES[machine] if isinstance(machine, str) else machine
    spec = SPECS.get(model) if isinstance(model, str) else model if isinstance(model, Spec) else None
    if spec is not None:
        machine = machine or MACHINES[PUBLISHED_MACHINE]
        ranks = ranks or PUBLISHED_RANKS
        batch = batch or BATCHES.get(model if isinstance(model, str) else "", PER_RANK * ranks)
        return Subject(spec, ranks, batch, limit or machine.memory, machine)
    choice = model_and_data(model, data, size)
    engines = running()
    ranks = ranks or (engines.n if engines is not None else DEFAULT_RANKS)
    batch = batch or PER_RANK * ranks
    x, y = (t[:batch].clone() for t in (choice.data.train_x, choice.data.train_y))
    if len(x) < batch:
        raise ValueError(f"a batch of {batch:,} is more than the {len(x):,} examples that there are")
    spec = spec_of(choice.model, x[:2], name=choice.words)
    machine = machine or this_machine(choice.model, x[:FEW], y[:FEW], spec.flops)
    return Subject(spec, ranks, batch, limit or machine.memory, machine, choice.model, x, y)


def this_machine(model, x, y, flops):
    """The Machine under the engines, or under this process with the laptop's network where none run."""
    if running() is not None:
        return run(measured, model, x.clone(), y.clone(), None, flops)[0]
    here, laptop = sim.run(1, measured, model, x, y, None, flops)[0], MACHINES["laptop"]
    network = replace(laptop.network, flops_per_s=here.network.flops_per_s)
    return replace(here, network=network, at_once=laptop.at_once)


def asked_bytes(limit):
    """Bytes from a number, or from such as "2 MB", "1.5 GiB". Raises ValueError."""
    if limit is None or (isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0):
        return limit if limit is None else int(limit)
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?\s*", str(limit).lower())
    if not found or not float(found[1]) or (found[3] and not found[2]):
        raise ValueError(f'limit={limit!r}: bytes per rank are needed, as a number or such as "2 MB" or "1.5 GiB"')
    return int(float(found[1]) * (BINARY if found[3] else UNITS)[found[2]])
