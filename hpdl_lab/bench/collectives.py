"""`hpdl bench all_reduce`, `hpdl bench collectives`: ours, MPI's and gloo's on real ranks, as nccl-tests prints them.

The speed of light is the kernel of the registered path without any synchronization of the ranks: the difference to it
is the cost of synchronization. Attendees read the Python algorithms: they show what an algorithm does to the bytes, not
what a language can do to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from ..collectives import expected
from ..collectives.implementations import BINDERS, bind, result_part, result_places
from ..collectives.native import gloo_group
from ..collectives.sweep import count_of, fill_with, whole_chunks
from ..collectives.sweep import row as row_of
from ..collectives.table import ALGORITHMS
from ..units import require_int
from . import launch, timing
from .report import Column, Report, Row, Table, field

if TYPE_CHECKING:
    from ..comm.mpi.session import Session
    from ..comm.mpi.transport import MpiTransport
    from ..comm.real import RealComm


DTYPE = "float32"
BASELINES = ("mpi", "gloo")
LIGHT, SHARED, ANY = "speed of light", "registered", "any tensor"
FAMILY_SAMPLES = 9

SIZES = (
    field("size", form=",", unit="B", width=12),
    field("count", form=",", unit="elements", width=12),
    field("type"),
)
TIMES = (
    *(field(name, f"{name}_us", ",.2f", unit="us", width=11) for name in ("time", "p25", "p75")),
    *(field(name, f"{name}_GBps", ".3f", unit="GB/s", width=8) for name in ("algbw", "busbw")),
    field("#wrong", "wrong", width=6),
)
RACE = Table(
    [
        *SIZES,
        field("name", width=18, left=True),
        *TIMES,
        Column("of light", lambda row: f"{row['of_light']:.0%}" if "of_light" in row else ""),
    ]
)
FAMILY = Table(
    [
        *SIZES,
        field("redop", width=6),
        field("root", width=5),
        field("name", width=19, left=True),
        field("place", width=5, left=True),
        *TIMES,
    ],
    group="collective",
)


# -- before the ranks start --------------------------------------------------------------------------------------------


def race_all_reduces(
    ranks: int,
    sizes: list[int],
    against: tuple[str, ...] = BASELINES,
    report: Report = Report(),  # noqa: B008
) -> list[Row]:
    """Start `ranks` ranks, race all-reduces on them, print the table while it comes; returns the rows.

    Args:    sizes: bytes; against: of "mpi" and "gloo".
    Raises:  ValueError for arguments that make no sense; RuntimeError if the ranks end with an error.
    """
    require(ranks, sizes, against, BASELINES)
    launch.warn_of_too_many(ranks)
    messages = launch.on_ranks(ranks, "all_reduce", [[size, list(against)] for size in sizes])
    return RACE.tell(f"all_reduce, {ranks} ranks on one machine", messages, _verdicts, report)


def race_collectives(
    ranks: int,
    sizes: list[int],
    names: tuple[str, ...] = expected.COLLECTIVES,
    report: Report = Report(),  # noqa: B008
    where: tuple[str, Callable[..., Iterator[Row]]] | None = None,
) -> list[Row]:
    """Race every way to do each collective, print the tables while they come; returns the rows.

    Args:    sizes: bytes of the whole vector; names: of collectives.
             where: None: new ranks on this machine; or (text, run) of ranks that run already;
             run(function, *args) calls function(comm, *args) on all of them and yields the rows of rank 0.
    Raises:  ValueError for arguments that make no sense; RuntimeError if the ranks end with an error.
    """
    require(ranks, sizes, names, expected.COLLECTIVES)
    runs = [[name, list(sizes)] for name in names]
    if where is None:
        launch.warn_of_too_many(ranks)
        return FAMILY.tell(f"{ranks} ranks on one machine", launch.on_ranks(ranks, "collectives", runs), report=report)
    text, run = where
    jobs = [(report_about,), *((family_on_ranks, *arguments) for arguments in runs)]
    return FAMILY.tell(f"{ranks} ranks on {text}", (message for job in jobs for message in run(*job)), report=report)


def require(ranks: int, sizes: list[int], names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise ValueError for a bench that cannot be run."""
    require_int("ranks", ranks, 1)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    for size in sizes:
        count_of(size, DTYPE)


def _verdicts(rows: list[Row]) -> list[str]:
    """Return a sentence per size: how many times faster than the baselines."""
    lines = []
    for size in dict.fromkeys(row["size"] for row in rows):
        times = {row["name"]: row["time_us"] for row in rows if row["size"] == size}
        baselines = {who: [t for name, t in times.items() if name.startswith(who)] for who in ("MPI", "gloo")}
        best = {who: min(t) for who, t in baselines.items() if t}
        for ours in (SHARED, ANY):
            if ours in times and best:
                ratios = ", ".join(f"{t / times[ours]:.1f}x {name}" for name, t in best.items())
                lines.append(f"{size:,} bytes, {ours}: {ratios}")
    return lines


# -- on every rank -----------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """`run()` does the collective from `x`; the result (or the whole vector of it) is `out`, or what it returns."""

    name: str
    run: Callable[[], object]
    x: torch.Tensor
    out: torch.Tensor | None = None
    place: str = "in"  # or "out" of x


