"""`lab.scaling`: the same work on more ranks, and the same work per rank, beside the ideal and a simulated cluster."""

from dataclasses import dataclass, field

import numpy as np

from ..collectives.sweep import time_work
from ..comm import sim
from ..comm.network import Switch
from ..data import digits
from ..features import cores
from ..parallel.data import DataParallel
from ..parallel.training import TrainingStep
from ..plots import live
from ..plots.scaling import draw
from ..trace import now_ns
from .cluster import running
from .ranks import place

KINDS = ("strong", "weak")
NETWORK = Switch()
NETWORK_TEXT = "a 100 Gbit/s switch, 2 µs per message"  # the defaults of Switch, in words


@dataclass(frozen=True)
class ScalingResult:
    """rows, simulated: dicts with kind, ranks, cores, rate (median, units of work per s), p25, p75, efficiency."""

    rows: list
    simulated: list
    unit: str
    figure: object = field(repr=False)

    def __repr__(self):
        lines = [f"{'scaling':<10}{'ranks':>6}{'rate, ' + self.unit:>20}{'efficiency':>12}"]
        for kind, source in (("", self.rows), (" simulated", self.simulated)):
            for r in source:
                crowded = f"  more ranks than the {r['cores']} cores" if r["ranks"] > r["cores"] else kind
                lines.append(f"{r['kind']:<10}{r['ranks']:>6}{r['rate']:>20,.0f}{r['efficiency']:>12.0%}{crowded}")
        return "\n".join(lines)


def scaling(work=None, *, all_reduce=None, ranks=None, n=512, unit=None, deadline=10.0):
    """Measure strong and weak scaling; points with more ranks than cores are grey, and simulated ranks stand beside.

    Args:    work: f(comm, n), does n units of work shared by all ranks; default a training step on n digits, with
             your all_reduce. It may keep state from call to call.
             ranks: which numbers of ranks, default 1, 2, 4, ... up to the engines.
             n: units of work, of all ranks in strong and of each rank in weak scaling.
             unit: of the rate, default "samples/s" for training; deadline: s, the longest that a rank may wait.
    Returns: ScalingResult. Without engines only the simulated points.
    """
    if work is not None and all_reduce is not None:
        raise ValueError("give work or all_reduce, not both: all_reduce is for the training step that is the default")
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of units of work, at least 1, got {n!r}")
    unit = unit or ("samples/s" if work is None else "units/s")
    title = (
        "Scaling of a training step on digits" if work is None else f"Scaling of {getattr(work, '__name__', 'work')}"
    )
    work = TrainingStep(DataParallel(all_reduce), digits.load()) if work is None else work
    counts = default_ranks() if ranks is None else sorted({ranks} if isinstance(ranks, int) else set(ranks))
    if not counts:
        raise ValueError("no number of ranks to measure: give some, such as (1, 2, 4)")
    rows, simulated = [], []
    plot = live.Live(draw, alt="strong and weak scaling")
    foot = f"Simulated: {NETWORK_TEXT}, a core per rank."
    foot += "" if running() else "  No engines run: lab.start(4) adds measured points."

    pace = pace_of_one_rank(work, n, deadline)
    for kind, p in ((kind, p) for kind in KINDS for p in counts):
        units = n if kind == "strong" else n * p
        where = place(p)
        if not where.simulated:
            times = where.run(time_work, work, units, deadline=deadline)[0]
            add(rows, kind, p, cores(), units / times * 1e9)
        messages = sim.run(p, time_work, work, units, 1, 0, network=NETWORK)[0][0]
        add(simulated, kind, p, p, np.array([units * 1e9 / (messages + units / p * pace)]))
        plot.update(rows, simulated, unit, title, foot)
    return ScalingResult(rows, simulated, unit, plot.finish(rows, simulated, unit, title, foot))


def default_ranks():
    """1, 2, 4, ... up to the engines, or to 4 simulated ranks."""
    engines = running()
    most = 4 if engines is None else engines.n
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def pace_of_one_rank(work, n, deadline):
    """Real ns per unit of work on one rank, where there are no messages: arithmetic is free on simulated ranks."""
    where = place(1)
    if not where.simulated:
        return float(np.median(where.run(time_work, work, n, deadline=deadline)[0])) / n
    times = []

    def clocked(comm, _):
        for _ in range(5):
            begin = now_ns()
            work(comm, n)
            times.append(now_ns() - begin)

    sim.run(1, clocked, None)
    return float(np.median(times[1:])) / n


def add(rows, kind, p, n_cores, rates):
    """Append the row of one point; efficiency is against the first row of its kind."""
    p25, median, p75 = (float(q) for q in np.percentile(rates, (25, 50, 75)))
    row = {"kind": kind, "ranks": p, "cores": n_cores, "rate": median, "p25": p25, "p75": p75}
    first = next((r for r in rows if r["kind"] == kind), row)
    rows.append(row | {"efficiency": median / first["rate"] * first["ranks"] / p})
