"""`lab.roofline`: what memory can do, and what all-reduces make of it; `lab.write_again`: a store that has to wait."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..bench import memory
from ..collectives.memory import ONE_PASS, RING_ONCE, RING_TWICE, STAGED
from ..collectives.memory import bytes_moved as library_bytes
from ..comm.base import Row
from ..features import cores
from ..plots import live
from ..plots.memory import draw_roofline, draw_write_again
from ..plots.style import Figure
from ..trace import number_text, seconds_text
from ..units import bytes_text, require_number
from .measure import REST_S, Sizes, asked_sizes
from .result import Result, text_table
from .world import World, world_of

SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB")
CHUNK, MOST = 2**18, 2**24  # bytes
COUNTS_OF = {ONE_PASS: (ONE_PASS,), STAGED: (STAGED,), memory.RING: (RING_ONCE, RING_TWICE)}
TOO_FAST = 1.05  # times as fast as the memory: that is a fault of the measurement


def here(verb: str, ranks: int | None) -> World:
    """Return a World of at most one rank for each core, on engines of one machine. Raises ValueError elsewhere."""
    world = world_of(min(world_of().ranks, max(2, cores())) if ranks is None else ranks)
    if world.simulated or world.link or world.device != "cpu" or world.ranks < 2:
        got = f"{world} with 1 rank" if world.ranks < 2 else f"{world}, {world.device}"
        raise ValueError(f"lab.{verb} measures memory that two engines on CPUs share, and here are {got}: lab.start(2)")
    return world


# -- all-reduces under the roof ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class RooflineResult(Result):
    """Result of `lab.roofline`.

    rows: of bench.memory.measure_roofline. moved: {all-reduce: (least, most) bytes that all ranks move together for
    each byte of a tensor}, as `bytes_moved` counts."""

    where: str
    ranks: int
    rows: list[Row]
    moved: dict[str, tuple[float, float]]
    figure: Figure = field(repr=False)

    def bandwidth(self, size: int) -> float:
        """Return bytes per s that all ranks together move, tensors of `size` bytes: best kernel, lower quartile."""
        return _best(self.rows, self.ranks)[size]

    def of_bound(self, name: str, size: int) -> float:
        """Return the least time of the bytes that an all-reduce moves over its time: 1 is all that the memory can."""
        (row,) = (r for r in self.rows if (r["name"], r["size"]) == (name, size))
        return self.moved[name][0] * size / self.bandwidth(size) / (row["time_us"] / 1e6)

    @property
    def too_fast(self) -> list[str]:
        """All-reduces that are faster than the memory by more than 5%: the machine was busy, or a clock is wrong."""
        names = {r["name"]: r["size"] for r in self.rows if not r["stream"]}
        sizes = sorted({r["size"] for r in self.rows})
        return [name for name in names if any(self.of_bound(name, size) > TOO_FAST for size in sizes)]

    def __repr__(self) -> str:
        sizes = sorted({r["size"] for r in self.rows})
        times = {(r["name"], r["size"]): r["time_us"] / 1e6 for r in self.rows}
        lines = text_table(
            ["size", "memory, GB/s", *self.moved],
            [
                [
                    bytes_text(n),
                    f"{self.bandwidth(n) / 1e9:.3g}",
                    *(f"{seconds_text(times[name, n])} ({self.of_bound(name, n):.0%})" for name in self.moved),
                ]
                for n in sizes
            ],
        )
        head = f"all-reduce on {self.where}: median time per call (and how much of the memory's speed that is)"
        wrong = f"Faster than the memory, which cannot be: {', '.join(self.too_fast)}. Run the cell again."
        return "\n".join([head, *lines, *([wrong] if self.too_fast else [])])


def _best(rows: list[Row], p: int) -> dict[int, float]:
    """Return {size: bytes per s of all ranks together} of the best kernel of STREAM."""
    found: dict[int, float] = {}
    for r in rows:
        if r["stream"]:
            found[r["size"]] = max(found.get(r["size"], 0.0), p * r["stream"] / (r["p25_us"] / 1e6))
    return found


def roofline(
    bytes_moved: Callable[[str, int, int], tuple[float, float]] = library_bytes,
    sizes: Sizes = SIZES,
    *,
    ranks: int | None = None,
    prediction: dict[str, float] | None = None,
    deadline: float = 10.0,
) -> RooflineResult:
    """Measure the bandwidth of this machine's memory, and all-reduces against the least time of the bytes they move.

    Args:    bytes_moved: f(algorithm, p, n) of exercise 5.1: what one rank reads and writes.
             sizes: bytes of a tensor, as numbers or as "1MiB"; ranks: default one for each core, as far as engines run.
             prediction: {"staged": 2, "ring": 3}: times as long as one pass, at the largest size.
             deadline: s, the longest that a rank may wait.
    Returns: RooflineResult.
    Raises:  ValueError if no two engines share memory.
    """
    world, asked = here("roofline", ranks), asked_sizes(sizes)
    for name, times in (prediction or {}).items():
        if name not in COUNTS_OF or name == ONE_PASS:
            raise ValueError(f'a prediction is {{"staged": 2, "ring": 3}}, times as long as one pass, got {name!r}')
        require_number(f"your guess for {name}", times, above=0)
    p, n = world.ranks, max(asked)
    counts = {name: [p * sum(bytes_moved(way, p, n)) / n for way in ways] for name, ways in COUNTS_OF.items()}
    moved = {name: (min(found), max(found)) for name, found in counts.items()}
    rows: list[Row] = []
    plot = live.Live(draw_roofline, alt="memory bandwidth, and bytes against time")

    def state() -> tuple[object, ...]:
        return rows, _best(rows, p), moved, prediction, f"All-reduces under the roof of the memory, {world}"

    def on_row(row: Row) -> None:
        rows.append(row)
        plot.update(*state())

    world.run(memory.measure_roofline, asked, REST_S, deadline=deadline, on_row=on_row)
    return RooflineResult(str(world), p, rows, moved, plot.finish(*state()))


# -- a buffer that is written again -----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class WriteAgainResult(Result):
    """Result of `lab.write_again`.

    rows: of bench.memory.measure_write_again.
    """

    rows: list[Row]
    figure: Figure = field(repr=False)

    def drawing(self, more: Iterable[Row] = ()) -> tuple[object, ...]:
        """Return the arguments of plots.memory.draw_write_again that show it, with `more` rows."""
        return [*self.rows, *more], CHUNK

    def slowdown(self, memory: int) -> float:
        """Return the time to write a chunk that the other core has read over one that it has not; memory: bytes."""
        took = {r["read"]: r["write_us"] for r in self.rows if r["memory"] == memory}
        return took[True] / took[False]

    def __repr__(self) -> str:
        sizes = sorted({r["memory"] for r in self.rows})
        took = {(r["memory"], r["read"]): r["write_us"] / 1e6 for r in self.rows}
        rows = [
            [
                bytes_text(n),
                seconds_text(took[n, False]),
                seconds_text(took[n, True]),
                f"{number_text(self.slowdown(n))}",
            ]
            for n in sizes
        ]
        head = f"writing a chunk of {bytes_text(CHUNK)}, in turn into each chunk of a buffer"
        return "\n".join([head, *text_table(["buffer", "not read since", "read by the other core", "times"], rows)])


def write_again(*, prediction: float | None = None, deadline: float = 10.0) -> WriteAgainResult:
    """Measure how long a core writes to a buffer that another core has read since, and to one that it has not.

    Rank 0 writes 256 KiB, then rank 1 reads them, or does not; then the next 256 KiB of the buffer, and so on. The
    buffer is from 256 KiB to 16 MiB long.

    Args:    prediction: times as long if it was read; deadline: s, the longest that a rank may wait.
    Returns: WriteAgainResult.
    Raises:  ValueError if no two engines share memory.
    """
    world = here("write_again", 2)
    if prediction is not None:
        require_number("your guess", prediction, above=0)
    rows: list[Row] = []
    plot = live.Live(draw_write_again, alt="time to write a chunk against the length of the buffer")

    def on_row(row: Row) -> None:
        rows.append(row)
        plot.update(rows, CHUNK, prediction)

    world.run(memory.measure_write_again, CHUNK, MOST, REST_S, deadline=deadline, on_row=on_row)
    return WriteAgainResult(rows, plot.finish(rows, CHUNK, prediction))
