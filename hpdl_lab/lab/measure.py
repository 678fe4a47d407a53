"""`lab.measure`: your collective against others, simulation, model and your own prediction, drawn as it goes."""

from dataclasses import dataclass, field

from ..collectives import cost, expected, table
from ..collectives.sweep import PING_SIZES, SAMPLE_NS, SAMPLES, WrongAnswer, count_of, parse_size, race, sweep
from ..comm import sim
from ..comm.network import Switch
from ..plots import live
from ..plots.measure import Reference, draw
from ..plots.style import bytes_text
from ..trace import number_text, seconds_text
from .contenders import peers, simulable
from .crossing import crossing
from .picture import WithFigure
from .progress import progress
from .ranks import SIMULATED_DEADLINE, place

SIZES = ("4", "1KiB", "16KiB", "128KiB", "1MiB", "4MiB")
REST_S = 0.1  # between two measurements: long enough to draw the last one
LINK_SAMPLES = 5  # of each row on a shaped link, which takes long and about equally long each time
LINK_PING_SIZES = (8, 2**20, 2**22)  # a shaped link lets some 64 KiB pass at once, which says nothing of its speed
RING = {"all_reduce": cost.all_reduce, "reduce_scatter": cost.reduce_scatter, "all_gather": cost.all_gather}


class Prediction(dict):
    """{bytes: seconds}: what you expect before you measure."""

    def __repr__(self):
        points = ", ".join(f"{bytes_text(n)} in {seconds_text(t)}" for n, t in sorted(self.items()))
        return f"You predict: {points}. Hand it to lab.measure(..., prediction=...)."


def predict(times_us):
    """Commit a guess before the measurement: lab.predict({"4": 20, "4MiB": 3000}).

    Args:    times_us: {size: microseconds per call}, sizes in bytes or as "1KiB".
    Returns: Prediction, to be drawn over the measurement by lab.measure.
    """
    if not isinstance(times_us, dict) or not times_us:
        raise ValueError(f'a prediction is {{size: microseconds}}, such as {{"4": 20, "4MiB": 3000}}, got {times_us!r}')
    for size, time_us in times_us.items():
        if not isinstance(time_us, (int, float)) or not time_us > 0:
            raise ValueError(f"a predicted time is a number of microseconds above 0, got {time_us!r} for {size}")
    return Prediction({parse_size(size): time_us / 1e6 for size, time_us in times_us.items()})


