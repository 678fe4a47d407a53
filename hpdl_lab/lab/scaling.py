"""`lab.scaling`: the same work on more ranks, and the same work per rank: measured, modelled, and simulated."""

from ..plots import live
from ..plots.scaling import HEIGHT, draw
from .cluster import running
from .measure import refusal
from .ranks import place
from .scaling_arguments import KINDS, asked_kinds, asked_prediction, asked_work, require_sane, whole_numbers
from .scaling_result import ScalingResult, fits_of, with_speedups
from .scaling_runs import Training, Work

SIMULATE = (8, 16, 64, 256, 1024)


def scaling(
    work=None,
    *,
    all_reduce=None,
    strategy=None,
    model=None,
    data=None,
    size="tiny",
    ranks=None,
    n=None,
    kind=KINDS,
    prediction=None,
    network=None,
    simulate=SIMULATE,
    unit=None,
    deadline=10.0,
):
    """Scale a training step: your prediction, the ideal, the model, what was measured, and clusters of 1,024 ranks.

        lab.scaling(all_reduce=all_reduce)                                 your ring, a small network, the digits
        lab.scaling(strategy=DataParallelOverlapped(), model="gpt", data="text", prediction={2: 1.8, 1024: 300})

    Points with more ranks than cores are grey. Simulated ranks compute as fast as one core of this machine, all of
    whose cores are busy, and send messages as fast as its engines do, unless a network is given.

    Args:    work: f(comm, n), does n units of work shared by all ranks, in place of a training step. It may keep state.
             all_reduce: f(comm, x); default the communicator's own. strategy: see parallel/data_parallel.py; default
             DataParallel(all_reduce). model, data, size: as in lab.train; default a small network and the digits.
             ranks: which numbers of ranks to measure, default 1, 2, 4, ... up to the engines.
             n: examples (units of work), of all ranks in strong and of each rank in weak scaling; default 512, and 32
             where examples are images or windows of tokens.
             kind: "strong", "weak" or both. prediction: {ranks: speedup}, or {"strong": {...}, "weak": {...}}.
             network: of comm.network, of the simulated ranks; default a switch as fast as the engines' messages, or
             one of 100 Gbit/s where none run. simulate: which numbers of ranks to simulate besides.
             unit: of the rate; deadline: s, the longest that a rank may wait.
    Returns: ScalingResult. Without engines only simulated points.
    Raises:  ValueError, TypeError in one sentence; collectives.sweep.WrongAnswer where all_reduce does not add up.
    """
    require_sane(n, network, deadline)
    kinds, guess = asked_kinds(kind), asked_prediction(prediction)
    counts = default_ranks() if ranks is None else whole_numbers(ranks, "ranks")
    far = whole_numbers(simulate, "simulate") if simulate else []
    if not counts:
        raise ValueError("no number of ranks to measure: give some, such as (1, 2, 4)")
    place(max(counts))  # raises, before anything is measured, where there are fewer engines
    job, n = asked_work(work, n, max(counts), all_reduce, strategy, model, data, size)
    course = (Training if work is None else Work)(job, kinds, n, network, deadline)
    plot = live.Live(draw, height=HEIGHT, alt="strong and weak scaling")
    unit = unit or course.unit

    def state():
        rows, simulated, modelled = (with_speedups(points) for points in (course.rows, course.simulated, course.model))
        fits = fits_of(rows, simulated)
        return rows, simulated, modelled, guess, fits, unit, course.title, course.foot()

    try:
        course.run(counts, sorted({*counts, *far}), lambda: plot.update(*state()))
    except BaseException as error:
        if course.rows or course.simulated:
            plot.finish(*state())
        raise refusal(error) from None
    figure = plot.finish(*state())
    rows, simulated, modelled, *_ = state()
    return ScalingResult(rows, simulated, modelled, unit, figure)


def default_ranks():
    """1, 2, 4, ... up to the engines, or to 4 simulated ranks."""
    engines = running()
    most = 4 if engines is None else engines.n
    return [2**k for k in range(most.bit_length()) if 2**k <= most]
