"""1F1B: after a warm-up of forwards, one forward, one backward."""

from .schedule import Action


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What rank `rank` does in the schedule 1F1B.

        p = 3, m = 4                                                     warm-up, then forward and backward in turn

        rank 0  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --    2 forwards
        rank 1  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .     1 forward
        rank 2  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .     none

    It takes as long as GPipe, but a backward comes as early as it can, and frees what its micro-batch held.

    Args:    rank: of the pipeline, which holds stage `rank`; ranks: p; micro_batches: m.
    Returns: list of Action, in order.
    Steps: 2 m actions; (m + p - 1)(tf + tb) seconds.   Live micro-batches: min(m, p - rank).
    Ref: Narayanan et al. 2019, "PipeDream"; Fan et al. 2021, "DAPPLE".
    """
    warm_up = min(ranks - 1 - rank, micro_batches)
    row = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        row += [Action(rank, "F", warm_up + i), Action(rank, "B", i)]
    row += [Action(rank, "B", i) for i in range(micro_batches - warm_up, micro_batches)]
    return row
