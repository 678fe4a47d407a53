"""Hints of notebook 09: three for each kind of mistake, from a nudge to the lines themselves."""

COLUMN_LAST = "return linear(copy_to(comm, x), weight, ...)"
COLUMN_LINEAR = {
    "": (
        "Two moves: make x known to all ranks' backward, then an ordinary linear layer with what this rank holds.",
        "torch.nn.functional.linear(x, weight, bias) is x @ weight.T + bias. copy_to(comm, x) looks like x, and adds "
        "its gradient over ranks in backward.",
        COLUMN_LAST,
    ),
    "transposed": (
        "Forward is right without any message. Who else has used x, and what do they know about its gradient?",
        "copy_to(comm, x): copy in forward, all-reduce in backward. Use what it returns in the place of x.",
        COLUMN_LAST,
    ),
    "sum": (
        "Is there anything in forward that ranks have to add? They compute different columns.",
        "reduce_from adds in forward; copy_to adds in backward. Which of the two do you need here?",
        COLUMN_LAST,
    ),
    "messages": (
        "Which call of yours sends something in forward?",
        "x, weight and bias of this rank are all it takes for the columns of this rank.",
        COLUMN_LAST,
    ),
}

ROW_LAST = "return reduce_from(comm, linear(x, weight)) + ...what is added only once..."
ROW_LINEAR = {
    "": (
        "Three moves: multiply what this rank holds, add over ranks, then add the bias.",
        "reduce_from(comm, y) adds y over ranks in forward, and hands its gradient through in backward.",
        ROW_LAST,
    ),
    "bias": (
        "How often is the bias added, and on which ranks? And what does its gradient have to be on each of them?",
        "Every rank adds the whole bias, once, after the sum: then its gradient is the same everywhere.",
        ROW_LAST,
    ),
    "sum": (
        "x @ weight.T is a sum over the columns of x, and this rank has only some of them.",
        "reduce_from(comm, y) is the sum over ranks, known to autograd.",
        ROW_LAST,
    ),
    "transposed": (
        "In backward every rank already has the whole gradient of y. What is there to add?",
        "reduce_from is enough: nothing is copied or added in front of it or behind it.",
        ROW_LAST,
    ),
}

ROWS_OF_HEADS_LAST = (
    "if heads % ranks: raise ValueError(...)\n"
    "n = width // ranks                  # rows of q on this rank; as many of k, and of v\n"
    "return torch.cat([torch.arange(...part * width + rank * n..., ...) for part in range(3)])"
)
ROWS_OF_HEADS = {
    "": (
        "How many heads has a rank, and how many rows is that in each of q, k and v?",
        "Rows of q: 0 to width - 1; of k: width to 2 width - 1; of v: from 2 width on. Take the same share of each.",
        ROWS_OF_HEADS_LAST,
    ),
    "boundary": (
        "Write down the rows of a weight with 2 heads: which are q of head 0, which k, which v?",
        "Three ranges, one in each block of `width` rows, joined by torch.cat.",
        ROWS_OF_HEADS_LAST,
    ),
    "order": (
        "In what order will the result be looked at? view(b, s, 3, heads, -1).",
        "The loop over q, k, v is the outer one, the loop over heads the inner one.",
        ROWS_OF_HEADS_LAST,
    ),
    "refuse": (
        "3 heads on 2 ranks: which rank would hold the second head?",
        "Compare heads with ranks, not width with ranks, before anything else.",
        ROWS_OF_HEADS_LAST,
    ),
}

