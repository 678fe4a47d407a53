"""Notebook 12: keys that several query heads share, and a cache of latents from which keys and values are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ...models.attention import grouped_query_attention
from ...models.deepseek import SIZES, latent_attention
from ...models.llama import SIZES as LLAMA
from ...units import counted
from ..checkers import because
from ..layer import difference, drawn, equal, why_wrong
from ..ranks import alone, capital, unlike
from ..record import Answer, Broken, Exercise, Passed

if TYPE_CHECKING:
    from torch._ops import OpOverload


class _Made(TorchDispatchMode):
    """While it is entered, notes the largest tensor that is made: `shape` of it, `most` numbers. A view is none."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        given = {_storage_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _storage_of(x) not in given and x.numel() > self.most:
                self.most, self.shape = x.numel(), tuple(x.shape)
        return out


def _storage_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Seen(NamedTuple):
    """The returned value, its gradients by name, the largest tensor that the answer made, the operations it took, and
    the names of inputs into which it has written."""

    y: Any
    grads: dict[str, np.ndarray | None]
    most: int
    shape: tuple[int, ...]
    flops: int
    changed: list[str]


def _observe(fn: Answer, inputs: dict[str, Tensor], given: tuple[object, ...]) -> _Seen:
    """Call fn(*inputs, *given), without gradients as a decoder does, and once more to go back through it."""
    mine = {name: x.clone() for name, x in inputs.items()}
    with torch.no_grad(), _Made() as made, FlopCounterMode(display=False) as counter:
        y = fn(*mine.values(), *given)
    changed = [name for name, x in mine.items() if not torch.equal(x, inputs[name])]
    grads: dict[str, np.ndarray | None] = {}
    if isinstance(y, Tensor) and not changed:
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        again = fn(*leaves.values(), *given)
        if again.requires_grad:
            again.square().sum().backward()
        grads = {name: None if x.grad is None else x.grad.numpy() for name, x in leaves.items()}
    return _Seen(y, grads, made.most, made.shape, counter.get_total_flops(), changed)


def _check_result(seen: _Seen, right: Tensor, rows: Iterator[tuple[Tensor, str]], where: str, promise: str) -> None:
    """Raise Broken unless `right` was returned, and nothing was written into what belongs to the caller."""
    if wrong := unlike(seen.y, right):
        raise Broken(f"returns: {where} your function returned {wrong}: return {promise}, {tuple(right.shape)}.")
    if seen.changed:
        raise Broken(f"input: {where} your function has written into {seen.changed[0]}, which belongs to its caller.")
    got, wanted = seen.y.numpy(), right.numpy()
    if not equal(got, wanted):
        why = why_wrong(got, wanted, [(value.numpy(), reason) for value, reason in rows], "value")
        raise because(why, f"{where}, {difference('y', got, wanted)}.")


def _check_grads(
    seen: _Seen, reference: Callable[..., Tensor], inputs: dict[str, Tensor], given: tuple[object, ...], where: str
) -> None:
    """Raise Broken if a gradient differs from the reference."""
    for name, right in _observe(reference, inputs, given).grads.items():
        grad = seen.grads[name]
        if right is not None and not equal(grad, right):
            says = "there is none" if grad is None else difference(name, grad, right)
            raise Broken(f"""gradient: {where} y is right, but the gradient of {name} is wrong: {says}. Autograd does
                not see what you compute from {name} (detach, .data, a new tensor).""")


# -- 12.1 --------------------------------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    """b sequences, h query heads, h_kv key heads, s queries of t positions, keys of d numbers, values of d_v."""

    b: int
    h: int
    h_kv: int
    s: int
    t: int
    d: int
    d_v: int
    scale: float | None = None

    def inputs(self) -> dict[str, Tensor]:
        q = drawn(1, self.b, self.h, self.s, self.d)
        k, v = (drawn(i, self.b, self.h_kv, self.t, n) for i, n in ((2, self.d), (3, self.d_v)))
        return {"q": q, "k": k, "v": v}

    @property
    def words(self) -> str:
        heads = f"{counted(self.h, 'query head')} and {counted(self.h_kv, 'key head')}"
        return f"with {heads}, the last {self.s} of {counted(self.t, 'position')}"


GROUPS = (
    _Groups(2, 8, 2, 1, 40, 16, 16),  # a token of a decoder
    _Groups(1, 6, 3, 4, 9, 8, 5),  # some more of a prompt
    _Groups(2, 4, 2, 6, 6, 8, 8, 0.2),  # a whole one, as in training
    _Groups(1, 4, 1, 2, 7, 4, 4),
    _Groups(1, 3, 3, 5, 5, 4, 4),
)


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor, dim: int = -1) -> Tensor:
    """Return attention with keys and values for each head; hidden: (s, t), what a query does not see."""
    return ((q @ k.mT) * scale).masked_fill(hidden, -torch.inf).softmax(dim) @ v


