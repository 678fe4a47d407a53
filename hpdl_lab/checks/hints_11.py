"""Hints of notebook 11: three for each kind of mistake, from a nudge to the lines themselves."""

COORDINATES_LAST = (
    "for size in reversed(sizes):\n"
    "    rank, coordinate = divmod(rank, size)\n"
    "    ...collect the coordinates; the last axis comes first, so turn them round at the end..."
)
COORDINATES = {
    "": (
        "Write 17 as hours and minutes of a clock whose hours have 5 minutes. Which digit do you get first?",
        "rank % size is the coordinate along the last axis; rank // size goes on to the axis before it.",
        COORDINATES_LAST,
    ),
    "order": (
        "Ranks 0 and 1 are neighbors. Along which axis do they differ?",
        "Begin with the last size, and turn the result round.",
        COORDINATES_LAST,
    ),
    "range": (
        "Which size do you take the remainder of, and which do you divide by?",
        "Remainder and quotient belong to the same size: divmod(rank, size).",
        COORDINATES_LAST,
    ),
}

GROUPS_LAST = (
    "found = {}\n"
    "for rank in range(math.prod(sizes)):\n"
    "    place = coordinates(rank, sizes)\n"
    "    others = ...place without the coordinate along axis...\n"
    "    found.setdefault(others, []).append(rank)\n"
    "return list(found.values())"
)
GROUPS = {
    "": (
        "Two ranks are in one group if they stand at the same place, but for one axis. What have they in common?",
        "place[:axis] + place[axis + 1:] is what they have in common: collect ranks by it, in a dict.",
        GROUPS_LAST,
    ),
    "axis": (
        "Write down the coordinates of two ranks of one of your groups. In what do they differ?",
        "Leave out the coordinate along `axis`; all the others must be equal.",
        GROUPS_LAST,
    ),
    "twice": (
        "For which ranks do you begin a group, and which are in one already?",
        "With a dict from what they have in common to the list of ranks, nobody comes twice.",
        GROUPS_LAST,
    ),
}

REDUCE_GRADIENTS_LAST = (
    "for placed in parameters:\n"
    "    p = placed.parameter\n"
    "    grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()\n"
    "    if placed.over_tp:\n"
    '        mesh["tp"].all_reduce(grad)\n'
    "    ...and over the stages that share it, and over dp...\n"
    "    p.grad = grad"
)
REDUCE_GRADIENTS = {
    "": (
        "For each parameter ask: which ranks hold the very same numbers, and has each of them a part of the gradient?",
        'All of them over mesh["dp"]; some over mesh["tp"], some over placed.shared: three ifs, not one of three.',
        REDUCE_GRADIENTS_LAST,
    ),
    "axis": (
        "The message says over which axes you added, and over which it should be. Which field of Placed decides that?",
        "placed.over_tp decides about tp, placed.shared about stages; dp is always added.",
        REDUCE_GRADIENTS_LAST,
    ),
    "mean": (
        "What has the loss of each replica been divided by?",
        "By the whole batch, not by the replica's share of it: nothing is left to divide.",
        REDUCE_GRADIENTS_LAST,
    ),
    "mean of parts": (
        "What does each rank of this axis know of the gradient: all of it, or what its own positions or layers say?",
        "Nobody has counted anything twice: there is nothing to divide, over none of the axes.",
        REDUCE_GRADIENTS_LAST,
    ),
    "deadlock": (
        "Which ranks call all_reduce, and which of the others of their group do not?",
        "Zeros in the place of a gradient that is None; placed.shared, not mesh['pp'], for tied weights.",
        REDUCE_GRADIENTS_LAST,
    ),
}

BEST_GRID_LAST = (
    "for every dp, pp, tp with dp * pp * tp == ranks:\n"
    "    try:\n"
    "        told = predict(dp, pp, tp)\n"
    "    except ValueError:\n"
    "        continue\n"
    "    ...keep it if told.nbytes <= limit and (told.seconds, told.nbytes) is less than the best so far..."
)
BEST_GRID = {
    "": (
        "Three loops, or two: if tp and pp are chosen, what is dp?",
        "Ask predict about every grid, leave out those that raise ValueError or do not fit, keep the fastest.",
        BEST_GRID_LAST,
    ),
    "limit": (
        "Which comes first, to fit or to be fast?",
        "Only grids with nbytes <= limit take part; of these the fastest.",
        BEST_GRID_LAST,
    ),
    "impossible": (
        "12 heads cannot be shared by 8 ranks. How does predict tell you?",
        "try: told = predict(dp, pp, tp)   except ValueError: continue",
        BEST_GRID_LAST,
    ),
    "refuse": (
        "What would you like to read if nothing fits?",
        "Remember the smallest nbytes of all, and raise ValueError with it and the limit.",
        BEST_GRID_LAST,
    ),
}
