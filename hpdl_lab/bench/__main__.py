"""On every rank: `mpiexec -n 2 python -m hpdl_lab.bench TASK`, as bench/launch.py starts it."""

import json
import sys
from collections.abc import Callable

from ..comm.mpi.session import session_of_this_process


def _main() -> None:
    """Do the task of the first argument; rank 0 prints what is reported, one JSON object a line.

    The last one tells what has been chosen meanwhile: how tensors of any origin go through shared memory.
    """
    task = json.loads(sys.argv[1])
    session = session_of_this_process()  # before the long import: who waits in MPI's start takes a core from the others
    from ..comm.device import comm_class
    from . import collectives, cycle, ddp, decode, fsdp, pipeline
    from .launch import DEADLINE, about

    tasks: dict[str, Callable[..., None]] = {
        "all_reduce": collectives.race_on_ranks,
        "collectives": collectives.family_on_ranks,
        "cycle": cycle.on_ranks,
        "ddp": ddp.on_ranks,
        "ddp_memory": ddp.memory_on_ranks,
        "decode": decode.on_ranks,
        "fsdp": fsdp.on_ranks,
        "fsdp_memory": fsdp.memory_on_ranks,
        "pipeline": pipeline.on_ranks,
        "pipeline_memory": pipeline.memory_on_ranks,
    }
    run, make = tasks[task["kind"]], comm_class(task["device"])
    tell = (lambda row: print(json.dumps(row), flush=True)) if session.rank == 0 else None
    if tell:
        tell({"about": about(session, task["device"])})
    for number, arguments in enumerate(task["runs"]):
        with session.comm(number, deadline=DEADLINE, on_row=tell, trace=False, make=make) as comm:
            run(comm, *arguments)
    if tell:
        staging = session.core.ShmGroup.path(session.size, session.oversubscribed)
        tell({"about": about(session, task["device"]) | {"staging": staging}})


if __name__ == "__main__":
    _main()
