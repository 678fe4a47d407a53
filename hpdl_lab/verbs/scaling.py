"""`lab.scaling`: the same work on more ranks, and the same work per rank: measured, modelled, and simulated."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..comm.network import Network, Switch, title
from ..data.dataset import Dataset
from ..features import cores
from ..models.mlp import mlp
from ..parallel.data_parallel import Strategy
from ..parallel.reducer import AllReduce
from ..parallel.scaling.laws import Fit, fit
from ..parallel.scaling.overlap import Interference
from ..plots import live
from ..plots.scaling import HEIGHT, draw
from ..plots.style import Figure
from ..trace import number_text, seconds_text
from ..units import require_int, require_number
from .choice import asked_strategy, model_and_data
from .cluster import running
from .measure import refusal
from .result import Result, text_table
from .scaling_points import (
    Row,
    ScaledStep,
    SimulatedCluster,
    measure_point,
    one_message,
    profiles,
    require_sums,
    scaled_step,
)
from .world import asked_network, world_of

KINDS = ("strong", "weak")
SIMULATE = (8, 16, 64, 256, 1024)
FEW_FEATURES, LARGE = 512, 32  # n if it is not given: for rows of numbers, and for larger examples
LAYERS = (64, 512, 256, 10)  # of the model that is trained if none is given
NETWORK_TEXT = "a 100 Gbit/s switch, 2 µs per message"  # the defaults of Switch, in words
UNIT = "samples/s"


@dataclass(frozen=True, repr=False)
class ScalingResult(Result):
    """Result of `lab.scaling`.

    Points are dicts: kind, ranks, cores, rate (median, samples/s), p25, p75, speedup, efficiency, exposed, overlap,
    imbalance (see parallel/scaling/accounting.py; None if the events do not tell).

    rows:      measured; "simulated" is the rate of simulated ranks that compute and talk as these engines did.
    simulated: on ranks with a core each. "how" says whose the time of an all-reduce is: "schedule", of an algorithm of
               the table, or "messages", of the function on simulated ranks.
    model:     of the alpha-beta-overlap model.
    title, foot: the text above and below the figure.
    """

    rows: list[Row]
    simulated: list[Row]
    model: list[Row]
    title: str
    foot: str
    figure: Figure = field(repr=False)

    def drawing(
        self, more: Iterable[Row] = (), prediction: dict[int, float] | None = None, kind: str | None = None
    ) -> tuple[object, ...]:
        """Return the arguments of plots.scaling.draw that show it, with `more` rows."""
        rows = [*self.rows, *more]
        return rows, self.simulated, self.model, prediction, self.fits, self.title, self.foot, kind

    @property
    def fits(self) -> list[Fit]:
        """Fits of Amdahl's law for strong and Gustafson's for weak scaling, to measured and to simulated points."""
        return fits_of(self.rows, self.simulated)

    def agreement(self) -> dict[tuple[str, int], float]:
        """Return {(kind, ranks): simulated over measured rate}, if ranks were measured and simulated alike."""
        return {(r["kind"], r["ranks"]): r["simulated"] / r["rate"] for r in self.rows if r.get("simulated")}

    def __repr__(self) -> str:
        head = ("scaling", "ranks", f"rate, {UNIT}", "efficiency", "exposed", "overlap", "imbalance", "simulated", "")
        rows = [_cells_of(r, f"more ranks than the {r['cores']} cores" * (r["ranks"] > r["cores"])) for r in self.rows]
        rows += [_cells_of(r, f"simulated, {r['how']}") for r in self.simulated]
        return "\n".join([*text_table(head, rows), *map(str, self.fits)])


def _cells_of(r: Row, remark: str) -> list[str]:
    """Return one point as cells of text; what the events do not tell is left blank."""
    over = r["simulated"] / r["rate"] if r.get("simulated") else None
    shares = ["" if v is None else f"{v:.0%}" for v in (r["efficiency"], r["exposed"], r["overlap"], over)]
    imbalance = f"{r['imbalance']:.2f}" if r["imbalance"] else ""
    return [r["kind"], f"{r['ranks']:,}", f"{r['rate']:,.0f}", *shares[:3], imbalance, shares[3], remark]


def with_speedups(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in order, with speedup and efficiency against the row of their kind with the fewest ranks."""
    out: list[Row] = []
    first: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: (r["kind"], r["ranks"])):
        one = first.setdefault(row["kind"], row)
        speedup = row["rate"] / one["rate"]
        out.append(row | {"speedup": speedup, "efficiency": speedup * one["ranks"] / row["ranks"]})
    return out


