"""Notebook 15: a ring all-reduce that notes flipped bits; its messages go wrong on purpose, at every rank and hop."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...collectives import ring
from ...collectives.chunks import bounds
from ...comm import Results
from ...comm.base import Comm
from ...resilience.checksums import Flips, checked_all_reduce, flip, swap
from ...units import counted
from ..checkers import engine_facts
from ..ranks import capital, case, number, simulate
from ..record import Answer, Broken, Exercise, Passed, Reason, Runner
from ..traffic import check_peers, check_waits, messages_sent

Pairs: TypeAlias = list[tuple[int, int]]
Faults: TypeAlias = dict[tuple[int, int], Callable[[Tensor], object]]
Given: TypeAlias = list[tuple[np.ndarray, Faults, bool]]
CASES = ((3, 30), (2, 31), (5, 33), (3, 2), (2, 0), (1, 9))  # (ranks, elements)
RUNS = ((2, 120), (3, 90), (5, 30))  # without faults, with so many ranks: so many
OF_FAULTS = {2: 8, 3: 2, 5: 1}  # with so many ranks: so many kinds at each rank and hop
BATCH = 20  # calls in one run on simulated ranks
N = 31  # elements with faults
SCALES = (1.0, 1e12, 1e-12)


def _call(comm: Comm, fn: Answer, given: list[tuple[np.ndarray, Faults, bool]]) -> list[tuple[object, np.ndarray]]:
    """Call fn for each (values, faults, whether they are in memory); returns [(what it returned, x)]."""
    left = []
    for values, faults, memory in given:
        x = torch.from_numpy(values[comm.rank]).to(comm.device, copy=True)
        out = fn(Flips(comm, faults, x if memory else None) if faults else comm, x)
        left.append((out, x.cpu().numpy()))
    return left


def _in_batches(p: int, fn: Answer, given: Given, where: str) -> list[list[tuple[object, np.ndarray]]]:
    """Return what `call` returns on each rank, in short runs."""
    runs = [simulate(p, _call, fn, given[i : i + BATCH], where=where) for i in range(0, len(given), BATCH)]
    return [[left for run in runs for left in run[r]] for r in range(p)]


def _pairs(out: Any, where: str) -> Pairs:
    """Return what an answer has returned as a list of (rank, hop)."""
    try:
        return [(int(source), int(hop)) for source, hop in out]
    except (TypeError, ValueError):
        text = "return a list of (source rank, hop), which is empty if nothing was wrong"
        raise Broken(f"returns: {capital(where)}, your function returned {out!r}: {text}.") from None


def _check_checked_all_reduce(fn: Answer, runner: Runner = None) -> Passed:
    rng = random.Random(15)
    for p, n in CASES:
        values = _made("ordinary", rng, p, n)
        run = simulate(p, _call, fn, [(values, {}, False)], where=case(p, n))
        _check_sum(run, values, case(p, n))
    most, run = _check_traffic(fn, rng)
    clean = sum(_check_clean(fn, rng, p, times) for p, times in RUNS)
    found = _check_faults(fn, rng)
    facts = [
        f"the sums of the plain ring, to the last bit, on 1, 2, 3 and 5 simulated ranks; {clean} runs without alarm",
        f"{found} faults in messages and memory: each noted once, by the next rank, at its hop",
        f"traffic: as many messages as a ring, and {most:.2%} more bytes for 10,000 numbers on 3 ranks",
    ]
    engines = engine_facts(
        runner, _check_engines, _call_engines, fn, company=True, say="right, and a flip noted, on {}"
    )
    return Passed(*facts, *engines, run=run)


# -- without faults ----------------------------------------------------------------------------------------------------

CARRIED = "carried: What arrives has the rounding of earlier hops. Which checksums does a rank send on?"
KINDS: dict[str, tuple[str, Reason]] = {
    "digits": (
        "whole numbers below 10",
        "checksums: Such sums are exact. Which checksums are right after elements are added, and which after a copy?",
    ),
    "whole": (
        "whole numbers up to 1,000,000,000",
        "dtype: float64 adds such numbers exactly. Is a checksum computed or sent as float32?",
    ),
    "ordinary": (
        "numbers between 1 and 2",
        "rounding: Another order of additions rounds differently. By how much may two checksums differ?",
    ),
    "zeros": ("zeros only", "zeros: Both checksums are 0, and so is your tolerance. Is a difference of 0 a fault?"),
    "large": ("numbers of about 1e12", "scale: Rounding grows with the numbers. Does your tolerance grow as well?"),
    "within": (
        "numbers of both signs that cancel within a chunk",
        "cancelation: The sum is nearly 0, and its rounding is not. Which numbers cause the rounding?",
    ),
    "over": (
        "numbers that cancel over ranks",
        "cancelation: The result is small. How large are the numbers that were added at this hop?",
    ),
    "mixed": (
        "numbers from 1e-12 to 1e12",
        "rounding: The largest numbers decide how much rounding there is. Which numbers does your tolerance count?",
    ),
}


def _made(kind: str, rng: random.Random, p: int, n: int) -> np.ndarray:
    """Make up (p, n) numbers of this kind."""

    def row(least: float, most: float) -> np.ndarray:
        return np.array([rng.uniform(least, most) for _ in range(n)])

    if kind in ("digits", "whole"):
        return np.array([np.floor(row(1, 10) if kind == "digits" else row(5e8, 1e9)) for _ in range(p)])
    if kind == "zeros":
        return np.zeros((p, n))
    if kind == "mixed":
        return np.array([[rng.choice((-1, 1)) * 10 ** rng.uniform(-12, 12) for _ in range(n)] for _ in range(p)])
    values = np.array([row(1, 2) for _ in range(p)]) * (1e12 if kind == "large" else 1)
    if kind == "within":
        for i in range(p):
            first, last = bounds(n, p, i)
            if last - first > 1:
                values[:, last - 1] = -values[:, first : last - 1].sum(axis=1)
    if kind == "over":
        values = np.array([(-1) ** r * values[0] * (1 + 1e-12 * values[r]) for r in range(p)])
    return values


def _check_sum(run: Results, values: np.ndarray, where: str) -> None:
    """Raise Broken unless all ranks hold what the ring of 04 leaves, and return pairs."""
    p, n = values.shape
    right = simulate(
        p,
        lambda comm, values: ring.all_reduce(comm, torch.from_numpy(values[comm.rank].copy())).numpy(),
        values,
        evidence=False,
    )
    for r, left in enumerate(run):
        out, x = left[0]
        if not np.array_equal(x, right[r]):
            at = int(np.argmax(x != right[r]))
            text = f"{capital(where)}, x[{at}] on rank {r} is {number(x[at])}; the ring gives {number(right[r][at])}."
            if p > 1 and np.array_equal(x, values[r]):
                raise Broken(f"in place: {capital(where)}, x on rank {r} is as before: overwrite it with the sum.")
            if np.allclose(x, right[r], rtol=1e-4):
                raise Broken(f"bits: {text} Which two numbers does the ring add at each hop, and in which dtype?")
            raise Broken(f"sum: {text} Is each chunk added in reduce-scatter, and copied in all-gather?")
        _pairs(out, where)


def _check_traffic(fn: Answer, rng: random.Random) -> tuple[float, Results]:
    """Return which share of bytes is sent on top of the ring's, and the run; raise Broken if it is too much."""
    p, n = 3, 10_000
    values, where = _made("ordinary", rng, p, n), f"With 3 ranks and {10_000:,} elements,"
    run = simulate(p, _call, fn, [(values, {}, False)], where=case(p, n))
    check_waits(run.events, p)
    sent, steps = messages_sent(run.events, p), 2 * (p - 1)
    if max(sent) != steps or min(sent) != steps:
        text = f"{where} a rank sends {counted(max(sent), 'message')}; the ring needs {steps}."
        raise Broken(f"messages: {text} How can a checksum travel without a message of its own?")
    if any(e.op == "barrier" for e in run.events):
        raise Broken(f"messages: {where} ranks wait in a barrier. What does a rank of the ring have to wait for?")
    check_peers(run.events, p)
    best = steps * 8 * n / p
    nbytes = max(sum(e.nbytes for e in run.events if e.op == "send" and e.rank == r) for r in range(p))
    more = (nbytes - best) / 8 / steps
    if more > 3:  # chunks may be filled up to one length
        text = f"{where} a rank sends {nbytes:,} bytes; the ring's messages have {best:,.0f}."
        raise Broken(f"bytes: {text} That is {more:,.0f} numbers more per message. How many are needed?")
    if more < 1.5:
        text = f"{where} a rank sends {nbytes:,} bytes, and a ring with 2 numbers more per message {best + 64:,.0f}."
        raise Broken(f"bytes: {text} What does the receiver compare its elements with?")
    return nbytes / best - 1, run


