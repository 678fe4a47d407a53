"""`lab.measure`: your all-reduce against others; `lab.ping_pong`: single messages; `lab.tune`: the best per size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from ..collectives import cost, table
from ..collectives.cost import fit_link
from ..collectives.selector import NATIVE, AlgorithmTime, Selection, fastest, function_of
from ..collectives.selector import predict_times as evaluated
from ..collectives.sweep import (
    PING_SIZES,
    SAMPLE_NS,
    SAMPLES,
    Collective,
    WrongAnswer,
    count_of,
    race_algorithms,
    sweep_sizes,
    time_rounds,
)
from ..comm import sim
from ..comm.base import Row
from ..comm.network import Network, Switch
from ..features import gpu
from ..parallel import messages
from ..plots import live
from ..plots.measure import Reference, alpha_beta_text, draw, draw_ping_pong
from ..plots.style import OVERSUBSCRIBED, Figure
from ..trace import number_text, seconds_text
from ..units import bytes_text, parse_bytes, require_number
from .progress import progress
from .result import Result, text_table
from .world import SIMULATED_DEADLINE, World, world_of

SIZES = ("4", "1KiB", "16KiB", "128KiB", "1MiB", "4MiB")
TUNED_SIZES = ("4", "256", "4KiB", "64KiB", "1MiB", "4MiB")
MESSAGES = tuple(2**k for k in range(3, 24, 2))  # 8 B to 8 MiB
REST_S = 0.1  # between two measurements: long enough to draw the last one
LINK_SAMPLES = 5  # of each row on a shaped link, which takes long and about equally long each time
LINK_PING_SIZES = (8, 2**20, 2**22)  # a shaped link lets some 64 KiB pass at once, which says nothing of its speed
PEERS = {  # its name in pictures, the all-reduce in collectives/native.py
    "compiled_ring": ("compiled ring", "ring_all_reduce"),
    "shm": ("shared memory", "shm_all_reduce"),
    "mpi": ("MPI", "mpi_all_reduce"),
    "gloo": ("gloo", "gloo_all_reduce"),
}
GPU_PEERS = {  # the same on GPUs; MPI and gloo go through the memory of the host
    "nccl": ("NCCL", "nccl_all_reduce"),
    "shm": ("one pass", "shm_all_reduce"),
    "mpi": PEERS["mpi"],
    "gloo": PEERS["gloo"],
}
Sizes: TypeAlias = str | int | Iterable[str | int]
Peers: TypeAlias = Collective | str | Iterable[Collective | str] | None  # to race against


# -- what is asked for ------------------------------------------------------------------------------------------------


def asked_times(prediction: object) -> dict[int, float]:
    """Return {bytes: seconds} of {size: microseconds}; empty for None. Raises ValueError for what is neither."""
    if prediction is None:
        return {}
    if not isinstance(prediction, dict) or not prediction:
        raise ValueError(f'a prediction is {{size: microseconds}}, such as {{"4": 20}}, got {prediction!r}')
    return {parse_bytes(n): require_number(f"the time of {n}", t, above=0) / 1e6 for n, t in prediction.items()}


def asked_sizes(sizes: Sizes, least: int = 1, itemsize: bool = True) -> list[int]:
    """Return bytes in rising order. Raises ValueError for fewer than `least`, or for no whole number of float32."""
    found = sorted(
        {parse_bytes(size, "a message size") for size in ([sizes] if isinstance(sizes, str | int) else sizes)}
    )
    if len(found) < least:
        raise ValueError(f"at least {least} message size(s) are needed, such as {SIZES}, got {len(found)}")
    for size in found if itemsize else ():
        count_of(size, "float32")
    return found


# -- collectives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class MeasureResult(Result):
    """Result of `lab.measure`.

    rows: one per function and size, see collectives.sweep.sweep_sizes; alpha s, beta s/B, gamma s/B: from ping-pong;
    contended: the same three while all ranks send and add at once, None if time is virtual.

    simulated: {name: {size: seconds}} on simulated ranks with that alpha and beta, if they were asked for.
    link_GBps: what a link carries, if that is known, else None.
    """

    where: str
    rows: list[Row]
    alpha: float
    beta: float
    gamma: float
    simulated: dict[str, dict[int, float]]
    link_GBps: float | None
    contended: tuple[float, ...] | None
    figure: Figure = field(repr=False)

    def __repr__(self) -> str:
        names = list(dict.fromkeys(r["name"] for r in self.rows))
        sizes = list(dict.fromkeys(r["size"] for r in self.rows))
        cells = {(r["name"], r["size"]): r for r in self.rows}

        def columns(text: Callable[[Row], str]) -> list[str]:
            rows = [[bytes_text(n), *(text(cells[m, n]) if (m, n) in cells else "" for m in names)] for n in sizes]
            return text_table(["size", *names], rows)

        lines = [f"all-reduce on {self.where}: median time per call (bus bandwidth, GB/s)", *columns(_time_text)]
        if self.simulated:
            lines += ["measured / simulated, with alpha and beta of the ping-pong", *columns(self._over_simulation)[1:]]
        if self.link_GBps:
            shares = ", ".join(f"{name} reaches {self.share(name):.0%}" for name in names)
            lines.append(
                f"Of the {self.link_GBps:.4g} GB/s that a link carries, at {bytes_text(max(sizes))}: {shares}."
            )
        return "\n".join(lines)

    def _over_simulation(self, row: Row) -> str:
        seconds = self.simulated.get(row["name"], {}).get(row["size"])
        return f"{row['time_us'] / 1e6 / seconds:.2f}" if seconds else ""

    def share(self, name: str) -> float:
        """Return the bus bandwidth of `name` over what a link carries; ValueError if that is not known.

        At the largest size: of short messages a good part passes in the burst that a link lets through after a pause.
        """
        if not self.link_GBps:
            raise ValueError(f"the speed of the links is not known on {self.where}: it is on emulated hosts")
        largest = max((r for r in self.rows if r["name"] == name), key=lambda r: r["size"])
        return largest["busbw_GBps"] / self.link_GBps

    def drawing(self, more: Iterable[Row] = ()) -> tuple[object, ...]:
        """Return the arguments of plots.measure.draw that show it, with `more` rows; without simulated curves."""
        p, sizes = self.rows[0]["ranks"], sorted({r["size"] for r in self.rows})
        fit: Row = {"alpha": self.alpha, "beta": self.beta, "gamma": self.gamma, "contended": self.contended}
        small, factor = foot(World(p, simulated=False), fit), cost.busbw_factor("all_reduce", p)
        lines = modelled(p, sizes, fit) if self.beta else []
        names = [*self.rows, *more], self.rows[0]["name"]
        return *names, factor, lines, None, f"all-reduce on {self.where}", small, None, self.link_GBps

    def crossover(self, one: str, other: str) -> int | None:
        """Return the size in bytes at which the measured times of two functions are equal; None if they do not cross.

        Args:    one, other: names as in the table that this result prints. Raises: ValueError for other names.
        """
        times = [{r["size"]: r["time_us"] for r in self.rows if r["name"] == name} for name in (one, other)]
        for name, found in zip((one, other), times, strict=True):
            if not found:
                known = ", ".join(dict.fromkeys(repr(r["name"]) for r in self.rows))
                raise ValueError(f"nothing called {name!r} was measured: there are {known}")
        return crossing(*times)

    def modelled_crossover(self, one: str, other: str) -> int | None:
        """Return the same on paper: by the costs of two algorithms of the table, alpha and beta of the ping-pong."""
        p, sizes = self.rows[0]["ranks"], [2**k for k in range(2, 34)]
        prices = [table.find_algorithm(name).cost for name in (one, other)]
        return crossing(*({n: price(p, n).seconds(self.alpha, self.beta) for n in sizes} for price in prices))


def _time_text(row: Row) -> str:
    """Return the time of a row, and in brackets its bus bandwidth."""
    digits = 3 if row["busbw_GBps"] >= 1 else 2  # as narrow as a small bandwidth's zeros, or exponent, allow
    return f"{seconds_text(row['time_us'] / 1e6)} ({row['busbw_GBps']:.{digits}g})"


def crossing(one: dict[int, float], other: dict[int, float]) -> int | None:
    """Return the size at which two curves {bytes: time > 0} meet, between sizes that both have; None if they do not.

    Between two sizes a curve is a straight line in a picture with logarithmic axes. Of several crossings the last one
    counts: below it noise decides.
    """
    sizes = sorted(set(one) & set(other))
    gaps = [math.log(one[n] / other[n]) for n in sizes]
    for i in range(len(sizes) - 1, 0, -1):
        before, after = gaps[i - 1], gaps[i]
        if before * after < 0:
            return round(sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** (before / (before - after)))
        if after == 0:
            return sizes[i]
    return None


def measure(
    fn: Collective | str,
    sizes: Sizes = SIZES,
    *,
    ranks: int | None = None,
    against: Peers = None,
    prediction: str | int | dict[str | int, float] | None = None,
    simulated: bool = False,
    network: Network | None = None,
    deadline: float = 10.0,
) -> MeasureResult:
    """Time your all-reduce over message sizes; time and bus bandwidth are drawn while it goes. Wrong ones are refused.

    Args:    fn: f(comm, x), which makes the float32 tensor x its sum over ranks; or the name of an algorithm.
             sizes: bytes per rank, as numbers or as "1KiB"; ranks: default all engines, or 4 simulated ranks.
             against: functions, names of algorithms such as "ring", "tree", "double_tree" (collectives.table), and
             "compiled_ring", "shm", "mpi", "gloo", on GPUs also "nccl"; default all of the compiled ones on engines.
             prediction: {size: microseconds}, what you expect; or the size at which you expect curves to cross.
             deadline: s, the longest that a rank may wait.
             simulated: draw with each measured curve the curve of simulated ranks with alpha and beta of this run.
             network: of comm.network: measure on simulated ranks joined by it, even if engines run.
    Returns: MeasureResult.
    Raises:  collectives.sweep.WrongAnswer if fn is wrong, with the rank, the index, and both values.
    """
    world, asked = world_of(ranks, network), asked_sizes(sizes)
    yours, function = _named(fn)
    functions = {yours: function, **_peers(world, against)}
    title, factor = f"all-reduce on {world}", cost.busbw_factor("all_reduce", world.ranks)
    times = prediction is None or isinstance(prediction, dict)
    guess = Reference("your guess", asked_times(prediction) if times else {})
    cross = None if times else parse_bytes(prediction, "the size at which curves cross")
    fit: Row = {}
    rows: list[Row] = []
    virtual: dict[str, dict[int, float]] = {}
    plot = live.Live(draw, alt="time and bus bandwidth against message size")

    def state() -> tuple[object, ...]:
        models = modelled(world.ranks, asked, fit) if fit and world.alike else []
        small = foot(world, fit, bool(virtual))
        return rows, yours, factor, models, guess, title, small, virtual, world.link_GBps, cross

    def on_row(row: Row) -> None:
        fit.update(row) if "alpha" in row else rows.append(row)
        plot.update(*state())

    samples = LINK_SAMPLES if world.link else SAMPLES
    timing = (1, 0, 0.0) if world.simulated else (samples, SAMPLE_NS, REST_S)  # virtual time is the same every time
    pings = LINK_PING_SIZES if world.link else PING_SIZES
    try:
        world.run(
            race_algorithms, functions, asked, "float32", *timing, "all_reduce", pings, deadline=deadline, on_row=on_row
        )
        if simulated and not world.simulated:
            virtual.update(_simulate(world.ranks, functions, asked, fit))
    except BaseException as error:
        if rows:
            plot.finish(*state())
        raise refusal(error) from None
    figure = plot.finish(*state())
    if not world.simulated:
        progress().add("measurement", **max((r for r in rows if r["name"] == yours), key=lambda r: r["busbw_GBps"]))
    numbers = fit["alpha"], fit["beta"], fit["gamma"]
    return MeasureResult(str(world), rows, *numbers, virtual, world.link_GBps, fit["contended"], figure)


def _named(fn: Collective | str) -> tuple[str, Collective]:
    """Return (its name in pictures, the function) of an attendee's function, or of the name of an algorithm."""
    if isinstance(fn, str):
        return fn, table.find_algorithm(fn).function
    if not callable(fn):
        raise TypeError(f"lab.measure needs a function f(comm, x), got {type(fn).__name__}: lab.measure(all_reduce)")
    name = getattr(fn, "__name__", "<object>")
    return ("your function" if name.startswith("<") else f"your {name}"), fn


