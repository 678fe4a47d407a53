"""Interleaved 1F1B: several short stages per rank, and a bubble as many times shorter."""

from .schedule import Action


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    """What rank `rank` does in the schedule interleaved 1F1B.

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
