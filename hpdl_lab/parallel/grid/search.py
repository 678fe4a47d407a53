"""The best grid: every way to share out the ranks among dp, pp and tp, priced, and the fastest that fits.

    16 ranks = dp x pp x tp      16 x 1 x 1   8 x 2 x 1   8 x 1 x 2   4 x 4 x 1   ...   1 x 1 x 16
                                 too large    fits        fastest     fits               heads do not divide

Experts and long sequences are shared out as well if that is asked for: ranks = dp x pp x tp x cp x ep.
Ref: Jia et al. 2018 (FlexFlow), arXiv:1807.05358; Narayanan et al. 2021, arXiv:2104.04473, section 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from ...mesh import Grid
from .machine import MACHINES, Machine, grid_of, replicas
from .model import Prediction, predict_step
from .spec import Spec


class Priced(Protocol):
    """Seconds of a step, bytes of the fullest rank."""

    @property
    def seconds(self) -> float: ...

    @property
    def nbytes(self) -> float: ...


def best_grid(ranks: int, predict: Callable[[int, int, int], Priced], limit: float) -> tuple[int, int, int]:
    """Find the fastest grid whose fullest rank holds no more than `limit` bytes.

    `grids(ranks)` lists all (dp, pp, tp) for this number of ranks, not only powers of
    two. Some grids are impossible: tp does not divide the heads, or pp is more than the
    number of layers. For an impossible grid, predict raises ValueError.

    Args:    ranks: int, at least 1; limit: the most bytes that a rank can hold.
             predict: predict(dp, pp, tp) -> a record with .seconds (of a step) and
             .nbytes (of the fullest rank).
    Returns: (dp, pp, tp). If several grids are equally fast, take the one with least
             .nbytes.
    Raises:  ValueError with the least memory that any grid needs, if no grid fits.
    """
    ### BEGIN SOLUTION
    best, least = None, float("inf")
    for dp, pp, tp in grids(ranks):
        try:
            found = predict(dp, pp, tp)
        except ValueError:
            continue
        least = min(least, found.nbytes)
        if found.nbytes <= limit and (best is None or (found.seconds, found.nbytes) < best[:2]):
            best = found.seconds, found.nbytes, (dp, pp, tp)
    if best is None:
        raise ValueError(f"no grid of {ranks} ranks fits into {limit:,} bytes per rank: the least is {least:,}")
    return best[2]
    ### END SOLUTION


def grids(ranks: int) -> list[tuple[int, int, int]]:
    """Return every (dp, pp, tp) whose product is `ranks`, by tp, then by pp."""
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    return [(ranks // tp // pp, pp, tp) for tp in divisors for pp in divisors if ranks // tp % pp == 0]


def every_grid(ranks: int, cp: Sequence[int] = (1,), ep: Sequence[int] = (1,)) -> list[Grid]:
    """Return every Grid of `ranks` ranks whose cp and ep are among these sizes, in the order of `grids`."""
    return [
        grid_of(dp, pp, tp, c, e)
        for c in cp
        for e in ep
        if ranks % (c * e) == 0
        for dp, pp, tp in grids(ranks // c // e)
    ]


def search_grids(
    spec: Spec,
    ranks: int,
    limit: int | None = None,
    machine: Machine | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    recompute: Sequence[bool] = (False, True),
    cp: Sequence[int] = (1,),
    ep: Sequence[int] = (1,),
    zero: Sequence[int] = (0,),
) -> list[Prediction]:
    """Return Predictions of every grid of `ranks` ranks that can be, fastest first.

    Args:    spec: a Spec; limit: bytes per rank, by default the machine's memory; see row.fits.
             batch: examples of a step, by default 8 per rank; micro_batch: examples in one, by default 1, 2, 4 and 8
             if they fit; recompute: which of both to try.
             cp, ep: sizes of these axes to try, such as (1, 2, 4, 8); zero: stages of ZeRO.
    Returns: list of Prediction. Each grid with each recomputation and stage of ZeRO comes once, under 1F1B: with the
             fastest micro-batch that fits, or with the one that needs least memory if none fits.
    Raises:  ValueError if no grid at all can be.
    """
    machine = MACHINES["laptop"] if machine is None else machine
    batch = 8 * ranks if batch is None else batch
    sizes = (1, 2, 4, 8) if micro_batch is None else (micro_batch,)
    rows: list[Prediction] = []
    why: object = f"cp and ep must divide {ranks}, and stages of ZeRO need replicas"
    options = itertools.product(every_grid(ranks, cp, ep), recompute, zero)
    for grid, recomputed, stage in options:
        if stage and replicas(grid) == 1:
            continue  # there is no other rank to share with
        candidates = []
        for size in sizes:
            try:
                count = micro_batches(batch, grid["dp"] * grid["ep"], size)
                how = recomputed, False, machine, batch, None, limit, stage
                candidates.append(predict_step(spec, grid, "1f1b", count, *how))
            except ValueError as error:
                why = error
        if candidates:
            rows.append(min(candidates, key=lambda row: (0, row.seconds) if row.fits else (1, row.nbytes)))
    if not rows:
        raise ValueError(f"no grid of {ranks} ranks is possible: {why}")
    return sorted(rows, key=lambda row: row.seconds)


def micro_batches(batch: int, dp: int, size: int) -> int:
    """Return how many micro-batches of `size` examples a replica has. Raises ValueError if it comes out uneven."""
    if batch % (dp * size):
        raise ValueError(f"a batch of {batch} cannot be cut into dp={dp} shards of micro-batches of {size}")
    return batch // (dp * size)


def best(rows: Sequence[Prediction]) -> Prediction:
    """Return the fastest of a search's rows that fits. Raises ValueError with the least memory if none does."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(row.nbytes for row in rows)
        raise ValueError(f"no grid fits into {rows[0].limit:,} bytes per rank: the least is {least:,}")
    return min(fitting, key=lambda row: (row.seconds, row.nbytes))