def _peers(world: World, against: Peers) -> dict[str, Collective]:
    """Return {name: f(comm, x)} of what to race against; None: the compiled ones that work here.

    Raises: ValueError for an unknown name, or for compiled code on simulated ranks.
    """
    compiled = GPU_PEERS if world.device == "cuda" else PEERS
    if against is None:
        absent = {"shm": bool(world.link), "nccl": "nccl" in compiled and not gpu.nccl_serves(world.ranks)}
        against = () if world.simulated else [name for name in compiled if not absent.get(name)]
    functions: dict[str, Collective] = {}
    for peer in (against,) if isinstance(against, str) or callable(against) else against:
        if callable(peer):
            functions[getattr(peer, "__name__", repr(peer))] = peer
        elif peer in table.algorithm_names():
            functions[peer] = table.find_algorithm(peer).function
        elif peer not in compiled:
            names = ", ".join(map(repr, [*table.algorithm_names(), *compiled]))
            raise ValueError(f"no peer is called {peer!r}: there are {names}, and any f(comm, x)")
        elif world.simulated:
            raise ValueError(f"{peer!r} is compiled code and needs engines: lab.start({world.ranks})")
        else:
            from ..collectives import native  # compiled: simulated ranks must not need it

            functions[compiled[peer][0]] = getattr(native, compiled[peer][1])
    return functions


