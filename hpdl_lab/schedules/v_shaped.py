"""Schedules that are folded: a rank holds a stage near each end of a model, or of two, and alternates between them.

    ZB-V and DualPipe-V: one model of 2 p stages        DualPipe: two replicas of p stages, in opposite directions

        rank 0   0 |   ^ 7                                  rank 0   0 |   ^ 7
        rank 1   1 |   | 6                                  rank 1   1 |   | 6
        rank 2   2 |   | 5                                  rank 2   2 |   | 5       4, 5, 6 and 7: stages 0 to 3
        rank 3   3 +---> 4                                  rank 3   3 v   | 4       of the second replica

A row is written as DeepSeek writes it: in steps that are repeated, with 0 for the stage that comes first in the table
above and 1 for the other one, and "F0&B1" if the forward of one micro-batch overlaps the backward of another.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from .schedule import Action, Pair

Steps = Iterable[tuple[int, str]]


def zero_bubble_v(rank: int, ranks: int, micro_batches: int) -> list[Action | Pair]:
    """List what rank `rank` does in the schedule ZB-V.

    Rank r holds the stages r and 2p - 1 - r. So rank 0 has the first stage and the last, whose backward waits for no
    message; W fills the rest of the bubble. No rank waits between its first action and its last:

        p = 2, m = 3, and F, I and W take equally long; rank 0 holds stages 0 and 3

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:    rank: of the pipeline; ranks: p; micro_batches: m; 2p - 1 are needed to fill the bubble.
    Returns: list of Action, in order.
    Steps: 6 m actions; 3 m + (p - 1)/2 units if a rank takes one unit each for F, I and W, and m >= 2p - 1.
    Live micro-batches: p at most, as 2p halves.   Ref: Qi et al. 2023, arXiv:2401.10241; 2024, arXiv:2405.15362.
    """
    left, m = ranks - rank, max(micro_batches, 2 * ranks - 1)
    steps = [(2 * left - 1, "F0"), (rank, "F1 F0"), (left, "F1 I1 W1"), (m - ranks, "F0 I0 W0 F1 I1 W1")]
    steps += [(rank, "I0 I1"), (left, "I0 W0"), (rank, "W1"), (rank, "W0")]
    return _laid_out(steps, (rank, 2 * ranks - 1 - rank), (range(micro_batches),) * 2)


def dualpipe(rank: int, ranks: int, micro_batches: int) -> list[Action | Pair]:
    """List what rank `rank` does in the schedule DualPipe.

    Two replicas lie on the ranks in opposite directions, as in GEMS: rank r holds stage r of one and p - 1 - r of the
    other (numbered p to 2p - 1), which works on every second micro-batch. So micro-batches come from both ends, and a
    rank can pair the forward of one with the backward of another: while one communicates, the other one computes.

        p = 4, m = 8, and F, I and W take equally long; from the main steps on, F and B that are neighbors are a pair

        rank 0  0F0 0F2 0F4 7F1 7I1 7W1 7F3 0F6 7B3 --  .   7F5 0B0 --  7B5 --  .   7F7 0B2 --  7B7 --  0I4 0W4 0I6 0W6
        rank 1  .   1F0 6F1 1F2 6F3 1F4 6B1 --  6F5 1B0 --  1F6 6B3 --  6F7 1B2 --  6B5 --  1B4 --  .   6I7 1I6 6W7 1W6
        rank 2  .   5F1 2F0 5F3 2F2 5F5 2B0 --  2F4 5B1 --  5F7 2B2 --  2F6 5B3 --  2B4 --  5B5 --  .   2I6 5I7 2W6 5W7
        rank 3  4F1 4F3 4F5 3F0 3I0 3W0 3F2 4F7 3B2 --  .   3F4 4B1 --  3B4 --  .   3F6 4B3 --  3B6 --  4I5 4W5 4I7 4W7

    Args:    rank: of the pipeline; ranks: p, even; micro_batches: m, which go to the replicas in turn.
    Returns: list of Action, and of Pair if two of them overlap, in order.
    Steps: 3 m + (p/2 - 1)(F&B + B - 3 W) units, if a rank takes 1 for F, 2 for B, 1 for W, and m >= 2p.
    Live micro-batches: p + 1.   Weights: twice.   Ref: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1.
    """
    half = min(rank, ranks - 1 - rank)
    stages, each = [rank, 2 * ranks - 1 - rank], [range(0, micro_batches, 2), range(1, micro_batches, 2)]
    steps = _eight_steps(half, ranks // 2, len(each[0]))
    nearer = 1 if rank == half else -1  # first the replica that begins nearer to this rank
    return _laid_out(steps, stages[::nearer], each[::nearer])


def dualpipe_v(rank: int, ranks: int, micro_batches: int) -> list[Action | Pair]:
    """List what rank `rank` does in the schedule DualPipe-V.

    It does on p ranks what DualPipe does on the first p of 2p: in place of a second replica, whose micro-batches come
    from the other end, there is the second half of the model, into which micro-batches turn. Weights are held once.

        p = 2, m = 4; rank 0 holds stages 0 and 3

        rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --  .   3F2 0B0 --  3B2 --  .   3F3 0B1 --  3B3 --  0I2 0W2 0I3 0W3
        rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 --  2F2 1B0 --  1F3 2B1 --  2F3 1B1 --  2B2 --  1B2 --  .   2I3 1I3 2W3 1W3

    Args:    rank: of the pipeline; ranks: p; micro_batches: m.
    Returns: list of Action, and of Pair if two of them overlap, in order.
    Steps: 3 m + (p - 1)(F&B + B - 3 W)/2 units, if a rank takes 1 for F, 2 for B, 1 for W, and m >= 2p.
    Live micro-batches: p + 1/2, as 2p + 1 halves.   Ref: github.com/deepseek-ai/DualPipe.
    """
    steps = _eight_steps(rank, ranks, micro_batches)
    return _laid_out(steps, (rank, 2 * ranks - 1 - rank), (range(micro_batches),) * 2)


def _eight_steps(rank: int, ranks: int, micro_batches: int) -> Steps:
    """Return DualPipe's steps on a rank of one half of its ranks, for as many micro-batches as come from one side."""
    away, main = ranks - 1 - rank, max(micro_batches, 2 * ranks) - 2 * ranks + rank + 1
    half, odd = divmod(rank + 1, 2)
    first = 0 if away else 1  # at the middle the first two are not a pair: B1 need not wait for F0
    return [
        (2 * away, "F0"),
        (rank + 1, "F0 F1"),
        (away, "I1 W F1"),
        (first, "F0 B1 F1&B0"),
        (main - first, "F0&B1 F1&B0"),
        (away, "B1 F1&B0"),
        (half, "B1 B0"),
        (odd, "B1 I0"),
        (half, "I1 I0"),
        (away, "W I0"),
        (rank + 1, "W"),
    ]


