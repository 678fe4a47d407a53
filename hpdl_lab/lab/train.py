"""`lab.train`: a network learns over several ranks, with your all-reduce or your strategy, drawn as it goes."""

import math
from dataclasses import dataclass, field, fields

from ..data.loading import Reader
from ..mesh import Grid
from ..models import batch_norm
from ..parallel.data_parallel import DataParallel, Strategy
from ..parallel.hybrid.training import train_on_mesh
from ..parallel.training import Recipe
from ..parallel.training import train as train_on_rank
from ..plots import live, loss
from ..trace import seconds_text
from .choice import model_and_data
from .picture import WithFigure
from .ranks import place

SAME = 1e-3  # how far the ranks' parameters may drift apart by rounding, as a share of the largest


@dataclass(frozen=True)
class TrainResult(WithFigure):
    """losses: of the global batch at every step; test_loss: mean cross-entropy per answer; test_accuracy: 0 to 1.

    learned: the same in words; perplexity: exp(test_loss); seconds: in steps; drift: between the ranks' parameters.
    """

    where: str
    simulated: bool
    losses: list
    test_loss: float
    test_accuracy: float
    learned: str
    seconds: float
    samples_per_s: float
    drift: float
    events: list = field(repr=False)
    figure: object = field(repr=False)

    @property
    def perplexity(self):
        return perplexity(self.test_loss)

    def __repr__(self):
        seconds = f"{seconds_text(self.seconds)}{' of virtual time' if self.simulated else ''}"
        lines = [
            f"{self.where}: {len(self.losses)} steps in {seconds}, {self.samples_per_s:,.0f} samples/s, "
            f"loss {self.losses[0]:.3g} -> {self.losses[-1]:.3g}, {self.learned}"
        ]
        if self.drift > SAME:
            lines.append(
                f"The ranks' models have drifted apart, by {self.drift:.2g} of their largest parameter: the all-reduce "
                "leaves different sums on different ranks. lab.check finds out where."
            )
        return "\n".join(lines)


