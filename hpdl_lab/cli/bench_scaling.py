"""`hpdl bench scaling`: what is simulated with the times of this machine, over what this machine measures."""

import statistics

from . import private
from .arguments import file, ranks

PLACES = {"engines": {}, "emulated hosts": {"where": "emulated", "link": "1gbit"}}
POINTS = tuple((kind, p) for kind in ("strong", "weak") for p in (1, 2, 4))
COLUMNS = ("place", "name", *(f"{kind} {p}" for kind, p in POINTS))
BUCKETS = (200_000, 100_000)  # bytes, of gradients of 670,000
GUESS = {2: 1.8, 4: 3, 1024: 300}  # drawn in the figure, as an attendee's would be


def add(benches):
    command = benches.add_parser("scaling", help="simulated over measured training steps, and the figure of scaling")
    command.add_argument("--rounds", type=ranks, default=3, help="whose median is told (3)")
    command.add_argument("--markdown", type=file, metavar="FILE", help="write the table there, in place of the last")
    command.add_argument("--png", type=file, metavar="FILE", help="write the figure of the emulated hosts there")
    command.set_defaults(command=run)


def run(arguments):
    """Measure and simulate each strategy on 1, 2 and 4 ranks of each place, `rounds` times."""
    from .. import lab
    from ..bench.markdown import put, section

    rows = []
    for place, how in PLACES.items():
        with private.place(), lab.start(4, **how):
            told = lab.run(about_it)[0]
            for name, strategy in strategies().items():
                found = [lab.scaling(strategy=strategy, simulate=()).agreement() for _ in range(arguments.rounds)]
                row = {point: statistics.median(ratios[point] for ratios in found) for point in POINTS}
                rows.append({"collective": "medians", "place": place, "name": name, **row})
                print("  ".join(cells(rows[-1])), flush=True)
            if arguments.png and how:
                lab.scaling(prediction=GUESS, strategy=strategies()["flat, Python"]).png(arguments.png)
    if arguments.markdown:
        command = f"hpdl bench scaling --rounds {arguments.rounds} --markdown docs/measurements.md"
        text = section("Simulated over measured", command, told, COLUMNS, [""] * len(COLUMNS), rows, cells)
        put(arguments.markdown, "scaling", text)
    return 0


def strategies():
    """{name: strategy}: messages that hold up the rank, and beside it; of our ring in Python, and in C++."""
    from ..collectives import ring
    from ..parallel.data_parallel import DataParallel, DataParallelBucketed, DataParallelOverlapped

    return {
        "flat, Python": DataParallel(ring.all_reduce),
        "bucketed, C++": DataParallelBucketed(None, *BUCKETS),
        "overlapped, Python": DataParallelOverlapped(ring.all_reduce, *BUCKETS),
        "overlapped, C++": DataParallelOverlapped(None, *BUCKETS),
    }


def about_it(comm):
    """What the numbers depend on."""
    from ..bench.launch import about

    return about(comm.session)


def cells(row):
    return [row["place"], row["name"], *(f"{row[point]:.2f}" for point in POINTS)]
