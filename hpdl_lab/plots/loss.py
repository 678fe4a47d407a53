"""Training as it goes: loss and samples per second against steps."""

from .style import BLUE, GREEN, GREY, heading, note, number_text

SMOOTH = 20  # steps over which samples/s are averaged: single steps show the operating system more than the training


def draw(figure, rows, steps, title="", foot="", reference=None):
    """Fill `figure` from the rows that a training reports.

    Args:    rows: dicts with step, loss, samples_per_s; steps: how many there will be.
             reference: losses to draw behind the curve, such as those of one rank; or None.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    figure.subplots_adjust(left=0.075, right=0.975, bottom=0.19, top=0.78, wspace=0.24)
    x = [r["step"] for r in rows]
    losses = [r["loss"] for r in rows]
    if reference is not None:
        left.plot(range(len(reference)), reference, color=GREY, linewidth=4, alpha=0.5, label="one rank")
    left.plot(x, losses, color=BLUE, linewidth=1.4)
    left.set_yscale("log")
    seen = [v for v in losses if v > 0] or [1.0, 3.0]
    left.set_ylim(min(*seen, 0.1) / 1.5, max(*seen, 3.0) * 1.5)
    left.yaxis.set_major_formatter(lambda v, _: number_text(v))
    left.set_title("loss of the global batch")

    rates = smoothed([r["samples_per_s"] for r in rows])
    right.plot(x, rates, color=GREEN)
    right.set_ylim(0, max([*rates, 1.0]) * 1.25)
    right.yaxis.set_major_formatter(thousands if max(rates, default=0) >= 10_000 else lambda v, _: number_text(v))
    right.set_title("samples per second")
    for ax in (left, right):
        ax.set_xlim(0, max(steps - 1, 1))
        ax.set_xlabel("step")
    now = "waiting for the first step"
    if rows:
        left.plot(x[-1:], losses[-1:], "o", color=BLUE, clip_on=False)
        right.plot(x[-1:], rates[-1:], "o", color=GREEN, clip_on=False)
        now = f"step {x[-1] + 1} of {steps}   loss {number_text(losses[-1])}   {rates[-1]:,.0f} samples/s"
    heading(figure, title, now)
    note(figure, foot)


def smoothed(rates):
    """Mean over the last SMOOTH steps of the time per step, as a rate: n / sum(1 / rate)."""
    out = []
    for i in range(len(rates)):
        window = [r for r in rates[max(0, i - SMOOTH + 1) : i + 1] if r > 0]
        out.append(len(window) / sum(1 / r for r in window) if window else 0.0)
    return out


def thousands(value, _):
    """45000 -> "45k"."""
    return f"{value / 1000:,.0f}k" if value else "0"
