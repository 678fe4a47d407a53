"""GEMS: two replicas of the model in opposite directions, so that one's forward follows the other's backward."""

from .schedule import Action


def gems(rank, ranks, micro_batches):
    """What rank `rank` does in GEMS' schedule.

    Rank r holds stage r of one replica and stage p - 1 - r of another (numbered p to 2p - 1), which works on every
    second micro-batch. A rank ends one micro-batch before it begins the next: it never holds more than one.

        p = 3, m = 2     rank 0  F0                   B0 B0 F1 B1 B1
                         rank 1     F0          B0 B0 F1       B1 B1           the second replica's stage 0 is
                         rank 2        F0 B0 B0 F1                   B1 B1     on rank 2

    GEMS MAST has one micro-batch for each replica; GEMS MASTER has more before the replicas add their gradients.

    Args:    rank: of the pipeline; ranks: p; micro_batches: N, which go to the replicas in turn.
    Returns: list of Action, in order.
    Steps: 2 N actions; p tf + N p tb + (N - 1) tf seconds, if tf <= tb.   Live micro-batches: 1.   Weights: twice.
    Ref: Jain et al. 2020, "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System", SC20.
    """
    stages = (rank, ranks + (ranks - 1 - rank))
    return [Action(stages[i % 2], kind, i) for i in range(micro_batches) for kind in "FB"]
