"""Check a collective: results, guard elements, bytes, peers, steps on simulated ranks; then results on the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..collectives.chunks import bounds
from ..comm import PerRank, Results
from ..comm.base import Comm
from ..comm.buffers import to_numpy
from ..comm.errors import name_ranks
from ..comm.network import Network, Switch
from ..units import counted
from .checkers import because, engine_facts
from .ranks import SENTINEL, capital, case, number, simulate, with_evidence
from .record import Answer, Broken, Passed, Reason, Runner
from .traffic import check_bytes, check_peers, check_waits, in_barriers, miscount

if TYPE_CHECKING:
    from torch import Tensor

    from ..collectives.cost import Cost


ENGINE_SIZES = ((1000,), (1001,), (1,), (0,))
GUARD = 16  # elements before and after every buffer; no rank may touch them


@dataclass(frozen=True)
class Collective:
    """A collective, by what it promises.

    start:    start(values, r) -> (n,) what x holds on rank r before the call; values: (p, n), row r belongs to rank r.
    whole:    whole(values) -> (n,) the vector of results.
    promised: promised(n, p, r) -> (first, last + 1): which elements of it rank r holds and returns.
    best:     best(comm, x): an answer that is right, to draw next to one that is not.
    cost:     cost(p, nbytes) -> collectives.cost.Cost: what the best answer sends; share: the same in words.
    adds:     whether contributions are added (or only moved).
    """

    name: str
    start: Callable[[np.ndarray, int], np.ndarray]
    whole: Callable[[np.ndarray], np.ndarray]
    promised: Callable[[int, int, int], tuple[int, ...]]
    best: Callable[[Comm, Tensor], Tensor]
    cost: Callable[[int, int], Cost]
    share: str
    adds: bool = True


class ArrayAfter(NamedTuple):
    """The result of a call on one rank: x and the returned value as arrays (None if it is neither tensor nor array)."""

    x: np.ndarray
    out: np.ndarray | None
    kind: str  # type of what was returned
    broken_guard: int | None  # index relative to x of the first guard element that was overwritten


def call(comm: Comm, fn: Answer, start: np.ndarray, dtype: str = "float32") -> ArrayAfter:
    """Call fn(comm, x) on a tensor x of the given values, on its device, between guard elements; returns ArrayAfter."""
    import torch

    n = len(start)
    store = torch.full((n + 2 * GUARD,), SENTINEL, dtype=getattr(torch, dtype), device=comm.device)
    x = store[GUARD : GUARD + n]
    x.copy_(torch.from_numpy(start))
    out = fn(comm, x)
    if x.shape != (n,):
        raise ValueError(f"x had shape ({n},) and now has {tuple(x.shape)}: change its elements, not its shape")
    kind = type(out).__name__
    if isinstance(out, torch.Tensor):
        out = to_numpy(out).copy()
    elif not isinstance(out, np.ndarray):
        out = None
    memory, outside = to_numpy(store), [*range(-GUARD, 0), *range(n, n + GUARD)]
    broken = next((i for i in outside if memory[GUARD + i] != SENTINEL), None)
    return ArrayAfter(to_numpy(x).copy(), out, kind, broken)


def inputs(p: int, n: int) -> np.ndarray:
    """Return (p, n) whole numbers, different on every rank, whose sums float32 holds exactly in any order."""
    return np.random.default_rng([p, n]).integers(-999, 1000, (p, n)).astype(float)


def _cases() -> list[tuple[int, int]]:
    """Return (ranks, elements) of every case, the plain ones first, so that a message can say what works."""
    # p = 3 is the case that the docstrings draw.
    grid = {(p, n) for p in (1, 2, 3, 5, 8) for n in (0, 1, p - 1, 1000, 1001)}
    return [(3, 999)] + sorted(grid, key=lambda c: (c[0] == 1, c[1] < c[0], c[1] % c[0] != 0, c))


def check_collective(collective: Collective, fn: Answer, runner: Runner = None) -> Passed:
    """Return Passed, or raise Broken for the first invariant that `fn` breaks. `runner(fn, *args)` runs on engines."""
    for p, n in _cases():
        if p > 1:
            _check_case(collective, fn, p, n)
    values = inputs(3, 999)
    try:
        _check_result(collective, fn, 3, values, _simulate_case(collective, fn, values, "float64"))
    except Broken as broken:
        raise broken.restate(f"""dtype: float32 is right, float64 is not: a buffer of your own must have the dtype of x.
            {broken.message}""") from None
    values = inputs(8, 1000)
    run = _simulate_case(collective, fn, values)
    cost = collective.cost(8, 4 * 1000)
    try:
        check_waits(run.events, 8)
        most = check_bytes(run.events, 8, 4 * 1000, cost)
        check_peers(run.events, 8)
        steps = _check_steps(collective, fn, cost.steps)
    except Broken as broken:
        raise _with_expected(broken, collective, values) from None
    for p, n in _cases():
        if p == 1:  # after the traffic, which says more about a loop that goes round once too often
            _check_case(collective, fn, p, n)
    _check_rounding(collective, fn)
    facts = [
        f"sums, odd sizes and guard elements: right in {len(_cases())} cases on 1, 2, 3, 5 and 8 simulated ranks",
        f"bytes: with 8 ranks none sends more than {most:,} for a vector of 4,000: {collective.share} of it",
        steps,
    ]

    def start(comm: Comm, fn: Answer, n: int) -> ArrayAfter:
        return call(comm, fn, collective.start(inputs(comm.size, n), comm.rank))

    def judge(run: Results, where: str, n: int) -> None:
        _check_result(collective, fn, len(run), inputs(len(run), n), run)

    return Passed(*facts, *engine_facts(runner, judge, start, fn, each=ENGINE_SIZES), run=run)


def _check_case(collective: Collective, fn: Answer, p: int, n: int) -> None:
    """Raise Broken unless `fn` leaves what is promised on p ranks with n elements."""
    values = inputs(p, n)
    try:
        _check_result(collective, fn, p, values, _simulate_case(collective, fn, values))
    except Broken as broken:
        raise _with_expected(_by_size(broken, p, n), collective, values) from None


def _simulate_case(
    collective: Collective,
    fn: Answer,
    values: np.ndarray,
    dtype: str = "float32",
    network: Network | None = None,
    evidence: bool = True,
) -> Results:
    p, n = values.shape
    starts = PerRank([collective.start(values, r) for r in range(p)])
    return simulate(p, call, fn, starts, dtype, network=network, where=case(p, n), evidence=evidence)


def _with_expected(broken: Broken, collective: Collective, values: np.ndarray) -> Broken:
    """Return the same failure, with the events of a right answer in the same run."""
    if with_evidence(broken).events:
        broken.expected = _simulate_case(collective, collective.best, values, evidence=False).events
    return broken


def _by_size(broken: Broken, p: int, n: int) -> Broken:
    """Return the same failure, named "sizes" or "one rank" if everything plainer than (p, n) has been found right."""
    plain = p > 1 and n >= p and n % p == 0
    if plain or broken.failed not in ("sum", "chunk", "steps", "returns", "in place", "raises", "deadlock"):
        return broken
    if p == 1:
        return broken.restate(f"""one rank: With 2 and more ranks all is right, but not on 1 rank, which has no
            neighbor. {broken.message}""")
    right = "every size that the number of ranks divides" if n >= p else "every size from the number of ranks up"
    return broken.restate(f"sizes: {capital(right)} is right, but not {n:,} on {p}. {broken.message}")


def _check_result(collective: Collective, fn: Answer, p: int, values: np.ndarray, run: Results) -> None:
    """Raise Broken unless every rank holds and returns what was promised, and no guard element has changed."""
    n = values.shape[1]
    whole = collective.whole(values)
    for r, left in enumerate(run):
        first, last = collective.promised(n, p, r)
        expected, where = whole[first:last], case(p, n)
        if left.broken_guard is not None:
            at = left.broken_guard
            place = f"at x[{at}]" if at > 0 else f"{-at} before its first element"
            raise Broken(f"""bounds: {capital(where)}, rank {r} wrote outside x, {place}: x has the elements 0 to
                {n - 1}.""")
        held = left.x[first:last]
        if not np.array_equal(held, expected):
            if left.out is not None and np.array_equal(left.out, expected):
                raise Broken(f"""in place: {capital(where)}, what rank {r} returns is right, but x was not overwritten
                    with it.""")
            i = first + int(np.argmax(held != expected))
            rerun = partial(_simulate_case, collective, fn, evidence=False)
            why = next(_reasons(collective, rerun, values, run, r, i), "sum: " if collective.adds else "chunk: ")
            text = f"{_place(i, n, p, r)} should be {number(whole[i])} and is {number(left.x[i])}."
            raise because(why, f"{capital(where)}, {text}")
        wrong = ""
        if left.out is None:
            wrong = "nothing" if left.kind == "NoneType" else left.kind
        elif left.out.shape != expected.shape:
            wrong = f"{counted(left.out.size, 'element')}, not {len(expected):,}"
        elif left.out.dtype != left.x.dtype:
            wrong = f"{left.out.dtype}, but x is {left.x.dtype}"
        elif not np.array_equal(left.out, expected):
            wrong = "something that differs from it"
        if wrong:
            promise = "x" if len(expected) == len(left.x) else f"chunk {r} of x"
            raise Broken(f"""returns: {capital(where)}, x is right on rank {r}, but your function returned {wrong}:
                return {promise}.""")


def _place(i: int, n: int, p: int, r: int) -> str:
    c = next(c for c in range(p) if bounds(n, p, c)[0] <= i < bounds(n, p, c)[1])
    return f"x[{i}] on rank {r} (chunk {c})"


def _check_rounding(collective: Collective, fn: Answer) -> None:
    """Check sums of real numbers: within the bound of float32 addition, bitwise the same on all ranks with them."""
    p, n = 5, 1001
    values = np.random.default_rng(0).standard_normal((p, n)).astype("f4").astype(float)
    whole, allowed = collective.whole(values), (p - 1) * 2.0**-24 * np.abs(values).sum(0)
    run = _simulate_case(collective, fn, values)
    first_holder = {}
    for r, left in enumerate(run):
        first, last = collective.promised(n, p, r)
        off = np.abs(left.x - whole)[first:last]
        if (off > allowed[first:last]).any():
            i = first + int(np.argmax(off))
            raise Broken(f"""sum: Whole numbers are added exactly, but on rank {r} x[{i}] is {left.x[i]:.9g} and should
                be {whole[i]:.9g}.""")
        for i in range(first, last):
            s, bits = first_holder.setdefault(i, (r, left.x[i]))
            if bits != left.x[i]:
                raise Broken(f"""bitwise: x[{i}] is {bits:.9g} on rank {s} and {left.x[i]:.9g} on rank {r}: they added
                    in different orders. Replicas that round differently drift apart: add once, and pass it on.""")


def _check_steps(collective: Collective, fn: Answer, steps: int) -> str:
    """Count messages in sequence: on a network where a message takes 1 s, whatever its size. Returns a fact."""
    run = _simulate_case(collective, fn, inputs(8, 1000), network=Switch(alpha=1.0, beta=0.0))
    took = round(run.seconds)
    if took > 2 * steps:
        in_a_row = "the ranks wait for each other in a row. Let all of them send and receive at once: comm.sendrecv."
        raise Broken(f"""steps: Result and bytes are right, but with 8 ranks it takes the time of {took} messages one
            after another, where {steps} are enough: {in_barriers(run.events) or in_a_row}""")
    if took > steps:
        return f"steps: {took} message times with 8 ranks, where {steps} are enough: see comm.sendrecv"
    return f"steps: {took} message times with 8 ranks: the least possible for a ring"


def _reasons(
    collective: Collective, rerun: Callable[[np.ndarray], Results], values: np.ndarray, run: Results, r: int, i: int
) -> Iterator[Reason]:
    """Yield why x[i] on rank r is wrong in a run of values, (p, n); rerun(values) runs the answer again."""
    (p, n), whole, held = values.shape, collective.whole(values), run[r].x
    spans = [collective.promised(n, p, c) for c in range(p)]
    first, last = spans[r]
    if collective.adds and np.allclose(held[first:last] * p, whole[first:last], rtol=1e-5):
        yield f"""sum: It is the average: the sum divided by {p}. {collective.name} adds, and leaves dividing to its
            caller."""
    for shift in range(1, p) if n >= p and (0, n) not in spans else ():  # whole sums, on other ranks
        moved = [spans[(s + shift) % p] for s in range(p)]
        if all(np.array_equal(run[s].x[a:b], whole[a:b]) for s, (a, b) in enumerate(moved)):
            off = "one chunk" if shift in (1, p - 1) else f"{shift} chunks"
            yield f"chunk: Rank {r} holds the whole sum of chunk {(r + shift) % p} instead: you are off by {off}."
    found = _again(rerun, np.ones((5, 100)))  # with 5 ranks one step more or less is not confused with none
    if found and (why := miscount(found.events, 5, collective.cost(5, 100).steps)):
        yield f"steps: {why}"
    for s in range(p) if collective.adds else ():
        if np.array_equal(run[-1].x[first:last], values[s, first:last]):
            yield f"sum: Rank {p - 1} holds the data of rank {s}, not the sum over ranks."
    if found := _again(rerun, np.tile(np.arange(1.0, n + 1), (p, 1))):
        j = found[r].x[i] / (p if collective.adds else 1) - 1
        if j != i and float(j).is_integer() and 0 <= j < n:
            both = collective.adds and spans[r] == (0, n)
            why = ": did both halves get the whole of x?" if both else "."
            yield f"chunk: That is the value of x[{int(j)}]: rank {r} got another chunk there{why}"
    if not collective.adds and held[i] == SENTINEL:
        yield f"""chunk: The chunk to which x[{i}] belongs never arrived on rank {r}: {number(held[i])} is what was
            there before."""
    elif not collective.adds and (held[i] - whole[i]) % SENTINEL == 0:
        yield f"""chunk: What arrived was added to the {number(SENTINEL)} that was there: all_gather replaces, it does
            not add."""
    elif collective.adds and (found := _again(rerun, np.tile(8.0 ** np.arange(p)[:, None], n))):
        value = found[r].x[i]  # whose digits in base 8 tell how often the part of each rank is in it
        if 0 <= value < 8.0**p and float(value).is_integer():
            digits = [int(value) // 8**s % 8 for s in range(p)]
            missing = [s for s, times in enumerate(digits) if times == 0]
            parts = [f"the part of {name_ranks(missing)} is missing"] if missing else []
            parts += [f"rank {s}'s part counts {times} times" for s, times in enumerate(digits) if times > 1]
            if parts:
                yield f"sum: In it {', '.join(parts)}."


def _again(rerun: Callable[[np.ndarray], Results], values: np.ndarray) -> Results | None:
    """Return another run of the same answer, or None if it fails on these numbers."""
    try:
        return rerun(values)
    except Broken:
        return None