def race_on_ranks(comm: RealComm, size: int, against: list[str]) -> None:
    """Check and time all candidates of all_reduce for one size; rank 0 reports a row for each."""
    count = count_of(size, DTYPE)
    found = _check_and_time(comm, "all_reduce", _all_reduces(comm, count, against), timing.SAMPLES)
    light = next((np.median(times) for c, times, _ in found if c.name == LIGHT), None)
    for candidate, times, wrong in found:
        of_light = {} if light is None else {"of_light": float(light / np.median(times))}
        if comm.rank == 0:
            comm.report(**row_of(candidate.name, count, DTYPE, times, comm) | {"wrong": wrong} | of_light)


def family_on_ranks(comm: RealComm, collective: str, sizes: list[int]) -> None:
    """Check and time every way to do `collective`, for each size; rank 0 reports a row for each."""
    counts = [whole_chunks(count_of(size, DTYPE), comm.size, collective) for size in sizes]
    for count in dict.fromkeys(counts):
        for candidate, times, wrong in _check_and_time(
            comm, collective, _family(comm, collective, count), FAMILY_SAMPLES
        ):
            found = row_of(candidate.name, count, DTYPE, times, comm, collective)
            if comm.rank == 0:
                comm.report(**found | {"place": candidate.place, "wrong": wrong})


def report_about(comm: RealComm) -> None:
    """Report on rank 0 what the numbers depend on."""
    if comm.rank == 0:
        comm.report(about=launch.about(cast("Session", comm.session)))


def _check_and_time(
    comm: RealComm, collective: str, candidates: list[Candidate], samples: int
) -> list[tuple[Candidate, np.ndarray, int]]:
    """Return [(candidate, (samples,) ns per call of the slowest rank, wrong elements)]."""
    wrong = [count_wrong(comm, collective, c) for c in candidates]
    for c in candidates:
        c.x.zero_()  # sums of sums would overflow
    times = timing.in_turns(comm, [c.run for c in candidates], samples)
    return list(zip(candidates, times, wrong, strict=True))


def _all_reduces(comm: RealComm, count: int, against: list[str]) -> list[Candidate]:
    """Return candidates; each call is one function of no arguments, so that Python's share is the same for all."""
    x, y = torch.zeros(count), torch.zeros(count)
    candidates = []
    if comm.shared("allocate"):
        z = comm.allocate((count,))
        candidates += [
            Candidate(LIGHT, speed_of_light(comm, z), z, z),
            Candidate(SHARED, lambda: comm.all_reduce(z), z, z),
        ]
    candidates += [
        Candidate(ANY, lambda: comm.all_reduce(x), x, x),
        Candidate("compiled ring", lambda: comm.ring_all_reduce(x), x, x),
    ]
    if "mpi" in against:
        # Without the barrier by which mpi_all_reduce keeps ranks from hanging: it would be part of the time.
        group = cast("MpiTransport", comm.transport).group
        candidates += [
            Candidate("MPI in place", lambda: comm.core.mpi.all_reduce(group, x, x), x, x),
            Candidate("MPI out of place", lambda: comm.core.mpi.all_reduce(group, x, y), x, y),
        ]
    if "gloo" in against:
        gloo = gloo_group(comm)
        candidates.append(Candidate("gloo", lambda: gloo.allreduce([x]).wait(), x, x))
    return candidates


def speed_of_light(comm: RealComm, z: torch.Tensor) -> Callable[[], object]:
    """Return the registered path without barriers: this rank's slice of every `z`, added and stored to all of them."""
    line = 64 // z.element_size()
    each = -(-len(z) // comm.size // line) * line
    slices = [of_rank[each * comm.rank : each * (comm.rank + 1)] for of_rank in comm.views(z)]
    return comm.core.Sum(comm.core.instructions()[0], slices, slices)


def _family(comm: RealComm, collective: str, count: int) -> list[Candidate]:
    """Return our algorithms in Python, the compiled ones, MPI's, gloo's and the one in shared memory."""
    x, y = torch.zeros(count), torch.zeros(count)
    found = [Candidate(a.name, lambda a=a: a.function(comm, x), x) for a in ALGORITHMS if a.collective == collective]
    if collective == "all_reduce":
        found.append(Candidate("compiled ring", lambda: comm.ring_all_reduce(x), x))
        if comm.shared("allocate"):
            z = comm.allocate((count,))
            found.append(Candidate("registered memory", lambda: comm.all_reduce(z), z))
    for who in BINDERS:
        for place in result_places(who, collective):
            out = x if place == "in" else y
            try:
                run = bind(who, comm, collective, x, out)
            except ValueError:  # on all ranks alike: no shared memory between hosts
                continue
            found.append(Candidate(who, run, x, result_part(collective, comm, out), place))
    return found


def count_wrong(comm: RealComm, collective: str, candidate: Candidate) -> int:
    """Return the wrong elements on all ranks together, of sums of small whole numbers, which are exact."""
    p, r, x = comm.size, comm.rank, candidate.x
    fill_with(x, expected.brought(collective, len(x), p, r))
    begin, want = expected.expected_result(collective, len(x), p, r)
    comm.barrier()
    returned: Any = candidate.run()
    comm.barrier()
    got = (returned if candidate.out is None else candidate.out).numpy()
    got = got[begin : begin + len(want)] if len(got) == len(x) else got[: len(want)]
    mine = int((got != want).sum()) if got.shape == want.shape else len(want)
    return int(np.asarray(comm.all_gather(np.array([mine]))).sum())