def train(
    model=None,
    strategy=None,
    *,
    data=None,
    size="tiny",
    all_reduce=None,
    reader=None,
    ranks=None,
    dtype="float32",
    mesh=None,
    schedule="1f1b",
    recompute=False,
    deadline=10.0,
    **recipe,
):
    """Train a network over all ranks; loss and samples/s are drawn while it goes.

        lab.train(all_reduce=all_reduce)                            the network, the digits and strategy of lesson 04
        lab.train(model="gpt", data="text", strategy=strategy)      by name: mlp, cnn, gpt, vit; digits, text, copy, ...
        lab.train(model, DataParallel(all_reduce), steps=200)       your own
        lab.train("gpt", mesh={"dp": 2, "pp": 2}, micro_batches=4)  a model dealt out over a mesh

    Args:    model: a name, or an nn.Module that fits the data; data: a name, or a data.dataset.Dataset. Where one of
             them is not given, it is what suits the other. size: of a model that is named: "tiny", "small", "paper".
             strategy: how gradients are added, see parallel/data_parallel.py; default DataParallel(all_reduce).
             all_reduce: f(comm, x), makes x its sum over ranks; default the communicator's own.
             reader: a data.loading.Reader, where reading examples shall cost something.
             ranks: default all engines, or 4 simulated ranks where none run; dtype: "float32" or "float64".
             mesh: {"dp":, "pp":, "tp":} or a mesh.Grid, over which the model is dealt out by HybridParallel, in place
             of a strategy; schedule: of its pipeline; recompute: activation checkpointing there.
             deadline: s, the longest that a rank may wait.
             steps, batch, lr, momentum, seed, optimizer, micro_batches, checkpoint, ...: see parallel.training.Recipe;
             what is not given is what suits a model that is named.
    Returns: TrainResult.
    """
    if strategy is not None and all_reduce is not None:
        raise ValueError("give a strategy or an all_reduce, not both: DataParallel(all_reduce=...) is a strategy")
    if strategy is not None and not isinstance(strategy, Strategy):
        got = getattr(strategy, "__name__", type(strategy).__name__)
        raise TypeError(
            f"strategy={got}: an object of one of the classes in hpdl_lab.parallel is needed, such as "
            "DataParallel(all_reduce); a function alone is given as all_reduce=..."
        )
    if all_reduce is not None and not callable(all_reduce):
        raise TypeError(f"all_reduce={all_reduce!r}: a function f(comm, x) is needed, which makes x its sum over ranks")
    if reader is not None and not isinstance(reader, Reader):
        raise TypeError(f"reader={reader!r}: a data.loading.Reader is needed, such as Reader(seconds=1e-3)")
    if mesh is None and (schedule != "1f1b" or recompute):
        raise ValueError("schedule and recompute are of a model on a mesh: give one, too, such as mesh={'pp': 4}")
    known = [option.name for option in fields(Recipe)]
    if unknown := [name for name in recipe if name not in known]:
        raise TypeError(f"lab.train has no {', '.join(unknown)}: a recipe has {', '.join(known)}")
    if mesh is None:
        where = place(ranks)
    else:
        where, mesh = place_of_mesh(mesh, {"strategy": strategy, "all_reduce": all_reduce, "reader": reader}, ranks)
    model, data, what, suiting = model_and_data(model, data, size, dtype)
    recipe = Recipe(**{**suiting, **recipe})
    strategy = DataParallel(all_reduce) if strategy is None else strategy
    title = f"{what}, {where}{f', {mesh!r}' if mesh is not None else ''}"
    lowest = 0.1 if data.positions == 1 else 1.0  # what comes next in a text is never sure
    rows = []
    plot = live.Live(loss.draw, alt="loss and samples per second")

    def on_row(row):
        rows.append(row)
        plot.update(rows, recipe.steps, title, where.remark, lowest)

    threads = batch_norm.talks(model) or strategy.talks_in_backward or mesh is not None
    work = (train_on_rank, model, strategy, data, recipe, reader)
    if mesh is not None:
        work = (train_on_mesh, model, mesh, data, recipe, schedule, recompute)
    try:
        results = where.run(*work, deadline=deadline, on_row=on_row, threads=threads)
    except BaseException:
        if rows:
            plot.finish(rows, recipe.steps, f"{title}: stopped", where.remark, lowest)
        raise
    first = results[0]
    learned = in_words(first, data)
    figure = plot.finish(rows, recipe.steps, f"{title}: {learned}", where.remark, lowest)
    scale = max(float(first.parameters.abs().max()), 1e-30)
    drift = max(float((trained.parameters - first.parameters).abs().max()) for trained in results) / scale
    return TrainResult(
        where=str(where),
        simulated=where.simulated,
        losses=first.losses,
        test_loss=first.test_loss,
        test_accuracy=first.test_accuracy,
        learned=learned,
        seconds=first.seconds,
        samples_per_s=first.samples / first.seconds if first.seconds else 0.0,
        drift=drift,
        events=results.events,
        figure=figure,
    )


def place_of_mesh(mesh, given, ranks):
    """(where a training on `mesh` runs, the Grid). Raises ValueError for what has no place beside a mesh."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"give a mesh or {name}, not both: a mesh deals the model out by HybridParallel")
    if not isinstance(mesh, Grid | dict) or not mesh:
        raise TypeError(f'mesh={mesh!r}: sizes such as {{"dp": 2, "pp": 2}}, or a Grid, are needed')
    grid = Grid(**mesh) if isinstance(mesh, dict) else mesh
    if ranks not in (None, grid.size):
        raise ValueError(f"{grid!r} has {grid.size} places, and ranks={ranks}")
    return place(grid.size), grid


def in_words(trained, data):
    """What has been learned: the share of answers that are right, or among how many tokens a language model wavers."""
    if data.positions > 1:
        return f"perplexity {perplexity(trained.test_loss):.3g} of {data.classes} on the test set"
    return f"test accuracy {trained.test_accuracy:.1%}"


def perplexity(loss):
    """exp(loss); of a model that has diverged a large number, not an error."""
    return math.exp(min(loss, 700.0))
