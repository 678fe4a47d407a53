"""Notebook 05, part one and appendix: the all-reduce that moves the fewest bytes in memory, and the bytes of others."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ...collectives import memory, ring
from ...collectives.chunks import bounds
from ...collectives.memory import ALGORITHMS, ONE_PASS, RING_ONCE, RING_TWICE, STAGED
from ...comm import Results, sim
from ...comm.base import Comm
from ...units import amount_text, counted
from ..accesses import SEVERAL, Accesses, Race, Watched
from ..checkers import because, engine_facts, reason
from ..collective import ENGINE_SIZES, GUARD, inputs
from ..ranks import SENTINEL, alone, capital, case, number, numbers_of, simulate, unlike
from ..record import Answer, Broken, Exercise, Passed, Runner

# -- 5.1 --------------------------------------------------------------------------------------------------------------

COUNTED_N = 960  # elements of float32, which every number of ranks below divides
COUNTED_RANKS = (2, 4, 3, 8)
SIZES = (2**20, 3 * 2**22)  # bytes
COPIES = {RING_ONCE: 1, RING_TWICE: 2}  # of each message


class Bytes(NamedTuple):
    """For each byte of x, on the average rank."""

    read: float
    written: float


@cache
def counted_bytes(algorithm: str, p: int) -> Bytes:
    """Return the bytes that `algorithm` moves on p simulated ranks: by operations of torch, and by its messages."""
    with Accesses() as seen:
        run = sim.run(p, _run_algorithm, algorithm, seen)
    sent = sum(e.nbytes for e in run.events if e.op == "send") * COPIES.get(algorithm, 0)
    read, written = (sum(getattr(x, which).total() for x in seen.watched.values()) for which in Bytes._fields)
    return Bytes((read + sent) / (4 * COUNTED_N * p), (written + sent) / (4 * COUNTED_N * p))


def _run_algorithm(comm: Comm, algorithm: str, seen: Accesses) -> None:
    x, shared, result = (comm.allocate(COUNTED_N) for _ in range(3))
    seen.enter(comm, x, shared, result)
    if algorithm == ONE_PASS:
        memory.one_pass(comm, x)
    elif algorithm == STAGED:
        memory.staged(comm, x, shared, result)
    else:
        ring.all_reduce(comm, x)


def _check_bytes_moved(fn: Answer) -> Passed:
    for algorithm in ALGORITHMS:
        for p in COUNTED_RANKS:
            for n in SIZES:
                _check_count(fn, algorithm, p, n)
    four = {algorithm: sum(counted_bytes(algorithm, 4)) for algorithm in ALGORITHMS}
    least = min(four.values())
    return Passed(
        f"""counted while they ran: {len(ALGORITHMS)} algorithms on {min(COUNTED_RANKS)} to {max(COUNTED_RANKS)}
        simulated ranks""",
        "with 4 ranks, for each byte of a tensor: " + "; ".join(f"{name}: {sum_:g}" for name, sum_ in four.items()),
        f"""if the memory is all that counts, {max(four, key=lambda name: four[name])} takes
        {number(max(four.values()) / least)} times as long as {min(four, key=lambda name: four[name])}""",
    )


def _check_count(fn: Answer, algorithm: str, p: int, n: int) -> None:
    """Raise Broken unless fn says what was counted."""
    where = f'with algorithm "{algorithm}", {p} ranks and {n:,} bytes'
    got = alone(fn, algorithm, p, n, where=where)
    got = numbers_of(got, 2, where, "two numbers, (bytes read, bytes written)")
    said, right = Bytes(*(value / n for value in got)), counted_bytes(algorithm, p)
    if np.allclose(said, right):
        return
    text = f"""{capital(where)} your function returns {amount_text(got[0])} read and {amount_text(got[1])} written; the
        lab counted {amount_text(n * right.read)} and {amount_text(n * right.written)}."""
    raise because(reason(said, _reasons(algorithm, p, right)) or "bytes: ", text)


def _reasons(algorithm: str, p: int, right: Bytes) -> list[tuple[Bytes, str]]:
    """Return (what may be said, why that is wrong), for each byte of x."""

    def without(read: float, written: float) -> Bytes:
        return Bytes(right.read - read, right.written - written)

    rows = [
        (Bytes(*(p * value for value in right)), f"ranks: That is what all {p} ranks move: count for one of them."),
        (Bytes(right.written, right.read), "order: First what is read, then what is written."),
    ]
    copy, added = 1 / p * (p - 1), (p - 1) / p
    if algorithm == ONE_PASS:
        rows += [
            (Bytes(p, 1), "slice: A rank adds one slice of every tensor, not all of it: p slices of n / p bytes."),
            (Bytes(1, 1 / p), "stores: The sum of a slice goes to every rank's tensor, not to one."),
            (Bytes(1 / p, 1), "slice: A rank adds its slice of every rank's tensor: how many slices are these?"),
        ]
    elif algorithm == STAGED:
        rows += [
            (without(1, 1), "copies: One of the two copies is missing: x is copied in, the result out."),
            (without(2, 2), "copies: The copies are missing: a copy reads each byte, and writes it."),
            (without(1, 1 / p), "additions: The additions are missing: p slices are read, and one is written."),
            (without(0, 1 / p), "stores: Where does the sum of a slice go, before it is copied out?"),
            (without(0, 1 / p - 1), "stores: A rank stores one slice of the result; the others store theirs."),
            (without(1 - p, 0), "slice: A rank adds one slice of every copy, not all of it: p slices of n / p bytes."),
        ]
    else:
        passed = COPIES[algorithm] * 2 * copy
        rows += [
            (without(added, 0), "additions: x += y reads x as well as y, and writes x."),
            (without(2 * added, added), "additions: The messages are counted, the additions are not."),
            (without(passed, passed), "copies: The additions are counted, but no message: each is copied."),
            (without(passed / 2, passed / 2), HALVED[algorithm]),
            (without(-passed, -passed), "copies: That is twice as many copies: how often is a message copied?"),
        ]
    return rows


HALVED = {
    RING_TWICE: "copies: A message is copied twice: to a buffer of the library, and then to the receiver's.",
    RING_ONCE: "copies: Half of the messages are missing: reduce-scatter and all-gather have p - 1 steps each.",
}


# -- 5.2 --------------------------------------------------------------------------------------------------------------

CASES = ((2, 1000), (3, 999), (4, 1001), (8, 1000), (5, 1001), (3, 1001), (3, 2), (5, 1), (3, 0), (1, 10))
UNEVEN = 16  # elements by which slices may differ, such as a cache line


class _ArrayAfter(NamedTuple):
    """The result of a call on one rank: x, the returned value (None if it is no tensor), and the guard elements."""

    x: np.ndarray
    out: object
    outside: np.ndarray


def _call(comm: Comm, fn: Answer, values: np.ndarray, seen: Accesses | None = None) -> _ArrayAfter:
    """Call fn(comm, x) on a tensor in shared memory that holds row comm.rank of values, between guard elements."""
    n = values.shape[1]
    store = comm.allocate(n + 2 * GUARD, str(values.dtype))
    store.fill_(SENTINEL)
    x = store[GUARD : GUARD + n]
    x.copy_(torch.from_numpy(values[comm.rank]))
    if seen is not None:
        seen.enter(comm, store)
    out = fn(comm, x)
    if seen is not None:
        seen.leave(comm, x)
    comm.barrier()
    return _ArrayAfter(x.numpy().copy(), out, torch.cat([store[:GUARD], store[GUARD + n :]]).numpy())


def _check_one_pass(fn: Answer, runner: Runner = None) -> Passed:
    for p, n in CASES:
        _check_case(fn, p, n)
    p, n = 4, 1000
    seen = Accesses()
    with seen:
        run = simulate(p, _call, fn, inputs(p, n).astype("f4"), seen, where=case(p, n))
    moved = max(_moved_by(seen, p).values())
    facts = [
        f"sums in the order of ranks, odd sizes, guard elements: right in {len(CASES)} cases on 1 to 8 simulated ranks",
        "races: none; between two barriers no rank touches what another one writes",
        f"""bytes: with {p} ranks each reads and writes {moved:,} in all for a tensor of {4 * n:,}: every element is
        read once and written once. If every rank added everything, it would be {4 * n * (p + 1):,}""",
    ]

    def start(comm: Comm, fn: Answer, n: int) -> _ArrayAfter:
        return _call(comm, fn, inputs(comm.size, n).astype("f4"))

    def judge(run: Results, where: str, n: int) -> None:
        _check_sums(run, inputs(len(run), n).astype("f4"), where)

    return Passed(*facts, *engine_facts(runner, judge, start, fn, each=ENGINE_SIZES), run=run)


def _check_case(fn: Answer, p: int, n: int) -> None:
    """Raise Broken unless fn leaves the sum, in order and without races, and moves each element once."""
    where = case(p, n)
    values = np.random.default_rng([p, n]).standard_normal((p, n)).astype("f4")  # in another order: other last bits
    seen = Accesses()
    with seen:
        run = simulate(p, _call, fn, values, seen, where=where)
    if seen.race is not None:
        raise Broken(f"barrier: {capital(where)} {_race_text(seen.race, n)}")
    _check_sums(run, values, capital(where))
    sent = sum(e.nbytes for e in run.events if e.op == "send")
    if sent:
        raise Broken(f"""messages: {capital(where)} the result is right, but the ranks send each other {sent:,} bytes:
            everything they need is in memory that they share.""")
    _check_traffic(seen, p, n, capital(where))


def _race_text(race: Race, n: int) -> str:
    """Return a sentence about a race."""
    does = "writes" if race.writes else "reads"
    i = race.i - GUARD
    what = f"x[{i}] of rank {race.owner}"
    other = "other ranks" if race.other == SEVERAL else f"rank {race.other}"
    if race.first:
        return f"""rank {race.rank} {does} {what} too early: the tensor of rank {race.owner} may not be complete yet.
            What has to come before the first read?"""
    if race.last and race.owner != race.rank:
        return f"""rank {race.rank} {does} {what}, and rank {race.owner} does not wait for that before it returns: its x
            may lack a slice. What has to come before the return?"""
    return f"""between the same two barriers, {what} is touched by rank {race.rank}, which {does} it, and by {other}.
        Chance decides which is first. Only the owner of a slice may touch it, or a barrier must come between."""


def _check_sums(run: Results, values: np.ndarray, where: str) -> None:
    """Raise Broken unless every rank holds and returns the sum, bitwise as added in the order of ranks."""
    p, n = values.shape
    right = np.add.accumulate(values, axis=0)[-1]
    for r, left in enumerate(run):
        if (left.outside != SENTINEL).any():
            raise Broken(f"bounds: {where}, a rank wrote outside x of rank {r}: x has the elements 0 to {n - 1}.")
        off = ~np.isclose(left.x, right, rtol=1e-5, atol=1e-5)
        if off.any():
            i = int(np.argmax(off))
            owner = next(c for c in range(p) if bounds(n, p, c)[0] <= i < bounds(n, p, c)[1])
            text = f"{where}, x[{i}] on rank {r} should be {number(right[i])} and is {number(left.x[i])}."
            raise because(_why_wrong(left, values, r, i, owner, off), text)
        if unlike(left.out, torch.from_numpy(left.x)):
            raise Broken(f"""returns: {where}, x is right on rank {r}, but your function returned
                {unlike(left.out, torch.from_numpy(left.x))}: return x.""")
    for r, left in enumerate(run):
        if not np.array_equal(left.x, right):
            i = int(np.argmax(left.x != right))
            raise Broken(f"""order: {where}, x[{i}] on rank {r} is {left.x[i]:.9g}, and {right[i]:.9g} if rank 0 comes
                first, then rank 1, and so on. Floats round: another order gives other bits.""")


def _why_wrong(left: _ArrayAfter, values: np.ndarray, r: int, i: int, owner: int, off: np.ndarray) -> str:
    """Return the Reason for x[i] on rank r, which is not the sum."""
    p, n = values.shape
    share = values[:, i].sum() / left.x[i] if left.x[i] else 0.0
    if isinstance(left.out, torch.Tensor) and left.out.shape == left.x.shape and not np.array_equal(left.out, left.x):
        return "in place: What it returns is something else: x itself has to hold the sum."
    if np.isclose(share, p) and p > 1:
        return f"sum: That is the mean: do not divide by {p}."
    if left.x[i] == values[r, i]:
        lacking = counted(int(off.sum()), "element")
        if off.sum() < p and n % p:
            return f"sizes: No rank adds {lacking} at the end: {p} does not divide {n:,}."
        return f"stores: The old value is still in {lacking} of x: does rank {owner} store to every rank?"
    return "sum: "


def _check_traffic(seen: Accesses, p: int, n: int, where: str) -> None:
    """Raise Broken unless each element of each tensor was read once and written once, by ranks that share the work."""
    for found in _shared_of(seen, p):
        for does, times in (("read", found.reads), ("written", found.writes)):
            mine = times[GUARD : GUARD + n]
            if n and not bool((mine == 1).all()):
                i = int((mine != 1).nonzero()[0])
                k = int(mine[i])
                text = f"{where}, the result is right, but x[{i}] of rank {found.owner} is {does} {k} times."
                raise because(_why_traffic(does, k, p, seen), text)
    most = 8 * p * (n // p + UNEVEN)
    for r, moved in _moved_by(seen, p).items():
        if moved > most:
            raise Broken(f"""slices: {where}, the result is right, but rank {r} moves {moved:,} of the {8 * p * n:,}
                bytes: every rank adds a slice, at the same time, and {most:,} are enough.""")


def _shared_of(seen: Accesses, p: int) -> list[Watched]:
    """Return the tensors that the ranks were given, before any buffer of their own."""
    return list(seen.watched.values())[:p]


def _moved_by(seen: Accesses, p: int) -> Counter[int]:
    """Return {rank: bytes} read and written in the tensors of all p ranks."""
    return sum((x.read + x.written for x in _shared_of(seen, p)), Counter())


def _why_traffic(does: str, k: int, p: int, seen: Accesses) -> str:
    if k == 0:
        return "traffic: The check counts only what torch reads and writes: add and store the views themselves."
    if does == "read" and min(int(x.reads.max()) for x in _shared_of(seen, p)) >= p > 1:
        return f"""traffic: Every rank adds everything, and the memory is read {p} times. Each element is needed by one
            rank only, the owner of its slice."""
    return """traffic: Once is enough. A sum that grows in a tensor is read and written at every step: keep it in a new
        tensor until it is complete."""


EXERCISES = (
    Exercise("5.1", "the bytes that an all-reduce moves", memory.bytes_moved, 1, _check_bytes_moved),
    Exercise("5.2", "one pass over shared memory", memory.one_pass, 2, _check_one_pass),
)
