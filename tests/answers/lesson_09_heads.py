"""Answers to attention_heads of notebook 09 that a check must reject or accept; CI proves both."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from hpdl_lab.parallel.tensor.linear import column_linear, reduce_from, row_linear


def attended(qkv, heads, causal, scale=None):
    b, s, _ = qkv.shape
    q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2).reshape(b, s, -1)


def heads_by_hand(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    """One head after the other, with softmax written out."""
    b, s, _ = x.shape
    q, k, v = column_linear(comm, x, qkv_weight, qkv_bias).view(b, s, 3, heads, -1).unbind(2)  # each (b, s, h, d/h)
    mixed = []
    for h in range(heads):
        scores = q[:, :, h] @ k[:, :, h].transpose(1, 2) / q.shape[-1] ** 0.5  # (b, s, s)
        if causal:
            scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(-1) @ v[:, :, h])
    return row_linear(comm, torch.cat(mixed, -1), out_weight, out_bias)


def heads_bias_last(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    mixed = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    return row_linear(comm, mixed, out_weight, None) + out_bias


WRONG = {
    "9.3": """
boundary: the first third are queries of all its heads
    b, s, _ = x.shape
    qkv = column_linear(comm, x, qkv_weight, qkv_bias)
    q, k, v = qkv.view(b, s, heads, 3, -1).permute(3, 0, 2, 1, 4)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(b, s, -1)
    return row_linear(comm, mixed, out_weight, out_bias)
causal: Positions attend to later ones
    mixed = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, False)
    return row_linear(comm, mixed, out_weight, out_bias)
causal: attend only to earlier ones
    mixed = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, True)
    return row_linear(comm, mixed, out_weight, out_bias)
heads: attends with one head of 6 numbers, not with 2
    mixed = attended(column_linear(comm, x, qkv_weight, qkv_bias), 1, causal)
    return row_linear(comm, mixed, out_weight, out_bias)
scale: divided by the root of 3
    mixed = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal, x.shape[-1] ** -0.5)
    return row_linear(comm, mixed, out_weight, out_bias)
scale: a head's width, not by 3
    b, s, _ = x.shape
    q, k, v = column_linear(comm, x, qkv_weight, qkv_bias).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1 / q.shape[-1])
    return row_linear(comm, mixed.transpose(1, 2).reshape(b, s, -1), out_weight, out_bias)
transposed: only the gradient of x from the heads of rank 0
    return row_linear(comm, attended(linear(x, qkv_weight, qkv_bias), heads, causal), out_weight, out_bias)
sum: Only the heads of rank 0 are in it
    return linear(attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal), out_weight, out_bias)
bias: out_bias was added 2 times
    mixed = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    return reduce_from(comm, linear(mixed, out_weight, out_bias))
merge: .transpose(1, 2), then reshape
    b, s, _ = x.shape
    qkv = column_linear(comm, x, qkv_weight, qkv_bias)
    q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    mixed = scaled_dot_product_attention(q, k, v, is_causal=causal).reshape(b, s, -1)
    return row_linear(comm, mixed, out_weight, out_bias)
messages: all_reduce of 120 numbers, 3 times
    qkv = [column_linear(comm, x, w, b) for w, b in zip(qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)]
    return row_linear(comm, attended(torch.cat(qkv, -1), heads, causal), out_weight, out_bias)
messages: heads need nothing from each other
    mixed = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    comm.all_gather(mixed.detach().contiguous())
    return row_linear(comm, mixed, out_weight, out_bias)
""",
}
RIGHT = {
    "9.3": (heads_by_hand, heads_bias_last),
}
COMPLETED = {
    "9.3": ["comm, x, qkv_weight, qkv_bias", "out_weight, out_bias"],
}