def fits_of(rows: list[Row], simulated: list[Row]) -> list[Fit]:
    """Return [Fit] for every kind of scaling, of measured points (if each rank had a core) and of simulated ones."""
    fits = []
    for kind in dict.fromkeys(r["kind"] for r in (*rows, *simulated)):
        for source, points in (("measured", rows), ("simulated", simulated)):
            curve = [r for r in points if r["kind"] == kind and r["ranks"] <= r["cores"]]
            if curve:
                fits.append(fit(kind, [r["ranks"] for r in curve], [r["speedup"] for r in curve], source))
    return fits


def scaling(
    *,
    all_reduce: AllReduce | None = None,
    strategy: Strategy | None = None,
    model: str | nn.Module | None = None,
    data: str | Dataset | None = None,
    ranks: int | Iterable[int] | None = None,
    n: int | None = None,
    kind: str | None = None,
    prediction: dict[int, float] | None = None,
    network: Network | None = None,
    simulate: int | Iterable[int] = SIMULATE,
    deadline: float = 10.0,
) -> ScalingResult:
    """Scale a training step: your prediction, the ideal, the model, what was measured, and clusters of 1,024 ranks.

        lab.scaling(all_reduce=all_reduce)                                 your ring, a small model, the digits
        lab.scaling(strategy=DataParallelOverlapped(), model="gpt", data="text", prediction={2: 1.8, 1024: 300})

    Points with more ranks than cores are gray. Simulated ranks compute as fast as one core of this machine, all of
    whose cores are busy, and send messages as fast as its engines do, unless a network is given.

    Args:    all_reduce: f(comm, x); default the communicator's own. strategy: see parallel/data_parallel.py; default
             DataParallel(all_reduce). model, data: as in lab.train; default a small model and the digits.
             ranks: which numbers of ranks to measure, default 1, 2, 4, ... up to the engines.
             n: examples, of all ranks in strong and of each rank in weak scaling; default 512, and 32 if examples are
             images or windows of tokens.
             kind: "strong" or "weak", for that one alone, whose speedup is then drawn as well as its efficiency.
             prediction: {ranks: speedup}.
             network: of comm.network, of the simulated ranks; default a switch as fast as the engines' messages, or
             one of 100 Gbit/s if none run. simulate: which numbers of ranks to simulate besides.
             deadline: s, the longest that a rank may wait.
    Returns: ScalingResult. Without engines only simulated points.
    Raises:  ValueError, TypeError in one sentence; collectives.sweep.WrongAnswer if all_reduce does not add up.
    """
    if n is not None:
        require_int("n, a number of examples,", n, 1)
    require_number("deadline", deadline, above=0)
    asked_network(network)
    if kind not in (None, *KINDS):
        raise ValueError(f"kind={kind!r}: one of {', '.join(map(repr, KINDS))} is needed, or None for both")
    guess = _asked_prediction(prediction)
    counts = _default_ranks() if ranks is None else _whole_numbers(ranks, "ranks")
    far = _whole_numbers(simulate, "simulate") if simulate else []
    if not counts:
        raise ValueError("no number of ranks to measure: give some, such as (1, 2, 4)")
    world_of(max(counts))  # raises, before anything is measured, if there are fewer engines
    job, n = _asked_job(model, asked_strategy(strategy, all_reduce), data, n, max(counts))
    course = _ScalingCourse(job, n, network, deadline, KINDS if kind is None else (kind,))
    heading = f"Scaling of a training step: {type(job.strategy).__name__}"
    plot = live.Live(draw, height=HEIGHT, alt="strong and weak scaling")

    def result() -> ScalingResult:
        rows, simulated, modelled = (with_speedups(points) for points in (course.rows, course.simulated, course.model))
        return ScalingResult(rows, simulated, modelled, heading, course.foot(), plot.figure)

    def state() -> tuple[object, ...]:
        return result().drawing(prediction=guess, kind=kind)

    try:
        course.run(counts, sorted({*counts, *far}), lambda: plot.update(*state()))
    except BaseException as error:
        if course.rows or course.simulated:
            plot.finish(*state())
        raise refusal(error) from None
    plot.finish(*state())
    return result()