def _hidden_of(s: int, t: int, shift: int) -> Tensor:
    """Return a mask by which query i sees the positions up to i + shift."""
    return torch.ones(s, t, dtype=torch.bool).triu(shift + 1)


def _wrong_groups(case: _Groups) -> Iterator[tuple[Tensor, str]]:
    """Yield (what may be returned, what is wrong with it)."""
    q, k, v = case.inputs().values()
    g, s, t = case.h // case.h_kv, case.s, case.t
    scale = case.d**-0.5 if case.scale is None else case.scale
    keys, values = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    seen = _hidden_of(s, t, t - s)
    turns = f"""groups: Key heads were given to query heads in turns. Heads of a group follow each other: the first {g}
        query heads use key head 0."""
    yield _attended(q, k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1), scale, seen), turns
    first = "groups: All query heads use key head 0: each group has its own key head."
    yield _attended(q, k[:, :1], v[:, :1], scale, seen), first
    everything = _hidden_of(s, t, t)
    yield _attended(q, keys, values, scale, everything), "causal: Queries attend to later positions."
    top = f"causal: The queries belong to the last {s} of {t} positions: query 0 is at position {t - s}, not 0."
    yield _attended(q, keys, values, scale, _hidden_of(s, t, 0)), top
    yield (
        _attended(q, keys, values, scale, _hidden_of(s, t, t - s - 1)),
        "causal: A query also attends to its own position.",
    )
    yield (
        _attended(q, keys, values, scale, _hidden_of(s, t, t - s + 1)),
        "causal: A query attends to one position too many.",
    )
    plain = "scale: Products q k are divided by the root of d, unless a scale is given."
    yield _attended(q, keys, values, 1.0, seen), plain
    yield _attended(q, keys, values, 1 / case.d, seen), plain
    yield (
        _attended(q, keys, values, case.d**-0.5, seen),
        "scale: A scale was given, and it is not the one that was used.",
    )
    over = (
        "softmax: The weights of a query add up to 1 over its own and earlier positions: softmax(-1), after the mask."
    )
    yield _attended(q, keys, values, scale, seen, -2), over
    yield (q @ keys.mT * scale).softmax(-1).masked_fill(seen, 0) @ values, over


def _check_grouped_query_attention(fn: Answer) -> Passed:
    for case in GROUPS:
        inputs, given, where = case.inputs(), () if case.scale is None else (case.scale,), capital(case.words)
        seen = alone(_observe, fn, inputs, given, where=case.words)
        right = grouped_query_attention(**inputs, scale=case.scale)
        _check_result(seen, right, _wrong_groups(case), where, "the output of each query head")
        keys, scores = inputs["k"].numel(), case.b * case.h * case.s * case.t
        most = max(scores, *(x.numel() for x in inputs.values()))
        if seen.most > most:
            raise Broken(f"""memory: {where} all numbers are right, but your function makes a tensor of {seen.most:,}
                numbers, {seen.shape}. All keys have {keys:,} numbers, and the scores {scores:,}: keys or values are
                repeated for each query head. A product of tensors with different leading dimensions does so, too.""")
        _check_grads(seen, grouped_query_attention, inputs, given, where)
    case, paper = GROUPS[0], LLAMA["paper"]
    seen = _observe(fn, case.inputs(), ())
    each = 2 * paper.width // paper.heads
    return Passed(
        f"""the same as with keys repeated for each query head, to 1e-10, in {len(GROUPS)} shapes; gradients, too""",
        f"""memory: with {case.h} query heads and {case.h_kv} key heads the largest tensor made has {seen.most:,}
        numbers; repeated, the keys alone would have {case.b * case.h * case.t * case.d:,}""",
        f"""Llama 3 8B keeps {paper.kv_heads * each:,} numbers per token and layer for {paper.kv_heads} key heads,
        and would keep {paper.heads * each:,} for {paper.heads}""",
    )


# -- 12.4 --------------------------------------------------------------------------------------------------------------


class _Latents(NamedTuple):
    """b sequences, h heads, s queries of t positions; n and r numbers of a query, latents of c, values of m."""

    b: int
    h: int
    s: int
    t: int
    n: int
    r: int
    c: int
    m: int

    def inputs(self) -> dict[str, Tensor]:
        b, h, s, t, n, r, c, m = self
        shapes = {
            "q": (b, h, s, n),
            "q_rope": (b, h, s, r),
            "cache": (b, t, c + r),
            "key_up": (h, n, c),
            "value_up": (h, m, c),
        }
        return {name: drawn(i, *shape) / shape[-1] ** 0.25 for i, (name, shape) in enumerate(shapes.items())}

    @property
    def scale(self) -> float:
        return (self.n + self.r) ** -0.5

    @property
    def words(self) -> str:
        return f"with {counted(self.h, 'head')}, the last {self.s} of {counted(self.t, 'position')}"


