"""On every rank: `mpiexec -n 2 python -m hpdl_lab.bench TASK`, as bench/launch.py starts it."""

import json
import sys

from ..comm.mpi import session_of_this_process
from ..features.freed_memory import keep_freed_memory
from ..features.torch_compiler import put_off_torch_compiler
from ..features.uncollected import uncollected
from . import family, race
from .ddp import memory_on_ranks
from .ddp import on_ranks as ddp_on_ranks
from .launch import DEADLINE, about
from .pipeline import memory_on_ranks as pipeline_memory_on_ranks
from .pipeline import on_ranks as pipeline_on_ranks

KINDS = {
    "all_reduce": race.on_ranks,
    "collectives": family.on_ranks,
    "ddp": ddp_on_ranks,
    "ddp_memory": memory_on_ranks,
    "pipeline": pipeline_on_ranks,
    "pipeline_memory": pipeline_memory_on_ranks,
}


def main():
    """Do the task of the first argument; rank 0 prints what is reported, one JSON object a line."""
    keep_freed_memory()
    put_off_torch_compiler()
    task = json.loads(sys.argv[1])
    do = KINDS[task["kind"]]
    session = session_of_this_process()  # before the long import: who waits in MPI's start takes a core from the others
    import_torch()
    tell = (lambda row: print(json.dumps(row), flush=True)) if session.rank == 0 else None
    if tell:
        tell({"about": about(session)})
    for run, arguments in enumerate(task["runs"]):
        with session.comm(run, deadline=DEADLINE, on_row=tell, trace=False) as comm:
            do(comm, *arguments)


def import_torch():
    """As all benchmarks do, here without looking for garbage, which would take a third of the time."""
    with uncollected():
        import torch  # noqa: F401


if __name__ == "__main__":
    main()