def _check_clean(fn: Answer, rng: random.Random, p: int, times: int) -> int:
    """Return the number of runs; raise Broken if a rank notes anything, though nothing is wrong."""
    kinds = list(KINDS)
    sizes = [rng.choice((p, 2 * p + 1, 7 * p, 12 * p + 2)) for _ in range(times)]
    drawn = [(kinds[i % len(kinds)], n) for i, n in enumerate(sizes)]
    given = [(_made(kind, rng, p, n), {}, False) for kind, n in drawn]
    run = _in_batches(p, fn, given, f"with {p} ranks")
    alarms: dict[str, tuple[int, int, tuple[int, int]]] = {}
    for i, (kind, n) in enumerate(drawn):
        for r in range(p):
            if noted := _pairs(run[r][i][0], case(p, n)):
                alarms.setdefault(kind, (n, r, noted[0]))
    for kind, (text, why) in KINDS.items():
        if kind in alarms:
            n, r, pair = alarms[kind]
            why = CARRIED if kind == "over" and pair[1] >= p - 1 else why
            failed, _, question = why.partition(": ")
            said = f"no bit was flipped, and rank {r} notes {pair}. x has {text}."
            raise Broken(f"{failed}: {capital(case(p, n))}, {said} {question}")
    return times


# -- with faults -------------------------------------------------------------------------------------------------------

