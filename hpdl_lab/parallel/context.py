"""Context parallel: one long sequence, cut by positions over ranks; attention goes around a ring of ranks.

    positions 0 1 2 3 4 5 6 7, two ranks        contiguous: 0 1 2 3 | 4 5 6 7        zigzag: 0 1 6 7 | 2 3 4 5

Everything else in a transformer works on each position by itself. Attention needs the keys and values of all of them:

    ring     keys and values go around, p - 1 hops; a rank merges what its queries get from each part
    Ulysses  all-to-all: from some positions of all heads to all positions of some heads, and back

A causal query sees only what lies before it, so with contiguous parts the last rank works in every step, and the first
one in its own: P/(2P-1) of the time is used. With zigzag rank r holds chunks r and 2P-1-r, an early and a late one, and
all ranks compute as much.

What a rank holds of the parameters is whole, as in data parallel: the loss is the mean over all positions, so EVERY
gradient is averaged over the ranks of this axis, too (the mean over dp x cp ranks), and no other gradient is treated
otherwise. On simulated ranks backward waits for others inside autograd: sim.run(..., threads=True).

Ref: Liu, Zaharia, Abbeel 2023 (ring attention), arXiv:2310.01889; Brandon et al. 2023 (striped), arXiv:2311.09431;
Jacobs et al. 2023 (DeepSpeed-Ulysses), arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..comm.base import Comm, Work
from ..models.attention import Attend, Causal, Full, attentions_of, require_groups
from .tensor.linear import conjugate, require_divisible

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class RingContext(FunctionCtx):
        """The state that forward of `Ring` leaves to its backward."""

        comm: Comm
        causal: bool
        scale: float | None
        holds: Callable[[int], tuple[int, ...]]
        saved_tensors: tuple[Tensor, ...]


Part: TypeAlias = tuple[Tensor, Tensor]  # out (b, h, s, d_v), logarithm of what its weights were divided by (b, h, s)
HOWS = ("ring", "zigzag", "ulysses")


# -- which positions, and which work -----------------------------------------------------------------------------------


def chunks_of(rank: int, ranks: int, zigzag: bool) -> tuple[int, ...]:
    """Return the chunks that a rank holds: of `ranks` chunks its own; zigzag: of 2 `ranks` chunks one from each end."""
    return (rank, 2 * ranks - 1 - rank) if zigzag else (rank,)


def positions_of(rank: int, ranks: int, s: int, zigzag: bool) -> Tensor:
    """Return the s positions of a rank in the whole sequence: (s,) int64."""
    mine = chunks_of(rank, ranks, zigzag)
    n = s // len(mine)
    return torch.cat([torch.arange(c * n, (c + 1) * n) for c in mine])


def sequence_part(comm: Comm, x: Tensor, dim: int = 1, zigzag: bool = False) -> Tensor:
    """Return this rank's positions of `x`, which is the same on every rank: (..., s, ...) -> (..., s/p, ...).

    Raises:  ValueError unless the ranks (zigzag: twice as many) divide s.
    """
    s, chunks = x.shape[dim], comm.size * (1 + zigzag)
    if s % chunks:
        raise ValueError(f"a sequence of {s} positions cannot be cut into {chunks} chunks for {comm.size} ranks")
    return x.index_select(dim, positions_of(comm.rank, comm.size, s // comm.size, zigzag).to(x.device))


def work(rank: int, ranks: int, zigzag: bool) -> list[float]:
    """Return what causal attention costs a rank in each step of the ring, in blocks of s/p queries by s/p keys.

    A block on the diagonal is half a block. work(0, 4, False) -> [0.5, 0, 0, 0]; zigzag: [0.5, 0.5, 0.5, 0.5].
    """
    mine, each = chunks_of(rank, ranks, zigzag), (1 + zigzag) ** -2

    def of(c: int, other: int) -> float:
        return each if other < c else each / 2 if other == c else 0

    sources = [chunks_of((rank - step) % ranks, ranks, zigzag) for step in range(ranks)]
    return [sum(of(c, other) for c in mine for other in theirs) for theirs in sources]


def utilization(ranks: int, zigzag: bool) -> float:
    """Return the share of time that a rank computes, if each waits for the slowest: P/(2P-1) contiguous, 1 zigzag."""
    steps = [work(rank, ranks, zigzag) for rank in range(ranks)]
    return sum(map(sum, steps)) / ranks / sum(map(max, zip(*steps, strict=True)))


# -- attention to some of the keys -------------------------------------------------------------------------------------


def _scores_of(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    """Map (b, h, s, d), (b, h_kv, t, d) to (b, h_kv, h/h_kv, s, t); causal: keys have the queries' positions, t = s."""
    grouped = q.unflatten(1, (k.shape[1], -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = grouped @ k.unsqueeze(2).mT
    if not causal:
        return scores
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)


def partial_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> Part:
    """Compute attention to some of the keys, and what it takes to merge it with attention to others.

    Args:    q: (b, h, s, d); k: (b, h_kv, t, d), v: (b, h_kv, t, d_v), h_kv divides h; causal: query i sees only
             keys up to i, and t = s; scale: of the scores, 1/sqrt(d) by default.
    Returns: out (b, h, s, d_v); lse (b, h, s), the log of the sum of exp(scores), by which its weights were divided.
    """
    scores = _scores_of(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v.unsqueeze(2)  # (b, h_kv, g, s, t) @ (b, h_kv, 1, t, d_v)
    return out.flatten(1, 2), lse.flatten(1, 2)


# -- the ring ----------------------------------------------------------------------------------------------------------


def attention_around_ring(
    comm: Comm,
    read: Callable[[int], Sequence[Tensor]],
    attend: Callable[[Tensor, Tensor, Tensor, bool], Part],
    causal: bool = True,
    holds: Callable[[int], tuple[int, ...]] | None = None,
) -> dict[int, Part]:
    """Compute attention of one sequence on p ranks; keys and values go around a ring.

        rank r - 1           rank r                rank r + 1
        k, v of r - 1  -->   k, v of r      -->    k, v of r + 1
                             attends, merges

    There are p steps. Between two steps there is a hop: every rank sends the k and v
    that it has to the next rank. Start a hop, compute the step, then wait for the hop.

    The sequence has 2p chunks; each rank has two of them. A chunk of queries attends
    causally to its own chunk of keys, fully to each earlier chunk, and to no later
    chunk. Choose the chunks so that all ranks compute equally many blocks. Merge each
    result of `attend` at once (online softmax). No exp may overflow, however large the
    scores are.

    pass_on(comm, x) -> (arrives, works) starts a hop: it sends x to rank r + 1. `works`
    is a list of two Works, one for sending and one for receiving. Call wait() of both
    Works; then `arrives` holds the x of rank r - 1.

    Args:    read: read(c) -> (q, k, v) of chunk c, each (b, h, n, d). Call it only for
             the two chunks of this rank.
             attend: attend(q, k, v, causal) -> (out, lse), attention to these keys.
             out: (b, h, n, d); lse: (b, h, n), the logarithm of the sum of exp(scores).
             Do not call attend for a block that is masked as a whole.
             causal, holds: ignore these two; the check never passes them. Only the
             library passes causal=False, for attention without a mask, and holds, which
             maps a rank to its chunks.
    Returns: {c: (out, lse)} for each chunk c of this rank, over all keys that c attends
             to.
    Steps: p - 1 hops.   Bytes per rank: (p - 1) times the bytes of its k and v.
    Ref: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889; Milakov, Gimelshein 2018,
         arXiv:1805.02867.
    """
    ### BEGIN SOLUTION
    p, none = comm.size, (torch.zeros(()), torch.tensor(-torch.inf))
    holds = holds or (lambda rank: (rank, 2 * p - 1 - rank))
    mine = {c: read(c) for c in holds(comm.rank)}
    merged = dict.fromkeys(mine, none)
    kv = torch.stack([torch.cat([k, v], -1) for _, k, v in mine.values()])  # (chunks, b, h, n, d + d_v)
    for step in range(p):
        following, works = pass_on(comm, kv) if step < p - 1 else (kv, [])
        for c, (q, k, v) in mine.items():
            for other, theirs in zip(holds((comm.rank - step) % p), kv, strict=True):
                if other <= c or not causal:
                    keys, values = theirs.split([k.shape[-1], v.shape[-1]], -1)
                    more, weight = attend(q, keys, values, causal and other == c)
                    out, lse = merged[c]
                    both = torch.logaddexp(lse, weight)  # no exponent below is positive
                    out = out * (lse - both).exp().unsqueeze(-1) + more * (weight - both).exp().unsqueeze(-1)
                    merged[c] = out, both
        for work in works:
            work.wait()
        kv = following
    return merged

    ### END SOLUTION


def pass_on(comm: Comm, x: Tensor) -> tuple[Tensor, list[Work]]:
    """Start sending `x` to the next rank, and receiving what the one before sends: (what arrives, what to wait for)."""
    arrives = torch.empty_like(x)
    return arrives, [comm.irecv(arrives, (comm.rank - 1) % comm.size), comm.isend(x, (comm.rank + 1) % comm.size)]


class Ring(torch.autograd.Function):
    """ring_attention for autograd: backward is a second ring, in which the gradients of k and v travel with them."""

    @staticmethod
    def forward(
        ctx: RingContext, comm: Comm, q: Tensor, k: Tensor, v: Tensor, causal: bool, zigzag: bool, scale: float | None
    ) -> Tensor:
        def holds(rank: int) -> tuple[int, ...]:
            return chunks_of(rank, comm.size, zigzag)

        mine = holds(comm.rank)
        cut = dict(zip(mine, zip(*(x.chunk(len(mine), 2) for x in (q, k, v)), strict=True), strict=True))
        done = attention_around_ring(comm, cut.__getitem__, partial(partial_attention, scale=scale), causal, holds)
        lse = torch.cat([done[c][1] for c in mine], 2)
        # laid out as (b, s, h, d), so that the next layer needs, and autograd keeps, no copy of it
        out = torch.cat([done[c][0].transpose(1, 2) for c in mine], 1).transpose(1, 2)
        ctx.comm, ctx.causal, ctx.scale, ctx.holds = comm, causal, scale, holds
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: RingContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        q, k, v, out, lse = ctx.saved_tensors
        comm, p, mine = ctx.comm, ctx.comm.size, ctx.holds(ctx.comm.rank)
        queries = (q, grad, lse, (grad * out).sum(-1))  # the last: what softmax takes from the gradient of each score
        rows = list(zip(*(x.chunk(len(mine), 2) for x in queries), strict=True))
        dq, widths = [torch.zeros_like(row[0]) for row in rows], [k.shape[-1], v.shape[-1]]
        kv = torch.stack(torch.cat([k, v], -1).chunk(len(mine), 2))  # (chunks, b, h_kv, n, d + d_v)
        sums = torch.zeros_like(kv)  # what the ranks before contribute to the keys and values that come next
        own, on_the_way = sums, []
        for step in range(p):
            following, works = pass_on(comm, kv) if step < p - 1 else (kv, [])
            dkv = torch.zeros_like(kv)  # what this rank's queries contribute to these keys and values
            for i, c in enumerate(mine):
                for j, other in enumerate(ctx.holds((comm.rank - step) % p)):
                    if other <= c or not ctx.causal:
                        keys, values = kv[j].split(widths, -1)
                        more, theirs = _attention_grads(rows[i], keys, values, ctx.causal and other == c, ctx.scale)
                        dq[i] += more
                        dkv[j] += theirs
            _wait_for(works + on_the_way)
            kv = following
            if step == 0:
                own = dkv  # belongs here
            else:
                sums, on_the_way = pass_on(comm, dkv.add_(sums))  # one hop after k and v, and at last to their owner
        _wait_for(on_the_way)
        dk, dv = torch.cat((own + sums).unbind(), 2).split(widths, -1)
        return None, torch.cat(dq, 2), dk, dv, None, None, None


def _wait_for(works: list[Work]) -> None:
    for work in works:
        work.wait()


def _attention_grads(
    queries: tuple[Tensor, ...], k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return what some keys contribute to the gradient of q (b, h, s, d), and the gradient of k and v, side by side.

    queries: q, and of the output for all keys: its gradient, its lse, and the sums of gradient times output, (b, h, s).
    """
    q, grad, lse, offset = (x.unflatten(1, (k.shape[1], -1)) for x in queries)
    weights = (_scores_of(queries[0], k, causal, scale) - lse.unsqueeze(-1)).exp()  # (b, h_kv, g, s, t)
    dscores = weights * (grad @ v.unsqueeze(2).mT - offset.unsqueeze(-1))
    dscores = dscores * (q.shape[-1] ** -0.5 if scale is None else scale)
    dk, dv = (dscores.mT @ q).sum(2), (weights.mT @ grad).sum(2)  # over the heads that share a key
    return (dscores @ k.unsqueeze(2)).flatten(1, 2), torch.cat([dk, dv], -1)


def ring_attention(
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    zigzag: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention between all positions; every rank holds some of them.

    Args:    q: (b, h, s/p, d); k: (b, h_kv, s/p, d), v: (b, h_kv, s/p, d_v), h_kv divides h: this rank's
             positions, as `sequence_part` gives them. zigzag: how they were cut. scale: 1/sqrt(d) by default.
    Returns: (b, h, s/p, d_v), this rank's positions. After backward the gradients of q, k and v are complete.
    Raises:  ValueError, before the first message, if shapes do not fit.
    Steps: p - 1 messages forward, 2(p - 1) backward.
    Bytes per rank: with n = b h_kv (s/p) (d + d_v) itemsize, (p - 1) n forward, 2(p - 1) n backward.
    Ref: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889.
    """
    _require_heads(q, k, v)
    if zigzag and q.shape[2] % 2:
        raise ValueError(f"zigzag: {q.shape[2]} positions on a rank are not two chunks of the same length")
    return Ring.apply(comm, q, k, v, causal, zigzag, scale)


def _require_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k, v are (b, h, s, d), (b, h_kv, s, d), (b, h_kv, s, d_v), and h_kv divides h."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fit = all(len(shape) == 4 for shape in shapes) and shapes[1][:3] == shapes[2][:3]
    if not fit or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"q, k, v of shapes {shapes}: (b, h, s, d), (b, h_kv, s, d), (b, h_kv, s, d_v) are needed")
    require_groups(q.shape[1], k.shape[1])


# -- Ulysses -----------------------------------------------------------------------------------------------------------


def to_heads(comm: Comm, x: Tensor) -> Tensor:
    """Bring x from some positions of all heads to all positions of some: (b, h, s/p, d) -> (b, h/p, s, d).

    Parts are contiguous. A function of plain tensors, whose transposed and inverse is to_positions.
    Bytes per rank: (p - 1)/p of the bytes of x.
    """
    if comm.size == 1:
        return x.clone()
    rows = x.unflatten(1, (comm.size, -1)).movedim(1, 0)  # (p, b, h/p, s/p, d): heads of rank r
    return comm.all_to_all(rows.contiguous()).movedim(0, 2).flatten(2, 3)  # positions of rank r


def to_positions(comm: Comm, x: Tensor) -> Tensor:
    """Bring x from all positions of some heads to some positions of all: (b, h/p, s, d) -> (b, h, s/p, d)."""
    if comm.size == 1:
        return x.clone()
    rows = x.unflatten(2, (comm.size, -1)).movedim(2, 0)  # (p, b, h/p, s/p, d): positions of rank r
    return comm.all_to_all(rows.contiguous()).movedim(0, 1).flatten(1, 2)  # heads of rank r


def _ulysses_attention(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, attend: Attend, scale: float | None = None
) -> Tensor:
    """Compute attention between all positions, head by head: every rank holds some positions, and gets some heads.

    Args:    q, k, v: as of ring_attention, contiguous parts; attend: what queries see, Causal() or Full().
    Returns: (b, h, s/p, d_v), this rank's positions. After backward the gradients of q, k and v are complete.
    Raises:  ValueError, before the first message, if the ranks do not divide the heads of q and of k.
    Steps: 4 all_to_all forward, 4 backward.
    Bytes per rank: (p - 1)/p b (s/p) (h d + h_kv (d + d_v) + h d_v) itemsize, each way.
    Ref: Jacobs et al. 2023, arXiv:2309.14509.
    """
    _require_heads(q, k, v)
    for x, what in ((q, "heads"), (k, "heads of keys")):
        require_divisible(comm, x.shape[1], f"Ulysses gives every rank equally many {what}")
    there, back = partial(to_heads, comm), partial(to_positions, comm)
    return conjugate(attend(*(conjugate(x, there, back) for x in (q, k, v)), scale=scale), back, there)


# -- what queries see, for models --------------------------------------------------------------------------------------


class RingAttention(Attend):
    """Attention around a ring of ranks, each with the positions of `sequence_part`."""

    def __init__(self, comm: Comm, zigzag: bool = True, causal: bool = True) -> None:
        self.comm, self.zigzag, self.causal, self.parts = comm, zigzag, causal, comm.size

    def positions(self, s: int, device: torch.device | None = None) -> Tensor:
        return positions_of(self.comm.rank, self.comm.size, s, self.zigzag).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return ring_attention(self.comm, q, k, v, self.causal, self.zigzag, scale)


class Ulysses(Attend):
    """Attention by all-to-all, of contiguous parts of a sequence."""

    def __init__(self, comm: Comm, causal: bool = True) -> None:
        self.comm, self.attend, self.parts = comm, Causal() if causal else Full(), comm.size

    def positions(self, s: int, device: torch.device | None = None) -> Tensor:
        return positions_of(self.comm.rank, self.comm.size, s, zigzag=False).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return _ulysses_attention(self.comm, q, k, v, self.attend, scale)


def context_parallel(comm: Comm, model: nn.Module, how: str = "zigzag") -> nn.Module:
    """Let `model`, a gpt, llama or deepseek, read this rank's positions of a sequence; in place, no messages.

        tokens, targets = (sequence_part(comm, t, zigzag=True) for t in (tokens, targets))
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())       the mean over this rank's positions
        loss.backward()                                                            then average all gradients over ranks

    Args:    model: with the same parameters on every rank; how: "ring" (contiguous), "zigzag" or "ulysses".
    Returns: the model: tokens (b, s/p) -> logits (b, s/p, vocabulary).
    Raises:  ValueError for another `how`, and for a model whose attention is not causal.
    """
    if how not in HOWS:
        raise ValueError(f"how={how!r}: one of {', '.join(map(repr, HOWS))} is needed")
    attentions = attentions_of(model)
    if not attentions or not all(isinstance(attention.attend, Causal) for attention in attentions):
        raise ValueError(f"context_parallel cuts a sequence of tokens: a {type(model).__name__} reads none")
    for attention in attentions:
        attention.attend = Ulysses(comm) if how == "ulysses" else RingAttention(comm, how == "zigzag")
    return model
