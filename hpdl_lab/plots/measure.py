"""Time and bus bandwidth of a collective against message size: yours, the peers, the model, your prediction."""

from dataclasses import dataclass

from .style import (
    FAINT,
    GREY,
    INK,
    SERIES,
    YOURS,
    crowding,
    heading,
    label_ends,
    log_axis,
    note,
    number_text,
    seconds_text,
    size_axis,
)


@dataclass(frozen=True)
class Reference:
    """A curve that was not measured: {size in bytes: seconds}, with the text that names it."""

    name: str
    seconds: dict


def draw(figure, rows, yours, factor, model=None, prediction=None, title="", foot=""):
    """Fill `figure` from the rows of a sweep; see `collectives.sweep.sweep`.

    Args:    rows: dicts with name, size (bytes), time_us (median), p25_us, p75_us, busbw_GBps, ranks, cores.
             yours: the name drawn in bold; factor: busbw over algbw, which turns times of references into bandwidths.
             model, prediction: a Reference or None; title, foot: text above and below.
    """
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.085, right=0.835, bottom=0.2, top=0.785, wspace=0.27)
    names = [yours] + [n for n in dict.fromkeys(r["name"] for r in rows) if n != yours]
    colors = dict(zip(names, (YOURS, *(c for c in SERIES if c != YOURS)), strict=False))
    curves = {n: sorted((r for r in rows if r["name"] == n), key=lambda r: r["size"]) for n in names}
    lines = [
        (ref, dash, shade)
        for ref, dash, shade in ((model, (0, (1, 1.2)), GREY), (prediction, (0, (5, 2)), INK))
        if ref is not None
    ]

    sizes = [r["size"] for r in rows] + [n for ref, _, _ in lines for n in ref.seconds]
    times = [r["time_us"] / 1e6 for r in rows] + [t for ref, _, _ in lines for t in ref.seconds.values()]
    rates = [r["busbw_GBps"] for r in rows]
    rates += [factor * n / t / 1e9 for ref, _, _ in lines for n, t in ref.seconds.items() if t > 0]
    for ax, values, text in ((left, times, seconds_text), (right, rates, number_text)):
        size_axis(ax, sizes or [4, 2**22])
        log_axis(ax, values, text)
    left.set_title("time per call (less is better)")
    right.set_title("bus bandwidth, GB/s (more is better)")

    ends = []
    for ref, dash, shade in lines:
        points = sorted(ref.seconds.items())
        style = {"color": shade, "linestyle": dash, "linewidth": 1.6, "zorder": 2}
        if len(points) == 1:
            style |= {"marker": "*", "markersize": 11}
        left.plot([n for n, _ in points], [t for _, t in points], **style)
        bandwidth = [(n, factor * n / t / 1e9) for n, t in points if t > 0]
        right.plot([n for n, _ in bandwidth], [b for _, b in bandwidth], **style)
        if bandwidth:
            ends.append((bandwidth[-1][1], ref.name, shade, False))
    for name, curve in curves.items():
        if not curve:
            continue
        own = name == yours
        x = [r["size"] for r in curve]
        style = {"color": colors[name], "linewidth": 2.6 if own else 1.5, "zorder": 4 if own else 3, "marker": "o"}
        style |= {"markerfacecolor": FAINT, "markeredgecolor": GREY} if crowding(rows) else {}
        left.plot(x, [r["time_us"] / 1e6 for r in curve], **style)
        low, high = ([r[key] / 1e6 for r in curve] for key in ("p25_us", "p75_us"))
        left.fill_between(x, low, high, color=colors[name], alpha=0.18, linewidth=0)
        right.plot(x, [r["busbw_GBps"] for r in curve], **style)
        ends.append((curve[-1]["busbw_GBps"], name, colors[name], own))
    label_ends(right, ends)
    heading(figure, title, crowding(rows))
    if foot:
        note(figure, foot)
