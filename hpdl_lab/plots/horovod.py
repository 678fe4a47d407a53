"""Horovod's timeline of one rank: a row per gradient, from its first negotiation to its sum."""

from .style import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, heading, note

COLORS = {
    "NEGOTIATE_ALLREDUCE": FAINT,
    "ALLREDUCE": GREY,
    "MEMCPY_IN_FUSION_BUFFER": GREEN,
    "MPI_ALLREDUCE": BLUE,
    "MEMCPY_OUT_FUSION_BUFFER": PURPLE,
}
READY = ORANGE
ROW, MARGIN = 0.155, 1.55  # inches


def height(rows):
    """Inches of a figure of `rows`, as parallel.horovod.to_horovod makes them."""
    return MARGIN + ROW * max(len(names_of(rows)), 6)


def names_of(rows):
    """{pid: name of the gradient}, in the order in which they are drawn."""
    return {row["pid"]: row["args"]["name"] for row in rows if row.get("name") == "process_name"}


def draw(figure, rows, title, foot=""):
    """Fill `figure` with `rows`, the dicts of a Chrome trace."""
    names, tall = names_of(rows), figure.get_size_inches()[1]
    ax = figure.subplots()
    figure.subplots_adjust(left=0.24, right=0.985, bottom=0.68 / tall, top=1 - 0.8 / tall)
    place = {pid: y for y, pid in enumerate(names)}
    for name, pid, begin, end in bars(rows):
        inner = name not in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")
        tops = (place[pid] - 0.42, 0.84) if not inner else (place[pid] - 0.3, 0.6)
        ax.broken_barh([(begin / 1e3, (end - begin) / 1e3)], tops, facecolors=COLORS[name])
    for row in rows:
        if row["ph"] == "X":
            ax.plot([row["ts"] / 1e3], [place[row["pid"]]], "|", color=READY, markersize=7)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), names.values(), fontsize=7.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("time, ms")
    heading(figure, title)
    legend(figure, tall)
    note(figure, foot)


def bars(rows):
    """(activity, pid, begin, end) of every pair of begin and end, the outer ones first."""
    open_, found = {}, []
    for row in rows:
        stack = open_.setdefault(row["pid"], [])
        if row["ph"] == "B":
            stack.append((row["name"], row["ts"]))
        elif row["ph"] == "E":
            name, begin = stack.pop()
            found.append((len(stack), name, row["pid"], begin, row["ts"]))
    return [(name, pid, begin, end) for _, name, pid, begin, end in sorted(found, key=lambda f: f[0])]


def legend(figure, tall):
    """Every color with its name, in one line under the title."""
    x = 0.012
    for name, color in (*COLORS.items(), ("a rank is ready", READY)):
        figure.text(x, 1 - 0.52 / tall, "■", fontsize=11, va="center", color=color)
        text = figure.text(x + 0.018, 1 - 0.52 / tall, name, fontsize=7, va="center", color=INK)
        x += text.get_window_extent().width / figure.bbox.width + 0.034
