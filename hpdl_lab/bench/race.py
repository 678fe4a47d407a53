"""`hpdl bench all_reduce`: ours against MPI and gloo on real ranks, in one run.

The speed of light is the kernel of the registered path without any meeting of the ranks: what is lost to it is what
synchronization costs.
"""

import json
from typing import NamedTuple

from ..collectives.sweep import count_of
from . import launch, turns

DTYPE = "float32"
RIVALS = ("mpi", "gloo")
LIGHT, SHARED, ANY = "speed of light", "registered", "any tensor"
TABLE = "{:>12} {:>12} {:>8}  {:<18} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6} {:>8}"
HEADER = (
    TABLE.format("size", "count", "type", "name", "time", "p25", "p75", "algbw", "busbw", "#wrong", "of light"),
    TABLE.format("(B)", "(elements)", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "").rstrip(),
)


# -- before the ranks start: hpdl calls this ---------------------------------------------------------------------------


def all_reduce(ranks, sizes, against=RIVALS, json_path=None):
    """Start `ranks` ranks, race all-reduces on them, print the table while it comes; returns the rows.

    Args:    sizes: bytes; against: of "mpi" and "gloo"; json_path: file for the rows, command, machine and versions.
    Raises:  ValueError for arguments that make no sense; RuntimeError where the ranks end with an error.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"a benchmark needs at least 1 rank, got {ranks!r}")
    unknown = [name for name in against if name not in RIVALS]
    if unknown:
        raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(RIVALS)}")
    for size in sizes:
        count_of(size, DTYPE)
    about, rows = {}, []
    launch.warn_of_too_many(ranks)
    for message in launch.on_ranks(ranks, "all_reduce", [[size, list(against)] for size in sizes]):
        if "about" in message:
            about = message["about"]
            print(f"{about['mpi']}, {about['instructions']}, {about['machine']}\n")
            print(*HEADER, sep="\n")
        else:
            rows.append(message)
            print(line_of(message), flush=True)
    for text in verdicts(rows):
        print(text)
    if json_path:
        invocation = f"hpdl bench all_reduce --ranks {ranks} --sizes {','.join(map(str, sizes))}"
        with open(json_path, "w") as file:
            json.dump({"command": f"{invocation} --against {','.join(against)}", **about, "rows": rows}, file, indent=1)
    return rows


def line_of(row):
    """One line of the table."""
    times = (f"{row[name]:,.2f}" for name in ("time_us", "p25_us", "p75_us", "algbw_GBps", "busbw_GBps"))
    light = f"{row['of_light']:.0%}" if "of_light" in row else ""
    return TABLE.format(f"{row['size']:,}", f"{row['count']:,}", row["type"], row["name"], *times, row["wrong"], light)


def verdicts(rows):
    """One line per size: how many times faster than the rivals."""
    lines = [""]
    for size in dict.fromkeys(row["size"] for row in rows):
        times = {row["name"]: row["time_us"] for row in rows if row["size"] == size}
        rivals = {"MPI": [t for name, t in times.items() if name.startswith("MPI")], "gloo": [times.get("gloo")]}
        best = {name: min(t) for name, t in rivals.items() if t and t[0]}
        for ours in (SHARED, ANY):
            if ours in times and best:
                ratios = ", ".join(f"{t / times[ours]:.1f}x {name}" for name, t in best.items())
                lines.append(f"{size:>12,} bytes, {ours}: {ratios}")
    return lines


# -- on every rank -----------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """`run()` adds in place, into `out`; `source` is what it adds, which is `out` again unless it says otherwise."""

    name: str
    run: object
    source: object
    out: object


def on_ranks(comm, size, against):
    """Check and time all contenders for one size; rank 0 reports a row for each."""
    import numpy as np

    from ..collectives.sweep import row

    count = count_of(size, DTYPE)
    contenders = line_up(comm, count, against)
    wrong = {c.name: check(comm, c, count) for c in contenders}
    for c in contenders:
        c.source.zero_()  # sums of sums would overflow
        c.out.zero_()
    slowest = turns.times(comm, {c.name: c.run for c in contenders})
    if comm.rank != 0:
        return
    for name, t in slowest.items():
        light = {"of_light": float(np.median(slowest[LIGHT]) / np.median(t))} if LIGHT in slowest else {}
        comm.report(**row(name, count, DTYPE, t, comm) | {"wrong": wrong[name]} | light)


def line_up(comm, count, against):
    """The contenders: each call is one function of no arguments, so that Python's share is the same for all."""
    import torch

    x, y = torch.zeros(count), torch.zeros(count)
    contenders = []
    if comm.shared("allocate"):
        z = comm.allocate((count,))
        contenders += [Contender(LIGHT, light(comm, z), z, z), Contender(SHARED, lambda: comm.all_reduce(z), z, z)]
    contenders += [
        Contender(ANY, lambda: comm.all_reduce(x), x, x),
        Contender("compiled ring", lambda: comm.ring_all_reduce(x), x, x),
    ]
    if "mpi" in against:
        # Without the meeting by which mpi_all_reduce makes sure that nobody hangs: it would be part of the time.
        contenders += [
            Contender("MPI in place", lambda: comm.core.mpi.all_reduce(comm.group, x, x), x, x),
            Contender("MPI out of place", lambda: comm.core.mpi.all_reduce(comm.group, x, y), x, y),
        ]
    if "gloo" in against:
        from ..collectives.native import gloo_group

        gloo = gloo_group(comm)
        contenders.append(Contender("gloo", lambda: gloo.allreduce([x]).wait(), x, x))
    return contenders


def light(comm, z):
    """The registered path without meetings: this rank's slice of every rank's `z`, added and stored to all of them."""
    line = 64 // z.element_size()
    each = -(-len(z) // comm.size // line) * line
    slices = [of_rank[each * comm.rank : each * (comm.rank + 1)] for of_rank in comm.shared("allocate").everybodys(z)]
    return comm.core.Sum(comm.core.instructions()[0], slices, slices)


def check(comm, contender, count):
    """Wrong elements on all ranks, of a sum of small whole numbers, which is exact."""
    import numpy as np
    import torch

    index = torch.arange(count) % 61
    contender.source.copy_(index + comm.rank)
    comm.barrier()
    contender.run()
    comm.barrier()
    expected = comm.size * index + comm.size * (comm.size - 1) // 2
    mine = int((contender.out != expected).sum())
    return int(np.asarray(comm.all_gather(np.array([mine]))).sum())