BITS = {"sign": 63, "exponent": 56, "top": 62, "mantissa": 51, "low": 36}
TEXTS = {
    **{kind: f"bit {bit} of an element was flipped" for kind, bit in BITS.items()},
    "swap": "two elements changed places",
    "moved": "each element moved by one place",
    "other": "all elements came from another chunk",
    "memory": "a bit was flipped in the memory of the next rank, while it waited",
    "two": "two messages were changed",
}
FAULTS = (*BITS, "swap", "moved", "other")


class _Fault(NamedTuple):
    """A fault, and the notes of each rank: the right ones, and the ones that were made."""

    kind: str
    scale: float
    p: int
    rank: int
    hop: int
    right: list[Pairs]
    got: list[Pairs]

    @property
    def nowhere(self) -> bool:
        return not any(self.got)

    @property
    def gather(self) -> bool:
        return self.hop >= self.p - 1

    def where(self) -> str:
        of = "of about " + number(self.scale) if self.scale != 1 else "between 1 and 2"
        at = f"with {self.p} ranks, and numbers {of}, {TEXTS[self.kind]}"
        place = f"rank {self.rank} sent at hop {self.hop}" if self.kind != "two" else f"rank {self.rank} sent"
        return f"{at} in what {place}" if self.kind != "memory" else f"{at} for what {place}"

    def said(self) -> str:
        noted = [f"rank {r} notes {', '.join(map(str, got))}" for r, got in enumerate(self.got) if got]
        return "; ".join(noted) or "no rank notes it"


def _change(x: torch.Tensor, kind: str, m: int, i: int, other: np.ndarray) -> None:
    """Let something of this kind go wrong in the first m elements of x."""
    if kind in BITS:
        flip(x, i, BITS[kind])
    elif kind == "swap":
        swap(x, i, (i + 1) % m)
    else:
        new = torch.from_numpy(other[:m]).to(x.device)
        x[:m] = x[:m].roll(1) if kind == "moved" else new


