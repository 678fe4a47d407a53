"""Notebook 11, gradients on a mesh: over which axes each of them is added."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm import Results
from ...comm.base import Comm
from ...mesh import DeviceMesh, Grid
from ...parallel.hybrid import gradients as reference
from ..checkers import because, engine_facts, in_all_cases
from ..layer import ring_bytes, whole_numbers
from ..ranks import number, simulate
from ..record import Broken, Exercise, Passed, Reason, Runner
from ..traffic import check_waits

# (dp, pp, tp): dp and tp of two sizes first, so that a mean over one of them is not taken for one over the other
CASES = ((3, 2, 2), (2, 1, 3), (2, 2, 2), (2, 1, 2), (2, 3, 1), (1, 2, 2), (3, 1, 1), (1, 1, 1))
AXES = ("dp", "pp", "tp")
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


class Reduced(NamedTuple):
    """One rank after the answer. grads: {name: array or None}; changed: names of parameters; nbytes: that it sent."""

    grads: dict
    changed: list
    nbytes: int


def gradient(name: str, dp: int, pp: int, tp: int) -> Tensor | None:
    """(WIDTH, 2) whole numbers: what the rank at these coordinates has after backward, or None."""
    if name == UNUSED and dp == 0:
        return None
    if name == BIAS:
        tp = 0  # the same on all of them
    place = (list(ABOUT).index(name) * 8 + dp) * 64 + pp * 8 + tp
    return whole_numbers(1000 + place, WIDTH, 2)


def names_of(pp: int, stages: int) -> list[str]:
    """The parameters of a stage, in order: what is tied is on the first and on the last."""
    return [name for name in ABOUT if "pp" not in ABOUT[name][0] or pp in (0, stages - 1)]


def told_name(name: str, sizes: tuple[int, ...] | None) -> str:
    """What the answer is told: in the first case the name, then one that says nothing, as names may be anything."""
    return name if sizes == CASES[0] else f"parameter {sorted(ABOUT).index(name)}"


def call(comm: Comm, fn: Callable, sizes: tuple[int, ...] | None) -> Reduced:
    """fn(mesh, parameters) on this rank; returns Reduced. sizes: (dp, pp, tp), None for a grid that fits."""
    mesh = DeviceMesh(comm, grid_of(sizes_for(comm.size) if sizes is None else sizes))
    dp, pp, tp = (mesh.coordinates[axis] for axis in AXES)
    stages, parameters = mesh.grid["pp"], []
    at_an_end = pp in (0, stages - 1)
    ends = mesh["pp"].split(at_an_end, pp)
    for name in names_of(pp, stages):
        parameter = torch.nn.Parameter(torch.full((WIDTH, 2), float(pp), dtype=torch.float64))
        parameter.grad = gradient(name, dp, pp, tp)
        shared = ends if "pp" in ABOUT[name][0] and stages > 1 else None
        parameters.append(reference.Placed(told_name(name, sizes), parameter, "tp" in ABOUT[name][0], shared))
    begun = len(comm.trace.log)
    fn(mesh, list(parameters))
    sent = sum(e.nbytes for e in comm.trace.events[begun:] if e.op == "send")
    held = dict(zip(names_of(pp, stages), [p.parameter for p in parameters], strict=True))
    grads = {name: None if p.grad is None else p.grad.numpy().copy() for name, p in held.items()}
    changed = [name for name, p in held.items() if not bool((p == pp).all())]
    return Reduced(grads, changed, sent)


def sizes_for(p: int) -> tuple[int, ...]:
    return (p // 2, 1, 2) if p % 2 == 0 else (p, 1, 1)


def check_reduce_gradients(fn: Callable, runner: Runner = None) -> Passed:
    def judge(run: Results, where: str, sizes: tuple[int, ...]) -> None:
        check_sums(run, where, sizes)
        check_waits(run.events, len(run))
        check_bytes(run, where, sizes)

    in_all_cases(fn, call, [(math.prod(sizes), sizes) for sizes in CASES], case_of, judge, with_missing)
    most = CASES[0]
    run = simulate(math.prod(most), call, fn, most, where=case_of(len(most), most))
    facts = [
        f"every gradient is that of the whole batch, on {len(CASES)} meshes of 1 to {math.prod(most)} simulated ranks",
        "added over dp: all; over tp: what each of its ranks holds whole and has in parts; over stages: what is tied",
        f"bytes: {max(left.nbytes for left in run):,} at most from one of {len(run)} ranks",
    ]
    return Passed(*facts, *engine_facts(runner, check_sums, call, fn, None), run=run)


def case_of(p: int, sizes: tuple[int, ...]) -> str:
    return f"on a mesh of dp {sizes[0]} x pp {sizes[1]} x tp {sizes[2]}"


def grid_of(sizes: tuple[int, ...]) -> Grid:
    return Grid(**dict(zip(AXES, sizes, strict=True)))


def with_missing(broken: Broken, where: str, sizes: tuple[int, ...] | None) -> Reason | None:
    """What is likely behind ranks that wait for each other."""
    if broken.failed == "raises" and re.search("'NoneType' .* no attribute '(all_reduce|size)'", broken.message):
        return f"shared: {broken.message} placed.shared is None where one stage alone holds the parameter."
    if broken.failed == "raises" and "NoneType" in broken.message:
        return f"""missing: {broken.message} A gradient of None counts as zeros: {UNUSED} has one on other replicas,
            which wait for this rank."""
    if broken.failed == "deadlock":
        return f"""deadlock: {broken.message} All ranks of a group have to call the same all_reduces in the same order:
            also a replica whose gradient of {UNUSED} is None; and over `shared` only the stages that hold {TIED}, not
            those between."""
    return None


def check_sums(run: Results, where: str, sizes: tuple[int, ...] | None) -> None:
    """Raise Broken unless every gradient is the sum over just those axes along which it is in parts."""
    grid = grid_of(sizes_for(len(run)) if sizes is None else sizes)
    for r, left in enumerate(run):
        place = grid.coordinates(r)
        told = f"rank {r} ({', '.join(f'{axis} {place[axis]}' for axis in AXES)})"
        for name, got in left.grads.items():
            axes, why = ABOUT[name]
            right = summed(name, place, grid, axes)
            if got is None and not right.any():
                continue  # nobody has one: to leave it so is as good as zeros
            if got is None:
                raise Broken(f"""hand back: {where} {name} of {told} still has no gradient, while other replicas have
                    the sum: they would take a step and this one would not. parameter.grad = ...""")
            if np.array_equal(got, right):
                continue
            i = tuple(int(k) for k in np.argwhere(got != right)[0])
            found = f"{explain(name, got, place, grid, axes)} It has to be added over {' and '.join(axes)}: {why}."
            raise because(
                found,
                f"""{where} the gradient of {name}{list(i)} on {told} should be {number(right[i])} and
                is {number(got[i])}.""",
            )
        if left.changed:
            raise Broken(f"""parameters: {where} {told} changed the parameter {left.changed[0]}: the step is the
                optimizer's.""")


