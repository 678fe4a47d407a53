"""Notebook 12: attention whose keys go around a ring, with the same work on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...comm import Results
from ...comm.base import Comm
from ...comm.network import Ring
from ...parallel.context import attention_around_ring, partial_attention
from ...units import counted
from ..checkers import because, engine_facts, in_all_cases, with_ranks
from ..layer import difference, drawn, equal, why_wrong
from ..ranks import number, simulate, type_text
from ..record import Answer, Broken, Exercise, Passed, Rows, Runner
from ..traffic import ROUNDING, check_peers, check_waits, in_barriers, messages_sent

RANKS = (3, 2, 1, 4)
B, H, N, D = 2, 2, 3, 4  # sequences, heads, positions of a chunk, numbers of a head
LARGE = 1e3  # times the queries: exp of such scores is infinite
HOP = 0.125  # s that a hop takes, while a rank computes 2 blocks of 1 s in each step


class _Heard(NamedTuple):
    """A rank's result.

    kind: the type of what it returned; found: {chunk: (out, lse)} as arrays, or None if it is something else.
    read: the chunks that it has read; work: what it computed, in blocks of N x N scores; a causal one is half.
    """

    kind: str
    found: dict[int, tuple[np.ndarray, ...] | None] | None
    read: set[int]
    work: float


@cache
def _sequence_of(p: int, large: bool) -> list[Tensor]:
    """Return q, k and v of all 2p chunks: (b, h, 2p n, d)."""
    q, k, v = (drawn(seed, B, H, 2 * p * N, D) for seed in (41, 42, 43))
    return [q * LARGE if large else q, k, v]


def _call(comm: Comm, fn: Answer, large: bool) -> _Heard:
    """Call fn(comm, read, attend) on one rank; a block takes a virtual second."""
    read, work = set(), [0.0]

    def read_chunk(c: int) -> tuple[Tensor, ...]:
        if not isinstance(c, int) or not 0 <= c < 2 * comm.size:
            raise ValueError(f"read({c!r}): chunks are numbered 0 to {2 * comm.size - 1}")
        read.add(c)
        return tuple(x[:, :, c * N : (c + 1) * N].clone() for x in _sequence_of(comm.size, large))

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        if causal and q.shape[2] != k.shape[2]:
            raise ValueError(f"attend(causal=True) is for a chunk's own keys: {q.shape[2]} queries, {k.shape[2]} keys")
        blocks = q.shape[2] * k.shape[2] / N**2 * (0.5 if causal else 1)
        work[0] += blocks
        comm.compute(blocks)
        return partial_attention(q, k, v, bool(causal))

    left = fn(comm, read_chunk, attend)
    found = {c: _arrays_of(part) for c, part in left.items()} if isinstance(left, dict) else None
    return _Heard(type(left).__name__, found, read, work[0])


def _arrays_of(part: object) -> tuple[np.ndarray, ...] | None:
    """Return (out, lse) as arrays; None if it is no such pair."""
    pair = isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(x, Tensor) for x in part)
    return tuple(x.detach().cpu().numpy().copy() for x in part) if pair else None


def _attention_where(p: int, c: int, sees: Callable[[int], str], large: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of the queries of chunk c. sees(other): "all", "causal" or "" of the keys of each chunk."""
    q, k, v = _sequence_of(p, large)
    scores = q[:, :, c * N : (c + 1) * N] @ k.mT / D**0.5
    earlier = torch.ones(N, N, dtype=torch.bool).tril()
    masks = {"all": torch.ones_like(earlier), "causal": earlier, "": torch.zeros_like(earlier)}
    scores = scores.masked_fill(~torch.cat([masks[sees(other)] for other in range(2 * p)], 1), -torch.inf)
    return (scores.softmax(-1) @ v).numpy(), scores.logsumexp(-1).numpy()


def _right_of(c: int) -> Callable[[int], str]:
    return lambda other: "all" if other < c else "causal" if other == c else ""


