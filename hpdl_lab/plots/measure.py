"""Time and bus bandwidth of a collective against message size: yours, the peers, the model, your prediction."""

import itertools
from dataclasses import dataclass

from ..trace import number_text, seconds_text
from .style import FAINT, GREY, INK, SERIES, YOURS, crowding, heading, label_ends, log_axis, note, size_axis

DOTS, DASHES, DASHDOT = (0, (1, 1.2)), (0, (5, 2)), (0, (4, 1.5))  # the model, the prediction, simulated ranks


@dataclass(frozen=True)
class Reference:
    """A curve that was not measured: {size in bytes: seconds}, with the text that names it."""

    name: str
    seconds: dict

    def points(self, factor):
        """[(size, seconds, bus bandwidth in GB/s)] in order of size; `factor` is busbw over algbw."""
        return [(n, t, factor * n / t / 1e9) for n, t in sorted(self.seconds.items()) if t > 0]


def draw(figure, rows, yours, factor, model=None, prediction=None, title="", foot="", simulated=None, link_GBps=None):
    """Fill `figure` from the rows of a sweep; see `collectives.sweep.sweep`.

    Args:    rows: dicts with name, size (bytes), time_us (median), p25_us, p75_us, busbw_GBps, ranks, cores.
             yours: the name drawn in bold; factor: busbw over algbw, which turns times of references into bandwidths.
             model, prediction: a Reference or None; title, foot: text above and below.
             simulated: {name: {size: seconds}}, drawn dashed beside the measured curves of these names.
             link_GBps: what a link carries, which no bus bandwidth can exceed; None where that is not known.
    """
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.085, right=0.835, bottom=0.2, top=0.785, wspace=0.27)
    references = ((model, DOTS, GREY), (prediction, DASHES, INK))
    references = [(ref, dash, color) for ref, dash, color in references if ref and ref.points(factor)]
    points = [(r["size"], r["time_us"] / 1e6, r["busbw_GBps"]) for r in rows]
    points += [point for ref, _, _ in references for point in ref.points(factor)]
    virtual = {name: Reference(name, seconds) for name, seconds in (simulated or {}).items()}
    points += [point for ref in virtual.values() for point in ref.points(factor)]
    bandwidths = [point[2] for point in points] + ([link_GBps] if link_GBps else [])
    for ax, values, text in ((left, [point[1] for point in points], seconds_text), (right, bandwidths, number_text)):
        size_axis(ax, [point[0] for point in points] or [4, 2**22])
        log_axis(ax, values, text)
    left.set_title("time per call (less is better)")
    right.set_title("bus bandwidth, GB/s (more is better)")

    ends = []  # height, name, color, bold
    for ref, dash, color in references:
        sizes, seconds, speeds = zip(*ref.points(factor), strict=True)
        look = {"color": color, "linestyle": dash, "linewidth": 1.6, "zorder": 2, "marker": "*" * (len(sizes) == 1)}
        left.plot(sizes, seconds, **look)
        right.plot(sizes, speeds, **look)
        ends.append((speeds[-1], ref.name, color, False))
    if link_GBps:
        right.axhline(link_GBps, color=INK, linewidth=1.0, zorder=1)
        ends.append((link_GBps, "the link", INK, False))
    others = [name for name in dict.fromkeys(r["name"] for r in rows) if name != yours]
    colors = dict(zip(others, itertools.cycle(SERIES[1:]), strict=False)) | {yours: YOURS}
    for name, color in colors.items():
        curve = sorted((r for r in rows if r["name"] == name), key=lambda r: r["size"])
        if curve:
            measured(left, right, curve, color, bold=name == yours)
            ends.append((curve[-1]["busbw_GBps"], shortened(name), color, name == yours))
        if name in virtual and (found := virtual[name].points(factor)):
            sizes, seconds, speeds = zip(*found, strict=True)
            look = {"color": color, "linestyle": DASHDOT, "linewidth": 1.2, "zorder": 2}
            left.plot(sizes, seconds, **look)
            right.plot(sizes, speeds, **look)
    label_ends(right, ends)
    heading(figure, title, crowding(rows))
    note(figure, foot)


def measured(left, right, curve, color, bold):
    """One function's curve in both panels, with its quartiles as a band; grey points where ranks exceed cores."""
    sizes = [r["size"] for r in curve]
    look = {"color": color, "linewidth": 2.6 if bold else 1.5, "zorder": 4 if bold else 3, "marker": "o"}
    if crowding(curve):
        look |= {"markerfacecolor": FAINT, "markeredgecolor": GREY}
    left.plot(sizes, [r["time_us"] / 1e6 for r in curve], **look)
    low, high = ([r[key] / 1e6 for r in curve] for key in ("p25_us", "p75_us"))
    left.fill_between(sizes, low, high, color=color, alpha=0.18, linewidth=0)
    right.plot(sizes, [r["busbw_GBps"] for r in curve], **look)


def shortened(name):
    """A name that fits beside the panels."""
    return name if len(name) <= 16 else name[:15] + "…"
