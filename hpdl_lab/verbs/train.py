"""`lab.train`: a model learns over several ranks, with your all-reduce or your strategy, drawn as it goes."""

import copy
import math
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from ..comm.base import Row
from ..data.dataset import Dataset
from ..engines.messages import Function
from ..mesh import Grid
from ..models import batch_norm
from ..parallel.data_parallel import Strategy
from ..parallel.hybrid.model import train_on_mesh
from ..parallel.reducer import AllReduce
from ..parallel.training import Recipe, Trained
from ..parallel.training import train as train_on_rank
from ..plots import live
from ..plots import live as loss
from ..plots.style import Figure
from ..trace import Event, seconds_text
from .choice import asked_strategy, model_and_data
from .result import Result
from .world import world_of

SAME = 1e-3  # how far the ranks' parameters may drift apart by rounding, as a share of the largest


@dataclass(frozen=True, repr=False)
class TrainResult(Result):
    """Result of `lab.train`.

    losses: of the global batch at every step; test_loss: mean cross-entropy per answer; test_accuracy: 0 to 1.

    learned: the same in words; perplexity: exp(test_loss); seconds: in steps; drift: between the ranks' parameters.
    model: a copy with rank 0's parameters after the last step. loss_scale: after that step, 1 if there is none.
    """

    where: str
    simulated: bool
    losses: list[float]
    test_loss: float
    test_accuracy: float
    learned: str
    seconds: float
    samples_per_s: float
    drift: float
    loss_scale: float
    model: nn.Module = field(repr=False)
    events: list[Event] = field(repr=False)
    figure: Figure = field(repr=False)

    @property
    def perplexity(self) -> float:
        """The exponential of test_loss."""
        return _perplexity(self.test_loss)

    def __repr__(self) -> str:
        seconds = f"{seconds_text(self.seconds)}{' of virtual time' if self.simulated else ''}"
        text = f"{self.where}: {len(self.losses)} steps in {seconds}, {self.samples_per_s:,.0f} samples/s on average, "
        text += f"loss {self.losses[0]:.3g} -> {self.losses[-1]:.3g}, {self.learned}"
        text += f", loss scale {self.loss_scale:,.0f}" if self.loss_scale != 1 else ""
        if self.drift > SAME:
            text += f"\nThe ranks' models have drifted apart, by {self.drift:.2g} of their largest parameter: "
            text += "the all-reduce leaves different sums on different ranks. lab.check finds out where."
        return text