def _explain(p: int, c: int, mine: set[int]) -> Rows:
    """Return Rows (out, reason) of known mistakes in chunk c, on the rank that holds `mine`."""
    sees = _right_of(c)
    outs = [_attention_where(p, c, lambda o, at=other: sees(o) if o == at else "")[0] for other in range(c + 1)]
    zigzag = [{r, 2 * p - 1 - r} for r in range(p)]
    pairs = zigzag if mine in zigzag else [{2 * r, 2 * r + 1} for r in range(p)]
    rank_of = {held: r for r, pair in enumerate(pairs) for held in pair}
    r, following = rank_of[c], (rank_of[c] + 1) % p

    def of_ranks(o: int) -> str:
        return "all" if rank_of[o] < r or (rank_of[o] == r and o < c) else "causal" if o == c else ""

    answered = (  # the keys seen, and why
        (
            lambda o: sees(o) and "all",
            "causal: In its own chunk a query attends to later keys, too: use causal=True there.",
        ),
        (lambda o: "causal" if o == c else "all", f"causal: Chunk {c} attends to all chunks, also to later ones."),
        (lambda o: "all", f"causal: Chunk {c} attends to all chunks, also to later ones."),
        (
            lambda o: sees(o) if rank_of[o] == r else "",
            f"ring: Chunk {c} attends only to keys of its own rank: {AROUND}",
        ),
        (of_ranks, "chunks: Ranks were compared, not chunks: each rank has an early chunk and a late one."),
        (
            lambda o: sees(o) if rank_of[o] != following else "",
            f"ring: The keys of rank {following} are missing. They come last: one step too few.",
        ),
    )
    yield from ((_attention_where(p, c, seen)[0], why) for seen, why in answered)
    yield sum(outs), "merge: The parts were added. Each has been divided by the sum of its weights: undo that first."
    for other, part in enumerate(outs):
        yield part, f"merge: Only the part of chunk {other} is in it: each part has replaced the parts before."
    for other in set(range(2 * p)) - {c}:
        swapped = _attention_where(p, other, _right_of(other))[0]
        yield swapped, f"chunks: That is the result of chunk {other}: the chunks have changed places."


AROUND = "k and v of all other ranks have to come around."


def _judge(run: Results, where: str, large: bool) -> None:
    """Raise Broken unless each chunk is on one rank, right, and the ranks have read and computed no more than that."""
    p = len(run)
    computed_by: dict[int, int] = {}
    for r, answered in enumerate(run):
        if answered.found is None:
            raise Broken(
                f"returns: {where} rank {r} returned {type_text(answered.kind)}: return {{chunk: (out, lse)}}."
            )
        for c, part in answered.found.items():
            if part is None:
                raise Broken(f"returns: {where} rank {r} has no pair of tensors for chunk {c}: (out, lse) is needed.")
            if c in computed_by:
                raise Broken(f"""chunks: {where} ranks {computed_by[c]} and {r} have both computed chunk {c}: each chunk
                    belongs to one rank.""")
            computed_by[c] = r
    missing = sorted(set(range(2 * p)) - set(computed_by))
    if missing or len(computed_by) > 2 * p:
        what = (
            f"no rank has computed chunk {missing[0]}" if missing else f"your keys are {sorted(computed_by, key=str)}"
        )
        raise Broken(f"chunks: {where} {what}: there are {2 * p}, two for each rank.")
    for c, r in sorted(computed_by.items(), key=lambda held: (held[0] != p + 1, held[0])):  # one whose mistakes differ
        _check_chunk(run[r].found[c], p, c, r, large, where, set(run[r].found))
    for r, answered in enumerate(run):
        if others := sorted(answered.read - set(answered.found)):
            raise Broken(f"""memory: {where} all numbers are right, but rank {r} has read chunk {others[0]}, which
                belongs to rank {computed_by[others[0]]}: a rank reads its own two chunks, and k and v of others
                come around.""")
    _check_work(run, where)


def _check_chunk(part: tuple[np.ndarray, ...], p: int, c: int, r: int, large: bool, where: str, mine: set[int]) -> None:
    right, at = _attention_where(p, c, _right_of(c), large), f"of chunk {c} on rank {r}"
    for name, got, wanted in zip(("out", "lse"), part, right, strict=True):
        if got.shape != wanted.shape:
            raise Broken(f"shape: {where} {name} {at} has shape {got.shape}, and should have {wanted.shape}.")
        if large and not np.isfinite(got).all():
            wrong = number(got[~np.isfinite(got)][0])
            raise Broken(f"""overflow: {where} and scores of about {LARGE:,.0f}, {name} {at} holds {wrong}: exp of such
                a number is infinite. Subtract before you take exp: exp(lse - the lse of both) is at most 1.""")
        if not equal(got, wanted):
            rows = _explain(p, c, mine) if name == "out" else ()
            text = f"{where} chunk {c} on rank {r} is wrong: {difference(name, got, wanted)}."
            raise because(why_wrong(got, wanted, rows, "merge" if name == "lse" else "value"), text)


