"""Notebook 11: a mesh of named axes, the fastest grid whose fullest rank has room, and gradients added over axes."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ... import mesh
from ...comm import Results
from ...comm.base import Comm
from ...mesh import DeviceMesh, Grid
from ...parallel.grid import search
from ...parallel.hybrid import gradients as reference
from ...units import counted
from ..checkers import because, engine_facts, first_wrong, in_all_cases
from ..layer import ring_bytes, small_integers
from ..ranks import alone, capital, describe_error, shown, simulate, tried
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Runner
from ..traffic import check_waits

SIZES = ((2, 2, 3), (2, 3), (4,), (2, 2, 2), (3, 2, 1), (2, 3, 4), (1,), (3, 1, 2, 2), (2, 1, 2, 1, 3))


def _true_place(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def _drawn(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _check_groups(fn: Answer) -> Passed:
    for sizes in SIZES:
        for axis in range(len(sizes)):
            _check_groups_of(fn, sizes, axis)
    tp = fn((8, 16, 8), 2)
    return Passed(
        f"right along every axis of {len(SIZES)} grids with one to five axes",
        f"with sizes (dp 8, pp 16, tp 8) there are {len(tp)} groups along tp, the first of ranks {tp[0][0]} to "
        f"{tp[0][-1]}, on one host; along dp the first is [0, 128, 256, ...], a rank of every replica",
    )


def _check_groups_of(fn: Answer, sizes: tuple[int, ...], axis: int) -> None:
    where = f"along axis {axis} of a grid of {_drawn(sizes)}"
    got = alone(fn, sizes, axis, where=where)
    n, where = math.prod(sizes), capital(where)
    if not isinstance(got, list | tuple) or not all(isinstance(group, list | tuple) for group in got):
        raise Broken(f"returns: {where} your function returned {shown(got)}: groups are a list of lists of ranks.")
    got = [list(group) for group in got]
    odd = next((r for group in got for r in group if not isinstance(r, int) or not 0 <= r < n), None)
    if odd is not None:
        raise Broken(f"returns: {where} a group holds {shown(odd)}: ranks are ints from 0 to {n - 1}.")
    right = _true_groups(sizes, axis)
    if got == right:
        return
    text = f"{where} you say {shown(got)}, and it should be {shown(right)}."
    raise because(_why_groups(got, right, sizes, axis), text)


def _true_groups(sizes: tuple[int, ...], axis: int) -> list[list[int]]:
    found = {}
    for rank in range(math.prod(sizes)):
        place = _true_place(rank, sizes)
        found.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return list(found.values())


def _why_groups(got: list[list[int]], right: list[list[int]], sizes: tuple[int, ...], axis: int) -> Reason:
    """Return the Reason for groups that are not right."""
    flat = [r for group in got for r in group]
    others = {}
    for rank in range(math.prod(sizes)):
        others.setdefault(_true_place(rank, sizes)[axis], []).append(rank)
    if got == list(others.values()):
        return f"""axis: These ranks have the same coordinate along axis {axis}, and differ in others. A group is the
            opposite: its ranks differ along this axis only."""
    twice = next((r for r in flat if flat.count(r) > 1), None)
    if twice is not None:
        return f"twice: Rank {twice} is in {flat.count(twice)} groups: along one axis it belongs to one."
    lost = [r for r in range(math.prod(sizes)) if r not in flat]
    if lost:
        return f"cover: Rank {lost[0]} is in no group: every rank has a group along every axis, even of one."
    if sorted(got) == sorted(right):
        return "order: The groups are right, but sort them by their lowest rank."
    for a in range(len(sizes)):
        if a != axis and got == _true_groups(sizes, a):
            return f"axis: These are the groups along axis {a}: count axes from the first, as in sizes."
    apart = [(g[0], r) for g in got for r in g[1:] if not _together(g[0], r, right)]
    if not apart:
        a, b = next((g[0], r) for g in right for r in g[1:] if not _together(g[0], r, got))
        return f"split: Ranks {a} and {b} differ along axis {axis} only: they belong together."
    a, b = apart[0]
    places = f"{a} stands at {_true_place(a, sizes)} and rank {b} at {_true_place(b, sizes)}"
    return f"axis: Rank {places}: they differ along another axis than {axis}."


def _together(a: int, b: int, groups: list[list[int]]) -> bool:
    return any(a in group and b in group for group in groups)


MODEL = "a made-up model of 12 layers and 12 heads"
RANKS = (12, 8, 1, 6, 16)
RANDOM = 12  # more price lists, in which nothing can be guessed
AXES = ("dp", "pp", "tp")


class _Price(NamedTuple):
    seconds: float  # of a step
    nbytes: int  # of the fullest rank


PriceOf: TypeAlias = Callable[..., _Price | None]  # of (dp, pp, tp)


class _Prices:
    """predict(dp, pp, tp), which also notes what it was asked. table: {grid: Price}, of grids that can be."""

    def __init__(self, ranks: int, price: PriceOf) -> None:
        self.ranks = ranks
        self.asked: list[tuple[int, int, int]] = []
        self.table: dict[tuple[int, ...], _Price] = {}
        for grid in _grids(ranks):
            found = price(*grid)
            if found is not None:
                self.table[grid] = found

    def __call__(self, dp: int, pp: int, tp: int) -> _Price:
        self.asked.append((dp, pp, tp))
        if dp * pp * tp != self.ranks:
            return _Price(0.0, 0)  # too good to be true
        if (dp, pp, tp) not in self.table:
            raise ValueError(f"dp {dp} x pp {pp} x tp {tp} cannot be: layers or heads do not divide")
        return self.table[dp, pp, tp]

    def best(self, limit: int) -> tuple[int, ...]:
        """Return the grid that is asked for."""
        fitting = [grid for grid, price in self.table.items() if price.nbytes <= limit]
        return min(fitting, key=lambda grid: self.table[grid])


def _grids(ranks: int) -> list[tuple[int, ...]]:
    return [
        (ranks // pp // tp, pp, tp)
        for tp in range(1, ranks + 1)
        for pp in range(1, ranks + 1)
        if ranks % tp == 0 and ranks // tp % pp == 0
    ]


def _model(dp: int, pp: int, tp: int) -> _Price | None:
    """Return the price of MODEL on a grid: 24 GB of weights and such, shared by tp and pp; None if it cannot be."""
    if 12 % tp or pp > 12:
        return None
    bubble, chatter = (pp - 1) / 8, 0.12 * (tp - 1)
    seconds = 24 / (dp * pp * tp) * (1 + bubble) * (1 + chatter) + 0.8 * (dp - 1) / dp / pp / tp
    return _Price(round(seconds, 3), round(24e9 / pp / tp + 1e9))


def _random_price(seed: int) -> PriceOf:
    """Return a price list: seconds with many ties, bytes without, and every fifth grid impossible."""
    generator = random.Random(seed)

    def price(dp: int, pp: int, tp: int) -> _Price | None:
        found = _Price(generator.randint(1, 4) / 2, generator.randint(1, 10**6) * 1000)
        return None if generator.random() < 0.2 and (dp, pp, tp) != (dp, 1, 1) else found

    return price


def _cases() -> Iterator[tuple[str, _Prices, int]]:
    """Yield (description, Prices, limit): from the plain ones on; limits that exclude some, that just fit, and none."""
    for ranks in RANKS:
        prices = _Prices(ranks, _model)
        sizes = sorted({price.nbytes for price in prices.table.values()})
        for limit in (sizes[len(sizes) // 2], sizes[-1], sizes[0]):
            yield f"for {MODEL} on {counted(ranks, 'rank')} with {limit / 1e9:.3g} GB each,", prices, limit
    for seed in range(RANDOM):
        prices = _Prices(12, _random_price(seed))
        sizes = sorted(price.nbytes for price in prices.table.values())
        yield f"for price list {seed} of 12 ranks with a limit of {sizes[-3]:,} bytes,", prices, sizes[-3]
    for ranks in (16, 12):
        for axis, name in enumerate(AXES):
            prices = _Prices(ranks, lambda *grid, axis=axis: _Price(round(24 / grid[axis], 3), 10**9))
            yield f"for {ranks} ranks and a step whose time falls with {name},", prices, 10**9


def _check_best_grid(fn: Answer) -> Passed:
    n = 0
    for where, prices, limit in _cases():
        _check_grid(_called(fn, prices, limit, where), prices, limit, capital(where))
        n += 1
    prices, limit = _Prices(12, _random_price(0)), 10  # neither the last nor the fastest of them is the smallest
    least = min(price.nbytes for price in prices.table.values())
    where = f"If no grid of 12 ranks fits into {limit} bytes,"
    got, error = tried(fn, 12, prices, limit, where=where)
    if error is None:
        raise Broken(f"refuse: {where} your function returned {got!r}: raise a ValueError with the numbers.")
    known = any(text in str(error) for text in (str(least), f"{least:,}", f"{least / 1e9:g}"))
    if not isinstance(error, ValueError) or not known:
        raise Broken(f"""refuse: {where} your function says {error!r}: a ValueError says how much the smallest grid
            needs, {least:,} bytes, so that one knows what to buy, or what to cut.""")
    prices = _Prices(16, _model)
    roomy, tight = (fn(16, prices, limit) for limit in (1e12, 4e9))
    return Passed(
        f"the fastest grid that fits in {n} cases, ties and grids that cannot be among them; none fits: refused",
        f"{MODEL} on 16 ranks: dp {roomy[0]} x pp {roomy[1]} x tp {roomy[2]} if memory is plenty, dp {tight[0]} "
        f"x pp {tight[1]} x tp {tight[2]} with 4 GB",
    )


def _called(fn: Answer, prices: _Prices, limit: int, where: str) -> object:
    """Return the answer of fn if there is a grid that fits; raise Broken, also if it refuses."""
    prices.asked.clear()
    got, error = tried(fn, prices.ranks, prices, limit, where=where)
    if error is None:
        return got
    if not isinstance(error, ValueError):
        raise Broken(f"raises: {describe_error(error, where)}")
    if "cannot be" in str(error):
        raise Broken(f"""impossible: {capital(where)} your function stopped at a grid that cannot be: {error}. predict
            says so by a ValueError: leave that grid out and go on with the others.""")
    best = prices.best(limit)
    head = f"""{capital(where)} your function refused ({error}), but dp {best[0]} x pp {best[1]} x tp {best[2]} needs
        {prices.table[best].nbytes:,} bytes, and fits"""
    if best not in prices.asked:
        raise Broken(f"cover: {head}. {_never_asked(prices, best)}")
    raise Broken(f"limit: {head}: a grid that needs exactly the limit fits, too.")


def _check_grid(got: object, prices: _Prices, limit: int, where: str) -> None:
    """Raise Broken unless `got` is the best grid of this list."""
    if not isinstance(got, tuple | list) or len(got) != 3 or not all(isinstance(n, int) for n in got):
        plain = isinstance(got, tuple | list | dict | int | float | str)
        shown = "nothing" if got is None else repr(got) if plain else f"something of type {type(got).__name__}"
        raise Broken(f"returns: {where} your function returned {shown}: return (dp, pp, tp), three ints.")
    got, best = tuple(got), prices.best(limit)
    if got == best:
        return
    described, right = (f"dp {g[0]} x pp {g[1]} x tp {g[2]}" for g in (got, best))
    if math.prod(got) != prices.ranks:
        busy = counted(math.prod(got), "rank")
        raise Broken(f"ranks: {where} you say {described}, which is work for {busy}, not for all {prices.ranks}.")
    if got not in prices.table:
        raise Broken(f"impossible: {where} you say {described}, which cannot be.")
    mine, least = prices.table[got], prices.table[best]
    facts = f"{described} takes {mine.seconds:g} s and {mine.nbytes:,} bytes; {right} takes {least.seconds:g} s and "
    head = f"{where} you say {facts}{least.nbytes:,} bytes. "
    if mine.nbytes > limit:
        raise Broken(f"limit: {head}The limit is {limit:,}: yours does not fit.")
    if got[::-1] == best:
        raise Broken(f"order: {head}The order is (dp, pp, tp), the same in which predict is asked.")
    if mine.seconds == least.seconds:
        raise Broken(f"ties: {head}Of equally fast grids, return the one that needs less memory.")
    if best not in prices.asked:
        raise Broken(f"cover: {head}{_never_asked(prices, best)}")
    raise Broken(f"slow: {head}Both fit, so return the faster one.")


def _never_asked(prices: _Prices, best: tuple[int, ...]) -> str:
    asked, beyond = {grid for grid in prices.asked if math.prod(grid) == prices.ranks}, ""
    for axis, name in reversed([*enumerate(AXES)]):
        longest = max((grid[axis] for grid in asked), default=0)
        if longest < best[axis]:
            beyond = f", and your longest {name} is {longest}: predict decides whether more is possible"
    return f"""You never asked predict about it: every dp x pp x tp = {prices.ranks} counts, {len(_grids(prices.ranks))}
        in all, and you asked about {len(asked)}{beyond}."""


# (dp, pp, tp): dp and tp of two sizes first, so that a mean over one of them is not taken for one over the other
MESHES = ((3, 2, 2), (2, 1, 3), (2, 2, 2), (2, 1, 2), (2, 3, 1), (1, 2, 2), (3, 1, 1), (1, 1, 1))
WIDTH = 4
CUT, BIAS, NORM, UNUSED, TIED = "mlp.weight", "mlp.bias", "norm.weight", "unused.weight", "tokens.weight"
BOTH = "scale.weight"
ABOUT = {  # name: (axes along which it is in parts, why)
    CUT: (("dp",), "tp has cut it: every tp rank holds another part, and each stage another layer"),
    BIAS: (("dp",), "all tp ranks hold it whole, and their gradients are equal and whole already"),
    NORM: (("dp", "tp"), "over_tp: every tp rank holds it whole, but has seen only its own positions"),
    UNUSED: (("dp",), "tp has cut it: every tp rank holds another part, and each stage another layer"),
    TIED: (("dp", "pp"), "the first and the last stage use the same table, and each has a part of its gradient"),
    BOTH: (("dp", "tp", "pp"), "over_tp and tied: two stages use it, each of whose tp ranks has a part"),
}


class _Reduced(NamedTuple):
    """A rank after the answer. grads: {name: array or None}; changed: names of parameters; nbytes: that it sent."""

    grads: dict[str, np.ndarray | None]
    changed: list[str]
    nbytes: int


def _gradient(name: str, dp: int, pp: int, tp: int) -> Tensor | None:
    """Return (WIDTH, 2) whole numbers: the gradient after backward of the rank at these coordinates, or None."""
    if name == UNUSED and dp == 0:
        return None
    if name == BIAS:
        tp = 0  # the same on all of them
    place = (list(ABOUT).index(name) * 8 + dp) * 64 + pp * 8 + tp
    return small_integers(1000 + place, WIDTH, 2)


def _names_of(pp: int, stages: int) -> list[str]:
    """Return the parameters of a stage, in order: a tied one is on the first and on the last."""
    return [name for name in ABOUT if "pp" not in ABOUT[name][0] or pp in (0, stages - 1)]


def _call(comm: Comm, fn: Answer, sizes: tuple[int, ...] | None) -> _Reduced:
    """Call fn(mesh, parameters) on this rank; returns Reduced. sizes: (dp, pp, tp), None for a grid that fits."""
    mesh = DeviceMesh(comm, _grid_of(_sizes_for(comm.size) if sizes is None else sizes))
    dp, pp, tp = (mesh.coordinates[axis] for axis in AXES)
    stages, parameters = mesh.grid["pp"], []
    at_an_end = pp in (0, stages - 1)
    ends = mesh["pp"].split(at_an_end, pp)
    for name in _names_of(pp, stages):
        parameter = torch.nn.Parameter(torch.full((WIDTH, 2), float(pp), dtype=torch.float64))
        parameter.grad = _gradient(name, dp, pp, tp)
        shared = ends if "pp" in ABOUT[name][0] and stages > 1 else None
        parameters.append(
            reference.Placed(
                (name if sizes == MESHES[0] else f"parameter {sorted(ABOUT).index(name)}"),
                parameter,
                "tp" in ABOUT[name][0],
                shared,
            )
        )
    begun = len(comm.trace.log)
    fn(mesh, list(parameters))
    sent = sum(e.nbytes for e in comm.trace.events[begun:] if e.op == "send")
    held = dict(zip(_names_of(pp, stages), [p.parameter for p in parameters], strict=True))
    grads = {name: None if p.grad is None else p.grad.numpy().copy() for name, p in held.items()}
    changed = [name for name, p in held.items() if not bool((p == pp).all())]
    return _Reduced(grads, changed, sent)


def _sizes_for(p: int) -> tuple[int, ...]:
    return (p // 2, 1, 2) if p % 2 == 0 else (p, 1, 1)


def _check_reduce_gradients(fn: Answer, runner: Runner = None) -> Passed:
    def judge(run: Results, where: str, sizes: tuple[int, ...]) -> None:
        _check_sums(run, where, sizes)
        check_waits(run.events, len(run))
        _check_bytes(run, where, sizes)

    in_all_cases(fn, _call, [(math.prod(sizes), sizes) for sizes in MESHES], _case_of, judge, _with_missing)
    most = MESHES[0]
    run = simulate(math.prod(most), _call, fn, most, where=_case_of(len(most), most))
    facts = [
        f"every gradient is the sum over the batch, on {len(MESHES)} meshes of 1 to {math.prod(most)} simulated ranks",
        "added over dp: all; over tp: what each of its ranks holds whole and has in parts; over stages: what is tied",
        f"bytes: {max(left.nbytes for left in run):,} at most from one of {len(run)} ranks",
    ]
    return Passed(*facts, *engine_facts(runner, _check_sums, _call, fn, None), run=run)


def _case_of(p: int, sizes: tuple[int, ...]) -> str:
    return f"on a mesh of dp {sizes[0]} x pp {sizes[1]} x tp {sizes[2]}"


def _grid_of(sizes: tuple[int, ...]) -> Grid:
    return Grid(**dict(zip(AXES, sizes, strict=True)))


def _with_missing(broken: Broken, where: str, sizes: tuple[int, ...] | None) -> Reason | None:
    """Return the likely reason for ranks that wait for each other."""
    if broken.failed == "raises" and re.search("'NoneType' .* no attribute '(all_reduce|size)'", broken.message):
        return f"shared: {broken.message} placed.shared is None if one stage alone holds the parameter."
    if broken.failed == "deadlock":
        return f"""deadlock: {broken.message} All ranks of a group have to call the same all_reduces in the same order:
            also a replica whose gradient of {UNUSED} is None; over `shared` only the stages that hold {TIED}."""
    return None


def _check_sums(run: Results, where: str, sizes: tuple[int, ...] | None) -> None:
    """Raise Broken unless every gradient is the sum over just those axes along which it is in parts."""
    grid = _grid_of(_sizes_for(len(run)) if sizes is None else sizes)
    for r, left in enumerate(run):
        place = grid.coordinates(r)
        described = f"rank {r} ({', '.join(f'{axis} {place[axis]}' for axis in AXES)})"
        for name, got in left.grads.items():
            axes, why = ABOUT[name]
            right = _summed(name, place, grid, axes)
            if got is None and not right.any():
                continue  # no rank has one: None is as good as zeros
            if got is None:
                raise Broken(f"""hand back: {where} {name} of {described} still has no gradient, while other replicas
                    have the sum: they would take a step and this one would not. parameter.grad = ...""")
            if np.array_equal(got, right):
                continue
            found = f"{_explain(name, got, place, grid, axes)} It has to be added over {' and '.join(axes)}: {why}."
            text = first_wrong(f"the gradient of {name}{{}} on {described}", got, right, got == right)
            raise because(found, f"{where} {text}.")
        if left.changed:
            raise Broken(f"""parameters: {where} {described} changed the parameter {left.changed[0]}: the step is the
                optimizer's.""")