def _plans(rng: random.Random, p: int) -> list[tuple[str, float, int, int, np.ndarray, Faults, bool]]:
    """Make up faults at each rank and hop: [(kind, scale, rank, hop, values, faults, whether in memory)]."""
    made_up: list[tuple[str, float, int, int, np.ndarray, Faults, bool]] = []
    m, last, signs = N // p, 2 * p - 3, [rng.choice((-1.0, 1.0)) for _ in range(N)]

    def add(kind: str, rank: int, hops: tuple[int, ...]) -> None:
        scale = SCALES[len(made_up) % 3]
        values = _made("ordinary", rng, p, N) * scale * signs
        other = _made("ordinary", rng, 1, N)[0] * scale
        faults: Faults
        i, how, reader = rng.randrange(m), "sign" if kind == "two" else kind, (rank + 1) % p
        if kind == "memory":
            i, how, at = i + bounds(N, p, reader - hops[0] - 2)[0], "exponent", (reader, hops[0])
            faults = {at: partial(_change, kind=how, m=m, i=i, other=other)}
        else:
            faults = {(rank, hop): partial(_change, kind=how, m=m, i=i, other=other) for hop in hops}
        made_up.append((kind, scale, rank, hops[0], values, faults, kind == "memory"))

    for rank in range(p):
        for hop in range(last + 1):
            for kind in rng.sample(FAULTS, OF_FAULTS[p]):
                add(kind, rank, (hop,))
            if hop < p - 1:
                add("memory", rank, (hop,))
        add("two", rank, (0, last))
    return made_up


def _check_faults(fn: Answer, rng: random.Random) -> int:
    """Return the number of faults; raise Broken unless each one is noted once, by the next rank, at its hop."""
    seen = []
    for p, _ in RUNS:
        drawn = _plans(rng, p)
        run = _in_batches(p, fn, [plan[4:] for plan in drawn], f"with {p} ranks, and a changed message")
        for i, (kind, scale, rank, hop, values, *_) in enumerate(drawn):
            got = [_pairs(left[i][0], f"with {p} ranks") for left in run]
            right: list[Pairs] = [[] for _ in range(p)]
            right[(rank + 1) % p] = [(rank, hop)] + [(rank, 2 * p - 3)] * (kind == "two")
            harmless = np.allclose(run[0][i][1], values.sum(axis=0), rtol=1e-9)  # another copy of x was read
            if kind != "memory" or any(got) or not harmless:
                seen.append(_Fault(kind, scale, p, rank, hop, right, got))
    wrong = [fault for fault in seen if fault.got != fault.right]
    if wrong:
        raise _explained(wrong, seen)
    return len(seen)


MISSED: tuple[tuple[Callable[[_Fault], bool], Reason], ...] = (
    (lambda f: f.kind in ("swap", "moved"), "places: The sum is the same. Which checksum depends on the places?"),
    (
        lambda f: f.kind == "top",
        "finite: Now an element is infinite, NaN, or very large. What does a comparison with such numbers give?",
    ),
    (lambda f: f.kind == "memory", "memory: Which elements are in the checksum of its own chunk? And when is it made?"),
    (lambda f: f.kind == "low", "tolerance: That is more than rounding. How large is rounding in float64?"),
    (lambda f: f.scale <= 1, "scale: Your tolerance is larger than these numbers. What should it depend on?"),
    (lambda f: f.hop == 2 * f.p - 3, "hops: That was the last hop. Do you check what arrives there?"),
    (lambda f: f.gather, "hops: You note faults in reduce-scatter only. Where do the copied sums come from?"),
    (lambda f: not f.gather, "hops: You note faults in all-gather only. What happens to partial sums on their way?"),
    (
        lambda f: True,
        "missed: With what do you compare the checksum of the elements, and which rank computes that?",
    ),
)