class _ScalingCourse:
    """The order of measurements and simulations. rows, simulated, model: the points so far, see ScalingResult."""

    def __init__(self, job: ScaledStep, n: int, network: Network | None, deadline: float, kinds: Sequence[str]) -> None:
        self.job, self.n, self.network, self.deadline, self.kinds = job, n, network, deadline, kinds
        self.rows: list[Row] = []
        self.simulated: list[Row] = []
        self.model: list[Row] = []
        self.left_out: list[int] = []
        self.alone: tuple[Row, SimulatedCluster | None] | None = None  # of one rank, from `measure`
        self.measured: dict[int, SimulatedCluster] = {}  # ranks -> with the alpha and beta of as many engines
        self.why = ""  # why nothing is simulated
        # what joins the simulated ranks, in words
        self.joined = "" if network is None else f"{title(network)}{_link_text(network, ': ')}"

    def run(self, counts: list[int], every: list[int], changed: Callable[[], None]) -> None:
        """Measure on `counts` engines, then simulate `every` number of ranks; changed() after each point."""
        engines = running() is not None
        if not engines:
            require_sums(self.job)
        for kind, p in ((kind, p) for kind in self.kinds for p in counts if engines):
            self.measure(kind, p)
            changed()
        if self.why:
            return
        q = min(cores(), max(counts)) if engines else 0
        disturbed = self.interference()
        speeds = profiles(self.job, every, self.n, q, self.deadline)
        cluster = SimulatedCluster(
            self.job, self.network or self.switch(), [profile._replace(interference=disturbed) for profile in speeds]
        )
        there = {(r["kind"], r["ranks"]) for r in self.simulated}
        for p, kind in ((p, kind) for p in every for kind in self.kinds if (kind, p) not in there):
            self.add(cluster, kind, p)
            changed()
        self.left_out = cluster.left_out

    def measure(self, kind: str, p: int) -> None:
        """Measure one point on p engines; on one rank strong and weak scaling are the same, and are measured once."""
        if p > 1 or self.alone is None:
            row, cluster, self.why = measure_point(self.job, kind, self.n, p, self.deadline)
            self.alone = (row, cluster) if p == 1 else self.alone
        else:
            row, cluster = self.alone
        self.rows.append(row | {"kind": kind})
        if cluster is not None and p > 1:
            self.measured.setdefault(p, cluster)
        if cluster is not None and self.network is None and p <= cores():
            self.add(cluster, kind, p, row["simulated"])

    def add(self, cluster: SimulatedCluster, kind: str, p: int, rate: float | None = None) -> None:
        """Add the simulated point, if it does not take too long, and the model's; rate: what is known already."""
        self.model.append(cluster.model(kind, self.n, p))
        row = cluster.simulate(kind, self.n, p)
        if row is not None:
            self.simulated.append(row if rate is None else row | dict.fromkeys(("rate", "p25", "p75"), rate))

    def switch(self) -> Network:
        """Return the network of simulated ranks: as fast as the engines' messages, if two of them ran."""
        if not self.measured:
            self.joined = NETWORK_TEXT
            return Switch()
        p = self.like_simulated()
        switch = self.measured[p].network
        self.joined = f"messages as between {world_of(p)}{_link_text(switch, ': ')}"
        return switch

    def interference(self) -> Interference:
        """Return how much computing and messages in the background slow each other down: as on the engines."""
        if not self.measured:
            return Interference()
        (profile,) = self.measured[self.like_simulated()].profiles
        return Interference(*(min(1.0, speed) for speed in profile.interference))

    def like_simulated(self) -> int:
        """Return the number of engines most like simulated ranks: the most that had a core each, else the fewest."""
        return max((p for p in self.measured if p <= cores()), default=min(self.measured))

    def foot(self) -> str:
        """Return the small print: what simulated ranks are, and what is not drawn."""
        if self.why:
            return f"Nothing is simulated: {self.why}."
        parts = [f"Simulated: a core per rank; {self.joined}." if self.joined else ""]
        if running() is None:
            parts.append("No engines run: lab.start(4) adds measured points.")
        if self.left_out:
            left = ", ".join(f"{p:,}" for p in sorted(set(self.left_out)))
            parts.append(f"{left} ranks would take too long, and the schedule of this all-reduce is not known.")
        if "strong" in self.kinds and self.simulated and self.simulated[-1]["ranks"] > self.n:
            parts.append(f"Strong: of more than {self.n:,} ranks some have no example.")
        return "  ".join(filter(None, parts))