LATENTS = (_Latents(2, 8, 1, 40, 16, 4, 12, 10), _Latents(1, 3, 4, 9, 6, 4, 8, 5), _Latents(2, 4, 5, 5, 5, 2, 6, 4))


def _naive(case: _Latents, scale: float | None = None, rotated: bool = True, shift: int | None = None) -> Tensor:
    """Return latent attention with keys and values of each head. shift: see hidden_of."""
    q, q_rope, cache, key_up, value_up = case.inputs().values()
    latent, part = cache.unsqueeze(1).split([case.c, case.r], -1)  # (b, 1, t, c), (b, 1, t, r)
    k, v = latent @ key_up.mT, latent @ value_up.mT  # (b, h, t, n), (b, h, t, m)
    if rotated:
        q, k = torch.cat([q, q_rope], -1), torch.cat([k, part.expand(-1, case.h, -1, -1)], -1)
    hidden = _hidden_of(case.s, case.t, case.t - case.s if shift is None else shift)
    return _attended(q, k, v, case.scale if scale is None else scale, hidden)


def _wrong_latents(case: _Latents) -> Iterator[tuple[Tensor, str]]:
    """Yield (what may be returned, what is wrong with it)."""
    own = f"""scale: That is the root of {case.c + case.r}, the length of the absorbed query. But a key has {case.n} +
        {case.r} numbers: pass the scale that is given."""
    yield _naive(case, (case.c + case.r) ** -0.5), own
    yield _naive(case, 1.0), "scale: The products are not scaled: attend takes the scale that is given."
    yield (
        _naive(case, rotated=False),
        "rotated: The rotated part is missing: q_rope, and the end of cache.",
    )
    yield _naive(case, shift=case.t), "causal: Queries attend to later positions."
    yield _naive(case, shift=0), f"causal: Query 0 is at position {case.t - case.s} of {case.t}."


def _work_of(case: _Latents) -> int:
    """Return the operations of the absorbed form: queries and results through key_up and value_up, scores, latents."""
    return 2 * case.b * case.h * case.s * (case.c * (case.n + case.m) + case.t * (2 * case.c + case.r))


def _check_latent_attention(fn: Answer) -> Passed:
    for case in LATENTS:
        inputs, given, where = case.inputs(), (case.scale, grouped_query_attention), capital(case.words)
        seen = alone(_observe, fn, inputs, given, where=case.words)
        _check_result(seen, _naive(case), _wrong_latents(case), where, "the output of each head")
        scores = case.b * case.h * case.s * case.t
        asked = case.b * case.h * case.s * (case.c + case.r)
        weights = case.b * max(inputs[name].numel() for name in ("key_up", "value_up"))  # as matmul expands them
        most = max(scores, asked, weights, *(x.numel() for x in inputs.values()))
        if seen.most > most:
            raise Broken(f"""memory: {where} all numbers are right, but your function makes a tensor of {seen.most:,}
                numbers, {seen.shape}. The whole cache has {inputs["cache"].numel():,}: your tensor has a row for
                each of {case.h} heads and {case.t} tokens. Multiply the query by key_up, not the cache.""")
        if case.s == 1 and seen.flops > 1.5 * _work_of(case):
            raise Broken(f"""work: {where} all numbers are right, but one token takes {seen.flops / 2:,.0f}
                multiply-adds, and {_work_of(case) / 2:,.0f} are enough: keys or values are computed from {case.t}
                latents.""")
        _check_grads(seen, latent_attention, inputs, given, where)
    case, paper = LATENTS[0], SIZES["paper"]
    seen = _observe(fn, case.inputs(), (case.scale, grouped_query_attention))
    kept, heads = paper.kv_lora_rank + paper.qk_rope_head_dim, paper.heads
    each = heads * (paper.qk_nope_head_dim + paper.qk_rope_head_dim + paper.v_head_dim)
    return Passed(
        f"the same as with keys and values of each head, to 1e-10, in {len(LATENTS)} shapes; gradients, too",
        f"""memory: the largest tensor made for {case.t} tokens and {case.h} heads has {seen.most:,} numbers; their keys
        would have {case.b * case.h * case.t * (case.n + case.r):,}""",
        f"""DeepSeek-V3 keeps {kept} numbers per token and layer; keys and values of {heads} heads would be {each:,},
        {each / kept:.1f} times as many""",
    )


EXERCISES = (
    Exercise("12.1", "grouped queries", grouped_query_attention, 2, _check_grouped_query_attention),
    Exercise("12.4", "latent attention's cache", latent_attention, 2, _check_latent_attention),
)
