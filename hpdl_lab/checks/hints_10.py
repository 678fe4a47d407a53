"""Hints of notebook 10: three for each kind of mistake, from a nudge to the lines themselves."""

GPIPE_LAST = (
    'forwards = [Action(rank, "F", i) for i in range(micro_batches)]\n'
    "backwards = ...the same with another letter...\n"
    "return forwards + backwards"
)
GPIPE = {
    "": (
        "What does rank 1 do in the picture, read from left to right? Waiting is not written down.",
        "Two lists, one after the other: a forward of every micro-batch, a backward of every micro-batch.",
        GPIPE_LAST,
    ),
    "stage": (
        "Which stage does rank 2 hold, and how many stages?",
        "The first field of every Action in this row is `rank`.",
        GPIPE_LAST,
    ),
    "lost": (
        "How many actions does the picture have in a row?",
        "range(micro_batches) goes from 0 to micro_batches - 1, and each of them needs F and B.",
        GPIPE_LAST,
    ),
    "forwards first": (
        "Are you inside one loop over micro-batches, or in one after the other?",
        "First a loop that only does forwards, then a loop that only does backwards.",
        GPIPE_LAST,
    ),
    "bubble": (
        "Rank 1 begins backward of micro-batch 3. When does rank 2 send what it needs for that?",
        "All ranks take the backwards in the same order: 0 first everywhere, or m - 1 first everywhere.",
        GPIPE_LAST,
    ),
}

ONE_F_ONE_B_LAST = (
    "warm_up = min(ranks - 1 - rank, micro_batches)\n"
    'row = [Action(rank, "F", i) for i in range(warm_up)]\n'
    "for i in range(micro_batches - warm_up):\n"
    "    row += [...a forward..., ...a backward...]\n"
    "row += [...the backwards that are left...]"
)
ONE_F_ONE_B = {
    "": (
        "Three parts: a few forwards, then pairs of a forward and a backward, then the backwards that are left.",
        "As many are left at the end as were done at the beginning. Each kind takes micro-batches in order.",
        ONE_F_ONE_B_LAST,
    ),
    "deadlock": (
        "Which rank has its first backward first: the first rank or the last one? Who has to send more before it?",
        "Rank r sends p - 1 - r micro-batches ahead before it waits for a gradient; the last rank none.",
        ONE_F_ONE_B_LAST,
    ),
    "bubble": (
        "Count in the picture: how many forwards does each rank do before its first backward?",
        "p - 1 - rank of warm-up, and one more as the first of a pair.",
        ONE_F_ONE_B_LAST,
    ),
    "memory": (
        "What is live on a rank: what it has forwarded and not yet gone back through. When could it have done so?",
        "p - 1 - rank forwards of warm-up: none on the last rank, which has its gradient at once.",
        ONE_F_ONE_B_LAST,
    ),
    "lost": (
        "Count them: m forwards, m backwards. After the last pair: which micro-batches have no backward yet?",
        "After a warm-up of w come m - w pairs, and then the backwards of the last w micro-batches.",
        ONE_F_ONE_B_LAST,
    ),
    "micro-batch": (
        "How many forwards has your row in all, and how many backwards? And what if there are 2 micro-batches and 4 "
        "ranks?",
        "m of each, counted from 0 to m - 1; those of the warm-up count as well. It can have no more forwards than "
        "there are micro-batches: min(ranks - 1 - rank, micro_batches).",
        ONE_F_ONE_B_LAST,
    ),
}

