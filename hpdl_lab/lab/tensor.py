"""`lab.tensor`: one part of a transformer cut in four ways: what each sends, keeps and takes, drawn as it goes."""

from dataclasses import dataclass, field

from ..features import cores
from ..parallel.tensor import ways as tensor_ways
from ..parallel.tensor.ways import Parts, Shape
from ..plots import live
from ..plots import tensor as drawing
from ..trace import seconds_text
from .measure import foot, refusal
from .picture import WithFigure
from .ranks import place

REPEATS = 5  # odd, so that the median is one of them
NAMES = {"whole": "whole on every rank", "by layer": "layer by layer", "pair": "columns, then rows"}
NAMES["sequence"] = "sequence parallel"


@dataclass(frozen=True)
class TensorResult(WithFigure):
    """rows: one dict per way: way, name; forward, backward, kept, weights: bytes, on the rank that has most; seconds
    (median), p25, p75; and the model's model_forward, model_backward, model_seconds.

    alpha s, beta s/byte: of a message, from a ping-pong; the model rests on them.
    """

    where: str
    rows: list
    alpha: float
    beta: float
    figure: object = field(repr=False)

    def __getitem__(self, way):
        """The row of one way: result["pair"]["forward"]."""
        known = {row["way"]: row for row in self.rows}
        if way not in known:
            raise LookupError(f"no way is called {way!r}: {', '.join(map(repr, known))}")
        return known[way]

    def __repr__(self):
        width = max(len(row["name"]) for row in self.rows)
        lines = [f"{self.where}: what a rank sends, holds and keeps, and the median time of a step"]
        lines.append(f"{'':<{width}}   forward  backward   weights      kept      time     model")
        for row in self.rows:
            cells = [drawing.mega(row[key]) for key in ("forward", "backward", "weights", "kept")]
            cells += [seconds_text(row["seconds"]), seconds_text(row["model_seconds"])]
            lines.append(f"{row['name']:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
        return "\n".join(lines)


def tensor(column_linear=None, row_linear=None, sequence_parallel=None, *, ranks=None, prediction=None, shape=None):
    """Run x + mlp(norm(x)) forward and backward in four ways, count bytes, measure time; wrong results are not timed.

        lab.tensor(column_linear, row_linear, prediction=1_500_000)

    Args:    column_linear, row_linear, sequence_parallel: your functions; by default the library's.
             ranks: default all engines, or 4 simulated ranks; shape: (batch, tokens, width), default (2, 256, 256).
             prediction: the bytes that you expect a rank to send, forward and backward together, as columns and rows.
    Returns: TensorResult.
    Raises:  ValueError where the ranks cannot share tokens and width, or where a result is not that of one rank.
    """
    where = place(ranks)
    shape = Shape(*asked_shape(shape, where.ranks))
    if prediction is not None and (isinstance(prediction, bool) or not isinstance(prediction, int | float)):
        raise ValueError(f"a prediction is a number of bytes, such as 1_500_000, got {prediction!r}")
    for fn in (column_linear, row_linear, sequence_parallel):
        if fn is not None and not callable(fn):
            raise TypeError(f"lab.tensor needs functions, such as lab.tensor(column_linear, row_linear), got {fn!r}")
    given = {"column": column_linear, "row": row_linear, "sequence": sequence_parallel}
    parts = Parts(**{name: fn for name, fn in given.items() if fn is not None})
    title = f"x + mlp(norm(x)), x {tuple(shape)}, on {where}"
    rows, fit = [], {"simulated": where.simulated}
    plot = live.Live(drawing.draw, height=drawing.HEIGHT, alt="what four ways of cutting a layer send, keep and take")

    def state():
        return rows, prediction, title, where.remark or foot(where, fit if rows else {}, {})

    def on_row(row):
        if "alpha" in row:
            fit.update(row)
        else:
            rows.append(row_of(row, where.ranks, shape, rows, fit))
        plot.update(*state())

    try:
        where.run(tensor_ways.race, parts, shape, 1 if where.simulated else REPEATS, on_row=on_row, threads=True)
    except BaseException as error:
        raise refusal(error) from None
    figure = plot.finish(*state())
    return TensorResult(str(where), rows, fit["alpha"], fit["beta"], figure)


def asked_shape(shape, p):
    """(batch, tokens, width) that p ranks can share. Raises ValueError with the numbers."""
    if shape is None:
        return 2, max(256 // p, 1) * p, max(256 // p, 1) * p
    if not isinstance(shape, tuple | list) or len(shape) != 3 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise ValueError(f"a shape is (batch, tokens, width), three whole numbers above 0, got {shape!r}")
    batch, tokens, width = shape
    if tokens % p or width % p:
        raise ValueError(
            f"{p} ranks cannot share {tokens} tokens and a width of {width} equally: both must divide by {p}"
        )
    return batch, tokens, width


def row_of(row, p, shape, rows, fit):
    """A reported row with the model's numbers beside it."""
    way, times = row["way"], sorted(row["times"])
    forward, backward = tensor_ways.bytes_sent(way, p, shape.nbytes)
    whole = rows[0]["seconds"] if rows else row["seconds"]
    return {
        **row,
        "name": NAMES[way],
        "ranks": p,
        "cores": p if fit["simulated"] else cores(),
        "p25": times[len(times) // 4],
        "p75": times[(3 * len(times)) // 4],
        "model_forward": forward,
        "model_backward": backward,
        "model_seconds": tensor_ways.seconds_of(way, p, shape.nbytes, whole, **fit_of(fit)),
    }


def fit_of(fit):
    return {name: fit[name] for name in ("alpha", "beta", "gamma")}