ATTENTION_HEADS_LAST = (
    "q, k, v = column_linear(...).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)\n"
    "heard = scaled_dot_product_attention(q, k, v, is_causal=causal)        # (b, h/p, s, d/h)\n"
    "return row_linear(comm, heard.transpose(1, 2).reshape(b, s, -1), ...)"
)
ATTENTION_HEADS = {
    "": (
        "It is models/transformer.py's attention with fewer heads: what takes the place of its two linear layers?",
        "column_linear makes q, k and v of this rank's heads; row_linear adds what the heads of all ranks have heard.",
        ATTENTION_HEADS_LAST,
    ),
    "boundary": (
        "What do the first columns of column_linear's result hold? You wrote rows_of_heads.",
        "view(b, s, 3, heads, -1): first q, k or v, then the head.",
        ATTENTION_HEADS_LAST,
    ),
    "messages": (
        "How many products with x are there, and how many all-reduces follow each of them in backward?",
        "One column_linear for q, k and v together; one row_linear.",
        ATTENTION_HEADS_LAST,
    ),
    "transposed": (
        "All ranks use x. Which of the two functions knows about that in backward?",
        "column_linear copies x in forward and adds its gradient in backward; an ordinary linear layer does not.",
        ATTENTION_HEADS_LAST,
    ),
}

SEQUENCE_PARALLEL_LAST = (
    "whole = conjugate(x, forward=gather, backward=...)\n"
    "part = layer(whole)\n"
    "return conjugate(part, forward=..., backward=gather)"
)
SEQUENCE_PARALLEL = {
    "": (
        "Three moves: all positions, the layer, this rank's positions of the sum. And each move has a way back.",
        "gather and scatter are each other's transposed: where one is forward, the other is backward.",
        SEQUENCE_PARALLEL_LAST,
    ),
    "transposed": (
        "Draw what one rank's positions touch in forward: which ranks' layers see them? Those have a say in backward.",
        "There are four slots, and each of gather and scatter fills two of them.",
        SEQUENCE_PARALLEL_LAST,
    ),
    "messages": (
        "Which of your calls moves more than is needed afterwards?",
        "scatter adds over ranks and leaves only this rank's positions: no all-reduce is needed.",
        SEQUENCE_PARALLEL_LAST,
    ),
}

HALO_EXCHANGE_LAST = (
    "up = rows[r - 1][1]                     # as many of my first rows does the rank above need\n"
    "top = x.new_zeros(b, c, above, w)       # and as many of its last rows do I need\n"
    "works += sending(comm, x[:, :, :up], r - 1) + receiving(comm, top, r - 1)\n"
    "# likewise with the rank below, whose rows begin at h - ...; then wait for all works"
)
HALO_EXCHANGE = {
    "": (
        "Each rank has two neighbors, above and below, or one, or none. What does it give to each, what does it get?",
        "To the rank above go my first rows, from there come its last rows. y starts as zeros, the strip in its "
        "middle.",
        HALO_EXCHANGE_LAST,
    ),
    "side": (
        "Draw three strips, one under the other. Which row of the upper one touches the middle one?",
        "Last rows go down, first rows go up.",
        HALO_EXCHANGE_LAST,
    ),
    "zeros": (
        "Which rows of y are outside of the image, and on which ranks?",
        "Rank 0 has zeros above, the last rank has zeros below; all other halo rows come from neighbors.",
        HALO_EXCHANGE_LAST,
    ),
    "asks": (
        "rows holds a pair for every rank, not only for yours. Whose pair says how many rows you send up?",
        "Up: rows[rank - 1][1], what the rank above needs below itself. Down: rows[rank + 1][0].",
        HALO_EXCHANGE_LAST,
    ),
    "everything": (
        "What are the last 0 rows of x? Try torch.arange(4)[-0:].",
        "Its last n rows begin at row h - n, also where n is 0.",
        HALO_EXCHANGE_LAST,
    ),
    "deadlock": (
        "All ranks do the same at the same time. Who sends while everybody receives?",
        "sending and receiving begin a message and return at once; wait() for all of them at the end.",
        HALO_EXCHANGE_LAST,
    ),
    "steps": (
        "Which message does your rank wait for before it sends its own? Does it need that one to send?",
        "Begin all messages first, wait for them afterwards.",
        HALO_EXCHANGE_LAST,
    ),
}