def _noted_after(fault: _Fault, how: Callable[[int, int], tuple[int, int]]) -> list[Pairs]:
    """Return what should be noted after this mistake in each pair."""
    return [[how(*pair) for pair in noted] for noted in fault.right]


NOTED: tuple[tuple[Callable[[_Fault], bool], Reason], ...] = (
    (
        lambda f: f.got == _noted_after(f, lambda s, h: ((s + 1) % f.p, h)),
        "source: That is the rank that received it. Which rank sent it?",
    ),
    (
        lambda f: f.got == _noted_after(f, lambda s, h: ((s + 2) % f.p, h)),
        "source: That is the rank to which you send. From which rank do you receive?",
    ),
    (
        lambda f: f.got == _noted_after(f, lambda s, h: (h, s)),
        "returns: Rank and hop are in the wrong order: (source rank, hop).",
    ),
    (lambda f: f.got == _noted_after(f, lambda s, h: (s, h + 1)), "hop: Hops are counted from 0."),
    (
        lambda f: f.got == _noted_after(f, lambda s, h: (s, h % (f.p - 1))),
        "hop: All-gather goes on counting: its first hop is p - 1.",
    ),
    (
        lambda f: any(f.got) and all(h == 2 * f.p - 3 for noted in f.got for _, h in noted),
        "hop: You note the last hop only. At which hop did the fault happen?",
    ),
    (lambda f: f.kind == "two" and f.got == [noted[::-1] for noted in f.right], "order: Which pair should be first?"),
    (
        lambda f: f.kind == "two" and f.got == [noted[:1] for noted in f.right],
        "second: After the first fault, the second is not noted. Does the rank go on as before?",
    ),
    (
        lambda f: f.kind == "memory" and f.got[(f.rank + 2) % f.p][:1] == [((f.rank + 1) % f.p, f.hop + 1)],
        "addition: A wrong number is added to a right one. Do you compare before or after it?",
    ),
    (
        lambda f: all(set(a) <= set(b) for a, b in zip(f.right, f.got, strict=True)),
        "once: The same fault is noted again. Which checksums does a rank send on after it has found one?",
    ),
)


def _explained(wrong: list[_Fault], seen: list[_Fault]) -> Broken:
    """Return the first reason that explains all faults which were not noted, or all that were noted otherwise."""
    missed, noted = [f for f in wrong if f.nowhere], [f for f in wrong if not f.nowhere]
    if len(missed) == len(seen):
        rows, found = MISSED[-1:], missed
    else:
        rows, found = (MISSED, missed) if missed else (NOTED, noted)
    other = "noted: The next rank should note (rank that sent it, hop), once. Which comparison is different here?"
    why = next((why for fits, why in rows if all(map(fits, found))), other)
    failed, _, question = why.partition(": ")
    return Broken(f"{failed}: {capital(found[0].where())}, and {found[0].said()}. {question}")


# -- on the engines ----------------------------------------------------------------------------------------------------


def _call_engines(comm: Comm, fn: Answer) -> list[tuple[object, np.ndarray]]:
    """Call fn without a fault, then with one in the last message of rank 0."""
    values = _made("ordinary", random.Random(15), comm.size, 1001)
    return _call(comm, fn, [(values, {}, False), (values, {(0, 2 * comm.size - 3): partial(flip, i=3, bit=63)}, False)])


def _check_engines(run: Results, where: str) -> None:
    p = len(run)
    values = _made("ordinary", random.Random(15), p, 1001)
    for r, ((clean, x), (out, _)) in enumerate(run):
        if not np.allclose(x, values.sum(axis=0), rtol=1e-12):
            raise Broken(f"sum: {where}, the sum is wrong on rank {r}.")
        right = [(0, 2 * p - 3)] if r == 1 else []
        if _pairs(clean, where) or _pairs(out, where) != right:
            raise Broken(f"noted: {where}, rank {r} notes {clean} without a fault, and {out} in place of {right}.")


EXERCISES = (Exercise("15.5", "one flipped bit", checked_all_reduce, 2, _check_checked_all_reduce),)