def _summed(name: str, place: dict[str, int], grid: Grid, axes: tuple[str, ...]) -> np.ndarray:
    """Return the gradient of `name` for the rank at `place`, added over some axes, as an array."""
    ranges = {axis: range(grid[axis]) if axis in axes else [place[axis]] for axis in AXES}
    if "pp" in axes and "pp" in ABOUT[name][0]:
        ranges["pp"] = sorted({0, grid["pp"] - 1})
    grads = [_gradient(name, dp, pp, tp) for dp, pp, tp in itertools.product(*(ranges[axis] for axis in AXES))]
    return sum((g.numpy() for g in grads if g is not None), np.zeros((WIDTH, 2)))


def _explain(name: str, got: np.ndarray, place: dict[str, int], grid: Grid, axes: tuple[str, ...]) -> Reason:
    """Return the Reason that names the axes over which it was added instead."""
    long = [axis for axis in AXES if grid[axis] > 1]
    for n in range(len(long) + 1):
        for taken in itertools.combinations(long, n):
            total = _summed(name, place, grid, taken)
            missing = [axis for axis in axes if axis in long and axis not in taken]
            extra = [axis for axis in taken if axis not in axes]
            over = " and ".join(taken)
            if np.array_equal(got, total):
                if not taken:
                    return "sum: That is this rank's own part, added to nothing."
                what = f"That is the sum over {over}"
                if extra:
                    lacking = f", and {' and '.join(missing)} is missing" if missing else ""
                    return f"axis: {what}: {' and '.join(extra)} too much{lacking}."
                return f"axis: {what} only: {' and '.join(missing)} is missing."
            for axis in long:
                if axis in (*taken, "dp") and np.allclose(got, total / _ways(grid, axis)):
                    same = [a for a in long if a in (*taken, "dp") and _ways(grid, a) == _ways(grid, axis)]
                    n, over = _ways(grid, axis), " or ".join(same)
                    if same == ["dp"]:
                        return f"""mean: That is divided by the {n} replicas of dp: each has divided its loss by the
                            global batch already, so gradients add up."""
                    return f"""mean of parts: That is divided by {n}, a mean over {over}: each of the {n} ranks has
                        another part of one gradient, and parts add up."""
            often = math.prod(_ways(grid, axis) for axis in taken)
            if len(taken) > 1 and np.array_equal(got, total * often):
                return f"twice: That is {often} times the sum over {over}: it was added over each of them twice."
            for axis in taken:
                if np.array_equal(got, total * _ways(grid, axis)):
                    return f"""twice: That is {_ways(grid, axis)} times the sum over {over}: it was added over {axis}
                        twice."""
    return "sum: "


