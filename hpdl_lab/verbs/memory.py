"""`lab.memory`: the ledger of a rank, predicted and counted, in ways to train one model on the same ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from .. import data as sets
from .. import models
from ..parallel.grid import ledger
from ..parallel.grid.ledger import WAYS, Counted
from ..parallel.grid.measure import spec_of
from ..parallel.grid.memory import Memory
from ..plots import ledger as drawing
from ..plots import live
from ..plots.style import Figure
from ..units import amount_text, parse_bytes, require_int, require_number
from .choice import model_and_data
from .grid import PER_RANK
from .result import Result, text_table
from .world import world_of

DEADLINE = 60.0  # s: engines that share few cores import what torch recomputes with first
KINDS = Memory._fields
NAMES = tuple(way.name for way in WAYS)
SIZE = {"layers": 4, "heads": 4, "width": 192}  # large enough that its state is seen in a process


@dataclass(frozen=True, repr=False)
class MemoryResult(Result):
    """Result of `lab.memory`.

    predicted, held: {way: grid.memory.Memory} of the fullest rank; most, process: {way: bytes, or None}: the most at
    once by torch's memory profiler, and the peak of the process above what it holds afterwards.

    limit: bytes that a rank may hold, or None.
    """

    where: str
    predicted: dict[str, Memory]
    held: dict[str, Memory]
    most: dict[str, int | None]
    process: dict[str, int | None]
    limit: int | None
    figure: Figure = field(repr=False)

    def __getitem__(self, way: str) -> Memory:
        """Return what was counted for one way: result["ZeRO-1"].optimizer."""
        if way not in self.held:
            raise LookupError(f"no way is called {way!r}: {', '.join(map(repr, self.held))}")
        return self.held[way]

    @property
    def off(self) -> dict[str, float]:
        """The distance from prediction to count, {way: share of the prediction}, temporaries apart."""
        return {way: lasting(held) / lasting(self.predicted[way]) - 1 for way, held in self.held.items()}

    def __repr__(self) -> str:
        rows = []
        for way, held in self.held.items():
            cells = [amount_text(nbytes) if nbytes else "-" for nbytes in held]
            peaks = ["" if n is None else amount_text(n) for n in (self.most[way], self.process[way])]
            over = "" if self.limit is None or held.total <= self.limit else "over"
            rows.append([way, *cells, amount_text(held.total), f"{self.off[way]:+.1%}", *peaks, over])
        head = ("", *KINDS, "total", "off by", "at most", "process", "")
        return "\n".join([f"{self.where}: what the fullest rank holds", *text_table(head, rows, gap=1)])


def lasting(held: Memory) -> int:
    """Return bytes without temporaries: late ranks have more of these at once."""
    return held.total - held.temporaries


def memory(
    model: str | nn.Module | None = None,
    ways: Sequence[str] = NAMES,
    *,
    ranks: int | None = None,
    batch: int | None = None,
    limit: int | str | None = None,
    prediction: dict[str, float] | None = None,
) -> MemoryResult:
    """Train a model in several ways for three steps each, and count what a rank holds, over what formulas say.

        lab.memory()                                    in 32 and in 16 bits, recomputed, ZeRO 1 to 3, tp, pp
        lab.memory(limit="3 MB")["ZeRO-3"].optimizer

    Args:    model: a name of models.MODELS, or an nn.Module; by default a GPT of four blocks, 192 wide.
             ways: their names; ways in which the ranks cannot share the model are left out.
             ranks: default all engines, or 4 simulated ranks; batch: examples of a step, default 8 per rank.
             limit: what a rank may hold, in bytes or as "3 MB", drawn as a line.
             prediction: {way: bytes} that you expect a rank to hold in all, such as {"ZeRO-3": 1e6}.
    Returns: MemoryResult.
    Raises:  ValueError for a way that is none, or a batch that the ranks cannot share.
    """
    world = world_of(ranks)
    p = world.ranks
    total = PER_RANK * p if batch is None else require_int("batch", batch, p)
    nbytes = None if limit is None else parse_bytes(limit, "limit")
    for name in (*_asked_names(ways), *_asked_names(prediction or ())):
        if name not in NAMES:
            raise ValueError(f"no way to train is called {name!r}: {', '.join(map(repr, NAMES))}")
    for name, guessed in (prediction or {}).items():
        require_number(f"your guess for {name}", guessed, 0)
    choice = model_and_data(models.build_for(sets.load("text"), "gpt", **SIZE) if model is None else model)
    there = len(choice.data.train_x)
    if there < total or total % p:
        raise ValueError(f"a batch of {total:,} must be a multiple of {p} ranks, and at most {there:,} examples")
    x, y = (t[:total].clone() for t in (choice.data.train_x, choice.data.train_y))
    spec = spec_of(choice.model, x[:2], name=choice.words)
    costs = [layer.flops for layer in spec.layers]
    title = f"{choice.words}, {spec.parameters:,} parameters, {total} examples, {world}"
    expected: dict[str, Memory] = {}
    found: dict[str, Counted] = {}
    plot = live.Live(drawing.draw, height=drawing.HEIGHT, alt="what a rank holds in several ways to train")

    def state() -> tuple[object, ...]:
        return expected, found, nbytes, prediction, title

    for way in WAYS:
        if way.name not in ways or not ledger.can_be(spec, way, p):
            continue
        expected[way.name] = ledger.predicted(spec, way, p, total)
        ranks_held = world.run(ledger.count_memory, choice.model, way, x, y, costs, deadline=DEADLINE, threads=True)
        found[way.name] = max(ranks_held, key=lambda counted: counted.held.total)
        plot.update(*state())
    return MemoryResult(
        str(world),
        expected,
        {way: counted.held for way, counted in found.items()},
        {way: counted.most for way, counted in found.items()},
        {way: counted.process for way, counted in found.items()},
        nbytes,
        plot.finish(*state()),
    )


def _asked_names(names: Sequence[str] | dict[str, float]) -> list[str]:
    """Return the names, of a list or of the keys of a dict. Raises TypeError for anything else."""
    if isinstance(names, str) or not isinstance(names, Sequence | dict):
        raise TypeError(f"a list of ways to train, such as {NAMES[-2:]!r}, or a dict of them is needed, got {names!r}")
    return list(names)
