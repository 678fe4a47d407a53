"""Answers to decode_step and tensor_parallel_decode of notebook 13 that a check must reject or accept."""

import torch
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from hpdl_lab.collectives import ring
from hpdl_lab.inference.decode import norm


def by_torch(x, qkv, out, keys, values):
    """The kernel that a model calls, of one query."""
    b, heads, _, n = keys.shape
    s = x.size(1)
    q, k, v = linear(x[:, -1:], qkv).view(b, 1, 3, heads, n).permute(2, 0, 3, 1, 4)
    keys[:, :, s - 1 : s] = k
    values[:, :, s - 1 : s] = v
    heard = scaled_dot_product_attention(q, keys[:, :, :s], values[:, :, :s])
    return linear(heard.transpose(1, 2).reshape(b, -1), out)


def with_a_mask(x, qkv, out, keys, values):
    """All the room is looked at, and what nobody has written weighs nothing: the shapes never change."""
    b, heads, room, n = keys.shape
    s = x.shape[1]
    q, k, v = torch.einsum("bd,fd->bf", x[:, -1], qkv).chunk(3, -1)
    keys[:, :, s - 1], values[:, :, s - 1] = k.reshape(b, heads, n), v.reshape(b, heads, n)
    scores = torch.einsum("bhn,bhrn->bhr", q.reshape(b, heads, n), keys) / n**0.5
    weights = scores.masked_fill(torch.arange(room) >= s, -torch.inf).softmax(-1)
    return torch.einsum("bhr,bhrn->bhn", weights, values).reshape(b, -1) @ out.T


def by_loops(x, qkv, out, keys, values):
    """Head by head."""
    b, heads, _, n = keys.shape
    d, s = heads * n, x.shape[1]
    new, heard = x[:, s - 1], []
    for h in range(heads):
        q, k, v = (new @ qkv[part * d + h * n : part * d + (h + 1) * n].T for part in range(3))
        keys[:, h, s - 1] = k
        values[:, h, s - 1] = v
        weights = torch.softmax((keys[:, h, :s] * q[:, None]).sum(-1) / n**0.5, dim=-1)
        heard.append((weights[..., None] * values[:, h, :s]).sum(1))
    return torch.cat(heard, -1) @ out.T


def everything_again(x, qkv, out, keys, values):
    """As a model does it that knows no cache; it fills the cache, too."""
    b, heads, _, n = keys.shape
    s = x.shape[1]
    q, k, v = (x @ qkv.T).view(b, s, 3, heads, n).permute(2, 0, 3, 1, 4)
    keys[:, :, :s], values[:, :, :s] = k, v
    heard = scaled_dot_product_attention(q, k, v, is_causal=True)
    return (heard.transpose(1, 2).reshape(b, s, -1) @ out.T)[:, -1]


def in_place_on_a_copy(comm, x, layers):
    x = x.clone()
    for layer in layers:
        heard = layer.attend(*linear(norm(x), layer.qkv).tensor_split(3, dim=-1))
        x += comm.all_reduce(linear(heard, layer.out))
        x += comm.all_reduce(linear(gelu(linear(norm(x), layer.up)), layer.down))
    return x


def by_a_ring(comm, x, layers):
    """With the all-reduce of 04."""

    def added(part):
        return ring.all_reduce(comm, part.flatten()).view(part.shape)

    for layer in layers:
        q, k, v = (norm(x) @ layer.qkv.T).chunk(3, -1)
        x = x + added(layer.attend(q, k, v) @ layer.out.T)
        x = x + added(gelu(norm(x) @ layer.up.T) @ layer.down.T)
    return x