def _link_text(network: Network, before: str) -> str:
    """Return `before`, with latency and bandwidth of the network's links; "" if these are not all alike."""
    alpha, beta = one_message(network)
    if not (alpha or beta):
        return ""
    speed = f"1/β = {number_text(1e-9 / beta)} GB/s" if beta else "no cost per byte"
    return f"{before}α = {seconds_text(alpha)}, {speed}"


# -- what was asked for -----------------------------------------------------------------------------------------------


def _default_ranks() -> list[int]:
    """Return 1, 2, 4, ... up to the engines, or to 4 simulated ranks."""
    engines = running()
    most = 4 if engines is None else engines.n
    return [2**k for k in range(most.bit_length()) if 2**k <= most]


def _whole_numbers(values: int | Iterable[int], name: str) -> list[int]:
    """Return numbers of ranks in rising order. Raises ValueError for what is none."""
    several = list(values) if isinstance(values, Iterable) else [values]
    return sorted({require_int(f"a number in {name}", value, 1) for value in several})


def _asked_prediction(prediction: dict[int, float] | None) -> dict[int, float]:
    """Return {ranks: speedup}. Raises ValueError for what is none."""
    if prediction is not None and (not isinstance(prediction, dict) or not prediction):
        raise ValueError(f"a prediction is {{ranks: speedup}}, such as {{2: 1.9, 1024: 300}}, got {prediction!r}")
    for p, speedup in (prediction or {}).items():
        require_int("a number of ranks that you predict for", p, 1)
        require_number(f"the speedup of {p} ranks", speedup, above=0)
    return prediction or {}


def _asked_job(
    model: str | nn.Module | None, strategy: Strategy, data: str | Dataset | None, n: int | None, most: int
) -> tuple[ScaledStep, int]:
    """Return (ScaledStep, with the examples that `most` ranks need; n). Raises ValueError, TypeError."""
    if not strategy.synchronous:
        raise ValueError(f"{strategy!r} is asynchronous: its ranks take no step together that could be timed")
    default = model is None and data is None
    choice = model_and_data(mlp(LAYERS) if default else model, data)
    rows = choice.data.train_x.is_floating_point() and choice.data.train_x.ndim == 2
    n = n or (FEW_FEATURES if rows else LARGE)
    used = slice(0, n * most)  # examples after these would only travel to the engines
    x, y = choice.data.train_x[used], choice.data.train_y[used]
    return scaled_step(
        choice.model, strategy, choice.data._replace(train_x=x, train_y=y, test_x=x[:0], test_y=y[:0])
    ), n
