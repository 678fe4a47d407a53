"""`lab.tune`: measure every all-reduce over message sizes, and keep the fastest for each as one all-reduce."""

from ..collectives.selector import NATIVE, function_of
from ..collectives.sweep import SAMPLE_NS, SAMPLES, count_of, parse_size, sweep
from ..collectives.table import names
from ..collectives.tuner import fastest, predict
from ..plots.style import OVERSUBSCRIBED, bytes_text
from ..trace import seconds_text
from .ranks import place

SIZES = ("4", "256", "4KiB", "64KiB", "1MiB", "4MiB")
SHOWN = 3  # of the fastest, per size


def tune(algorithms=None, sizes=SIZES, *, ranks=None, network=None, deadline=10.0):
    """Time all-reduces over message sizes here; returns what was fastest where, as an all-reduce that chooses by size.

        chosen = lab.tune()                       # Selection.parse('recursive_doubling:0-16384;ring:16385-max')
        lab.train(all_reduce=chosen)              # it goes wherever an all_reduce goes
        chosen.save("all_reduce.txt")             # collectives.selector.Selection.load reads it

    Args:    algorithms: names of collectives.table, and "native" for the communicator's own; default all of them.
             sizes: bytes per rank, as numbers or as "1KiB".
             ranks: default all engines, or 4 simulated ranks where none run.
             network: of comm.network: the times on simulated ranks joined by it, even where engines run. They come from
             the schedules, so that thousands of ranks are possible; "native" has none.
             deadline: s, the longest that a rank may wait.
    Returns: collectives.selector.Selection.
    Raises:  LookupError for an unknown name, ValueError for sizes that are no whole number of float32.
    """
    if algorithms is None:
        algorithms = names() if network is not None else [*names(), NATIVE]
    functions = {name: function_of(name) for name in algorithms}
    sizes = sorted({parse_size(size) for size in ((sizes,) if isinstance(sizes, (int, str)) else sizes)})
    if not functions or not sizes:
        raise ValueError(f"nothing to measure: {len(functions)} algorithms, {len(sizes)} sizes")
    for size in sizes:
        count_of(size, "float32")  # raises before any rank has started
    where = place(ranks, network)
    rows = []

    def on_row(row):
        rows.append(row)
        if len(rows) % len(functions) == 0:
            print(line_of(rows[-len(functions) :]), flush=True)

    print(f"all-reduce on {where}: the fastest of {len(functions)}. {where.remark}".rstrip())
    if network is not None:
        for row in predict(functions, sizes, where.ranks, network):
            on_row(row)
    else:
        timing = (1, 0) if where.simulated else (SAMPLES, SAMPLE_NS)  # virtual time is the same every time
        where.run(sweep, functions, sizes, "float32", *timing, deadline=deadline, on_row=on_row)
        if rows[0]["ranks"] > rows[0]["cores"] and not where.simulated:
            print(f"{rows[0]['ranks']} ranks on {rows[0]['cores']} cores: {OVERSUBSCRIBED}")
    return fastest(rows)


def line_of(rows):
    """The fastest of the rows of one size, as a line of text."""
    best = sorted(rows, key=lambda row: row["time_us"])[:SHOWN]
    times = ", ".join(f"{row['name']} {seconds_text(row['time_us'] / 1e6)}" for row in best)
    return f"{bytes_text(best[0]['size']):>10}  {times}"
