"""`hpdl record`: measure what `lab.replay` shows elsewhere: the race of lesson 04, training steps of lesson 06."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .arguments import Commands, folder, name_list, own_engines

if TYPE_CHECKING:
    from ..data.recorded import Recording
    from ..parallel.data_parallel import Strategy
    from ..trace import Event
    from ..verbs.measure import MeasureResult
    from ..verbs.replay import Drawn
    from ..verbs.roofline import WriteAgainResult
    from ..verbs.scaling import ScalingResult
    from ..verbs.staging import StagingResult

DEADLINE = 60.0  # s, that a rank may wait
BUCKETS = (100_000, 20_000)  # bytes, as in lesson 06
STEPS = 2  # of training in a timeline
LINK = "1gbit"
STAGING = "4 MiB from device to device in blocks of many sizes"
SCALING = "scaling of a training step of lesson 06"


class Job(NamedTuple):
    """A measurement: run(device) returns what verbs.replay.write_recording takes; what: it is, in a few words."""

    run: Callable[[str], Drawn | list[Event] | Recording]
    what: str
    devices: tuple[str, ...] = ("cpu", "cuda")


def add(commands: Commands) -> None:
    command = commands.add_parser("record", help="measure this machine for lab.replay on others")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device to measure (cpu)")
    command.add_argument("--only", type=name_list, metavar="JOBS", help=f"some of {', '.join(JOBS)}")
    command.add_argument("--folder", type=folder, help="write there; by default where lab.replay looks")
    command.set_defaults(command=_record_all)


def _record_all(arguments: argparse.Namespace) -> int:
    """Do the jobs one after the other; returns 1 if one of them could not be done, and says which."""
    from ..features import gpu
    from ..verbs.replay import write_recording

    known = [name for name, job in JOBS.items() if arguments.device in job.devices]
    if unknown := [name for name in arguments.only or () if name not in known]:
        raise ValueError(f"unknown on {arguments.device}: {', '.join(unknown)}; known: {', '.join(known)}")
    if arguments.device == "cuda":
        gpu.require_gpu_transfer()
    where, failed = arguments.folder and Path(arguments.folder), 0
    for name in arguments.only or known:
        job = JOBS[name]
        try:
            print(
                "recorded:",
                write_recording(job.run(arguments.device), name, job.what, arguments.device, where),
                flush=True,
            )
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # the others are worth having without it
            print(f"hpdl: {name} was not recorded: {error}", file=sys.stderr)
            failed = 1
    return failed


def race(device: str) -> MeasureResult:
    """Race all that race by default; on GPUs NCCL is among them."""
    from .. import lab

    with own_engines(), lab.start(2, device=device):
        return lab.measure("ring", deadline=DEADLINE)


def race_emulated(device: str) -> MeasureResult:
    from .. import lab

    sizes = [2**k for k in range(10, 23, 3)]
    with own_engines(), lab.start(4, where="emulated", link=LINK):
        others = ("tree", "parameter_server", "mpi")
        return lab.measure("ring", sizes, against=others, deadline=DEADLINE)


def overlap(device: str) -> list[Event]:
    """Return the events of the last steps."""
    from .. import lab

    with own_engines(), lab.start(2, device=device):
        events = lab.train(model="gpt", data="text", strategy=_overlapped(), steps=20, deadline=DEADLINE).events
    begin = sorted(e.t0_ns for e in events if e.op == "forward")[-2 * STEPS]
    end = max(e.t1_ns for e in events if e.op == "update")
    return [e for e in events if begin <= e.t0_ns < end]


def scaling(device: str) -> ScalingResult:
    from .. import lab

    with own_engines(), lab.start(2):
        return lab.scaling(strategy=_overlapped(), model="gpt", data="text", deadline=DEADLINE)


def scaling_emulated(device: str) -> ScalingResult:
    from .. import lab

    with own_engines(), lab.start(4, where="emulated", link=LINK):
        return lab.scaling(strategy=_overlapped(), model="gpt", data="text", deadline=DEADLINE)


def staging(device: str) -> StagingResult:
    """Stage copies, which are real on a GPU; else they are emulated, as are the hosts."""
    from .. import lab

    where, link = ("emulated", LINK) if device == "cpu" else (None, None)
    with own_engines(), lab.start(2, where=where, link=link, device=device):
        return lab.staging(deadline=DEADLINE)


def write_again(device: str) -> WriteAgainResult:
    from .. import lab

    with own_engines(), lab.start(2):
        return lab.write_again(deadline=DEADLINE)


def _overlapped() -> Strategy:
    from ..parallel.data_parallel import DataParallelOverlapped

    return DataParallelOverlapped(None, *BUCKETS)


def ddp(device: str) -> Recording:
    from ..bench import ddp

    rows = ddp.ddp(2, "small", 8, 25, device=device)
    return {"rows": rows, "lines": [*ddp.TABLE.lines(rows), "", *ddp.verdicts(rows)]}


def ladder(device: str) -> Recording:
    from ..kernels import on_gpu
    from ..kernels.reduction import Ladder
    from .bench import LADDER

    rungs = Ladder()
    rows = [*rungs.rows(), *(() if on_gpu.why_not() else on_gpu.rows(bandwidth=rungs.bandwidth))]
    return {"rows": rows, "lines": LADDER.lines(rows)}


JOBS = {
    "race": Job(race, "all-reduce, the race of lesson 04 on 2 ranks"),
    "race_emulated": Job(race_emulated, f"all-reduce on 4 emulated hosts with links of {LINK}", ("cpu",)),
    "overlap": Job(overlap, f"{STEPS} overlapped training steps of lesson 06 on 2 ranks"),
    "scaling": Job(scaling, f"{SCALING} to 2 ranks", ("cpu",)),
    "scaling_emulated": Job(scaling_emulated, f"{SCALING} to 4 emulated hosts with links of {LINK}", ("cpu",)),
    "staging": Job(staging, f"{STAGING}: real copies", ("cuda",)),
    "staging_emulated": Job(staging, f"{STAGING}: emulated copies, hosts with links of {LINK}", ("cpu",)),
    "write_again": Job(write_again, "a store to what another core has read, and to what it has not", ("cpu",)),
    "ddp": Job(ddp, "a training step by PyTorch's DDP and by our strategies, on 2 ranks"),
    "ladder": Job(ladder, "the ladder of CUDA kernels that add a vector", ("cuda",)),
}
