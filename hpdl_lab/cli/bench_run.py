"""`hpdl bench run`: what it costs to start engines, and to call a function on them."""

import json
import statistics
import time

from . import private
from .arguments import file, ranks


def add(benches):
    command = benches.add_parser("run", help="start of the engines and time of an empty lab.run")
    command.add_argument("--ranks", type=ranks, default=4, help="engines (4)")
    command.add_argument("--repeats", type=ranks, default=200, help="empty calls (200)")
    command.add_argument("--json", type=file, metavar="FILE", help="write the result there")
    command.set_defaults(command=run)


def run(arguments):
    """Start engines, call an empty function on all of them `repeats` times, and stop them."""
    from .. import lab

    times_ms = []
    with private.place():
        t0 = time.perf_counter()
        with lab.start(arguments.ranks):
            lab.run(nothing)
            start_s = time.perf_counter() - t0
            for _ in range(arguments.repeats):
                t0 = time.perf_counter()
                lab.run(nothing)
                times_ms.append((time.perf_counter() - t0) * 1e3)
    times_ms.sort()
    result = {
        "ranks": arguments.ranks,
        "start_s": round(start_s, 3),
        "repeats": arguments.repeats,
        "median_ms": round(statistics.median(times_ms), 3),
        "p25_ms": round(times_ms[len(times_ms) // 4], 3),
        "p75_ms": round(times_ms[3 * len(times_ms) // 4], 3),
    }
    print(f"start to first answer   {start_s:6.2f} s    {arguments.ranks} engines")
    print(
        f"empty lab.run, median   {result['median_ms']:6.2f} ms   p25 {result['p25_ms']:.2f}, "
        f"p75 {result['p75_ms']:.2f}, {arguments.repeats} calls"
    )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    return 0


def nothing(comm):
    """The empty function that is called."""