def _check_work(run: Results, where: str) -> None:
    """Raise Broken unless every rank computes p blocks of 2 x 2 chunks, half of them hidden by causality: 2p."""
    p, done = len(run), [answered.work for answered in run]
    low, high = min(range(p), key=lambda r: done[r]), max(range(p), key=lambda r: done[r])
    enough = 2 * p  # of the (2p)^2 pairs of chunks half, shared by p
    if sum(done) > enough * p:
        raise Broken(f"""work: {where} all numbers are right, but the ranks compute {number(sum(done))} blocks, and
            {enough * p} are enough: do not compute blocks that are masked as a whole.""")
    if done[high] > enough:
        held = sorted(run[high].found)
        raise Broken(f"""work: {where} all numbers are right, but rank {high} computes {number(done[high])} blocks and
            rank {low} {number(done[low])}. All wait for the slowest: {sum(done) / p / done[high]:.0%} of the time is
            used. Rank {high} holds chunks {" and ".join(map(str, held))}: which pairs make the work equal?""")


def _check_traffic(run: Results) -> str:
    """Raise Broken if a rank sends more than its k and v in each hop, or to others. Returns a fact."""
    p, each = len(run), 2 * B * H * 2 * N * D * 8  # k and v of two chunks
    sent = [sum(e.nbytes for e in run.events if e.op == "send" and e.rank == r) for r in range(p)]
    check_peers(run.events, p)
    if waits := in_barriers(run.events):
        raise Broken(f"messages: The result is right, but {waits}")
    most = (p - 1) * each
    worst = max(range(p), key=lambda r: sent[r])
    if sent[worst] > most * (1 + ROUNDING):
        again = sent[worst] == p * each and messages_sent(run.events, p)[worst] % p == 0
        why = "one hop too many, all get their own keys back" if again else "queries stay, only keys and values travel"
        raise Broken(f"""bytes: The result is right, but with {p} ranks rank {worst} sent {sent[worst]:,} bytes; {p - 1}
            hops of its k and v are {most:,}: {why}.""")
    scores = B * H * (2 * p * N) ** 2 * 8
    return f"bytes: {sent[0]:,} per rank with {p} ranks, {p - 1} hops of {each:,}; the scores would be {scores:,}"


def _time_of(fn: Answer, p: int) -> str:
    """Return the fact that tells how many hops overlap with blocks, if a hop takes a fraction of a step's work."""
    run = simulate(p, _call, fn, False, network=Ring(alpha=HOP, beta=0.0), evidence=False)
    waited = run.seconds - max(answered.work for answered in run)
    if waited < HOP / 2:
        return f"time: {counted(p - 1, 'hop')} under way while blocks are computed, and no rank waits"
    return f"""time: of {number(run.seconds)} s ranks wait {number(waited)} s for messages, if one takes {HOP} s and a
        block 1 s: what starts before the blocks of a step is free"""


def _check_attention_around_ring(fn: Answer, runner: Runner = None) -> Passed:
    def judge_all(run: Results, where: str, large: bool) -> None:
        _judge(run, where, large)
        check_waits(run.events, len(run))
        _check_traffic(run)

    cases = [(p, large) for large in (False, True) for p in RANKS]
    run = in_all_cases(fn, _call, cases, with_ranks, judge_all)
    p = len(run)
    facts = [
        "attention to all earlier positions, to 1e-10, on 1, 2, 3 and 4 simulated ranks, also if exp(scores) overflow",
        f"""work: {number(run[0].work)} blocks on each of {p} ranks; with contiguous chunks the last rank would compute
            {number(4 * p - 2)}, and {p / (2 * p - 1):.0%} of the time would be used""",
        _check_traffic(run),
        _time_of(fn, p),
    ]
    return Passed(*facts, *engine_facts(runner, _judge, _call, fn, False), run=run)


EXERCISES = (
    Exercise(
        "12.3",
        "ring attention: which chunks a rank has, and how parts are merged",
        attention_around_ring,
        3,
        _check_attention_around_ring,
    ),
)
