"""How the rate grows with ranks: strong and weak scaling, the ideal line, efficiency, spread; honest about crowding."""

from .style import BLUE, GREEN, GREY, INK, crowding, heading, note, number_text

PANELS = {"strong": "strong: the same work on more ranks", "weak": "weak: the same work per rank"}


def draw(figure, rows, simulated=(), unit="calls/s", title="", foot=""):
    """Fill `figure` with one panel for each kind of scaling in `rows`.

    Args:    rows: dicts with kind ("strong" or "weak"), ranks, cores, rate (median), p25, p75 (rates); measured.
             simulated: the same, from simulated ranks on a network of their own: one core each.
             unit: of the rates.
    """
    kinds = [k for k in PANELS if any(r["kind"] == k for r in (*rows, *simulated))]
    axes = figure.subplots(1, max(len(kinds), 1), squeeze=False)[0]
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.2, top=0.8, wspace=0.24)
    for ax, kind in zip(axes, kinds, strict=False):
        ax.set_title(PANELS[kind])
        panel(ax, *([r for r in source if r["kind"] == kind] for source in (rows, simulated)), unit)
    heading(figure, title, crowding(rows))
    note(figure, foot)


def panel(ax, rows, simulated, unit):
    """One kind of scaling: rate over the rate of the fewest ranks, against ranks."""
    rows, simulated = (sorted(source, key=lambda r: r["ranks"]) for source in (rows, simulated))
    every = sorted({r["ranks"] for r in (*rows, *simulated)})
    ax.plot(every, [n / every[0] for n in every], color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
    ax.text(every[-1], every[-1] / every[0], "ideal ", ha="right", va="bottom", fontsize=9)
    highest = [every[-1] / every[0]]
    sides = ("bottom", "top")  # of its point on which a label stands: not both on one
    if simulated:
        speedup = [r["rate"] / simulated[0]["rate"] for r in simulated]
        ax.plot([r["ranks"] for r in simulated], speedup, "s-", color=GREEN, markersize=4, linewidth=1.4)
        highest += speedup
        if rows and speedup[-1] < rows[-1]["rate"] / rows[0]["rate"]:
            sides = sides[::-1]
        text = f"{speedup[-1] * every[0] / every[-1]:.0%} simulated"
        write(ax, text, every[-1], speedup[-1], GREEN, sides[0])
    if rows:
        base = rows[0]["rate"]
        ax.plot([r["ranks"] for r in rows], [r["rate"] / base for r in rows], color=GREY, linewidth=1, zorder=2)
        for r in rows:
            highest.append(point(ax, r, base, rows[0]["ranks"], sides[1]))
        ax.set_ylabel(f"speedup   (1 is {number_text(base)} {unit})")
    ax.set_xticks(every)
    ax.set_xlim(every[0] - 0.06 * every[-1], every[-1] * 1.4)
    ax.set_ylim(0, max(highest) * 1.12)
    ax.set_xlabel("ranks   (percent: efficiency)")


def point(ax, row, base, fewest, side):
    """One measurement with its spread and efficiency; returns the upper end of its bar."""
    y, low, high = (row[key] / base for key in ("rate", "p25", "p75"))
    color = GREY if row["ranks"] > row["cores"] else BLUE
    bars = [[max(0, y - low)], [max(0, high - y)]]
    ax.errorbar([row["ranks"]], [y], yerr=bars, fmt="o", color=color, capsize=4, markersize=7, zorder=4)
    write(ax, f"{y * fewest / row['ranks']:.0%}", row["ranks"], y, color, side)
    return high


def write(ax, text, x, y, color, side):
    """Bold text to the right of a point, above it (side "bottom": of the text) or below."""
    offset = (9, 1 if side == "bottom" else -2)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    look = {"va": side, "color": color, "fontsize": 9, "fontweight": "bold", "bbox": paper}
    ax.annotate(text, (x, y), offset, textcoords="offset points", **look)
