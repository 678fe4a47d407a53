"""GPipe: all forwards, then all backwards."""

from .schedule import Action


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """What rank `rank` does in GPipe's schedule.

        p = 3, m = 4, backward takes twice as long as forward

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
        rank 1  .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
        rank 2  .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .

    Args:    rank: of the pipeline, which holds stage `rank`; ranks: p; micro_batches: m.
    Returns: list of Action, in order.
    Steps: 2 m actions; (m + p - 1)(tf + tb) seconds.   Live micro-batches: m.   Ref: Huang et al. 2019.
    """
    forwards = [Action(rank, "F", i) for i in range(micro_batches)]
    backwards = [Action(rank, "B", i) for i in range(micro_batches)]
    return forwards + backwards
