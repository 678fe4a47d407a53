"""Memory: its bandwidth and how all-reduces use it, how long a store waits for another core, what a step holds."""

from collections.abc import Sequence

from ..trace import number_text
from ..units import bytes_text
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, VERMILION
from .measure import DASHDOT, DASHES, DOTS
from .style import Figure, Look, Row, Rows, amounts, footnote, heading, label_ends, log_axis, size_axis, x_label

COLORS = {"one pass": BLUE, "staged": VERMILION, "ring": ORANGE}
STREAM = {"copy": DOTS, "add": DASHDOT, "in place": DASHES}
LEFT = 0.085


def draw_roofline(
    figure: Figure,
    rows: Rows,
    bandwidth: dict[int, float],
    moved: dict[str, tuple[float, float]],
    prediction: dict[str, float] | None = None,
    title: str = "",
) -> None:
    """Fill `figure` with bandwidths over the size of a tensor, and with time over the bytes that an all-reduce moves.

    Args:    rows: of bench.memory.measure_roofline; bandwidth: {size: bytes per s} of the roof.
             moved: {name: (least, most) bytes that all ranks move for each byte of a tensor}.
             prediction: {name: times as long as one pass}.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    figure.subplots_adjust(left=LEFT, right=0.88, bottom=0.2, top=0.785, wspace=0.62)
    sizes = sorted({r["size"] for r in rows}) or [2**16, 2**24]
    names = dict.fromkeys(r["name"] for r in rows)
    speeds = {name: {r["size"]: _rate(r, moved) for r in rows if r["name"] == name} for name in names}
    size_axis(left, sizes)
    log_axis(left, [value for curve in speeds.values() for value in curve.values()])
    left.set_title("bytes moved / time, GB/s")
    ends = []
    for name, curve in speeds.items():
        color, dash = COLORS.get(name, GRAY), STREAM.get(name, "-")
        left.plot(*zip(*sorted(curve.items()), strict=True), color=color, linestyle=dash, marker="o" * (name in COLORS))
        ends.append((curve[max(curve)], name, color, name in COLORS))
    label_ends(left, ends)
    x_label(left, "size of a rank's tensor")

    largest = sizes[-1]
    times = {r["name"]: r["time_us"] / 1e6 for r in rows if r["size"] == largest and not r["stream"]}
    labels: list[tuple[float, str, str, bool]] = []
    right.set_title(f"time, tensors of {bytes_text(largest)}")
    x_label(right, "bytes moved by all ranks, per byte of a tensor")
    most = 1.15 * max(high for _, high in moved.values())
    right.set_xlim(0, most)
    right.yaxis.set_major_formatter(amounts("s"))
    if largest in bandwidth:
        bound = largest / bandwidth[largest]
        right.plot([0, most], [0, most * bound], color=INK, linewidth=1.2)
        right.fill_between([0, most], 0, [0, most * bound], color=GRAY, alpha=0.18, linewidth=0)
        labels.append((most * bound, "the bound", INK, False))
    for name, seconds in times.items():
        low, high = moved[name]
        right.plot([low, high], [seconds] * 2, "o-", color=COLORS[name], zorder=4)
        labels.append((seconds, name, COLORS[name], True))
        if prediction and name in prediction and "one pass" in times:
            guessed = prediction[name] * times["one pass"]
            right.plot([low], [guessed], "*", color=COLORS[name], markersize=12, markeredgecolor=INK, zorder=5)
    right.set_ylim(0)
    label_ends(right, labels)
    heading(figure, title, "shaded: faster than the memory can be" + ("; stars: your guesses" if prediction else ""))
    footnote(
        figure, "Gray: kernels as in STREAM, on all ranks at once. The ring: with one copy of each message, or two."
    )


def _rate(row: Row, moved: dict[str, tuple[float, float]]) -> float:
    """Return GB/s of all ranks together; of a ring with one copy of each message."""
    nbytes = row["ranks"] * row["stream"] or moved[row["name"]][0] * row["size"]
    return nbytes / row["time_us"] / 1e3


def draw_write_again(figure: Figure, rows: Rows, chunk: int, prediction: float | None = None) -> None:
    """Fill `figure` from the rows of bench.memory.measure_write_again; those with "recorded" are drawn dashed.

    prediction: times as long for a chunk that was read.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=LEFT, right=0.76, bottom=0.2, top=0.785)
    size_axis(ax, [r["memory"] for r in rows] or [chunk, 64 * chunk])
    x_label(ax, f"length of the buffer, which is written in chunks of {bytes_text(chunk)} in turn")
    curves: dict[tuple[bool, bool], list[Row]] = {(read, old): [] for read in (False, True) for old in (False, True)}
    for r in rows:
        curves[r["read"], "recorded" in r].append(r)
    names = {False: "not read since", True: "read by the other core"}
    looks = {False: BLUE, True: VERMILION}
    values = [r[key] / 1e6 for r in rows for key in ("p25_us", "p75_us")]
    ends = []
    for (read, recorded), curve in curves.items():
        if curve:
            at = [r["memory"] for r in curve]
            look: Look = {"linestyle": DASHES, "markerfacecolor": "white"} if recorded else {}
            ax.plot(at, [r["write_us"] / 1e6 for r in curve], marker="o", color=looks[read], **look)
            low, high = ([r[key] / 1e6 for r in curve] for key in ("p25_us", "p75_us"))
            ax.fill_between(at, low, high, color=looks[read], alpha=0.18, linewidth=0)
            if not recorded or not curves[read, False]:
                ends.append((curve[-1]["write_us"] / 1e6, names[read], looks[read], read))
    unread, read = (curves[read, False] or curves[read, True] for read in (False, True))
    if prediction and unread:
        guessed = prediction * unread[0]["write_us"] / 1e6
        values.append(guessed)
        ax.plot([unread[0]["memory"]], [guessed], "*", color=INK, markersize=12, zorder=5, clip_on=False)
    log_axis(ax, values, "s")
    label_ends(ax, ends)
    both = zip(unread, read, strict=False)
    times = {again["memory"]: again["write_us"] / once["write_us"] for once, again in both}
    subtitle = ""
    if times:
        most = max(times, key=lambda n: times[n])
        subtitle = (
            f"if the other core has read it: {number_text(next(iter(times.values())))} times as long when written "
        )
        subtitle += f"again at once, {number_text(times[most])} times in a buffer of {bytes_text(most)}"
    heading(figure, f"Time to write {bytes_text(chunk)} of a buffer", subtitle)
    guess = " Star: your guess." if prediction else ""
    footnote(figure, f"One core writes, then the other one reads or does not; never both at once.{guess}")


