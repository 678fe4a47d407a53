"""Answers to rows_of_heads and attention_heads of notebook 09 that a check must reject or accept; CI proves both."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from hpdl_lab.parallel.tensor.linear import column_linear, reduce_from, row_linear

from . import WrongAnswer

# -- rows_of_heads: wrong ----------------------------------------------------------------------------------------------


def require(heads, ranks):
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be shared by {ranks} ranks")


def rows_one_piece(rank, ranks, heads, width):
    require(heads, ranks)
    n = 3 * width // ranks
    return torch.arange(rank * n, (rank + 1) * n)


def rows_only_queries(rank, ranks, heads, width):
    require(heads, ranks)
    n = width // ranks
    return torch.arange(rank * n, (rank + 1) * n)


def rows_head_by_head(rank, ranks, heads, width):
    """q, k and v of the first head, then of the second: right rows, in an order that view() does not expect."""
    require(heads, ranks)
    each, per = width // heads, heads // ranks
    starts = [part * width + head * each for head in range(rank * per, (rank + 1) * per) for part in range(3)]
    return torch.cat([torch.arange(start, start + each) for start in starts])


def rows_dealt_out(rank, ranks, heads, width):
    require(heads, ranks)
    each = width // heads
    starts = [part * width + head * each for part in range(3) for head in range(rank, heads, ranks)]
    return torch.cat([torch.arange(start, start + each) for start in starts])


def rows_cut_heads_in_two(rank, ranks, heads, width):
    n = width // ranks
    return torch.cat([torch.arange(part * width + rank * n, part * width + (rank + 1) * n) for part in range(3)])


def rows_of_the_next_rank(rank, ranks, heads, width):
    require(heads, ranks)
    n, rank = width // ranks, (rank + 1) % ranks
    return torch.cat([torch.arange(part * width + rank * n, part * width + (rank + 1) * n) for part in range(3)])


def rows_without_the_last(rank, ranks, heads, width):
    require(heads, ranks)
    n = width // ranks
    return [part * width + rank * n + i for part in range(3) for i in range(n)][:-1]


def rows_as_slices(rank, ranks, heads, width):
    require(heads, ranks)
    n = width // ranks
    return [slice(part * width + rank * n, part * width + (rank + 1) * n) for part in range(3)]


# -- rows_of_heads: right ----------------------------------------------------------------------------------------------


def rows_by_a_view(rank, ranks, heads, width):
    require(heads, ranks)
    return torch.arange(3 * width).view(3, ranks, width // ranks)[:, rank].reshape(-1)


def rows_as_a_list(rank, ranks, heads, width):
    require(heads, ranks)
    per, each = heads // ranks, width // heads
    mine = range(rank * per, (rank + 1) * per)
    return [row for row in range(3 * width) if row % width // each in mine]


# -- attention_heads: wrong --------------------------------------------------------------------------------------------


def attended(qkv, heads, causal, scale=None):
    b, s, _ = qkv.shape
    q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2).reshape(b, s, -1)


def heads_before_parts(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    b, s, _ = x.shape
    qkv = column_linear(comm, x, qkv_weight, qkv_bias)
    q, k, v = qkv.view(b, s, heads, 3, -1).permute(3, 0, 2, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(b, s, -1)
    return row_linear(comm, heard, out_weight, out_bias)


def heads_see_the_future(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, False)
    return row_linear(comm, heard, out_weight, out_bias)


def heads_always_causal(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, True)
    return row_linear(comm, heard, out_weight, out_bias)


def heads_all_in_one(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), 1, causal)
    return row_linear(comm, heard, out_weight, out_bias)


def heads_scaled_by_the_width(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal, x.shape[-1] ** -0.5)
    return row_linear(comm, heard, out_weight, out_bias)


def heads_scaled_without_a_root(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    b, s, _ = x.shape
    q, k, v = column_linear(comm, x, qkv_weight, qkv_bias).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=1 / q.shape[-1])
    return row_linear(comm, heard.transpose(1, 2).reshape(b, s, -1), out_weight, out_bias)


def heads_without_copy_to(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    return row_linear(comm, attended(linear(x, qkv_weight, qkv_bias), heads, causal), out_weight, out_bias)


def heads_without_sum(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    return linear(attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal), out_weight, out_bias)


def heads_with_many_biases(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    return reduce_from(comm, linear(heard, out_weight, out_bias))


def heads_merged_wrongly(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    b, s, _ = x.shape
    qkv = column_linear(comm, x, qkv_weight, qkv_bias)
    q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal).reshape(b, s, -1)
    return row_linear(comm, heard, out_weight, out_bias)


def heads_all_columns_at_once(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    """Each of q, k and v is a column linear layer: three all-reduces in backward instead of one."""
    qkv = [column_linear(comm, x, w, b) for w, b in zip(qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)]
    return row_linear(comm, attended(torch.cat(qkv, -1), heads, causal), out_weight, out_bias)


def heads_gathered(comm, x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    """What the heads of all ranks have heard is gathered before the product."""
    heard = attended(column_linear(comm, x, qkv_weight, qkv_bias), heads, causal)
    comm.all_gather(heard.detach().contiguous())
    return row_linear(comm, heard, out_weight, out_bias)


# -- attention_heads: right --------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "9.3": (
        WrongAnswer(rows_one_piece, "boundary", "q of heads 0, 1, 2, 3, k of heads 0, 1, v of no head"),
        WrongAnswer(rows_only_queries, "boundary", "k of no head, v of no head"),
        WrongAnswer(rows_head_by_head, "order", "the right rows in another order"),
        WrongAnswer(rows_dealt_out, "heads", "your rows hold heads 0, 2, and should hold heads 0, 1"),
        WrongAnswer(rows_cut_heads_in_two, "refuse", "a head would be cut in two"),
        WrongAnswer(rows_of_the_next_rank, "heads", "your rows hold heads 2, 3, and should hold heads 0, 1"),
        WrongAnswer(rows_without_the_last, "rows", "you give 11 rows, and 12 are needed: row 19 is missing"),
        WrongAnswer(rows_as_slices, "returns", "one flat tensor of them"),
    ),
    "9.4": (
        WrongAnswer(heads_before_parts, "boundary", "the first third are queries of all its heads"),
        WrongAnswer(heads_see_the_future, "causal", "Positions hear what comes later"),
        WrongAnswer(heads_always_causal, "causal", "hear only what came before"),
        WrongAnswer(heads_all_in_one, "heads", "attends with one head of 6 numbers, not with 2"),
        WrongAnswer(heads_scaled_by_the_width, "scale", "divided by the root of 3"),
        WrongAnswer(heads_scaled_without_a_root, "scale", "a head's width, not by 3"),
        WrongAnswer(heads_without_copy_to, "transposed", "only what the heads of rank 0 say about x"),
        WrongAnswer(heads_without_sum, "sum", "Only the heads of rank 0 are in it"),
        WrongAnswer(heads_with_many_biases, "bias", "out_bias was added 2 times"),
        WrongAnswer(heads_merged_wrongly, "merge", ".transpose(1, 2), then reshape"),
        WrongAnswer(heads_all_columns_at_once, "messages", "all_reduce of 120 numbers, 3 times"),
        WrongAnswer(heads_gathered, "messages", "heads need nothing from each other"),
    ),
}
RIGHT = {
    "9.3": (rows_by_a_view, rows_as_a_list),
    "9.4": (heads_by_hand, heads_bias_last),
}