@dataclass(frozen=True)
class MeasureResult(WithFigure):
    """rows: one per function and size, see collectives.sweep.sweep; alpha s, beta s/B, gamma s/B: from ping-pong.

    simulated: {name: {size: seconds}} on simulated ranks with that alpha and beta, where they were asked for.
    link_GBps: what a link carries, where that is known, else None.
    """

    where: str
    collective: str
    rows: list
    alpha: float
    beta: float
    gamma: float
    simulated: dict
    link_GBps: float | None
    figure: object = field(repr=False)

    def __repr__(self):
        names = list(dict.fromkeys(r["name"] for r in self.rows))
        cells = {(r["name"], r["size"]): r for r in self.rows}
        width = max(18, *(len(n) + 2 for n in names))  # five columns fit a notebook beside the list of files
        lines = [f"{spoken(self.collective)} on {self.where}: median time per call (bus bandwidth, GB/s)"]
        lines.append(f"{'size':>10}" + "".join(f"{n:>{width}}" for n in names))
        for size in dict.fromkeys(r["size"] for r in self.rows):
            texts = (time_text(cells.get((n, size))) for n in names)
            lines.append(f"{bytes_text(size):>10}" + "".join(f"{t:>{width}}" for t in texts))
        if self.simulated:
            lines.append("measured / simulated, with alpha and beta of the ping-pong")
            for size in dict.fromkeys(r["size"] for r in self.rows):
                texts = (self._against_simulation(cells.get((n, size))) for n in names)
                lines.append(f"{bytes_text(size):>10}" + "".join(f"{t:>{width}}" for t in texts))
        if self.link_GBps:
            size = bytes_text(max(r["size"] for r in self.rows))
            shares = ", ".join(f"{name} reaches {self.share(name):.0%}" for name in names)
            lines.append(f"Of the {self.link_GBps:.4g} GB/s that a link carries, at {size}: {shares}.")
        return "\n".join(lines)

    def _against_simulation(self, row):
        seconds = self.simulated.get(row["name"], {}).get(row["size"]) if row else None
        return f"{row['time_us'] / 1e6 / seconds:.2f}" if seconds else ""

    def share(self, name):
        """The bus bandwidth of `name` over what a link carries; ValueError where that is not known.

        At the largest size: of short messages a good part passes in the burst that a link lets through after a pause.
        """
        if not self.link_GBps:
            raise ValueError(f"the speed of the links is not known on {self.where}: it is on emulated hosts")
        largest = max((r for r in self.rows if r["name"] == name), key=lambda r: r["size"])
        return largest["busbw_GBps"] / self.link_GBps

    def crossover(self, one, other):
        """The size in bytes at which the measured times of two contenders are equal; None where they do not cross.

        Args:    one, other: names as in the table that this result prints. Raises: ValueError for other names.
        """
        times = {name: {r["size"]: r["time_us"] for r in self.rows if r["name"] == name} for name in (one, other)}
        for name, measured in times.items():
            if not measured:
                known = ", ".join(dict.fromkeys(repr(r["name"]) for r in self.rows))
                raise ValueError(f"nothing called {name!r} was measured: there are {known}")
        return crossing(times[one], times[other])

    def modelled_crossover(self, one, other):
        """The same on paper: from the costs of two algorithms of the table, with alpha and beta of the ping-pong."""
        p = self.rows[0]["ranks"]
        sizes = [2**k for k in range(2, 34)]
        one, other = (
            {n: table.find(name, self.collective).cost(p, n).seconds(self.alpha, self.beta) for n in sizes}
            for name in (one, other)
        )
        return crossing(one, other)


def time_text(row):
    if not row:
        return ""
    digits = 3 if row["busbw_GBps"] >= 1 else 2  # as narrow as a small bandwidth's zeros, or exponent, allow
    return f"{seconds_text(row['time_us'] / 1e6)} ({row['busbw_GBps']:.{digits}g})"


def spoken(collective):
    return collective.replace("_", "-")


