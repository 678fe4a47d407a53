"""`lab.train`: the handwritten digits, learned by several ranks with your all-reduce, drawn as it goes."""

from dataclasses import dataclass, field

from ..data import digits
from ..models.mlp import mlp
from ..parallel.data import DataParallel
from ..parallel.training import Recipe
from ..parallel.training import train as train_on_rank
from ..plots import live, loss
from .ranks import place

SAME = 1e-3  # how far the ranks' parameters may drift apart by rounding, as a share of the largest


@dataclass(frozen=True)
class TrainResult:
    """losses: of the global batch at every step; test_accuracy: 0 to 1; seconds: in steps; drift: between ranks."""

    where: str
    simulated: bool
    losses: list
    test_accuracy: float
    seconds: float
    samples_per_s: float
    drift: float
    events: list = field(repr=False)
    figure: object = field(repr=False)

    def __repr__(self):
        seconds = f"{self.seconds:.3g} s{' of virtual time' if self.simulated else ''}"
        lines = [
            f"{self.where}: {len(self.losses)} steps in {seconds}, {self.samples_per_s:,.0f} samples/s, "
            f"loss {self.losses[0]:.3g} -> {self.losses[-1]:.3g}, test accuracy {self.test_accuracy:.1%}"
        ]
        if self.drift > SAME:
            lines.append(
                f"The ranks' models have drifted apart, by {self.drift:.2g} of their largest parameter: the all-reduce "
                "leaves different sums on different ranks. lab.check finds out where."
            )
        return "\n".join(lines)


def train(model=None, strategy=None, *, all_reduce=None, ranks=None, dtype="float32", deadline=10.0, **recipe):
    """Train a network on the digits over all ranks; loss and samples/s are drawn while it goes.

        lab.train(all_reduce=all_reduce)                            the network and strategy of the lesson
        lab.train(model, DataParallel(all_reduce), steps=200)       your own

    Args:    model: nn.Module from 64 pixels to 10 logits; default models.mlp.mlp().
             strategy: how gradients are added, see parallel/data.py; default DataParallel(all_reduce).
             all_reduce: f(comm, x), makes x its sum over ranks; default the communicator's own.
             ranks: default all engines, or 4 simulated ranks where none run; dtype: "float32" or "float64".
             deadline: s, the longest that a rank may wait.
             steps, batch, lr, momentum, seed: see parallel.training.Recipe.
    Returns: TrainResult.
    """
    if strategy is not None and all_reduce is not None:
        raise ValueError("give a strategy or an all_reduce, not both: DataParallel(all_reduce=...) is a strategy")
    recipe = Recipe(**recipe)
    where = place(ranks)
    data = digits.load(dtype)
    model = mlp(dtype=dtype) if model is None else model
    strategy = DataParallel(all_reduce) if strategy is None else strategy
    title = f"Digits on {where}"
    rows = []
    plot = live.Live(loss.draw, alt="loss and samples per second")

    def on_row(row):
        rows.append(row)
        plot.update(rows, recipe.steps, title, where.remark)

    try:
        results = where.run(train_on_rank, model, strategy, data, recipe, deadline=deadline, on_row=on_row)
    except BaseException:
        if rows:
            plot.finish(rows, recipe.steps, f"{title}: stopped", where.remark)
        raise
    first = results[0]
    accuracy = f"{title}: {first.test_accuracy:.1%} of the test images read rightly"
    figure = plot.finish(rows, recipe.steps, accuracy, where.remark)
    scale = max(float(first.parameters.abs().max()), 1e-30)
    drift = max(float((trained.parameters - first.parameters).abs().max()) for trained in results) / scale
    return TrainResult(
        where=str(where),
        simulated=where.simulated,
        losses=first.losses,
        test_accuracy=first.test_accuracy,
        seconds=first.seconds,
        samples_per_s=first.samples / first.seconds if first.seconds else 0.0,
        drift=drift,
        events=results.events,
        figure=figure,
    )