def _laid_out(steps: Steps, stages: Sequence[int], micro_batches: Sequence[range]) -> list[Action | Pair]:
    """Return the actions of `steps`, [(how often, "F0 F1&B0")]; each kind takes the micro-batches of its stage in turn.

    "W1" is the oldest weight gradient of stage 1 that is left, "W" the oldest of any stage. An action without a further
    micro-batch is left out.
    """
    taken: Counter[tuple[int, str]] = Counter()
    later: list[tuple[int, int]] = []  # (0 or 1, index of its micro-batch): input gradients without their W

    def action(symbol: str) -> list[Action]:
        kind, local = symbol[0], [int(stage) for stage in symbol[1:]] or [0, 1]
        if kind == "W":
            later.remove(found := next(pair for pair in later if pair[0] in local))
            stage, i = found
        else:
            stage, direction = local[0], "F" if kind == "F" else "B"
            i, taken[stage, direction] = taken[stage, direction], taken[stage, direction] + 1
            later.extend([(stage, i)] * (kind == "I"))
        return [Action(stages[stage], kind, n) for n in micro_batches[stage][i : i + 1]]

    row: list[Action | Pair] = []
    for times, text in steps:
        for word in text.split() * times:
            found = [a for symbol in word.split("&") for a in action(symbol)]
            row += [Pair(*found)] if len(found) == 2 else found
    return row
