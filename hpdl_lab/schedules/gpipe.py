"""GPipe: all forwards, then all backwards."""

from .schedule import Action


def gpipe(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """List what rank `rank` does in GPipe's schedule.

        p = 3, m = 4, backward takes twice as long as forward

        rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
        rank 1  .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
        rank 2  .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .

    Args:    rank: this rank, which holds stage `rank`; ranks: p; micro_batches: m.
    Returns: list of Action, in order.
    Steps: 2 m actions; (m + p - 1)(tf + tb) seconds, if F takes tf and B takes tb.
    Live micro-batches, with activations in memory: m.   Ref: Huang et al. 2019.
    """
    forwards = [Action(rank, "F", i) for i in range(micro_batches)]
    backwards = [Action(rank, "B", i) for i in range(micro_batches)]
    return forwards + backwards


def gems(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Return what rank `rank` does in GEMS' schedule.

    Rank r holds stage r of one replica and stage p - 1 - r of another (numbered p to 2p - 1), which works on every
    second micro-batch. A rank ends one micro-batch before it begins the next: it never holds more than one.

        p = 3, N = 2; stages 3, 4 and 5 are the second replica's

        rank 0  0F0 .   .   .   .   .   .   0B0 --  5F1 5B1 --  .   .   .   .
        rank 1  .   1F0 .   .   .   1B0 --  4F1 .   .   .   .   4B1 --  .   .
        rank 2  .   .   2F0 2B0 --  3F1 .   .   .   .   .   .   .   .   3B1 --

    GEMS MAST has one micro-batch for each replica; GEMS MASTER has more before the replicas add their gradients.

    Args:    rank: of the pipeline; ranks: p; micro_batches: N, which go to the replicas in turn.
    Returns: list of Action, in order.
    Steps: 2 N actions; p tf + N p tb + (N - 1) tf seconds, if tf <= tb.   Live micro-batches: 1.   Weights: twice.
    Ref: Jain et al. 2020, "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System", SC20.
    """
    stages = (rank, ranks + (ranks - 1 - rank))
    return [Action(stages[i % 2], kind, i) for i in range(micro_batches) for kind in "FB"]
