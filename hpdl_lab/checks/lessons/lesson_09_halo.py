"""Notebook 09, halos: the rows of its neighbors that a rank needs to convolve its strip of an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm import Results
from ...comm.base import Comm
from ...comm.network import Network, Ring
from ...parallel.tensor import spatial as reference
from ...units import counted
from ..checkers import because, engine_facts, in_all_cases, with_ranks
from ..layer import whole_numbers
from ..ranks import capital, full_stop, number, simulate, type_told
from ..record import Broken, Exercise, Passed, Reason, Runner
from ..traffic import check_waits, in_barriers

Needs = Sequence[tuple[int, int]]  # rows (above, below) of each rank

BATCH, CHANNELS, WIDTH = 2, 4, 3  # no two alike, so that none is taken for another
CASES = (  # (height of the image, (above, below) of each rank)
    (9, ((1, 1),) * 3),
    (4, ((1, 1),) * 2),
    (14, ((2, 2),) * 4),
    (11, ((0, 1),) * 3),  # a kernel of 2: nobody needs what is above
    (13, ((1, 0), (2, 1), (0, 2), (1, 2))),  # every rank needs something else
    (6, ((0, 0),) * 2),
    (5, ((2, 1),)),
)
MANY = (24, ((1, 1),) * 8)  # where time is counted
MOST_STEPS = 2  # messages in a row: up and down, or both at once, however many ranks there are


class Padded(NamedTuple):
    """One rank: what the answer returned as an array, or None; its type; whether it changed x."""

    y: np.ndarray | None
    kind: str
    changed: bool


def image_of(height: int) -> Tensor:
    return whole_numbers(31, BATCH, CHANNELS, height, WIDTH)


def call(comm: Comm, fn: Callable, height: int, rows: Needs | None, noted: list | None = None) -> Padded:
    """fn(comm, x, rows) on this rank's strip of the image; returns Padded.

    noted: a list of (source, dest, height) of a whole strip that is sent where none of it is needed: when it is sent,
    as most such messages never arrive.
    """
    rows = rows_for(comm.size) if rows is None else list(rows)
    x = image_of(height).tensor_split(comm.size, 2)[comm.rank].contiguous()
    given = x.clone()
    if noted is not None:
        for name in ("send", "isend"):
            setattr(comm, name, noting(comm, getattr(comm, name), x.shape[2], rows, noted))
    y = fn(comm, x, rows)
    value = y.detach().numpy().copy() if isinstance(y, torch.Tensor) else None
    return Padded(value, type(y).__name__, not torch.equal(x, given))


def noting(comm: Comm, send: Callable, high: int, rows: Needs, noted: list) -> Callable:
    """`send`, which also notes a strip that goes down to a rank that needs no rows from above."""

    def sends(x: Tensor, dest: int, *args: Any, **kwargs: Any) -> Any:
        if dest == comm.rank + 1 < comm.size and rows[dest][0] == 0 and x.ndim == 4 and x.shape[2] == high:
            noted.append((comm.rank, dest, high))
        return send(x, dest, *args, **kwargs)

    return sends


def rows_for(p: int) -> list[tuple[int, int]]:
    """On the engines, however many there are: alternating needs."""
    return [((1, 2), (2, 1))[r % 2] for r in range(p)]


def check_halo_exchange(fn: Callable, runner: Runner = None) -> Passed:
    for height, rows in CASES:
        noted = []
        trial = partial(call, noted=noted)  # of arguments every rank would get a copy
        blame = partial(with_needs, noted=noted)
        in_all_cases(fn, trial, [(len(rows), height, rows)], case_of, check_strips, blame)
    check_bytes(run_of(fn, *CASES[4]), *CASES[4])
    run = run_of(fn, *CASES[2])
    facts = [
        f"the strips of {len(CASES)} images, of equal and unequal heights, on 1, 2, 3 and 4 simulated ranks",
        check_bytes(run, *CASES[2]),
        check_steps(run_of(fn, *MANY, Ring(alpha=1.0, beta=0.0))),
    ]
    return Passed(*facts, *engine_facts(runner, check_strips, call, fn, 17, None), run=run)


def run_of(fn: Callable, height: int, rows: Needs, network: Network | None = None) -> Results:
    return simulate(len(rows), call, fn, height, rows, network=network, where=case_of(len(rows), height, rows))


def case_of(p: int, height: int, rows: Needs) -> str:
    needs = f"{rows[0]} for every rank" if len(set(rows)) == 1 else list(rows)
    return f"{with_ranks(p)}, an image of {height} rows and rows = {needs},"


def with_needs(broken: Broken, where: str, height: int, rows: Needs, noted: list) -> Reason | None:
    """Where ranks need different numbers of rows and messages do not fit, what is behind it."""
    if len({pair[0] for pair in rows} | {pair[1] for pair in rows}) == 1 or broken.failed not in ("raises", "deadlock"):
        return None
    found = capital(broken.message.removeprefix(where).strip())
    if noted:
        source, dest, high = noted[0]
        return f"""everything: You send all {high} rows where 0 are needed: x[:, :, -0:] is everything. So rank
            {source} does to rank {dest} {where[0].lower()}{where[1:-1]}: rows[{dest}][0] is 0. Count
            from the front, as in x[:, :, h - n:]. {full_stop(found)}"""
    return f"""asks: {where} messages do not fit, though they do where all ranks need as many rows above as below. How
        many rows go up is what the rank above asks for, rows[rank - 1][1]; how many come from there is rows[rank][0].
        {full_stop(found)}"""


def check_strips(run: Results, where: str, height: int, rows: Needs | None) -> None:
    """Raise Broken unless every rank holds its strip, with the rows around it, or zeros outside the image."""
    p, rows = len(run), rows_for(len(run)) if rows is None else rows
    strips = [s.numpy() for s in image_of(height).tensor_split(p, 2)]
    for r, left in enumerate(run):
        above, below = rows[r]
        image = np.pad(image_of(height).numpy(), ((0, 0), (0, 0), (above, below), (0, 0)))
        first, n = sum(s.shape[2] for s in strips[:r]), strips[r].shape[2]
        right = image[:, :, first : first + above + n + below]
        if left.y is None:
            raise Broken(f"returns: {where} rank {r} returned {type_told(left.kind)}: return a tensor, (b, c, h, w).")
        if left.y.shape != right.shape:
            raise Broken(f"""shape: {where} rank {r} returned shape {left.y.shape}, where {right.shape} is right:
                {above} + {n} + {below} rows, those above, its own and those below.""")
        if not np.array_equal(left.y, right):
            index = tuple(int(i) for i in np.argwhere(left.y != right)[0])
            text = f"y{list(index)} on rank {r} should be {number(right[index])} and is {number(left.y[index])}."
            raise because(explain(left.y, r, rows, strips), f"{where} {text}")
        if left.changed:
            raise Broken(f"input: {where} rank {r} has changed x: its caller still needs it.")
    if hasattr(run, "events"):
        check_waits(run.events, p)


def explain(got: np.ndarray, r: int, rows: Needs, strips: list[np.ndarray]) -> Reason:
    """Reason for what rank r returned, which is not right."""
    p, above, n = len(rows), rows[r][0], strips[r].shape[2]
    if not np.array_equal(got[:, :, above : above + n], strips[r]):
        return f"inside: Rows {above} to {above + n - 1} of y are the strip of rank {r} itself, unchanged."
    for side, halo, s in ((0, got[:, :, :above], r - 1), (1, got[:, :, above + n :], r + 1)):
        told, k = ("above", "below")[side], halo.shape[2]
        opposite = r + 1 if side == 0 else r - 1
        if not 0 <= s < p:
            if not halo.any():
                continue
            if p > 1 and same(halo, edge(strips[s % p], k, 1 - side)):
                return f"edge: There is nothing {told} rank {r}, and no ring: zeros, not the rows of rank {s % p}."
            return f"edge: There is nothing {told} rank {r}: outside the image are zeros."
        if same(halo, edge(strips[s], k, 1 - side)):
            continue
        which = ("last", "first")[side]
        if not halo.any():
            return f"""zeros: The rows {told} the strip of rank {r} are zeros, in the middle of the image: they are the
                {which} rows of rank {s}. Only the image has an edge, a strip has none."""
        if same(halo, edge(strips[s], k, side)):
            return f"""side: Those are the {("first", "last")[side]} rows of rank {s}, the ones that lie farthest away:
                {told} the strip of rank {r} lie its {which}."""
        if 0 <= opposite < p and (same(halo, edge(strips[opposite], k, side))):
            return f"neighbor: Those are rows of rank {opposite}: {told} the strip of rank {r} lies rank {s}."
        if same(halo, edge(strips[s], k, 1 - side)[:, :, ::-1]):
            return f"upside down: Those are the right rows of rank {s} upside down."
        return f"value: Those are not the {which} {counted(k, 'row')} of rank {s}."
    return "value: "


def edge(strip: np.ndarray, k: int, last: int) -> np.ndarray:
    """The first k rows of a strip, or its last ones."""
    return strip[:, :, strip.shape[2] - k :] if last else strip[:, :, :k]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b)


def check_bytes(run: Results, height: int, rows: Needs) -> str:
    """Raise Broken where more than the halos was sent. Returns a fact."""
    p, row = len(run), BATCH * CHANNELS * WIDTH * 8
    sends = [e.nbytes for e in run.events if e.op == "send"]
    sent, halos = sum(sends), [(r > 0) * above for r, (above, _) in enumerate(rows)]
    halos += [(r < p - 1) * below for r, (_, below) in enumerate(rows)]
    needed = row * sum((r > 0) * above + (r < p - 1) * below for r, (above, below) in enumerate(rows))
    if sent > needed:
        why = "of a neighbor's strip a rank needs only the rows next to its own, and of all others none"
        many, enough = sum(n > 0 for n in sends), sum(n > 0 for n in halos)
        if many > enough:
            why = f"{counted(many, 'message')} with something in them, and {enough} would do, one for each halo: {why}"
        raise Broken(f"""bytes: The strips are right, but with {p} ranks {sent:,} bytes were sent, where {needed:,} are
            enough: {why}.""")
    return f"bytes: {sent:,} with {p} ranks, the halos and nothing else; the image has {height * row:,}"


def check_steps(run: Results) -> str:
    """Raise Broken where ranks wait for each other in a row: `run` is one where a message takes 1 s. Returns a fact."""
    p, took = len(run), round(run.seconds)
    if took > MOST_STEPS:
        in_a_row = """a rank can send before its neighbor's rows have come. Begin all messages with sending and
            receiving, then wait for them."""
        raise Broken(f"""steps: The strips are right, but with {p} ranks it takes the time of {took} messages one after
            another, where {MOST_STEPS} are enough: {in_barriers(run.events) or in_a_row}""")
    told = counted(took, "message")
    return f"time: that of {told} in a row with {p} ranks, and no more with 1,000: only neighbors wait for each other"


EXERCISES = (Exercise("9.6", "halos of a convolution", reference.halo_exchange, 3, check_halo_exchange),)
