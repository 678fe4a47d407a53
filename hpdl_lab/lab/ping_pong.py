"""`lab.ping_pong`: what a message costs here, over sizes, with the line alpha + beta n fitted to it."""

from dataclasses import dataclass, field

from ..collectives.cost import fit_alpha_beta
from ..collectives.rounds import time_rounds
from ..collectives.sweep import SAMPLE_NS, SAMPLES, parse_size
from ..parallel import messages
from ..plots import live
from ..plots.ping_pong import draw, sentence
from ..plots.style import bytes_text
from ..trace import seconds_text
from .measure import refusal
from .picture import WithFigure
from .ranks import place

SIZES = tuple(2**k for k in range(3, 24, 2))  # 8 B to 8 MiB


@dataclass(frozen=True)
class PingPongResult(WithFigure):
    """nbytes, seconds: of the measured messages, one way, medians; alpha s, beta s/byte: fitted to them."""

    where: str
    nbytes: list
    seconds: list
    alpha: float
    beta: float
    figure: object = field(repr=False)

    def __repr__(self):
        lines = [f"{bytes_text(n):>10}  {seconds_text(t)}" for n, t in zip(self.nbytes, self.seconds, strict=True)]
        return "\n".join([f"a message between two of {self.where}: {sentence(self.alpha, self.beta)}", *lines])


def ping_pong(fn=messages.ping_pong, sizes=SIZES, *, ranks=None, prediction=None, deadline=10.0):
    """Time messages between ranks 0 and 1, half a round trip each, and fit alpha + beta * bytes; drawn as it goes.

    Args:    fn: f(comm, x), one round: x goes from rank 0 to rank 1 and back; the other ranks look on.
             sizes: bytes, as numbers or as "1KiB", at least two; ranks: default all engines, or 4 simulated ranks.
             prediction: what lab.predict returned; deadline: s, the longest that a rank may wait.
    Returns: PingPongResult.
    Raises:  collectives.sweep.WrongAnswer where what comes back is not what was sent; ValueError for one size or rank.
    """
    if not callable(fn):
        raise TypeError(f"lab.ping_pong needs a function f(comm, x), got {type(fn).__name__}: lab.ping_pong(ping_pong)")
    where = place(ranks)
    if where.ranks < 2:
        raise ValueError("a ping-pong needs two ranks, and there is 1: lab.start(2)")
    sizes = sorted({parse_size(size) for size in ((sizes,) if isinstance(sizes, (int, str)) else sizes)})
    if len(sizes) < 2:
        raise ValueError(f"a line needs two different sizes, got {len(sizes)}: give some, such as (8, '64KiB', '1MiB')")
    title = f"Ping-pong between two of {where}"
    rows, fit = [], []
    plot = live.Live(draw, alt="time of a message against its size")

    def on_row(row):
        rows.append(row)
        plot.update(rows, None, prediction, title, where.remark)

    timing = (1, 0) if where.simulated else (SAMPLES, SAMPLE_NS)
    try:
        where.run(time_rounds, fn, sizes, *timing, deadline=deadline, on_row=on_row)
    except BaseException as error:
        raise refusal(error) from None
    nbytes, seconds = [r["size"] for r in rows], [r["seconds"] for r in rows]
    fit = fit_alpha_beta(nbytes, seconds)
    figure = plot.finish(rows, fit, prediction, title, where.remark)
    return PingPongResult(str(where), nbytes, seconds, *fit, figure)
