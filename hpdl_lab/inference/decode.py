"""Two steps of decoding, written out: one layer of attention with a cache, and a stack of layers on several ranks.

    prefill   x (b, s, d) of a whole prompt at once: products of matrices, as in training
    decode    x (b, d) of one new token at a time: each weight is read for a vector, each old key for a score

A token's key and value never change, so they are computed once and kept: 2 d numbers for each token and layer.
The engine's own cache is in cache.py; it keeps them in pages (pages.py).   Ref: Shazeer 2019, arXiv:1911.02150.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from ..comm.base import Comm
from ..measure import Measured, measure


def without_cache(x: Tensor, qkv: Tensor, out: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the same as `decode_step`, without a cache: it computes all s positions for each new token."""
    b, s, d = x.shape
    q, k, v = (x @ qkv.T).view(b, s, 3, keys.shape[1], -1).permute(2, 0, 3, 1, 4)  # each (b, heads, s, n)
    attn_output = scaled_dot_product_attention(q, k, v, is_causal=True)
    return (attn_output.transpose(1, 2).reshape(b, s, d) @ out.T)[:, -1]


def decode_step(x: Tensor, qkv: Tensor, out: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention at the newest position, with a cache of keys and values.

        position       0    1    2    3           s = 4 positions so far, 3 is newest
        keys         [ k0 | k1 | k2 |    |    ]   earlier calls have written k0 to k2,
        values       [ v0 | v1 | v2 |    |    ]   and this call writes k3 and v3

    A score is a query times a key, divided by the root of n, the length of a key.
    Softmax over the positions turns scores into weights of the values.

    Args:    x: (b, s, d), the input of this layer for all s positions so far. The
             function is called for s = 1, then 2, 3 ...
             qkv: (3d, d), the rows of q, then of k, then of v; in each, head 0 first.
             out: (d, d), the weight of the last layer, as nn.Linear keeps it.
             keys, values: (b, heads, room, n), overwritten at the newest position.
    Returns: (b, d), the attention at the newest position, after `out`.
    Work: calls for s = 1 and for s = 1,000 multiply by qkv and by out equally often.
    Ref: Shazeer 2019, section 2.4.
    """
    ### BEGIN SOLUTION
    b, heads, _, n = keys.shape
    s = x.shape[1]
    q, k, v = (x[:, -1] @ qkv.T).view(b, 3, heads, n).unbind(1)  # (b, d) @ (d, 3d), then each (b, heads, n)
    keys[:, :, s - 1], values[:, :, s - 1] = k, v
    scores = (keys[:, :, :s] @ q[..., None]).squeeze(-1) / n**0.5  # (b, heads, s, n) @ (b, heads, n, 1) = (.., s, 1)
    attn_output = scores.softmax(-1)[:, :, None] @ values[:, :, :s]  # (b, heads, 1, s) @ (b, heads, s, n) = (.., 1, n)
    return attn_output.flatten(1) @ out.T  # (b, d)
    ### END SOLUTION


class Times(dict[str, dict[int, Measured]]):
    """The times {how: {s: of the newest of s tokens}}; `lab.show` draws them."""

    def factor(self, how: str) -> float:
        """Return the time of the last token over the time of the first."""
        first, *_, last = self[how].values()
        return last.median / first.median


@torch.no_grad()
def compare_decode_steps(
    steps: dict[str, Callable[..., Tensor]],
    lengths: Sequence[int] = (1, 4, 16, 64, 256, 1024),
    width: int = 256,
    heads: int = 8,
) -> Times:
    """Measure functions such as `decode_step` on sequences of these lengths, whose cache holds all but the newest."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, max(lengths), width, generator=draw)
    qkv, out = torch.randn(3 * width, width, generator=draw) / width, torch.randn(width, width, generator=draw) / width
    keys, values = torch.randn(2, 1, heads, max(lengths), width // heads, generator=draw)
    return Times(
        {
            how: {s: measure(partial(step, x[:, :s], qkv, out, keys, values), repeats=7, calls=5) for s in lengths}
            for how, step in steps.items()
        }
    )


@dataclass(frozen=True)
class Shard:
    """A rank's part of a layer: qkv (3d/p, d), out (d, d/p), up (4d/p, d), down (d, 4d/p), and its heads' cache.

    attend: f(q, k, v), each (b, d/p) of one new token -> (b, d/p): adds k and v to the cache of this rank's heads, and
    returns their attention.
    """

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


def norm(x: Tensor) -> Tensor:
    """Return the layer norm of x, without parameters."""
    return layer_norm(x, x.shape[-1:])


def tensor_parallel_decode(comm: Comm, x: Tensor, layers: Sequence[Shard]) -> Tensor:
    """Send one new token through layers that ranks share, with some heads on each rank.

        x -> norm -> [attention of my heads]   -> add over ranks -> + x
          -> norm -> [up, gelu, down: my part] -> add over ranks -> + x    in each layer

    `norm(x)` is a layer norm without parameters, and `gelu` is torch's.

    Args:    x: (b, d), the same on every rank.
             layers: this rank's part of each layer. .qkv (3d/p, d), .out (d, d/p), .up
             (4d/p, d) and .down (d, 4d/p) are weights as nn.Linear keeps them.
             .attend(q, k, v), each (b, d/p), puts k and v into this rank's cache and
             returns its heads' attention, (b, d/p).
    Returns: (b, d), the same on every rank. x stays as it is.
    Steps: two all_reduce of b d elements per layer. No key, value or weight travels.
    Ref: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Pope et al. 2022,
         arXiv:2211.05102.
    """
    ### BEGIN SOLUTION
    for layer in layers:
        q, k, v = (norm(x) @ layer.qkv.T).chunk(3, -1)  # each (b, d/p)
        x = x + comm.all_reduce(layer.attend(q, k, v) @ layer.out.T)  # (b, d/p) @ (d/p, d) = (b, d)
        x = x + comm.all_reduce(gelu(norm(x) @ layer.up.T) @ layer.down.T)  # (b, d) -> (b, 4d/p) -> (b, d)
    return x
    ### END SOLUTION