def draw_held(
    figure: Figure,
    courses: dict[str, Sequence[tuple[float, float]]],
    title: str = "",
    prediction: tuple[float, float] | None = None,
) -> None:
    """Fill `figure` with the bytes that are held over the arithmetic that is done.

    Args:    courses: {name: [(FLOPs so far, bytes)]}; the first one is what the others are compared with.
             prediction: (times its FLOPs, share of its most bytes) that are expected of one of the others.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=LEFT, right=0.79, bottom=0.2, top=0.785)
    (name, first), *_ = courses.items()
    flops, most = first[-1][0], max(nbytes for _, nbytes in first)
    ends = []
    for (label, course), color in zip(courses.items(), (INK, ORANGE, BLUE, GREEN, VERMILION), strict=False):
        done, held = zip(*course, strict=True)
        ax.plot([x / flops for x in done], held, color=color, linewidth=1.4)
        peak = max(range(len(held)), key=held.__getitem__)
        ax.plot([done[peak] / flops], [held[peak]], "o", color=color, zorder=4)
        ends.append((held[peak], label, color, label == name))
    if prediction:
        ax.plot([prediction[0]], [prediction[1] * most], "*", color=INK, markersize=12, zorder=5, clip_on=False)
    ax.set_ylim(0)
    ax.set_xlim(0)
    ax.yaxis.set_major_formatter(amounts("B"))
    ax.set_title("bytes held")
    x_label(ax, f"arithmetic done, as a share of a step with {name}")
    label_ends(ax, ends)
    heading(figure, title, "points: the most that is held" + ("; star: your guess" if prediction else ""))
    footnote(figure, "What forward and backward have computed and still hold, without the gradients of parameters.")
