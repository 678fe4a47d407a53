"""A pipeline schedule over time, also as planned and as measured, one under the other.

A rank has a row and an action a bar; a row is hatched while its rank waits. What a rank waits is counted next to its
row; so are the micro-batches whose activations it holds at most. Ranks with several stages have a lane for each.
Shades tell micro-batches apart, numbers name them if there is room.
"""

from collections import defaultdict
from collections.abc import Sequence

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from ..schedules import Action, Evaluation, Schedule, TimedAction
from ..trace import number_text, seconds_text
from ..units import counted
from .collective import write_at
from .colors import BLUE, FAINT, GRAY, GREEN, INK, ORANGE, PURPLE
from .style import Axes, Figure, Look, bare, footnote, heading, legend, rows_only

COLORS = {"F": BLUE, "B": GREEN, "I": ORANGE, "W": PURPLE}
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
SHADES = (0.62, 0.42, 0.2, 0.0)  # how much white is in the color of micro-batches 0, 1, 2, 3, and so on again

TOP, FOOT = 0.86, 0.74  # inches: above and below the rows
ROW, LANE = 0.34, 0.24  # inches of a rank with one stage; of each stage if a rank has several
LEFT, MIDDLE, RIGHT = 0.07, 0.775, 0.985  # shares of the width: rows begin and end, what is next to them ends
DIGIT = 0.052  # inches of a digit of the numbers in bars
TICKS = 10  # of the time axis, at most


def height(schedule: Schedule) -> float:
    """Return inches of a figure for `schedule`."""
    return TOP + FOOT + schedule.ranks * _row_height(schedule)


def _row_height(schedule: Schedule) -> float:
    lanes = schedule.chunks * schedule.replicas
    return ROW if lanes == 1 else LANE * lanes


def draw(figure: Figure, schedule: Schedule, times: Evaluation, title: str = "", now: float | None = None) -> None:
    """Fill `figure`, `height(schedule)` inches tall.

    Args:    times: the Evaluation of `schedule`, calculated or measured; title: its name, if not said.
             now: only what has begun until then is drawn; None: all.
    """
    tall = figure.get_size_inches()[1]
    box = {"bottom": FOOT / tall, "top": 1 - TOP / tall}
    ax = figure.add_axes((LEFT, box["bottom"], MIDDLE - LEFT, box["top"] - box["bottom"]))
    held = figure.add_axes((MIDDLE + 0.075, box["bottom"], RIGHT - MIDDLE - 0.1, box["top"] - box["bottom"]))
    axis(ax, schedule, times.makespan)
    bars(ax, schedule, times, now)
    waits(ax, times, now)
    activations(held, times, now)
    heading(figure, title or f"{schedule.name}: {of_schedule(schedule)}")
    figure.text(0.012, 1 - 0.36 / tall, _subtitle(times, now), va="top")
    kinds_of(figure, schedule, tall)
    footnote(figure, _footnote(schedule))


def of_schedule(schedule: Schedule) -> str:
    """Return the numbers of a schedule in words."""
    return f"{counted(schedule.ranks, 'rank')}, {counted(schedule.micro_batches, 'micro-batch', 'micro-batches')}"


def _subtitle(times: Evaluation, now: float | None) -> str:
    """Return the line below the title."""
    whole = number_text(float(times.makespan))
    if now is None:
        return f"{whole} units of time; ranks wait for {times.bubble:.1%}: the bubble"
    return (
        f"at {number_text(float(now))} of {whole} units of time; in the end ranks will have waited {times.bubble:.1%}"
    )


def _footnote(schedule: Schedule) -> str:
    if schedule.replicas > 1:
        return f"A rank has a lane for its stage of each of {schedule.replicas} replicas. Hatched: it waits."
    if schedule.chunks > 1:
        n = schedule.chunks
        return (
            f"A rank has a lane for each of its {n} stages, which are 1/{n} as long: live counts activations of these."
        )
    return "A number is a micro-batch, where there is room. Hatched: the rank waits."


def axis(ax: Axes, schedule: Schedule, makespan: float) -> None:
    """Make rows of ranks, rank 0 on top, over time."""
    ax.set_xlim(0, makespan or 1)
    rows_only(ax, schedule.ranks, [f"rank {r}" for r in range(schedule.ranks)])
    ax.locator_params(axis="x", nbins=TICKS)
    ax.set_xlabel("time")