def _simulate(
    p: int, functions: dict[str, Collective], sizes: list[int], fit: dict[str, float]
) -> dict[str, dict[int, float]]:
    """Return {name: {size: seconds}} of simulated ranks with this alpha and beta; compiled code is left out."""
    compiled = {name for known in (PEERS, GPU_PEERS) for name, _ in known.values()}
    functions = {name: function for name, function in functions.items() if name not in compiled}
    network = Switch(alpha=fit["alpha"], beta=fit["beta"])
    timing = "float32", 1, 0, 0.0
    found = sim.run(p, sweep_sizes, functions, sizes, *timing, network=network, deadline=SIMULATED_DEADLINE)
    times: dict[str, dict[int, float]] = {}
    for row in found.rows:
        times.setdefault(row["name"], {})[row["size"]] = row["time_us"] / 1e6
    return times


def refusal(error: BaseException) -> BaseException:
    """Return WrongAnswer if that stopped the ranks, on engines as on simulated ranks; else the error itself."""
    for rank_error in getattr(error, "errors", {}).values():
        if rank_error.type == WrongAnswer.__name__:
            return WrongAnswer(rank_error.message)
    return error


def modelled(p: int, sizes: list[int], fit: Row) -> list[Reference]:
    """Return the ring's cost on paper at powers of two between the sizes: with what messages and additions cost when
    all ranks send and add at once, and with what they cost two ranks alone; only the latter if time is virtual."""
    doublings = range((sizes[-1] // sizes[0]).bit_length())
    points = {*sizes, *(sizes[0] << k for k in doublings if sizes[0] << k < sizes[-1])}
    alone = fit["alpha"], fit["beta"], fit["gamma"]
    models = {"no contention": alone, "ring model": fit["contended"]} if fit["contended"] else {"ring model": alone}
    return [
        Reference(name, {n: cost.all_reduce(p, n).seconds(*numbers) for n in points})
        for name, numbers in models.items()
    ]


def foot(world: World, fit: Row, virtual: bool = False) -> str:
    """Return the small print: what the model rests on, and whether time is virtual."""
    parts = [world.remark]
    if fit and fit["beta"] and world.alike:
        parts.append(f"Ping-pong: {_link_text(fit['alpha'], fit['beta'])}.")
        if fit.get("contended"):
            parts.append(f"All ranks at once, which the model takes: {_link_text(*fit['contended'][:2])}.")
    if virtual:
        parts.append("Dashed: simulated ranks with the same α and β.")
    return "  ".join(filter(None, parts))


def _link_text(alpha: float, beta: float) -> str:
    """Return latency and bandwidth of a link in words."""
    return f"α = {seconds_text(alpha)}, 1/β = " + (f"{number_text(1e-9 / beta)} GB/s" if beta else "∞")


# -- messages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class PingPongResult(Result):
    """Result of `lab.ping_pong`.

    nbytes, seconds: of the measured messages, one way, medians; alpha s, beta s/byte: fitted to them.
    """

    where: str
    nbytes: list[int]
    seconds: list[float]
    alpha: float
    beta: float
    figure: Figure = field(repr=False)

    def __repr__(self) -> str:
        lines = [f"{bytes_text(n):>10}  {seconds_text(t)}" for n, t in zip(self.nbytes, self.seconds, strict=True)]
        return "\n".join([f"a message between two of {self.where}: {alpha_beta_text(self.alpha, self.beta)}", *lines])


_measured: list[PingPongResult] = []  # of this notebook


def last_ping_pong() -> PingPongResult | None:
    """Return what lab.ping_pong measured last; None before."""
    return _measured[-1] if _measured else None


def ping_pong(
    fn: Collective = messages.ping_pong,
    sizes: Sizes = MESSAGES,
    *,
    ranks: int | None = None,
    prediction: dict[str | int, float] | None = None,
    deadline: float = 10.0,
) -> PingPongResult:
    """Time messages between ranks 0 and 1, half a round trip each, and fit alpha + beta * bytes; drawn as it goes.

    Args:    fn: f(comm, x), one round: x goes from rank 0 to rank 1 and back; the other ranks look on.
             sizes: bytes, as numbers or as "1KiB", at least two; ranks: default all engines, or 4 simulated ranks.
             prediction: {size: microseconds}, what you expect; deadline: s, the longest that a rank may wait.
    Returns: PingPongResult.
    Raises:  collectives.sweep.WrongAnswer if what comes back is not what was sent; ValueError for one size or rank.
    """
    if not callable(fn):
        raise TypeError(f"lab.ping_pong needs a function f(comm, x), got {type(fn).__name__}: lab.ping_pong(ping_pong)")
    world, asked = world_of(ranks), asked_sizes(sizes, least=2, itemsize=False)
    if world.ranks < 2:
        raise ValueError("a ping-pong needs two ranks, and there is 1: lab.start(2)")
    title, guess = f"Ping-pong between two of {world}", asked_times(prediction)
    rows: list[Row] = []
    plot = live.Live(draw_ping_pong, alt="time of a message against its size")

    def on_row(row: Row) -> None:
        rows.append(row)
        plot.update(rows, None, guess, title, world.remark)

    timing = (1, 0) if world.simulated else (SAMPLES, SAMPLE_NS)
    try:
        world.run(time_rounds, fn, asked, *timing, deadline=deadline, on_row=on_row)
    except BaseException as error:
        raise refusal(error) from None
    nbytes, seconds = [r["size"] for r in rows], [r["seconds"] for r in rows]
    alpha, beta = fit_link(nbytes, seconds)
    figure = plot.finish(rows, (alpha, beta), guess, title, world.remark)
    _measured[:] = [PingPongResult(str(world), nbytes, seconds, alpha, beta, figure)]
    return _measured[-1]


# -- which is best for what -------------------------------------------------------------------------------------------


def tune(
    algorithms: Iterable[str] | None = None,
    sizes: Sizes = TUNED_SIZES,
    *,
    ranks: int | None = None,
    network: Network | None = None,
    deadline: float = 10.0,
) -> Selection:
    """Time all-reduces over message sizes here; returns an all-reduce that takes for each size what was fastest.

        chosen = lab.tune()                       # Selection.parse('recursive_doubling:0-16384;ring:16385-max')
        lab.train(all_reduce=chosen)              # it goes wherever an all_reduce goes
        chosen.save("all_reduce.txt")             # collectives.selector.Selection.load reads it

    Args:    algorithms: names of collectives.table, and "native" for the communicator's own; default all of them.
             network: of comm.network: the times on simulated ranks joined by it, even if engines run. They come from
             the schedules, so that thousands of ranks are possible; "native" has none.
    Raises:  LookupError for an unknown name, ValueError for sizes that are no whole number of float32.
    """
    if algorithms is None:
        algorithms = table.algorithm_names() if network is not None else [*table.algorithm_names(), NATIVE]
    functions = {name: function_of(name) for name in algorithms}
    world, asked = world_of(ranks, network), asked_sizes(sizes)
    if not functions:
        raise ValueError("no algorithm to measure: give some, such as ['ring', 'tree']")
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        if len(rows) % len(functions) == 0:
            best = sorted(rows[-len(functions) :], key=lambda r: r["time_us"])[:3]
            times = ", ".join(f"{r['name']} {seconds_text(r['time_us'] / 1e6)}" for r in best)
            print(f"{bytes_text(row['size']):>10}  {times}", flush=True)

    print(f"all-reduce on {world}: the fastest of {len(functions)}. {world.remark}".rstrip())
    if network is not None:
        for row in evaluated(list(functions), asked, world.ranks, network):
            on_row({**row})
    else:
        timing = (1, 0) if world.simulated else (SAMPLES, SAMPLE_NS)
        world.run(sweep_sizes, functions, asked, "float32", *timing, deadline=deadline, on_row=on_row)
        if rows[0]["ranks"] > rows[0]["cores"] and not world.simulated:
            print(f"{rows[0]['ranks']} ranks on {rows[0]['cores']} cores: {OVERSUBSCRIBED}")
    return fastest(cast(list[AlgorithmTime], rows))
