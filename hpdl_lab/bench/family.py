"""`hpdl bench collectives`: the family of algorithms, MPI's, gloo's and the compiled ones, as nccl-tests prints them.

The Python algorithms are those that attendees read: they show what an algorithm does to the bytes, not what a language
can do to it.
"""

import json
from typing import NamedTuple

from ..collectives import expected
from ..collectives.sweep import count_of, fill, row, whole_chunks
from . import launch, turns
from .markdown import put, section

DTYPE = "float32"
SAMPLES = 9
COLUMNS = ("size", "count", "type", "redop", "root", "name", "place", "time", "p25", "p75", "algbw", "busbw", "#wrong")
UNITS = ("(B)", "(elements)", "", "", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "")
TABLE = "{:>12} {:>11} {:>8} {:>6} {:>5}  {:<19} {:<5} {:>11} {:>11} {:>11} {:>8} {:>8} {:>7}"


# -- before the ranks start ------------------------------------------------------------------------------------------


def collectives(ranks, sizes, names=expected.COLLECTIVES, json_path=None, markdown_path=None, where=None, command=""):
    """Race every way to do each collective, print the tables while they come; returns the rows.

    Args:    ranks: number; sizes: bytes of the whole vector; names: of collectives.
             json_path: file for the rows, command, machine and versions. markdown_path: file that gets, or whose
             section of this name is replaced by, the tables.
             where: None: new ranks on this machine; or (text, run) of ranks that run somewhere already, where
             run(function, *args) calls function(comm, *args) on all of them and yields the rows of rank 0.
             command: what made the tables, to be written with them.
    Raises:  ValueError for arguments that make no sense; RuntimeError where the ranks end with an error.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"a benchmark needs at least 1 rank, got {ranks!r}")
    unknown = [name for name in names if name not in expected.COLLECTIVES]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(expected.COLLECTIVES)}")
    for size in sizes:
        count_of(size, DTYPE)
    title, messages = where_from(ranks, [[name, list(sizes)] for name in names], where)
    about, rows = {}, []
    for message in messages:
        if "about" in message:
            about = message["about"]
            print(f"{title}; {about['mpi']}, {about['instructions']}, {about['machine']}")
            continue
        if not rows or rows[-1]["collective"] != message["collective"]:
            print(f"\n# {message['collective']}", TABLE.format(*COLUMNS), TABLE.format(*UNITS), sep="\n")
        rows.append(message)
        print(TABLE.format(*cells(message)), flush=True)
    if json_path:
        with open(json_path, "w") as file:
            json.dump({"command": command, **about, "rows": rows}, file, indent=1)
    if markdown_path:
        put(markdown_path, title, section(title, command, about, COLUMNS, UNITS, rows, cells))
    return rows


def where_from(ranks, runs, where):
    """(title of the table, iterator of messages)."""
    if where is None:
        launch.warn_of_too_many(ranks)
        return f"{ranks} ranks on one machine", launch.on_ranks(ranks, "collectives", runs)
    text, run = where
    jobs = [(tell_about,), *((on_ranks, *arguments) for arguments in runs)]
    return f"{ranks} ranks on {text}", (message for job in jobs for message in run(*job))


def cells(row):
    """One row as texts, in the order of COLUMNS."""
    numbers = (f"{row[name]:,.2f}" for name in ("time_us", "p25_us", "p75_us"))
    speeds = (f"{row[name]:.3f}" for name in ("algbw_GBps", "busbw_GBps"))
    first = (f"{row['size']:,}", f"{row['count']:,}", row["type"], row["redop"], row["root"], row["name"], row["place"])
    return (*first, *numbers, *speeds, row["wrong"])


# -- on every rank ---------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """`run()` does the collective from `x`; returns the tensor with this rank's result, or the whole vector of it."""

    name: str
    place: str  # "in" or "out" of x
    run: object
    x: object


def on_ranks(comm, collective, sizes):
    """Check and time every way to do `collective`, for each size; rank 0 reports a row for each."""
    counts = [whole_chunks(count_of(size, DTYPE), comm.size, collective) for size in sizes]
    for count in dict.fromkeys(counts):
        contenders = line_up(comm, collective, count)
        wrong = {name: check(comm, collective, c) for name, c in contenders.items()}
        for c in contenders.values():
            c.x.zero_()  # sums of sums would overflow
        slowest = turns.times(comm, {name: c.run for name, c in contenders.items()}, SAMPLES)
        if comm.rank == 0:
            for key, c in contenders.items():
                found = row(c.name, count, DTYPE, slowest[key], comm, collective)
                comm.report(**found | {"place": c.place, "wrong": wrong[key]})


def tell_about(comm):
    """Rank 0 reports what the numbers depend on."""
    if comm.rank == 0:
        comm.report(about=launch.about(comm.session))


def line_up(comm, collective, count):
    """{name and place: Contender}."""
    import torch

    from ..collectives.rivals import BINDERS, bind, places, result_of
    from ..collectives.table import ALGORITHMS

    x, y = torch.zeros(count), torch.zeros(count)
    found = [
        Contender(a.name, "in", lambda a=a: a.function(comm, x), x) for a in ALGORITHMS if a.collective == collective
    ]
    if collective == "all_reduce":
        found.append(Contender("compiled ring", "in", lambda: comm.ring_all_reduce(x), x))
        if comm.shared("allocate"):
            z = comm.allocate((count,))
            found.append(Contender("registered memory", "in", lambda: comm.all_reduce(z), z))
    for who in BINDERS:
        for place in places(who, collective):
            out = x if place == "in" else y
            try:
                run = bind(who, comm, collective, x, out)
            except ValueError:  # on all ranks alike: no shared memory between hosts
                continue
            result = result_of(collective, comm, out)
            found.append(Contender(who, place, lambda run=run, result=result: (run(), result)[1], x))
    return {f"{c.name}, {c.place} place": c for c in found}


def check(comm, collective, contender):
    """Wrong elements on all ranks together."""
    import numpy as np

    p, r, x = comm.size, comm.rank, contender.x
    fill(x, expected.brought(collective, len(x), p, r))
    begin, want = expected.left(collective, len(x), p, r)
    comm.barrier()
    got = contender.run().numpy()
    got = got[begin : begin + len(want)] if len(got) == len(x) else got[: len(want)]
    mine = int((got != want).sum()) if got.shape == want.shape else len(want)
    return int(np.asarray(comm.all_gather(np.array([mine]))).sum())