def measure(
    fn,
    sizes=SIZES,
    *,
    ranks=None,
    against=None,
    prediction=None,
    collective="all_reduce",
    simulated=False,
    network=None,
    deadline=10.0,
):
    """Time your collective over message sizes; time and bus bandwidth are drawn while it goes. Wrong ones are refused.

    Args:    fn: f(comm, x), which makes the float32 tensor x its sum over ranks; or the name of an algorithm.
             sizes: bytes per rank, as numbers or as "1KiB"; ranks: default all engines, or 4 simulated ranks.
             against: functions, names of algorithms such as "ring", "tree", "double_tree" (collectives.table), and
             "compiled_ring", "shm", "mpi", "gloo", on GPUs also "nccl"; default all of the compiled ones on engines.
             prediction: what lab.predict returned; deadline: s, the longest that a rank may wait.
             collective: another one than "all_reduce": fn and `against` then do that, as collectives.table says.
             simulated: draw beside each measured curve that of simulated ranks with alpha and beta of this run.
             network: of comm.network: measure on simulated ranks joined by it, even where engines run.
    Returns: MeasureResult.
    Raises:  collectives.sweep.WrongAnswer where fn is wrong, with the rank, the index, and both values.
    """
    if collective not in expected.COLLECTIVES:
        raise ValueError(f"collective={collective!r}: one of {', '.join(map(repr, expected.COLLECTIVES))} is needed")
    where = place(ranks, network)
    sizes = sorted({parse_size(size) for size in ((sizes,) if isinstance(sizes, (int, str)) else sizes)})
    if not sizes:
        raise ValueError(f"no message size to measure: give some, such as {SIZES}")
    for size in sizes:
        count_of(size, "float32")  # raises before any rank has started
    yours, fn = named(fn, collective)
    functions = {yours: fn, **peers(where, against, collective)}
    title = f"{spoken(collective)} on {where}"
    factor = cost.busbw_factor(collective, where.ranks)
    guess = Reference("your prediction", dict(prediction)) if prediction else None
    fit, rows, virtual = {}, [], {}
    plot = live.Live(draw, alt="time and bus bandwidth against message size")

    def state():
        model = modelled(collective, where.ranks, sizes, fit) if fit and where.alike else None
        return rows, yours, factor, model, guess, title, foot(where, fit, virtual), virtual, where.link_GBps

    def on_row(row):
        fit.update(row) if "alpha" in row else rows.append(row)
        plot.update(*state())

    samples = LINK_SAMPLES if where.link else SAMPLES
    timing = (1, 0, 0.0) if where.simulated else (samples, SAMPLE_NS, REST_S)  # virtual time is the same every time
    pings = LINK_PING_SIZES if where.link else PING_SIZES
    try:
        where.run(race, functions, sizes, "float32", *timing, collective, pings, deadline=deadline, on_row=on_row)
        if simulated and not where.simulated:
            virtual.update(simulate(where.ranks, simulable(functions), sizes, collective, fit))
    except BaseException as error:
        if rows:
            plot.finish(*state())
        raise refusal(error) from None
    figure = plot.finish(*state())
    if not where.simulated:
        best = max((r for r in rows if r["name"] == yours), key=lambda r: r["busbw_GBps"])
        progress().add("measurement", **best)
    return MeasureResult(
        str(where), collective, rows, fit["alpha"], fit["beta"], fit["gamma"], virtual, where.link_GBps, figure
    )


def named(fn, collective):
    """(what the picture calls it, the function) of an attendee's function, or of the name of an algorithm."""
    if isinstance(fn, str):
        return fn, table.find(fn, collective).function
    if not callable(fn):
        raise TypeError(f"lab.measure needs a function f(comm, x), got {type(fn).__name__}: lab.measure(all_reduce)")
    name = getattr(fn, "__name__", "<object>")
    return ("your function" if name.startswith("<") else f"your {name}"), fn


def simulate(p, functions, sizes, collective, fit):
    """{name: {size: seconds}} of the same functions on simulated ranks, joined by a switch as fast as the ping-pong."""
    times = {}

    def on_row(row):
        times.setdefault(row["name"], {})[row["size"]] = row["time_us"] / 1e6

    network = Switch(alpha=fit["alpha"], beta=fit["beta"])
    sim.run(
        p,
        sweep,
        functions,
        sizes,
        "float32",
        1,
        0,
        0.0,
        collective,
        network=network,
        deadline=SIMULATED_DEADLINE,
        on_row=on_row,
    )
    return times


def refusal(error):
    """WrongAnswer where that is what stopped the ranks, on engines as on simulated ranks; else the error itself."""
    for rank_error in getattr(error, "errors", {}).values():
        if rank_error.type == WrongAnswer.__name__:
            return WrongAnswer(rank_error.message)
    return error


def modelled(collective, p, sizes, fit):
    """The ring's cost on paper, with what ping-pong found, at powers of two between the sizes; None without one."""
    if collective not in RING:
        return None
    points, n = set(sizes), sizes[0]
    while n < sizes[-1]:
        points.add(n)
        n *= 2
    price = RING[collective]
    return Reference("ring model", {n: price(p, n).seconds(fit["alpha"], fit["beta"], fit["gamma"]) for n in points})


def foot(where, fit, virtual):
    """The small print: what the model rests on, and whether time is virtual."""
    parts = [where.remark]
    if fit and fit["beta"] and where.alike:
        parts.append(
            f"Model from ping-pong: α = {seconds_text(fit['alpha'])} per message, "
            f"1/β = {number_text(1 / fit['beta'] / 1e9)} GB/s."
        )
    if virtual:
        parts.append("Dashed: simulated ranks with the same α and β.")
    return "  ".join(part for part in parts if part)
