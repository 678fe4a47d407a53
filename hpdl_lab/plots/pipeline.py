"""A pipeline as planned and as measured, one under the other on one axis of time, with the attendee's guess."""

from ..trace import number_text, seconds_text
from . import schedule as rows
from .style import BLUE, INK, heading, note

TOP, BETWEEN, FOOT = 1.02, 0.62, 0.66  # inches: above, between and below the two panels
LEFT, MIDDLE, RIGHT = 0.07, 0.775, 0.985


def height(schedule):
    """Inches of a figure for `schedule`."""
    return TOP + BETWEEN + FOOT + 2 * schedule.ranks * rows.row_height(schedule)


def draw(figure, schedule, planned, measured, guess=None, title="", foot=""):
    """Fill `figure`, `height(schedule)` inches tall.

    Args:    planned, measured: schedules.Evaluation in seconds; measured: what there is so far, may be empty.
             guess: the makespan in s that the attendee expects, or None.
    """
    tall = figure.get_size_inches()[1]
    panel = schedule.ranks * rows.row_height(schedule) / tall
    end = max(planned.makespan, measured.makespan, guess or 0.0)
    unit, scale = ("s", 1.0) if end >= 10 else ("ms", 1e3)
    bottoms = (1 - TOP / tall - panel, FOOT / tall)
    for times, bottom, name in zip((planned, measured), bottoms, ("planned", "measured"), strict=True):
        times = in_unit(times, scale)
        ax = figure.add_axes((LEFT, bottom, MIDDLE - LEFT, panel))
        beside = figure.add_axes((MIDDLE + 0.075, bottom, RIGHT - MIDDLE - 0.1, panel))
        rows.axis(ax, schedule, 1.01 * end * scale)
        rows.bars(ax, schedule, times)
        rows.waits(ax, times)
        rows.activations(beside, times)
        ax.set_title(name, fontsize=9.5, pad=3)
        ax.set_title(told(times, unit), loc="right", fontsize=8.5, fontweight="normal", pad=3)
        ax.set_xlabel(f"time, {unit}" if name == "measured" else "")
        ax.axvline(planned.makespan * scale, color=INK, linewidth=1, zorder=5)
        if guess:
            ax.axvline(guess * scale, color=BLUE, linewidth=1.6, linestyle=(0, (4, 2)), zorder=6)
    heading(figure, title or f"{schedule.name}: {rows.of_schedule(schedule)}")
    subtitle = "black line: planned end" + (
        f";  blue: the end that you expected, {seconds_text(guess)}" if guess else ""
    )
    figure.text(0.012, 1 - 0.36 / tall, f"Hatched: ranks wait;  {subtitle}", va="top")
    rows.legend(figure, schedule, tall)
    note(figure, foot)


def told(times, unit):
    """What stands at the right above a panel."""
    if not times.makespan:
        return "waiting for the first action"
    return f"{number_text(float(times.makespan))} {unit}, bubble {times.bubble:.1%}"


def in_unit(times, scale):
    """An Evaluation with all times multiplied by `scale`."""
    return times._replace(
        rows=tuple(tuple(t._replace(begin=t.begin * scale, end=t.end * scale) for t in row) for row in times.rows),
        makespan=times.makespan * scale,
        live=tuple(tuple((time * scale, count) for time, count in counts) for counts in times.live),
    )
