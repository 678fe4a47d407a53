"""`lab.tensor`: one part of a transformer cut in four ways: what each sends, keeps and takes, drawn as it goes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..comm.base import Comm, Row
from ..features import cores
from ..measure import Measured
from ..parallel.tensor import ways as tensor_ways
from ..parallel.tensor.linear import Map
from ..parallel.tensor.ways import Linear, Parts, Shape
from ..plots import live
from ..plots import tensor as drawing
from ..plots.style import Figure
from ..trace import seconds_text
from ..units import amount_text, require_number
from .measure import foot, refusal
from .result import Result, text_table
from .world import World, world_of

SIZE = 256  # tokens, and numbers of each
REPEATS = 5  # odd, so that the median is one of them
NAMES = {"whole": "whole on every rank", "by layer": "layer by layer", "pair": "columns, then rows"}
NAMES["sequence"] = "sequence parallel"


@dataclass(frozen=True, repr=False)
class TensorResult(Result):
    """Result of `lab.tensor`.

    rows: one dict per way: way, name; forward, backward, kept, weights: bytes, on the rank that has most; seconds
    (median), p25, p75; and the model's model_forward, model_backward, model_seconds.

    alpha s, beta s/byte: of a message, from a ping-pong; the model rests on them.
    """

    where: str
    rows: list[Row]
    alpha: float
    beta: float
    figure: Figure = field(repr=False)

    def __getitem__(self, way: str) -> Row:
        """Return the row of one way: result["pair"]["forward"]."""
        known = {row["way"]: row for row in self.rows}
        if way not in known:
            raise LookupError(f"no way is called {way!r}: {', '.join(map(repr, known))}")
        return known[way]

    def __repr__(self) -> str:
        rows = []
        for row in self.rows:
            sizes = [amount_text(row[key]) for key in ("forward", "backward", "weights", "kept")]
            rows.append([row["name"], *sizes, seconds_text(row["seconds"]), seconds_text(row["model_seconds"])])
        head = ("", "forward", "backward", "weights", "kept", "time", "model")
        title = f"{self.where}: what a rank sends, holds and keeps, and the median time of a step"
        return "\n".join([title, *text_table(head, rows)])


def tensor(
    column_linear: Linear | None = None,
    row_linear: Linear | None = None,
    sequence_parallel: Callable[[Comm, Tensor, Map], Tensor] | None = None,
    *,
    ranks: int | None = None,
    prediction: float | None = None,
) -> TensorResult:
    """Run x + mlp(norm(x)) forward and backward in four ways, count bytes, measure time; wrong results are not timed.

        lab.tensor(column_linear, row_linear, prediction=1_500_000)

    Args:    column_linear, row_linear, sequence_parallel: your functions; by default the library's.
             ranks: default all engines, or 4 simulated ranks; they share 256 tokens and a width of 256, or the next
             smaller numbers that they can share.
             prediction: the bytes that you expect a rank to send, forward and backward together, as columns and rows.
    Returns: TensorResult.
    Raises:  ValueError if a result differs from one rank's.
    """
    if prediction is not None:
        require_number("the bytes that you expect", prediction, 0)
    for fn in (column_linear, row_linear, sequence_parallel):
        if fn is not None and not callable(fn):
            raise TypeError(f"lab.tensor needs functions, such as lab.tensor(column_linear, row_linear), got {fn!r}")
    world = world_of(ranks)
    width = max(SIZE // world.ranks, 1) * world.ranks
    shape = Shape(2, width, width)
    own = Parts()
    parts = Parts(column_linear or own.column, row_linear or own.row, sequence_parallel or own.sequence)
    title = f"x + mlp(norm(x)), x {tuple(shape)}, on {world}"
    rows: list[Row] = []
    fit: Row = {}
    plot = live.Live(drawing.draw, height=drawing.HEIGHT, alt="what four ways of cutting a layer send, keep and take")

    def state() -> tuple[object, ...]:
        return rows, prediction, title, world.remark or foot(world, fit if rows else {})

    def on_row(row: Row) -> None:
        if "alpha" in row:
            fit.update({name: row[name] for name in ("alpha", "beta", "gamma")})
        else:
            rows.append(_row_of(row, world, shape, rows, fit))
        plot.update(*state())

    try:
        world.run(tensor_ways.race, parts, shape, 1 if world.simulated else REPEATS, on_row=on_row, threads=True)
    except BaseException as error:
        raise refusal(error) from None
    return TensorResult(str(world), rows, fit["alpha"], fit["beta"], plot.finish(*state()))


def _row_of(row: Row, world: World, shape: Shape, rows: list[Row], fit: dict[str, float]) -> Row:
    """Return a reported row with the model's numbers."""
    way, p, (p25, p75) = row["way"], world.ranks, Measured(tuple(row["times"])).quartiles
    forward, backward = tensor_ways.bytes_sent(way, p, shape.nbytes)
    whole = rows[0]["seconds"] if rows else row["seconds"]
    return {
        **row,
        "name": NAMES[way],
        "ranks": p,
        "cores": p if world.simulated else cores(),
        "p25": p25,
        "p75": p75,
        "model_forward": forward,
        "model_backward": backward,
        "model_seconds": tensor_ways.seconds_of(way, p, shape.nbytes, whole, **fit),
    }
