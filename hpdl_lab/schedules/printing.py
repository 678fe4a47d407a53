"""A schedule as text: one line per rank, as DualPipe writes its steps, and as a grid over time."""

from typing import Any

LONGEST_BLOCK = 6  # actions that are written once with a number of repetitions before them


def compact(schedule: Any) -> str:
    """One line per rank: "rank 0: 3F 5FB 3B" is three forwards, five times a forward and a backward, three backwards.

    Micro-batches are left out: each kind takes them in turn. Ranks with several stages number them: F0, F1. What
    overlaps stands together: F0&B1.
    """
    lines = []
    for rank, row in enumerate(schedule.rows):
        places = {stage: place for place, stage in enumerate(sorted({action.stage for action in row}))}
        symbols: list[str] = []
        for action in row:
            symbol = f"{action.kind}{places[action.stage]}" if len(places) > 1 else action.kind
            if symbols and symbols[-1].endswith("&"):
                symbols[-1] += symbol
            else:
                symbols.append(symbol + "&" * (action in schedule.paired))
        lines.append(f"rank {rank}: {' '.join(shortest(symbols))}")
    return "\n".join(lines)


def shortest(symbols: list[str]) -> list[str]:
    """`symbols` in as few letters as blocks with repetitions allow: F F F F B F B B B -> ["3F", "2FB", "2B"].

    Found from the end: best[i] is (length, repetitions, the block at i, where the next one begins).
    """
    n = len(symbols)
    best = [(0, 0, "", n)] * (n + 1)
    for i in reversed(range(n)):
        ways = []
        for long in range(1, min(LONGEST_BLOCK, n - i) + 1):
            part, times, j = symbols[i : i + long], 0, i
            block = "".join(part)
            while symbols[j : j + long] == part:
                times, j = times + 1, j + long
                text = block if times == 1 else f"{times}{block}"
                ways.append((best[j][0] + 1 + long + block.count("&"), best[j][1] + times, text, j))
        best[i] = min(ways)
    texts, i = [], 0
    while i < n:
        texts.append(best[i][2])
        i = best[i][3]
    return texts


def over_time(schedule: Any, times: Any) -> str:
    """A grid: a line per rank, a column per unit of time, which is what the shortest action takes.

        rank 0  F0 F1 .  .  B0 --        "--": what stands before it goes on;  ".": the rank waits

    Args:    times: the Evaluation of `schedule`.
    """
    unit = min((end - begin for row in times.rows for _, begin, end in row if end > begin), default=1)
    columns = round(times.makespan / unit)
    several = len({action.stage for row in schedule.rows for action in row}) > schedule.ranks
    cells = []
    for row in times.rows:
        line = ["."] * columns
        for action, begin, end in row:
            first, last = round(begin / unit), round(end / unit)
            line[first:last] = ["--"] * (last - first)
            if first < last:
                line[first] = str(action) if several else f"{action.kind}{action.micro_batch}"
        cells.append(line)
    wide = max((len(text) for line in cells for text in line), default=1)
    name = len(f"rank {schedule.ranks - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{name}}  {' '.join(f'{text:<{wide}}' for text in line)}".rstrip()
        for rank, line in enumerate(cells)
    )
