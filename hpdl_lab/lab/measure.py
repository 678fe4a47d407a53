"""`lab.measure`: your all-reduce against the compiled ones, the model and your own prediction, drawn as it goes."""

from dataclasses import dataclass, field

from ..collectives import cost
from ..collectives.sweep import SAMPLE_NS, SAMPLES, WrongAnswer, count_of, parse_size, race
from ..engines.errors import without_traceback
from ..plots import live
from ..plots.measure import Reference, draw
from ..plots.style import bytes_text, number_text, seconds_text
from .progress import progress
from .ranks import place

SIZES = ("4", "1KiB", "16KiB", "128KiB", "1MiB", "4MiB")
REST_S = 0.1  # between two measurements: long enough to draw the last one
PEERS = {  # name: what the picture calls it, the function in collectives/native.py
    "ring": ("compiled ring", "ring_all_reduce"),
    "shm": ("shared memory", "shm_all_reduce"),
    "mpi": ("MPI", "mpi_all_reduce"),
    "gloo": ("gloo", "gloo_all_reduce"),
}


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
class MeasureResult:
    """rows: one per function and size, see collectives.sweep.sweep; alpha s, beta s/B, gamma s/B: from ping-pong."""

    where: str
    rows: list
    alpha: float
    beta: float
    gamma: float
    figure: object = field(repr=False)

    def __repr__(self):
        names = list(dict.fromkeys(r["name"] for r in self.rows))
        cells = {(r["name"], r["size"]): r for r in self.rows}
        width = max(20, *(len(n) + 2 for n in names))  # five columns fit a notebook
        lines = [f"all-reduce on {self.where}: median time per call (bus bandwidth, GB/s)"]
        lines.append(f"{'size':>10}" + "".join(f"{n:>{width}}" for n in names))
        for size in dict.fromkeys(r["size"] for r in self.rows):
            texts = (time_text(cells.get((n, size))) for n in names)
            lines.append(f"{bytes_text(size):>10}" + "".join(f"{t:>{width}}" for t in texts))
        return "\n".join(lines)


def time_text(row):
    return f"{seconds_text(row['time_us'] / 1e6)} ({row['busbw_GBps']:.3g})" if row else ""


def measure(fn, sizes=SIZES, *, ranks=None, against=None, prediction=None, deadline=10.0):
    """Time your all-reduce over message sizes; time and bus bandwidth are drawn while it goes. Wrong ones are refused.

    Args:    fn: f(comm, x), which makes the float32 tensor x its sum over ranks.
             sizes: bytes per rank, as numbers or as "1KiB"; ranks: default all engines, or 4 simulated ranks.
             against: names out of "ring", "shm", "mpi", "gloo", and functions; default all four on engines.
             prediction: what lab.predict returned; deadline: s, the longest that a rank may wait.
    Returns: MeasureResult.
    Raises:  collectives.sweep.WrongAnswer where fn is wrong, with the rank, the index, and both values.
    """
    where = place(ranks)
    sizes = sorted({parse_size(size) for size in ((sizes,) if isinstance(sizes, (int, str)) else sizes)})
    if not sizes:
        raise ValueError(f"no message size to measure: give some, such as {SIZES}")
    for size in sizes:
        count_of(size, "float32")  # raises before any rank has started
    if not callable(fn):
        raise TypeError(f"lab.measure needs a function f(comm, x), got {type(fn).__name__}: lab.measure(all_reduce)")
    name = getattr(fn, "__name__", "<object>")
    yours = "your function" if name.startswith("<") else f"your {name}"
    functions = {yours: fn, **peers(where, against)}
    title = f"all-reduce on {where}"
    factor = cost.busbw_factor("all_reduce", where.ranks)
    guess = Reference("your prediction", dict(prediction)) if prediction else None
    fit, rows = {}, []
    plot = live.Live(draw, alt="time and bus bandwidth against message size")

    def state():
        model = modelled(where.ranks, sizes, fit) if fit else None
        return rows, yours, factor, model, guess, title, foot(where, fit)

    def on_row(row):
        fit.update(row) if "alpha" in row else rows.append(row)
        plot.update(*state())

    timing = (1, 0, 0.0) if where.simulated else (SAMPLES, SAMPLE_NS, REST_S)  # virtual time is the same every time
    try:
        where.run(race, functions, sizes, "float32", *timing, deadline=deadline, on_row=on_row)
    except BaseException as error:
        if rows:
            plot.finish(*state())
        raise refusal(error) from None
    figure = plot.finish(*state())
    if not where.simulated:
        best = max((r for r in rows if r["name"] == yours), key=lambda r: r["busbw_GBps"])
        progress().add("measurement", **best)
    return MeasureResult(str(where), rows, fit["alpha"], fit["beta"], fit["gamma"], figure)


def refusal(error):
    """WrongAnswer where that is what stopped the ranks, on engines as on simulated ranks; else the error itself."""
    for rank_error in getattr(error, "errors", {}).values():
        if rank_error.type == WrongAnswer.__name__:
            error = WrongAnswer(rank_error.message)
    return without_traceback(error) if isinstance(error, WrongAnswer) else error


def peers(where, against):
    """{name: function} of what to race against. Raises ValueError for an unknown name."""
    if against is None:
        against = () if where.simulated else tuple(PEERS)
    functions = {}
    for peer in against:
        if callable(peer):
            functions[getattr(peer, "__name__", repr(peer))] = peer
        elif peer not in PEERS:
            raise ValueError(f"no peer is called {peer!r}: there are {', '.join(map(repr, PEERS))}, and any f(comm, x)")
        elif where.simulated:
            raise ValueError(f"{peer!r} is compiled code and needs engines: lab.start({where.ranks})")
        else:
            from ..collectives import native  # compiled: simulated ranks must not need it

            name, function = PEERS[peer]
            functions[name] = getattr(native, function)
    return functions


def modelled(p, sizes, fit):
    """The ring's cost on paper, with what ping-pong found, at every power of two between the sizes."""
    points, n = set(sizes), sizes[0]
    while n < sizes[-1]:
        points.add(n)
        n *= 2
    return Reference(
        "ring model", {n: cost.all_reduce(p, n).seconds(fit["alpha"], fit["beta"], fit["gamma"]) for n in points}
    )


def foot(where, fit):
    """The small print: what the model rests on, and whether time is virtual."""
    parts = [where.remark]
    if fit and fit["beta"]:
        parts.append(
            f"Model from ping-pong: α = {seconds_text(fit['alpha'])} per message, "
            f"1/β = {number_text(1 / fit['beta'] / 1e9)} GB/s."
        )
    return "  ".join(part for part in parts if part)
