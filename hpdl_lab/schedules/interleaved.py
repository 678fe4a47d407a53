"""Interleaved 1F1B: several short stages per rank, and a bubble as many times shorter."""

from .schedule import Action


def interleaved(rank, ranks, micro_batches, chunks):
    """What rank `rank` does in the schedule interleaved 1F1B.

    Rank r holds the stages r, p + r, 2p + r, ...: a micro-batch goes round all ranks v times. Forwards come p
    micro-batches at a time, first through chunk 0, then through chunk 1, ...; backwards through the last chunk first:

        p = 2, v = 2, m = 4     forwards of rank 0   0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
                                backwards            2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3

    The first backward of rank p - 1 comes after the v p - p + 1st forward; every rank before it is 2 forwards further
    ahead: one that it does earlier, and one that travels.

    Args:    rank: of the pipeline; ranks: p; micro_batches: m, a multiple of p; chunks: v, stages per rank.
    Returns: list of Action, in order.
    Steps: 2 v m actions; m (tf + tb) + (p - 1)(tf + tb)/v seconds.   Ref: Narayanan et al. 2021, arXiv:2104.04473.
    """
    total = micro_batches * chunks
    warm_up = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), total)

    def nth(kind, i):
        """The ith forward, or the ith backward, of this rank."""
        lap, place = divmod(i, ranks * chunks)  # a lap: p micro-batches through every chunk
        chunk, micro_batch = divmod(place, ranks)
        if kind == "B":
            chunk = chunks - 1 - chunk
        return Action(chunk * ranks + rank, kind, lap * ranks + micro_batch)

    row = [nth("F", i) for i in range(warm_up)]
    for i in range(total - warm_up):
        row += [nth("F", warm_up + i), nth("B", i)]
    row += [nth("B", i) for i in range(total - warm_up, total)]
    return row