ZERO_BUBBLE_H1_LAST = (
    'row = [Action(rank, "F", i) for i in range(warm_up)]                  # as in 1F1B\n'
    "for i in range(micro_batches):\n"
    "    ...a forward, if one is left...\n"
    '    row.append(Action(rank, "I", i))\n'
    "    if i >= ...:\n"
    '        row.append(Action(rank, "W", i - ...))\n'
    "row += [...the Ws that are left...]"
)
ZERO_BUBBLE_H1 = {
    "": (
        "Begin with 1F1B, an I in the place of every B. Where in the picture do the Ws stand?",
        "After its Is, rank r does a W, but the last r of them it keeps back until the end.",
        ZERO_BUBBLE_H1_LAST,
    ),
    "bubble": (
        "Which rank waits, and at which end? A W waits for nobody: it can be done whenever its I is done.",
        "Rank r starts r units after rank 0: at the end it needs r Ws to do while gradients travel to rank 0.",
        ZERO_BUBBLE_H1_LAST,
    ),
    "memory": (
        "Activations live until W is done. How many are live on rank r: warm-up, the pair, and what is kept back?",
        "p - 1 - rank of warm-up, 1, and `rank` kept back: together p, on every rank.",
        ZERO_BUBBLE_H1_LAST,
    ),
    "lost": (
        "Which Ws have not been done when the loop is over?",
        "The last `rank` of them: range(max(0, micro_batches - rank), micro_batches).",
        ZERO_BUBBLE_H1_LAST,
    ),
}

PARTITION_LAST = (
    "Is there a partition whose parts cost at most `most`? Fill from the left: begin a new part where the next\n"
    "layer would be too much; count the parts. The best `most` is one of the sums of neighbors."
)
PARTITION = {
    "": (
        "Which stage sets the pace of the pipeline? What does one layer more or less cost it?",
        "Try all places for the last cut: the parts before it are the same question with one stage less.",
        PARTITION_LAST,
    ),
    "balance": (
        "Add up the costs of each of your parts. Which is the largest, and can a layer leave it?",
        "Going from left to right and stopping at the average is not enough: what is left over meets in the last part.",
        PARTITION_LAST,
    ),
    "form": (
        "What is returned: sizes, or places?",
        "One whole number per stage: how many layers it has. Together they are len(costs), and none is 0.",
        PARTITION_LAST,
    ),
}

DO_BACKWARD_LAST = (
    "x, y = saved.pop((stage, micro_batch))\n"
    "dy = None if ...last... else comm.recv(torch.empty(y.shape, dtype=y.dtype), ...who...)\n"
    "torch.autograd.backward(y, dy)\n"
    "if not schedule.is_first(stage):\n"
    "    comm.send(x.grad, ...who...)"
)
DO_BACKWARD = {
    "": (
        "Three moves: get the gradient of y, unless y is the loss; go back from y to x; pass on the gradient of x.",
        "torch.autograd.backward(y, dy) fills x.grad and adds to the .grad of every parameter between.",
        DO_BACKWARD_LAST,
    ),
    "deadlock": (
        "Who sends what you wait for, and to whom do you send? Draw both arrows of the docstring for each rank.",
        "The gradient of y comes from schedule.rank_of(schedule.next(stage)), that of x goes to "
        "schedule.rank_of(schedule.previous(stage)). The ends have one arrow less.",
        DO_BACKWARD_LAST,
    ),
    "neighbor": (
        "In GEMS the second replica runs the other way: on which rank is the stage after stage 3?",
        "Ask the schedule, not your rank: schedule.rank_of(schedule.next(stage)).",
        DO_BACKWARD_LAST,
    ),
    "gradient": (
        "What do the stages before need: the gradient of what they sent, which is your x.",
        "torch.autograd.backward(y, dy) with what was received as dy; then x.grad is what you send.",
        DO_BACKWARD_LAST,
    ),
    "scale": (
        "Is the loss divided by the number of micro-batches yet? Who has done it?",
        "It is: do not divide again, and do not multiply; gradients of micro-batches add up to those of the batch.",
        DO_BACKWARD_LAST,
    ),
    "accumulate": (
        "What stands in p.grad when the second micro-batch comes?",
        "The gradients of the first: backward adds to them by itself. Clear nothing.",
        DO_BACKWARD_LAST,
    ),
    "micro-batch": (
        "Which micro-batch does the action name, and which one do you take?",
        "stage, _, micro_batch = action; the key is (stage, micro_batch).",
        DO_BACKWARD_LAST,
    ),
    "memory": (
        "How many micro-batches does `saved` hold when all is done?",
        "saved.pop(key) hands out the entry and forgets it.",
        DO_BACKWARD_LAST,
    ),
}