def train(
    model: str | nn.Module | None = None,
    strategy: Strategy | None = None,
    *,
    data: str | Dataset | None = None,
    all_reduce: AllReduce | None = None,
    ranks: int | None = None,
    dtype: str = "float32",
    mesh: Grid | dict[str, int] | None = None,
    schedule: str = "1f1b",
    deadline: float = 10.0,
    **recipe: Any,
) -> TrainResult:
    """Train a model over all ranks; loss and samples/s are drawn while it goes.

        lab.train(all_reduce=all_reduce)                            the model, the digits and strategy of lesson 04
        lab.train(model="gpt", data="text", strategy=strategy)      by name, see models.MODELS; digits, text, copy, ...
        lab.train(model, DataParallel(all_reduce), steps=200)       your own
        lab.train("gpt", mesh={"dp": 2, "pp": 2}, micro_batches=4)  a model sharded over a mesh

    Args:    model: a name, or an nn.Module that fits the data; data: a name, or a data.dataset.Dataset. If one of
             them is not given, it is what suits the other.
             strategy: for adding gradients, see parallel/data_parallel.py; default DataParallel(all_reduce).
             all_reduce: f(comm, x), makes x its sum over ranks; default the communicator's own.
             ranks: default all engines, or 4 simulated ranks if none run; dtype: "float32" or "float64".
             mesh: {"dp":, "pp":, "tp":, "cp":, "ep":} or a mesh.Grid, over which HybridParallel deals the model out, in
             place of a strategy; schedule: of its pipeline.
             deadline: s, the longest that a rank may wait.
             recipe: steps, batch, lr, momentum, seed, optimizer, micro_batches, checkpoint, ...: the fields of
             parallel.training.Recipe; what is not given is what suits a model that is named.
    Returns: TrainResult.
    """
    chosen = asked_strategy(strategy, all_reduce)
    if mesh is None and schedule != "1f1b":
        raise ValueError("a schedule is of a model on a mesh: give one, too, such as mesh={'pp': 4}")
    if mesh is not None and (strategy or all_reduce):
        raise ValueError("give a mesh, or a strategy or an all_reduce: a mesh distributes the model by HybridParallel")
    known = [option.name for option in fields(Recipe)]
    if unknown := [name for name in recipe if name not in known]:
        raise TypeError(f"lab.train has no {', '.join(unknown)}: a recipe has {', '.join(known)}")
    grid = None if mesh is None else _asked_grid(mesh, ranks)
    world = world_of(ranks if grid is None else grid.size)
    model, data, what, suiting = model_and_data(model, data, dtype)
    options = Recipe(**{**suiting, **recipe})
    title = f"{what}, {world}{f', {grid!r}' if grid is not None else ''}"
    lowest = 0.1 if data.positions == 1 else 1.0  # what comes next in a text is never sure
    rows: list[Row] = []
    plot = live.Live(loss.draw, alt="loss and samples per second")

    def on_row(row: Row) -> None:
        rows.append(row)
        plot.update(rows, options.steps, title, world.remark, lowest)

    threads = batch_norm.talks(model) or chosen.talks_in_backward or grid is not None
    fn: Function = train_on_rank
    work: tuple[object, ...] = (model, chosen, data, options)
    if grid is not None:
        fn, work = train_on_mesh, (model, grid, data, options, schedule, False)
    try:
        results = world.run(fn, *work, deadline=deadline, on_row=on_row, threads=threads)
    except BaseException:
        if rows:
            plot.finish(rows, options.steps, f"{title}: stopped", world.remark, lowest)
        raise
    first = results[0]
    learned = _in_words(first, data)
    finished = copy.deepcopy(model)
    nn.utils.vector_to_parameters(first.parameters, finished.parameters())
    scale = max(float(first.parameters.abs().max()), 1e-30)
    return TrainResult(
        where=str(world),
        simulated=world.simulated,
        losses=first.losses,
        test_loss=first.test_loss,
        test_accuracy=first.test_accuracy,
        learned=learned,
        seconds=first.seconds,
        samples_per_s=first.samples / first.seconds if first.seconds else 0.0,
        drift=max(float((rank.parameters - first.parameters).abs().max()) for rank in results) / scale,
        loss_scale=rows[-1].get("loss_scale", 1.0) if rows else 1.0,
        model=finished,
        events=results.events,
        figure=plot.finish(rows, options.steps, f"{title}: {learned}", world.remark, lowest),
    )


def _asked_grid(mesh: Grid | dict[str, int], ranks: int | None) -> Grid:
    """Return the Grid of a training. Raises TypeError, ValueError."""
    if not isinstance(mesh, Grid | dict) or not mesh:
        raise TypeError(f'mesh={mesh!r}: sizes such as {{"dp": 2, "pp": 2}}, or a Grid, are needed')
    grid = Grid(**mesh) if isinstance(mesh, dict) else mesh
    if ranks not in (None, grid.size):
        raise ValueError(f"{grid!r} has {grid.size} places, and ranks={ranks}")
    return grid


def _in_words(trained: Trained, data: Dataset) -> str:
    """Say what has been learned: the share of answers that are right, or a language model's perplexity."""
    if data.positions > 1:
        return f"perplexity {_perplexity(trained.test_loss):.3g} of {data.classes} on the test set"
    return f"test accuracy {trained.test_accuracy:.1%}"


def _perplexity(loss: float) -> float:
    """Return exp(loss); of a model that has diverged a large number, not an error."""
    return math.exp(min(loss, 700.0))
