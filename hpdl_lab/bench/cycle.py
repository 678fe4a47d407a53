"""`hpdl bench all_reduce --cycle`, `hpdl bench collectives --cycle`: what a collective adds to a step that uses it.

    produce    every rank writes what it contributes, as backward writes a gradient
    reduce     the collective
    consume    every rank reads its result into other memory, as an optimizer does
    subtract   produce and consume alone, on memory that no other rank touches

A collective that is called again and again on the same tensor finds it in the caches that the last call used. Here the
caches hold what the step has left there, and what moves only when the result is read counts. Every round starts each
MPI library anew, one after the other, so that the state of the machine meets all alike.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from .. import features
from ..collectives.chunks import chunk
from ..collectives.implementations import bind, result_part, result_places
from ..collectives.sweep import count_of, whole_chunks
from ..units import bytes_text, require_int
from . import collectives, launch, timing
from .collectives import ANY, DTYPE, LIGHT, SHARED, Candidate
from .report import Column, Report, Row, Table, field

if TYPE_CHECKING:
    from ..comm.mpi.session import Session
    from ..comm.real import RealComm


COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
COPIES, RING = "via registered", "compiled ring"
OURS = (LIGHT, SHARED, COPIES, ANY, RING)
ALONE = "produce and consume"
PULLED = 1 << 16  # bytes that the other core has just written: the machine's state
APART = 1.4  # pulls that differ by more than this factor: two states
TURNS = 3, 25  # at least, at most, for one size in one round
CYCLES = (1 << 20, 7), (1 << 22, 5), (sys.maxsize, 1)  # up to so many bytes: cycles in a row, after a first one
METHOD = (
    "A cycle: every rank writes its tensor (produce), the collective runs, every rank reads the result into another "
    "tensor (consume). Shown is what the collective adds: the cycle less produce and consume alone. The slowest rank "
    "counts; all candidates take turns, {turns[0]} to {turns[1]} in each of {rounds} rounds, which start each library "
    "anew, one after the other. '<': a quarter of the turns or more added nothing that can be seen. Sizes are rounded "
    "up to whole chunks. Ours and MPI's are called through the same thin binding."
)
STATE = "64 KiB that the other core has just written are read in {} us"


def _table(sizes: list[int]) -> Table:
    """Return a line for each way to do it, one column for each size: median (quartiles)."""
    return Table(
        [
            field("name", width=19, left=True),
            field("place", width=5, left=True),
            *(
                Column(bytes_text(size), lambda row, key=str(size): _cell(row["sizes"].get(key)), "us", 22)
                for size in sizes
            ),
            field("#wrong", "wrong", width=6),
        ],
        group="part",
    )


def _cell(found: Row | None) -> str:
    """Return the median (quartiles); no time below 0 is a time."""
    if found is None:
        return ""
    p25, p75 = (_digits(max(found[key], 0.0)) for key in ("p25_us", "p75_us"))
    return f"{_digits(found['time_us']) if _seen(found) else '<' + p75} ({p25} to {p75})"


def _digits(us: float) -> str:
    return f"{us:,.{2 if us < 10 else 1 if us < 100 else 0}f}"


# -- before the ranks start --------------------------------------------------------------------------------------------


def cycle(
    ranks: int,
    sizes: list[int],
    names: tuple[str, ...],
    against: tuple[str, ...],
    rounds: int = 3,
    seconds: float = 0.4,
    report: Report = Report(),  # noqa: B008
) -> list[Row]:
    """Measure what each way to do the collectives `names` adds to a step; print the table; returns the rows.

    Args:    sizes: bytes of the whole vector; against: of "mpi", "gloo" and folders of environments with another MPI;
             seconds: for one size in one round.
    Raises:  ValueError for arguments that make no sense; RuntimeError if the ranks end with an error.
    """
    folders = [name for name in against if os.sep in name or os.path.isdir(name)]
    baselines = [name for name in against if name not in folders]
    collectives.require(ranks, sizes, names, COLLECTIVES)
    collectives.require(ranks, sizes, tuple(baselines), collectives.BASELINES)
    require_int("rounds", rounds, 1)
    takes_turns = ranks > features.cores()  # then what a core has just written is no state, and light does not wait
    ours = [name for name in OURS if not (takes_turns and name == LIGHT)]
    environments = {sys.prefix: [*ours, *baselines], **{launch.environment_path(f): ["mpi"] for f in folders}}
    launch.warn_of_too_many(ranks)

    def messages() -> Iterator[Row]:
        found, abouts = [], {}
        for number in range(1, rounds + 1):
            for folder, who in environments.items():
                runs = [[name, size, who, seconds] for name in names for size in sizes]
                for message in launch.on_ranks(ranks, "cycle", runs, folder):
                    if "staging" in message.get("about", ""):
                        abouts[folder] = message["about"]
                    elif "about" in message:
                        abouts[folder] = message["about"]
                        print(f"round {number} of {rounds}: {library(abouts[folder])}", flush=True)
                    else:
                        found.append(message)
        mpi, method = "; ".join(map(library, abouts.values())), METHOD.format(rounds=rounds, turns=TURNS)
        yield {"about": abouts[sys.prefix] | launch.about() | {"mpi": mpi, "method": method}}
        yield from _pooled(found, sys.maxsize if takes_turns else APART)

    title = f"{', '.join(names)} in the cycle of a step, {ranks} ranks on one machine"
    return _table(sizes).tell(title, messages(), _verdicts, report)


def library(about: Row) -> str:
    """Return the name of an MPI library, without what it says of its making, and how it was started."""
    return f"{about['mpi'].split(', package')[0]} ({about['settings']})"


def _pooled(found: list[Row], apart: float = APART) -> list[Row]:
    """Return a row for each state of the machine, collective, name and place, with what was found for each size.

    apart: two states are met if one pull takes more than so many times as long as another.
    """
    pulls = [row["pull_us"] for row in found]
    least, most = min(pulls), max(pulls)
    edge = (least * most) ** 0.5 if most > apart * least else most
    groups: dict[tuple, dict[str, list[Row]]] = {}
    for row in found:
        key = (row["pull_us"] > edge, row["collective"], row["name"], row["place"], row["library"])
        groups.setdefault(key, {}).setdefault(str(row["size"]), []).append(row)
    states = {far: sorted(pull for pull in pulls if (pull > edge) == far) for far in (False, True)}
    rows = []
    for (far, collective, name, place, library), sizes in sorted(groups.items(), key=lambda group: group[0][:2]):
        pull_us = states[far][0], states[far][-1]
        part = f"{collective}; {STATE.format(f'{pull_us[0]:.1f} to {pull_us[1]:.1f}')}"
        row = {"part": part, "collective": collective, "name": name, "place": place, "library": library}
        wrong = sum(row["wrong"] for several in sizes.values() for row in several)
        rows.append(row | {"pull_us": pull_us, "sizes": {k: _summary(v) for k, v in sizes.items()}, "wrong": wrong})
    return rows


def _summary(several: list[Row]) -> Row:
    """Return the results of several rounds for one size; cycle_us: of the whole cycle, with nothing subtracted."""
    middle, p25, p75 = timing.quartiles(np.concatenate([row["added_us"] for row in several]))
    whole = timing.quartiles(np.concatenate([row["cycle_us"] for row in several]))
    return {"time_us": middle, "p25_us": p25, "p75_us": p75, "cycle_us": whole, "count": several[0]["count"]}


def _seen(found: Row) -> bool:
    """Return True if time was added in at least three quarters of the turns."""
    return found["p25_us"] > 0


def _verdicts(rows: list[Row]) -> list[str]:
    """Return, for each part, how many times faster than each library's better form, how near to the speed of light."""
    lines = []
    for ours in (row for row in rows if row["name"] in (SHARED, ANY)):
        here = [row for row in rows if row["part"] == ours["part"]]
        where = f"{ours['collective']}, pull {ours['pull_us'][0]:.1f} us, {ours['name']}"
        for library in dict.fromkeys(row["library"] for row in here if row["library"]):
            theirs = [row["sizes"] for row in here if row["library"] == library]
            ratios = _compared(ours["sizes"], theirs, "{:.1f}x")
            lines += [f"{where}, against {library}: {ratios}"] if ratios else []
        light = [row["sizes"] for row in here if row["name"] == LIGHT and ours["name"] == SHARED]
        shares = _compared(ours["sizes"], light, "{:.0%}")
        lines += [f"{where}, of the speed of light: {shares}"] if shares else []
    return lines