def summed(name: str, place: dict[str, int], grid: Grid, axes: tuple[str, ...]) -> np.ndarray:
    """The gradient of `name` for the rank at `place`, added over some axes, as an array."""
    ranges = {axis: range(grid[axis]) if axis in axes else [place[axis]] for axis in AXES}
    if "pp" in axes and "pp" in ABOUT[name][0]:
        ranges["pp"] = sorted({0, grid["pp"] - 1})
    grads = [gradient(name, dp, pp, tp) for dp, pp, tp in itertools.product(*(ranges[axis] for axis in AXES))]
    return sum((g.numpy() for g in grads if g is not None), np.zeros((WIDTH, 2)))


def explain(name: str, got: np.ndarray, place: dict[str, int], grid: Grid, axes: tuple[str, ...]) -> Reason:
    """Reason: over which axes was it added instead?"""
    long = [axis for axis in AXES if grid[axis] > 1]
    for n in range(len(long) + 1):
        for taken in itertools.combinations(long, n):
            total = summed(name, place, grid, taken)
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
                if axis in (*taken, "dp") and np.allclose(got, total / ways(grid, axis)):
                    same = [a for a in long if a in (*taken, "dp") and ways(grid, a) == ways(grid, axis)]
                    return mean_over(same, ways(grid, axis))
            often = math.prod(ways(grid, axis) for axis in taken)
            if len(taken) > 1 and np.array_equal(got, total * often):
                return f"twice: That is {often} times the sum over {over}: it was added over each of them twice."
            for axis in taken:
                if np.array_equal(got, total * ways(grid, axis)):
                    return f"""twice: That is {ways(grid, axis)} times the sum over {over}: it was added over {axis}
                        twice."""
    return "sum: "


def ways(grid: Grid, axis: str) -> int:
    """How many ranks along an axis hold a gradient that is added there: of the stages the first and the last."""
    return min(grid[axis], 2) if axis == "pp" else grid[axis]


def mean_over(axes: list[str], n: int) -> Reason:
    """Reason for a sum that is divided by n, the size of one of these axes."""
    if axes == ["dp"]:
        return f"""mean: That is divided by the {n} replicas of dp: each has divided its loss by the global batch
            already, so gradients add up."""
    return f"""mean of parts: That is divided by {n}, a mean over {" or ".join(axes)}: each of the {n} ranks has another
        part of one gradient, and parts add up."""


def check_bytes(run: Results, where: str, sizes: tuple[int, ...]) -> None:
    """Raise Broken where more was sent than one all-reduce over each axis needs."""
    grid = grid_of(sizes)
    nbytes, most = 8 * WIDTH * 2, 0
    for pp in range(grid["pp"]):
        names = names_of(pp, grid["pp"])
        most += len(names) * grid["tp"] * ring_bytes(grid["dp"], nbytes)
        most += sum("tp" in ABOUT[name][0] for name in names) * grid["dp"] * ring_bytes(grid["tp"], nbytes)
    tied = sum("pp" in axes for axes, _ in ABOUT.values())
    most += tied * grid["dp"] * grid["tp"] * ring_bytes(min(grid["pp"], 2), nbytes)
    sent = sum(left.nbytes for left in run)
    if sent > most:
        raise Broken(f"""messages: {where} all gradients are right, but the ranks send {sent:,} bytes, where {most:,}
            are enough: one all_reduce of a gradient for each axis over which it is in parts.""")


EXERCISES = (
    Exercise("11.3", "which gradient is added over which axes", reference.reduce_gradients, 3, check_reduce_gradients),
)
