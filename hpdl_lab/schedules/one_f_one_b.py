"""1F1B: after a warm-up of forwards, one forward, one backward."""

from .schedule import Action


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """List what rank `rank` does in the schedule 1F1B.

        p = 3, m = 4                                                        warm-up

        rank 0  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --    2 forwards
        rank 1  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .     1 forward
        rank 2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .     none

    First come forwards only, the warm-up; then one forward and one backward in turn.
    1F1B takes as long as GPipe. But each backward comes as early as it can, and frees
    its micro-batch's activations.

    Args:    rank: this rank, which holds stage `rank`; ranks: p; micro_batches: m.
    Returns: list of Action, in order.
    Steps: 2 m actions; (m + p - 1)(tf + tb) seconds, if F takes tf and B takes tb.
    Live micro-batches, with activations in memory: min(m, p - rank).
    Ref: Narayanan et al. 2019, "PipeDream"; Fan et al. 2021, "DAPPLE".
    """
    warm_up = min(ranks - 1 - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "F", warm_up + i), Action(rank, "B", i)]
    row += [Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]
    return row


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """Return what rank `rank` does in the schedule interleaved 1F1B.

    Rank r holds the stages r, p + r, 2p + r, ...: a micro-batch goes round all ranks v times. Forwards come p
    micro-batches at a time, first through chunk 0, then through chunk 1, ...; backwards through the last chunk first:

        p = 2, v = 2, m = 2; rank 0 holds stages 0 and 2

        rank 0  0F0 0F1 2F0 2F1 .   .   2B0 --  .   2B1 --  0B0 --  0B1 --
        rank 1  .   1F0 1F1 3F0 3B0 --  3F1 3B1 --  1B0 --  1B1 --  .   .

    Before its first backward the last rank has done (v - 1) p forwards and one; every rank before it 2 more: one
    while forwards travel there, one while the first backward travels back.

    Args:    rank: of the pipeline; ranks: p; micro_batches: m, a multiple of p; chunks: v, stages per rank.
    Returns: list of Action, in order.
    Steps: 2 v m actions; m (tf + tb) + (p - 1)(tf + tb)/v seconds.   Ref: Narayanan et al. 2021, arXiv:2104.04473.
    """
    total = micro_batches * chunks
    warm_up = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), total)

    def nth(kind: str, i: int) -> Action:
        """Return the ith forward, or the ith backward, of this rank."""
        lap, position = divmod(i, ranks * chunks)  # a lap: p micro-batches through every chunk
        chunk, micro_batch = divmod(position, ranks)
        if kind == "B":
            chunk = chunks - 1 - chunk
        return Action(chunk * ranks + rank, kind, lap * ranks + micro_batch)

    row = [nth("F", i) for i in range(warm_up)]
    for i in range(total - warm_up):
        row += [nth("F", warm_up + i), nth("B", i)]
    row += [nth("B", i) for i in range(total - warm_up, total)]
    return row


def zero_bubble_h1(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """List what rank `rank` does in the schedule ZB-H1.

    I computes the gradient of a stage's input, and the previous stage waits for it.
    W computes the gradients of the weights. No stage waits for W, so a rank does W in
    slots in which it would otherwise wait.

        p = 3, m = 4, and F, I and W take equally long

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Args:    rank: this rank, which holds stage `rank`; ranks: p; micro_batches: m.
    Returns: list of Action, in order.
    Steps: 3 m actions; 3 m + p - 1 units if F, I and W take one unit each and m >= p.
    Live micro-batches: min(m, p), on every rank.
    Ref: Qi et al. 2023, arXiv:2401.10241.
    """
    warm_up = min(ranks - 1 - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches):
        if warm_up + i < micro_batches:
            row.append(Action(rank, "F", warm_up + i))
        row.append(Action(rank, "I", i))
        if i >= rank:
            row.append(Action(rank, "W", i - rank))
    row += [Action(rank, "W", i) for i in range(max(0, micro_batches - rank), micro_batches)]
    return row
