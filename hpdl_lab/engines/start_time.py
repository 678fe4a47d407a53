"""How long engines take to start and to answer, beside plain ipyparallel: `python -m hpdl_lab.engines.start_time`.

Prints one line per measurement: median and spread over the repeats. docs/measurements.md explains what was found.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

from .cluster import Cluster


def start(n):
    """Seconds from the call to the first answer of all `n` engines, and from the call to a new set of engines."""
    began = time.perf_counter()
    with Cluster.start(n) as cluster:
        assert cluster.run(rank_of) == list(range(n))
        started = time.perf_counter()
        cluster.restart()
        assert cluster.run(rank_of) == list(range(n))
        return started - began, time.perf_counter() - started


def empty_runs(n, repeats):
    """Seconds of each of `repeats` empty runs on `n` engines that have finished their imports."""
    with Cluster.start(n) as cluster:
        cluster.run(import_torch)
        return [timed(lambda: cluster.run(rank_of)) for _ in range(repeats)]


def start_plain(n):
    """Seconds from the call to the first answer of `n` engines of plain ipyparallel, started by the same mpiexec."""
    import ipyparallel

    with tempfile.TemporaryDirectory() as profile:
        began = time.perf_counter()
        with ipyparallel.Cluster(engines="mpi", n=n, log_level=50, profile_dir=profile) as client:
            assert client[:].apply_sync(os.getpid)
            return time.perf_counter() - began


def rank_of(comm):
    return comm.rank


def import_torch(comm):
    import torch  # noqa: F401


def timed(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def row(name, seconds):
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    print(f"{name:<44}{middle:8.4f} s   ({low:.4f} to {high:.4f}, {len(seconds)} times)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=4, help="engines")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="measure plain ipyparallel as well")
    options = parser.parse_args()
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # for plain ipyparallel
    starts, restarts = zip(*(start(options.n) for _ in range(options.repeats)), strict=True)
    row(f"start of {options.n} engines to the first answer", starts)
    row(f"restart of {options.n} engines to the first answer", restarts)
    row(f"empty run on {options.n} engines", empty_runs(options.n, 100 * options.repeats))
    if options.plain:
        row("plain ipyparallel to the first answer", [start_plain(options.n) for _ in range(options.repeats)])


if __name__ == "__main__":
    main()