def _ways(grid: Grid, axis: str) -> int:
    """Return how many ranks along an axis hold a gradient that is added there: of stages, the first and the last."""
    return min(grid[axis], 2) if axis == "pp" else grid[axis]


def _check_bytes(run: Results, where: str, sizes: tuple[int, ...]) -> None:
    """Raise Broken if more was sent than one all-reduce over each axis needs."""
    grid = _grid_of(sizes)
    nbytes, most = 8 * WIDTH * 2, 0
    for pp in range(grid["pp"]):
        names = _names_of(pp, grid["pp"])
        most += len(names) * grid["tp"] * ring_bytes(grid["dp"], nbytes)
        most += sum("tp" in ABOUT[name][0] for name in names) * grid["dp"] * ring_bytes(grid["tp"], nbytes)
    tied = sum("pp" in axes for axes, _ in ABOUT.values())
    most += tied * grid["dp"] * grid["tp"] * ring_bytes(min(grid["pp"], 2), nbytes)
    sent = sum(left.nbytes for left in run)
    if sent > most:
        raise Broken(f"""messages: {where} all gradients are right, but the ranks send {sent:,} bytes, and {most:,}
            are enough: one all_reduce of a gradient for each axis over which it is in parts.""")


EXERCISES = (
    Exercise("11.1", "who is in whose group", mesh.groups, 1, _check_groups),
    Exercise(
        "11.2",
        "which gradient is added over which axes",
        reference.reduce_gradients,
        3,
        _check_reduce_gradients,
        picture=Drawing("traffic", "Your sums: each rank, and the ranks that hold the same parameters"),
    ),
    Exercise("11.3", "search the grid under a memory limit", search.best_grid, 2, _check_best_grid),
)
