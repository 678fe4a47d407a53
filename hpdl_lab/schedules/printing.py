"""A schedule as text, as a grid over time."""

from .evaluation import Evaluation
from .schedule import Schedule


def over_time(schedule: Schedule, times: Evaluation) -> str:
    """Return a grid: a line per rank, a column per unit of time, in which the shortest action is done.

        rank 0  F0 F1 .  .  B0 --        "--": the action before it goes on;  ".": the rank waits

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