def _compared(ours: Row, theirs: list[Row], form: str) -> str:
    """Return, for each size, the least time of `theirs` over ours, if both were seen."""
    found = []
    for size in sorted(ours, key=int):
        times = [sizes[size]["time_us"] for sizes in theirs if size in sizes and _seen(sizes[size])]
        if times and _seen(ours[size]):
            found.append(f"{bytes_text(int(size))} {form.format(min(times) / ours[size]['time_us'])}")
    return ", ".join(found)


# -- on every rank -----------------------------------------------------------------------------------------------------


class Cycle(NamedTuple):
    """`run()` does the collective: this rank writes `mine` before it, and reads `result` after it."""

    candidate: Candidate
    mine: Tensor
    result: Tensor
    library: str = ""


def on_ranks(comm: RealComm, collective: str, size: int, who: list[str], seconds: float) -> None:
    """Check and time what `who` adds to a cycle of one collective and size; rank 0 reports a row for each."""
    count = whole_chunks(count_of(size, DTYPE), comm.size, collective)
    cycles = _candidates(comm, collective, count, who)
    wrong = [collectives.count_wrong(comm, collective, c.candidate) for c in cycles]
    idle = {place: _alone(comm, collective, count, place) for place in {c.candidate.place: None for c in cycles}}
    source, sink = torch.ones(count), torch.zeros(count)
    repeats = next(n for most, n in CYCLES if count * 4 <= most)

    def block(cycle: Cycle) -> list[float]:
        """Return ns of each of `repeats` cycles, after one that warms up."""
        mine, result, run = cycle.mine, cycle.result, cycle.candidate.run
        written, read = source[: len(mine)], sink[: len(result)]
        times: list[float] = []
        for _ in range(repeats + 1):
            comm.barrier()
            begin = time.perf_counter_ns()
            mine.copy_(written)
            run()
            read.copy_(result)
            times.append(time.perf_counter_ns() - begin)
        return times[1:]

    pull = puller(comm)
    everything = [*idle.values(), *cycles]
    jobs = [pull, *(lambda c=c: block(c) for c in everything)]
    begin = time.perf_counter()
    for job in jobs:
        job()
    took = timing.slowest(comm, [time.perf_counter() - begin])[0]
    turns = max(TURNS[0], min(TURNS[1], int(seconds / took)))
    times = [[job() for job in jobs] for _ in range(turns)]
    by_job = [_slowest_blocks(comm, [row[i] for row in times]) for i in range(len(jobs))]
    if comm.rank != 0:
        return
    subtracted = dict(zip(idle, by_job[1:], strict=False))
    for cycle, wrongs, blocks in zip(everything, [0] * len(idle) + wrong, by_job[1:], strict=True):
        less = 0 if cycle.candidate.name == ALONE else subtracted[cycle.candidate.place]
        comm.report(
            name=cycle.candidate.name,
            place=cycle.candidate.place,
            library=cycle.library,
            collective=collective,
            size=size,
            count=count,
            type=DTYPE,
            added_us=(blocks - less).round(4).tolist(),
            cycle_us=blocks.round(4).tolist(),
            pull_us=float(np.median(by_job[0])),
            wrong=wrongs,
        )


