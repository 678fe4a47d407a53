"""Answers to rows_of_heads and attention_heads of notebook 09 that a check must reject or accept; CI proves both."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from hpdl_lab.parallel.tensor.linear import column_linear, reduce_from, row_linear


def require(heads, ranks):
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be shared by {ranks} ranks")


def rows_by_a_view(rank, ranks, heads, width):
    require(heads, ranks)
    return torch.arange(3 * width).view(3, ranks, width // ranks)[:, rank].reshape(-1)


def rows_as_a_list(rank, ranks, heads, width):
    require(heads, ranks)
    per, each = heads // ranks, width // heads
    mine = range(rank * per, (rank + 1) * per)
    return [row for row in range(3 * width) if row % width // each in mine]


def attended(qkv, heads, causal, scale=None):
    b, s, _ = qkv.shape
    q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2).reshape(b, s, -1)


def heads_by_hand(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    """One head after the other, with softmax written out."""
    b, s, _ = x.shape
    q, k, v = column_linear(comm, x, qkv_weight, qkv_bias).view(b, s, 3, heads, -1).unbind(2)  # each (b, s, h, d/h)
    heard = []
    for h in range(heads):
        scores = q[:, :, h] @ k[:, :, h].transpose(1, 2) / q.shape[-1] ** 0.5  # (b, s, s)
        if causal:
            scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        heard.append(scores.softmax(-1) @ v[:, :, h])
    return row_linear(comm, torch.cat(heard, -1), out_weight, out_bias)


def heads_bias_last(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    return row_linear(comm, heard, out_weight, None) + out_bias


WRONG = {
    "9.3": """
boundary: q of heads 0, 1, 2, 3, k of heads 0, 1, v of no head
    require(heads, ranks)
    n = 3 * width // ranks
    return torch.arange(rank * n, (rank + 1) * n)
boundary: k of no head, v of no head
    require(heads, ranks)
    n = width // ranks
    return torch.arange(rank * n, (rank + 1) * n)
order: the right rows in another order
    require(heads, ranks)
    each, per = width // heads, heads // ranks
    starts = [part * width + head * each for head in range(rank * per, (rank + 1) * per) for part in range(3)]
    return torch.cat([torch.arange(start, start + each) for start in starts])
heads: your rows hold heads 0, 2, and should hold heads 0, 1
    require(heads, ranks)
    each = width // heads
    starts = [part * width + head * each for part in range(3) for head in range(rank, heads, ranks)]
    return torch.cat([torch.arange(start, start + each) for start in starts])
refuse: a head would be cut in two
    n = width // ranks
    return torch.cat([torch.arange(part * width + rank * n, part * width + (rank + 1) * n) for part in range(3)])
heads: your rows hold heads 2, 3, and should hold heads 0, 1
    require(heads, ranks)
    n, rank = width // ranks, (rank + 1) % ranks
    return torch.cat([torch.arange(part * width + rank * n, part * width + (rank + 1) * n) for part in range(3)])
rows: you give 11 rows, and 12 are needed: row 19 is missing
    require(heads, ranks)
    n = width // ranks
    return [part * width + rank * n + i for part in range(3) for i in range(n)][:-1]
returns: one flat tensor of them
    require(heads, ranks)
    n = width // ranks
    return [slice(part * width + rank * n, part * width + (rank + 1) * n) for part in range(3)]
""",
    "9.4": """
boundary: the first third are queries of all its heads
    b, s, _ = x.shape
    qkv = column_linear(comm, x, qkv_weight, qkv_bias)
    q, k, v = qkv.view(b, s, heads, 3, -1).permute(3, 0, 2, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(b, s, -1)
    return row_linear(comm, heard, out_weight, out_bias)
causal: Positions hear what comes later
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, False)
    return row_linear(comm, heard, out_weight, out_bias)
causal: see only earlier positions
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, True)
    return row_linear(comm, heard, out_weight, out_bias)
heads: attends with one head of 6 numbers, not with 2
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), 1, causal)
    return row_linear(comm, heard, out_weight, out_bias)
scale: divided by the root of 3
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal, x.shape[-1] ** -0.5)
    return row_linear(comm, heard, out_weight, out_bias)
scale: a head's width, not by 3
    b, s, _ = x.shape
    q, k, v = column_linear(comm, x, qkv_weight, qkv_bias).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1 / q.shape[-1])
    return row_linear(comm, heard.transpose(1, 2).reshape(b, s, -1), out_weight, out_bias)
transposed: only what the heads of rank 0 say about x
    return row_linear(comm, attended(linear(x, qkv_weight, qkv_bias), heads, causal), out_weight, out_bias)
sum: Only the heads of rank 0 are in it
    return linear(attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal), out_weight, out_bias)
bias: out_bias was added 2 times
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    return reduce_from(comm, linear(heard, out_weight, out_bias))
merge: .transpose(1, 2), then reshape
    b, s, _ = x.shape
    qkv = column_linear(comm, x, qkv_weight, qkv_bias)
    q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal).reshape(b, s, -1)
    return row_linear(comm, heard, out_weight, out_bias)
messages: all_reduce of 120 numbers, 3 times
    qkv = [column_linear(comm, x, w, b) for w, b in zip(qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)]
    return row_linear(comm, attended(torch.cat(qkv, -1), heads, causal), out_weight, out_bias)
messages: heads need nothing from each other
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    comm.all_gather(heard.detach().contiguous())
    return row_linear(comm, heard, out_weight, out_bias)
""",
}
RIGHT = {
    "9.3": (rows_by_a_view, rows_as_a_list),
    "9.4": (heads_by_hand, heads_bias_last),
}
COMPLETED = {
    "9.3": ["part * width + rank * n", "part * width + (rank + 1) * n"],
    "9.4": ["comm, x, qkv_weight, qkv_bias", "out_weight, out_bias"],
}
