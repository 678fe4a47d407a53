"""Answers to grouped_query_attention and latent_attention of notebook 12 that a check must reject or accept."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from hpdl_lab.models.attention import grouped_query_attention


def group_by_group(q, k, v, scale=None):
    """A loop over query heads; each looks at the keys of its group: views, no copies."""
    each, s, t = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    later = torch.ones(s, t, dtype=torch.bool).triu(t - s + 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = []
    for i in range(q.shape[1]):
        scores = (q[:, i] @ k[:, i // each].mT * scale).masked_fill(later, -torch.inf)
        heads.append(torch.softmax(scores, -1) @ v[:, i // each])
    return torch.stack(heads, 1)


def by_einsum(q, k, v, scale=None):
    """Letters for groups and heads of a group; einsum puts the latter into rows."""
    q = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bkgsd,bktd->bkgst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s, t = scores.shape[-2:]
    last = torch.arange(t - s, t)
    weights = scores.masked_fill(torch.arange(t) > last[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bkgst,bktd->bkgsd", weights, v).flatten(1, 2)


def repeated(q, k, v, scale=None):
    """As it was done before there were kernels for it."""
    each, s, t = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    seen = torch.ones(s, t, dtype=torch.bool).tril(t - s)
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def by_broadcasting(q, k, v, scale=None):
    """No repeat in sight, but matmul expands and copies."""
    s, t = q.shape[2], k.shape[2]
    scores = q.unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones(s, t, dtype=torch.bool).triu(t - s + 1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


def from_einsums(q, q_rope, cache, key_up, value_up, scale, attend):
    """Without attend: two parts of the scores, and the mask by hand."""
    c, s, t = key_up.shape[-1], q.shape[2], cache.shape[1]
    latent, turned = cache[..., :c], cache[..., c:]
    scores = torch.einsum("bhsc,btc->bhst", torch.einsum("bhsn,hnc->bhsc", q, key_up), latent)
    scores = (scores + torch.einsum("bhsr,btr->bhst", q_rope, turned)) * scale
    weights = scores.masked_fill(torch.ones(s, t, dtype=torch.bool).triu(t - s + 1), -torch.inf).softmax(-1)
    return torch.einsum("bhsc,hmc->bhsm", torch.einsum("bhst,btc->bhsc", weights, latent), value_up)


def by_products(q, q_rope, cache, key_up, value_up, scale, attend):
    """One key head, and plain products with the weights of each head."""
    c = key_up.size(2)
    k = cache[:, None]
    mixed = attend(torch.cat((q @ key_up, q_rope), dim=3), k, k.narrow(3, 0, c), scale)
    return mixed @ value_up.transpose(1, 2)


def of_each_head(q, q_rope, cache, key_up, value_up, scale, attend):
    """Naive: the cache is small, and what is made of it is not."""
    latent, turned = cache.unsqueeze(1).split([key_up.shape[-1], q_rope.shape[-1]], -1)
    k = torch.cat([latent @ key_up.mT, turned.expand(-1, q.shape[1], -1, -1)], -1)
    return attend(torch.cat([q, q_rope], -1), k, latent @ value_up.mT, scale)


def head_by_head(q, q_rope, cache, key_up, value_up, scale, attend):
    """Keys and values of one head at a time: little room, all the work."""
    latent, turned = cache.split([key_up.shape[-1], q_rope.shape[-1]], -1)
    heads = []
    for i in range(q.shape[1]):
        k = torch.cat([latent @ key_up[i].T, turned], -1)[:, None]
        asked = torch.cat([q[:, i], q_rope[:, i]], -1)[:, None]
        heads.append(attend(asked, k, (latent @ value_up[i].T)[:, None], scale))
    return torch.cat(heads, 1)


WRONG = {
    "12.1": """
memory @repeated: repeated for each query head
memory @by_broadcasting: A product of tensors with different leading dimensions
groups @repeated: Key heads were given to query heads in turns
    k.repeat_interleave(each, 1) => k.repeat(1, each, 1, 1)
    v.repeat_interleave(each, 1) => v.repeat(1, each, 1, 1)
groups @group_by_group: All query heads use key head 0
    k[:, i // each].mT => k[:, 0].mT
    v[:, i // each] => v[:, 0]
causal: Queries attend to later positions
    scores.masked_fill(later, -torch.inf).softmax(-1) => scores.softmax(-1)
causal: query 0 is at position 39, not 0
    triu(t - s + 1) => triu(1)
causal @repeated: belong to the last 1 of 40 positions
    attn_mask=seen => is_causal=True
causal: A query also attends to its own position
    triu(t - s + 1) => triu(t - s)
causal: one position too many
    triu(t - s + 1) => triu(t - s + 2)
scale: divided by the root of d
    rows @ k.mT * (d ** (-0.5) if scale is None else scale) => rows @ k.mT
scale: A scale was given
    d ** (-0.5) if scale is None else scale => d ** (-0.5)
softmax: after the mask
    scores.masked_fill(later, -torch.inf).softmax(-1) => scores.softmax(-1).masked_fill(later, 0)
gradient: the gradient of k is wrong
    -     scores = (rows @ k.mT
    +     scores = (rows @ k.detach().mT
input: written into q
    rows = q.reshape => rows = q.mul_(2).reshape
returns: something of shape (2, 2, 4, 16)
    return (weights @ v).view(b, h, s, v.shape[-1]) => return weights @ v
returns: returned nothing
    k.mT
""",
    "12.4": """
memory @of_each_head: your tensor has a row for each of 8 heads and 40 tokens
work @head_by_head: computed from 40 latents
memory: your tensor has a row for each of 8 heads
    k = cache.unsqueeze(1) => k = cache.unsqueeze(1).repeat(1, q.shape[1], 1, 1)
scale: the length of the absorbed query
    [..., :key_up.shape[-1]], scale) => [..., :key_up.shape[-1]])
scale: are not scaled
    [..., :key_up.shape[-1]], scale) => [..., :key_up.shape[-1]], 1.0)
rotated: The rotated part is missing
    k = cache.unsqueeze(1) => k = cache.unsqueeze(1)[..., : key_up.shape[-1]]
    torch.cat([absorbed, q_rope], -1) => absorbed
causal @from_einsums: Queries attend to later positions
    scores.masked_fill(torch.ones(s, t, dtype=torch.bool).triu(t - s + 1), -torch.inf).softmax(-1) => scores.softmax(-1)
causal @from_einsums: Query 0 is at position 39
    triu(t - s + 1) => triu(1)
returns: something of shape (2, 8, 1, 12)
    return torch.einsum('bhsc,hmc->bhsm', attn_output, value_up) => return attn_output
raises: does not broadcast
    'bhsn,hnc->bhsc', q, key_up => 'bhsm,hmc->bhsc', q, value_up
gradient: the gradient of cache is wrong
    k = cache.unsqueeze(1) => k = cache.detach().unsqueeze(1)
input: written into cache
    k = cache.unsqueeze(1) => k = cache.mul_(1.5).unsqueeze(1)
value: should be
    [absorbed, q_rope] => [absorbed, -q_rope]
""",
}
RIGHT = {
    "12.1": (group_by_group, by_einsum),
    "12.4": (from_einsums, by_products),
}
COMPLETED = {
    "12.1": ["t - s + 1", "b, h, s, v.shape[-1]"],
    "12.4": ["k[..., : key_up.shape[-1]]", "attn_output"],
}