def _alone(comm: RealComm, collective: str, count: int, place: str) -> Cycle:
    """Produce and consume with nothing between, in as much memory: one tensor in place, else two."""
    x = torch.zeros(count)
    out = x if place == "in" else torch.zeros(count)
    return cycle_of(comm, collective, Candidate(ALONE, lambda: None, x, out, place))


def _slowest_blocks(comm: RealComm, blocks: list[list[float]]) -> np.ndarray:
    """Return (turns,) us: of each block of cycles, the median of what the slowest rank took."""
    slowest = timing.slowest(comm, [ns for block in blocks for ns in block])
    return np.median(slowest.reshape(len(blocks), -1), axis=1) / 1e3


def puller(comm: RealComm) -> Callable[[], list[float]]:
    """Return a function: ns of each of some reads of PULLED bytes that the next rank has just written."""
    mine = comm.allocate(PULLED // 4)
    theirs = comm.views(mine)[(comm.rank + 1) % comm.size]
    source, sink = torch.ones(PULLED // 4), torch.zeros(PULLED // 4)

    def pull() -> list[float]:
        times: list[float] = []
        for _ in range(CYCLES[0][1] + 1):
            mine.copy_(source)
            comm.barrier()
            begin = time.perf_counter_ns()
            sink.copy_(theirs)
            times.append(time.perf_counter_ns() - begin)
            comm.barrier()
        return times[1:]

    return pull


def _candidates(comm: RealComm, collective: str, count: int, who: list[str]) -> list[Cycle]:
    """Return the candidates among `who`, each with what it reads and writes."""
    x, y = torch.zeros(count), torch.zeros(count)
    place = "in" if collective in ("all_reduce", "broadcast") else "out"
    out = x if place == "in" else y
    found: list[Cycle] = []

    def add(
        name: str, run: Callable[[], object], x: Tensor, out: Tensor, place: str = place, library: str = ""
    ) -> None:
        found.append(cycle_of(comm, collective, Candidate(name, run, x, out, place), library))

    if SHARED in who:
        z = comm.allocate(count)
        z_out = z if place == "in" else comm.allocate(count)
        registered = bind("shared memory", comm, collective, z, z_out)
        add(SHARED, registered, z, z_out)
        if collective == "all_reduce" and LIGHT in who:
            add(LIGHT, collectives.speed_of_light(comm, z), z, z)
        copies = cycle_of(comm, collective, Candidate(COPIES, registered, z, z_out))
        plain = cycle_of(comm, collective, Candidate(COPIES, registered, x, out))

        def via_registered() -> None:
            copies.mine.copy_(plain.mine)
            registered()
            plain.result.copy_(copies.result)

        add(COPIES, via_registered, x, out)
    if ANY in who:
        add(ANY, bind("shared memory", comm, collective, x, out), x, out)
    if RING in who and collective == "all_reduce":
        add(RING, lambda: comm.ring_all_reduce(x), x, x)
    if "mpi" in who:
        vendor = cast("Session", comm.session).MPI.get_vendor()[0]
        for where in ("in", "out") if collective == "all_reduce" else (place,):
            to = x if where == "in" else y
            add(vendor, bind("MPI", comm, collective, x, to), x, to, where, vendor)
    if "gloo" in who:
        where = "in" if "in" in result_places("gloo", collective) else "out"
        to = x if where == "in" else y
        add("gloo", bind("gloo", comm, collective, x, to), x, to, where, "gloo")
    return found


def cycle_of(comm: RealComm, collective: str, candidate: Candidate, library: str = "") -> Cycle:
    """Return the candidate with what this rank writes and reads: its chunk or all; the root writes a broadcast."""
    mine, result = candidate.x, result_part(collective, comm, cast(Tensor, candidate.out))
    if collective == "all_gather":
        mine = chunk(mine, comm.size, comm.rank)
    if collective == "broadcast" and comm.rank != 0:
        mine = mine[:0]
    return Cycle(candidate._replace(out=result), mine, result, library)