WRONG = {
    "13.1": """
work @everything_again: the keys and values of all positions are computed again
work: although they are in the cache
    b, heads, _, n = keys.shape
    s = x.shape[1]
    k, v = (part.unflatten(-1, (heads, n)).transpose(1, 2) for part in (x @ qkv[len(out):].T).chunk(2, -1))
    q = (x[:, -1] @ qkv[:len(out)].T).view(b, heads, 1, n)
    keys[:, :, :s], values[:, :, :s] = k, v
    return scaled_dot_product_attention(q, k, v).flatten(1) @ out.T
work: is something computed twice
    -     keys[:, :, s - 1], values[:, :, s - 1] = (k, v)
    +     keys[:, :, s - 1] = (x[:, -1] @ qkv.T).view(b, 3, heads, n)[:, 1]
    +     values[:, :, s - 1] = (x[:, -1] @ qkv.T).view(b, 3, heads, n)[:, 2]
place: no call has written
    keys[:, :, s - 1], values[:, :, s - 1] = (k, v) => keys[:, :, s], values[:, :, s] = (k, v)
place: as Python counts
    -     keys[:, :, s - 1], values[:, :, s - 1] = (k, v)
    +     pass
own: A position also attends to itself
    -     scores = (keys[:, :, :s] @ q[..., None])
    +     scores = (keys[:, :, :s - 1] @ q[..., None])
    @ values[:, :, :s] => @ values[:, :, :s - 1]
room: no call has written there
    (keys[:, :, :s] @ q[..., None]) => (keys @ q[..., None])
    @ values[:, :, :s] => @ values
newest: take the query of the newest position
    b, heads, _, n = keys.shape
    s = x.shape[1]
    new = (x[:, -1] @ qkv.T).view(b, 3, heads, n)
    keys[:, :, s - 1], values[:, :, s - 1] = new[:, 1], new[:, 2]
    q = (x[:, 0] @ qkv[:len(out)].T).view(b, heads, 1, n)
    return scaled_dot_product_attention(q, keys[:, :, :s], values[:, :, :s]).flatten(1) @ out.T
scale: divided by the root of n
    / n ** 0.5 => * 1
scale: not of 24
    / n ** 0.5 => / x.shape[-1] ** 0.5
scale: not by 6
    / n ** 0.5 => / n
softmax: for each head by itself
    scores.softmax(-1) => scores.softmax(1)
softmax: Scores become weights
    scores.softmax(-1) => scores
order: Keys and values have changed places
    q, k, v = => q, v, k =
order: A key was used as the query
    q, k, v = => k, q, v =
heads: The rows of qkv are q of all heads
    .view(b, 3, heads, n).unbind(1) => .view(b, heads, 3, n).unbind(2)
out: multiply them by out.T
    attn_output.flatten(1) @ out.T => attn_output.flatten(1)
out: multiply by out.T
    @ out.T => @ out
cache: does not hold the keys of
    b, heads, _, n = keys.shape
    s = x.shape[1]
    kept = decode_step.__dict__.setdefault(x[0, 0, 0].item(), [torch.zeros_like(keys), torch.zeros_like(values)])
    return decode_step(x, qkv, out, *kept)
cache: holds more than 1 position
    keys[:, :, s - 1], values[:, :, s - 1] => keys[:, :, s - 1:], values[:, :, s - 1:]
    .view(b, 3, heads, n).unbind(1) => .view(b, 3, heads, 1, n).unbind(1)
    @ q[..., None] => @ q.mT
input: has written into x
    s = x.shape[1] => x[:, 0], s = (x[:, 0] + 1, x.shape[1])
dtype: right to the 7 digits
    return attn_output.flatten(1) @ out.T => return (attn_output.flatten(1).float() @ out.float().T).double()
returns: returned something of shape (2, 1, 24)
    return attn_output.flatten(1) @ out.T => return (attn_output.flatten(1) @ out.T)[:, None]
returns: returned nothing
    return attn_output.flatten(1) @ out.T => attn_output.flatten(1) @ out.T
raises: IndexError
    keys[:, :, s - 1], values => keys[:, :, s + 3], values
""",
    "13.2": """
sum: the part of rank 0 alone
    x + comm.all_reduce(layer.attend(q, k, v) @ layer.out.T) => x + layer.attend(q, k, v) @ layer.out.T
    x + comm.all_reduce(gelu(norm(x) @ layer.up.T) @ layer.down.T) => x + gelu(norm(x) @ layer.up.T) @ layer.down.T
mean: the parts of a product add up
    @ layer.out.T) => @ layer.out.T) / comm.size
    @ layer.down.T) => @ layer.down.T) / comm.size
residual: so the sum has it once for each rank
    x + comm.all_reduce(layer.attend => comm.all_reduce(x + layer.attend
    x + comm.all_reduce(gelu => comm.all_reduce(x + gelu
residual: each half of a layer adds its result to x
    x + comm.all_reduce(layer.attend => comm.all_reduce(layer.attend
    x + comm.all_reduce(gelu => comm.all_reduce(gelu
norm: and again before the MLP
    (norm(x) @ layer.qkv.T) => (x @ layer.qkv.T)
    gelu(norm(x) @ layer.up.T) => gelu(x @ layer.up.T)
order: its input is the sum of x and attention
    for layer in layers:
        q, k, v = (norm(x) @ layer.qkv.T).chunk(3, -1)
        part = layer.attend(q, k, v) @ layer.out.T + gelu(norm(x) @ layer.up.T) @ layer.down.T
        x = x + comm.all_reduce(part)
    return x
gelu: between up and down
    gelu(norm(x) @ layer.up.T) => (norm(x) @ layer.up.T)
layers: Only the first layer was computed
    -     return x
    +         return x
messages: all_gather of 48 numbers
    for layer in layers:
        q, k, v = (norm(x) @ layer.qkv.T).chunk(3, -1)
        x = x + comm.all_gather(layer.attend(q, k, v) @ layer.out.T).sum(0)
        x = x + comm.all_gather(gelu(norm(x) @ layer.up.T) @ layer.down.T).sum(0)
    return x
messages: two all-reduces of b d
    for layer in layers:
        q, k, v = (norm(x) @ layer.qkv.T).chunk(3, -1)
        heard = torch.cat([*comm.all_gather(layer.attend(q, k, v))], -1)
        out = torch.cat([*comm.all_gather(layer.out.contiguous())], -1)
        x = x + heard @ out.T
        x = x + comm.all_reduce(gelu(norm(x) @ layer.up.T) @ layer.down.T)
    return x
messages: all_gather of 48 numbers, all_reduce
    @ layer.qkv.T).chunk(3, -1) => @ layer.qkv.T).chunk(3, -1) if comm.all_gather(x) is not None else 0
value: y[0, 0] should be
    @ layer.down.T) => @ layer.down.T) * 2
cache: was called 6 times for 3 tokens
    -         x = x + comm.all_reduce(layer.attend(q, k, v) @ layer.out.T)
    +         if comm.size > 1:
    +             comm.all_reduce(0 * layer.attend(q, k, v) @ layer.out.T)
    +         x = x + comm.all_reduce(layer.attend(q, k, v) @ layer.out.T)
input: has written into its
    x = x + comm.all_reduce(layer.attend => x += comm.all_reduce(layer.attend
messages: waits in 6 barriers
    -     return x
    +     comm.barrier(), comm.barrier()
    +     return x
raises: q, k and v of this rank's heads
    q, k, v = (norm(x) @ layer.qkv.T).chunk(3, -1) => q, k, v = 3 * (norm(x),)
dtype: right to the 7 digits
    @ layer.down.T) => @ layer.down.T).float().double()
deadlock: there is a deadlock
    comm.all_reduce(gelu => (abs if comm.rank else comm.all_reduce)(gelu
returns: returned nothing
    for layer in layers:
        q, k, v = (norm(x) @ layer.qkv.T).chunk(3, -1)
        x = x + comm.all_reduce(layer.attend(q, k, v) @ layer.out.T)
""",
}
RIGHT = {
    "13.1": (by_torch, with_a_mask, by_loops),
    "13.2": (in_place_on_a_copy, by_a_ring),
}
COMPLETED = {
    "13.1": ["scores.softmax(-1)[:, :, None] @ values[:, :, :s]"],
    "13.2": ["comm.all_reduce(gelu(norm(x) @ layer.up.T) @ layer.down.T)"],
}
