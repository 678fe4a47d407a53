"""ZB-H1: backward in two halves, the second of which fills the bubble."""

from .schedule import Action


def zero_bubble_h1(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What rank `rank` does in the schedule ZB-H1.

    The stage before waits for the gradient of the input (I), nobody for those of the weights (W). Take 1F1B, do I
    where it does backward, and keep the last `rank` Ws back: they fill the slots in which others wait.

        p = 3, m = 4, and F, I and W take equally long

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Args:    rank: of the pipeline, which holds stage `rank`; ranks: p; micro_batches: m.
    Returns: list of Action, in order.
    Steps: 3 m actions; 3 m + p - 1 units where F, I and W take one unit each and m >= p.
    Live micro-batches: min(m, p), on every rank.   Ref: Qi et al. 2023, arXiv:2401.10241.
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