def bars(ax: Axes, schedule: Schedule, times: Evaluation, now: float | None = None) -> None:
    """Draw a bar for every action that has begun until `now`, in the row of its rank and the lane of its stage."""
    width = ax.get_window_extent().width / ax.figure.dpi  # inches
    scale = width / (times.makespan or 1)
    corners, faces = [], []
    numbers: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)  # by (text, color)
    for rank, row in enumerate(times.rows):
        lanes = {stage: lane for lane, stage in enumerate(schedule.stages_of(rank))}
        for action, begin, end in row:
            if now is not None and begin >= now:
                continue
            end = end if now is None else min(end, now)
            top, tall = _lane(rank, lanes[action.stage], len(lanes))
            corners.append([(begin, top), (end, top), (end, top + tall), (begin, top + tall)])
            faces.append(shade(action))
            text = str(action.micro_batch)
            if (end - begin) * scale >= DIGIT * len(text) + 0.012:
                numbers[text, ink(faces[-1])].append((float(begin + end) / 2, top + tall / 2))
    ax.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=0.6, zorder=2))
    for (text, color), points in numbers.items():
        write_at(ax, text, points, 6, color)


def _lane(rank: int, lane: int, lanes: int) -> tuple[float, float]:
    """Return (top, height) of the bars of a stage: `lane` of `lanes` in the row of its rank, which is 1 tall."""
    tall = 0.88 / lanes
    return rank - 0.44 + lane * tall, tall if lanes == 1 else tall * 0.92


def shade(action: Action) -> tuple[float, ...]:
    """Return (r, g, b): the color of the action's kind, with as much white as its micro-batch has."""
    white = SHADES[action.micro_batch % len(SHADES)]
    return tuple(white + (1 - white) * part for part in to_rgb(COLORS[action.kind]))


def ink(face: tuple[float, ...]) -> str:
    """Return the color in which a number on `face` can be read."""
    red, green, blue = face
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _gaps(row: Sequence[TimedAction], until: float) -> list[tuple[float, float]]:
    """Return [(begin, end)] of what a rank waits from 0 to `until`."""
    begins, ends = [begin for _, begin, _ in row], [end for _, _, end in row]
    between = zip([0, *ends], [*begins, until], strict=True)
    return [(begin, min(end, until)) for begin, end in between if begin < min(end, until)]


def waits(ax: Axes, times: Evaluation, now: float | None = None) -> None:
    """Hatch each row while its rank waits."""
    until = times.makespan if now is None else now
    corners = []
    for rank, row in enumerate(times.rows):
        for begin, end in _gaps(row, until):
            corners.append([(begin, rank - 0.44), (end, rank - 0.44), (end, rank + 0.44), (begin, rank + 0.44)])
    look: Look = {
        "facecolors": "#F7F7F7",
        "edgecolors": "#C9C9C9",
        "linewidths": 0,
        "hatch": "//////",
        "zorder": 1,
    }
    ax.add_collection(PolyCollection(corners, **look))
    if now is not None:
        ax.axvline(now, color=INK, linewidth=1.2, zorder=5)


def activations(ax: Axes, times: Evaluation, now: float | None = None) -> None:
    """Draw next to each row how many micro-batches' activations are held at most; a darker part for `now`."""
    ranks, most = len(times.rows), max(times.peak, default=0)
    ax.set_xlim(0, (most or 1) * 1.3)
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_xticks([])
    ax.set_yticks([])
    bare(ax)
    ax.barh(range(ranks), times.peak, height=0.55, color=FAINT if now is not None else "#B9C7D6")
    if now is not None:
        ax.barh(range(ranks), [_held_at(counts, now) for counts in times.live], height=0.55, color="#6F8FAF")
    for rank, peak in enumerate(times.peak):
        count = peak if now is None else _held_at(times.live[rank], now)
        ax.text(peak + most * 0.06, rank, str(count), fontsize=8.5, va="center", color=INK)
        share = _waited(times, rank, times.makespan if now is None else now)
        ax.text(
            -0.05,
            rank,
            f"{share:.0%}",
            fontsize=8.5,
            va="center",
            ha="right",
            color=GRAY,
            transform=ax.get_yaxis_transform(),
        )
    head = "live" if now is not None else "live at most"
    ax.text(0, 1.02, head, fontsize=8.5, transform=ax.transAxes, va="bottom")
    ax.text(-0.05, 1.02, "waits", fontsize=8.5, transform=ax.transAxes, va="bottom", ha="right", color=GRAY)


