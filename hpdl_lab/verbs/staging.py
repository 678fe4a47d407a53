"""`lab.staging`: a vector from GPU to GPU through the hosts, for many sizes of a block, and the model over it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ..collectives.cost import fit_link
from ..collectives.sweep import WrongAnswer
from ..comm.base import Row
from ..comm.network import Network, Switch
from ..engines.messages import Function
from ..kernels import staging as kernel
from ..plots import live
from ..plots.staging import draw
from ..plots.style import Figure
from ..trace import number_text, seconds_text
from ..units import amount_text, bytes_text, parse_bytes, require_number
from .measure import REST_S, asked_sizes
from .result import Result, text_table
from .world import World, world_of

SAMPLES = 5
COPY_GBPS = 1.0  # of emulated copies if the speed of the wire is not known


@dataclass(frozen=True, repr=False)
class StagingResult(Result):
    """Result of `lab.staging`.

    rows: {block (bytes), seconds (median), p25, p75} of each size; costs: kernels.staging.StagingCosts, measured alone.

    real: whether copies are a GPU's.
    """

    where: str
    nbytes: int
    rows: list[Row]
    costs: kernel.StagingCosts
    real: bool
    figure: Figure = field(repr=False)

    def drawing(self, more: Iterable[Row] = (), guess: int | None = None, foot: str = "") -> tuple[object, ...]:
        """Return the arguments of plots.staging.draw that show it, with `more` rows."""
        costs, size, best = self.costs, self.nbytes, self.modelled
        title = _title_of(size, self.where)
        curve, times = partial(curve_of, costs, size), kernel.stages(costs, size, max(4, round(best)))
        rows = [*self.rows, *more]
        return rows, curve, best, times, costs.wire(size), guess, title, _sentence(costs, self.real), foot

    @property
    def best(self) -> int:
        """The fastest block that was measured, in bytes."""
        return int(min(self.rows, key=lambda row: row["seconds"])["block"])

    @property
    def modelled(self) -> float:
        """The best block on paper, in bytes."""
        return kernel.best_block(self.costs, self.nbytes)

    def __repr__(self) -> str:
        times = {row["block"]: row["seconds"] for row in self.rows}
        lines = [
            ("blocking", "one block", times.get(self.nbytes), kernel.seconds(self.costs, self.nbytes, self.nbytes)),
            ("pipelined", bytes_text(self.best), times[self.best], kernel.seconds(self.costs, self.nbytes, self.best)),
            ("without staging", "", None, self.costs.wire(self.nbytes)),
        ]
        cells = [[name, block, seconds_text(t) if t else "", seconds_text(model)] for name, block, t, model in lines]
        head = f"{bytes_text(self.nbytes)} from device to device, {self.where}"
        on_paper = f"on paper the best block has {amount_text(self.modelled)}"
        return "\n".join([f"{head}: {on_paper}", *text_table(["", "block", "measured", "model"], cells)])


def staging(
    fn: Function = kernel.pipelined_copy,
    nbytes: str | int = "4MiB",
    blocks: Iterable[str | int] | None = None,
    *,
    copy_GBps: float | None = None,
    network: Network | None = None,
    prediction: str | int | None = None,
    deadline: float = 10.0,
) -> StagingResult:
    """Time fn(comm, x, 0, 1, device, block) for many sizes of a block; measured, model and prediction are drawn.

    Args:    fn: as kernels.staging.pipelined_copy; nbytes: of x; blocks: bytes, default nbytes and its halves.
             copy_GBps: of emulated copies, each way; default as fast as the wire, if its speed is known. On engines
             with a GPU copies are real.
             network: of comm.network: in virtual time, even if engines run.
             prediction: bytes of the block that you expect to be best; deadline: s, the longest that a rank may wait.
    Returns: StagingResult.
    Raises:  collectives.sweep.WrongAnswer if the vector does not arrive as it was; ValueError for sizes that are no
             whole number of float32.
    """
    if not callable(fn):
        raise TypeError(f"lab.staging needs a function as pipelined_copy, got {type(fn).__name__}")
    world = world_of(2, network)
    (size,) = asked_sizes(nbytes)
    halves = [size >> k for k in range(9 if world.simulated else 7) if size >> k >= 4 and size % (4 << k) == 0]
    sizes = asked_sizes(halves if blocks is None else blocks)
    guess = None if prediction is None else parse_bytes(prediction, "the best block")
    wire = world.network or Switch()
    if copy_GBps is None:
        copy_GBps = world.link_GBps or (1e-9 / wire.beta if world.simulated and wire.beta else COPY_GBPS)
    copies = wire.alpha if world.simulated else 0.0, 1e-9 / require_number("copy_GBps", copy_GBps, above=0)
    rows: list[Row] = []
    found: list[kernel.StagingCosts] = []
    real = world.device != "cpu"
    plot = live.Live(draw, alt="time against block size")

    def state() -> tuple[object, ...]:
        if not found:
            return (rows, None, 0.0, (), 0.0, guess, _title_of(size, world))
        return StagingResult(str(world), size, rows, found[0], real, plot.figure).drawing((), guess, world.remark)

    def on_row(row: Row) -> None:
        if "wire" in row:
            fitted = [fit_link(list(row[of]), list(row[of].values())) for of in ("wire", "copy")]
            found.append(kernel.StagingCosts(*fitted[0], *fitted[1]))
        else:
            rows.append(row)
        plot.update(*state())

    timing = (1, 0.0) if world.simulated else (SAMPLES, REST_S)
    world.run(kernel.sweep_blocks, fn, size, sizes, copies, *timing, deadline=deadline, on_row=on_row)
    for row in rows:
        if not row["correct"]:
            block = bytes_text(row["block"])
            raise WrongAnswer(f"with blocks of {block} rank 1 has not got what rank 0 had; lab.check says why")
    return StagingResult(str(world), size, rows, found[0], real, plot.finish(*state()))


def _title_of(nbytes: int, world: World | str) -> str:
    """Return the title of the figure."""
    return f"{bytes_text(nbytes)} from device to device through two hosts, {world}"


def curve_of(costs: kernel.StagingCosts, nbytes: int, blocks: np.ndarray) -> list[float]:
    """Return the model's s for each size of a block."""
    return [kernel.seconds(costs, nbytes, float(block)) for block in blocks]


def _sentence(costs: kernel.StagingCosts, real: bool) -> str:
    """Say what a message and a copy cost, in a line."""
    each = [
        f"{name}: α = {seconds_text(alpha)}, {number_text(1e-9 / beta) if beta else '∞'} GB/s"
        for name, alpha, beta in (("Wire", *costs[:2]), ("a copy" if real else "an emulated copy", *costs[2:]))
    ]
    return "; ".join(each) + "."