def _waited(times: Evaluation, rank: int, until: float) -> float:
    """Return the share of the time until `until` in which `rank` waits."""
    return sum(end - begin for begin, end in _gaps(times.rows[rank], until)) / until if until else 0


def _held_at(counts: Sequence[tuple[float, int]], now: float) -> int:
    """Return how many are live at `now`, from ((time, count), ...)."""
    return next((count for time, count in reversed(counts) if time <= now), 0)


def kinds_of(figure: Figure, schedule: Schedule, tall: float) -> None:
    """Draw the colors of the kinds of actions that there are, above the rows."""
    kinds = {action.kind for row in schedule.rows for action in row}
    legend(figure, [(color, NAMES[kind]) for kind, color in COLORS.items() if kind in kinds], LEFT, 1 - 0.68 / tall)


# -- planned and measured ---------------------------------------------------------------------------------------------

RUN_TOP, BETWEEN, RUN_FOOT = 1.02, 0.62, 0.66  # inches: above, between and below the two panels


def run_height(schedule: Schedule) -> float:
    """Return inches of a figure with both panels."""
    return RUN_TOP + BETWEEN + RUN_FOOT + 2 * schedule.ranks * _row_height(schedule)


def draw_run(
    figure: Figure,
    schedule: Schedule,
    planned: Evaluation,
    measured: Evaluation,
    guess: dict[str, float] | None = None,
    title: str = "",
    foot: str = "",
) -> None:
    """Fill `figure`, `run_height(schedule)` inches tall.

    Args:    planned, measured: schedules.Evaluation in seconds; measured: what there is so far, may be empty.
             guess: what the attendee expects, or None: {"makespan": s, "live": micro-batches of rank 0, or nothing}.
    """
    tall = figure.get_size_inches()[1]
    panel = schedule.ranks * _row_height(schedule) / tall
    expected, live = (guess["makespan"], guess.get("live")) if guess else (0.0, None)
    end = max(planned.makespan, measured.makespan, expected)
    unit, scale = ("s", 1.0) if end >= 10 else ("ms", 1e3)
    bottoms = (1 - RUN_TOP / tall - panel, RUN_FOOT / tall)
    for times, bottom, name in zip((planned, measured), bottoms, ("planned", "measured"), strict=True):
        times = _in_unit(times, scale)
        ax = figure.add_axes((LEFT, bottom, MIDDLE - LEFT, panel))
        held = figure.add_axes((MIDDLE + 0.075, bottom, RIGHT - MIDDLE - 0.1, panel))
        axis(ax, schedule, 1.01 * end * scale)
        bars(ax, schedule, times)
        waits(ax, times)
        activations(held, times)
        ax.set_title(name, fontsize=9.5, pad=3)
        ax.set_title(_outcome(times, unit), loc="right", fontsize=8.5, fontweight="normal", pad=3)
        ax.set_xlabel(f"time, {unit}" if name == "measured" else "")
        ax.axvline(planned.makespan * scale, color=INK, linewidth=1, zorder=5)
        if guess:
            ax.axvline(expected * scale, color=BLUE, linewidth=1.6, linestyle=(0, (4, 2)), zorder=6)
        if live is not None:
            held.plot([live, live], [-0.4, 0.4], color=BLUE, linewidth=2.4, clip_on=False)
    heading(figure, title or f"{schedule.name}: {of_schedule(schedule)}")
    text = "Hatched: ranks wait;  black line: planned end"
    text += f";  blue: your guess, {seconds_text(expected)}" if guess else ""
    text += f" and {live:g} live on rank 0" if live is not None else ""
    figure.text(0.012, 1 - 0.36 / tall, text, va="top")
    kinds_of(figure, schedule, tall)
    footnote(figure, foot)


def _outcome(times: Evaluation, unit: str) -> str:
    """Return the text at the right above a panel."""
    if not times.makespan:
        return "waiting for the first action"
    return f"{number_text(float(times.makespan))} {unit}, bubble {times.bubble:.1%}"


def _in_unit(times: Evaluation, scale: float) -> Evaluation:
    """Return an Evaluation with all times multiplied by `scale`."""
    return times._replace(
        rows=tuple(tuple(t._replace(begin=t.begin * scale, end=t.end * scale) for t in row) for row in times.rows),
        makespan=times.makespan * scale,
        live=tuple(tuple((time * scale, count) for time, count in counts) for counts in times.live),
    )
