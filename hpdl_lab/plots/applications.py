"""The data and the accelerator-hours of published models of five applications, on one axis."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.ticker import FixedLocator, NullLocator

from .colors import BLUE, INK
from .style import Figure, footnote, heading, rows_only

YEAR = 365.25 * 24  # hours
SPANS = {"a day": 24, "a year": YEAR, "a century": 100 * YEAR, "3,500 years": 3500 * YEAR}


class _Application(NamedTuple):
    """A published training; hours: of each accelerator; source: of the data, then of the hours."""

    name: str
    model: str
    data: str
    kind: str
    accelerators: int
    hours: float
    source: str


LLAMA = 30.84e6  # hours of all H100: Meta, Llama 3.1 model card; 2024
PAIRS = "400 million pairs"
APPLICATIONS = (
    _Application("vision", "ResNet-50", "1.28 million images", "P100", 8, 29, "ImageNet; 2015. arXiv:1706.02677"),
    # 28,130 labeled moments, 6 cameras. Hours: the first author of BEVFormer, issue 101 of its repository; 2022
    _Application("driving", "BEVFormer", "169 thousand images", "A100", 8, 56, "arXiv:1903.11027. arXiv:2203.17270"),
    _Application("speech", "wav2vec 2.0", "960 hours", "V100", 128, 2.3 * 24, "LibriSpeech; 2015. arXiv:2006.11477"),
    _Application("images with text", "CLIP", PAIRS, "V100", 256, 12 * 24, "arXiv:2103.00020"),
    _Application("text", "Llama 3.1", "15.6 trillion tokens", "H100", 16_384, LLAMA / 16_384, "arXiv:2407.21783"),
)


def draw(figure: Figure) -> None:
    """Fill `figure` with a bar for each of APPLICATIONS: the hours that one accelerator of its kind would need."""
    ax = figure.subplots()
    figure.subplots_adjust(left=0.22, right=0.73, bottom=0.17, top=0.8)
    rows_only(ax, len(APPLICATIONS), [f"{a.name}: {a.model}" for a in APPLICATIONS])
    ax.set(xscale="log", xlim=(10, 4e7))
    ax.xaxis.set_major_locator(FixedLocator(list(SPANS.values())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticklabels(SPANS)
    for y, a in enumerate(APPLICATIONS):
        total = a.accelerators * a.hours
        ax.barh(y, total, 0.5, color=BLUE)
        text = f"{a.data}\n{a.accelerators:,} {a.kind} for {took(a.hours)}"
        ax.text(total * 1.25, y, text, va="center", fontsize=8.5, color=INK)
    heading(figure, "Five applications", "Bars: the time of one accelerator. Text: the data, and who took how long.")
    footnote(figure, "Logarithmic axis. An H100 computes up to 8 times as fast as a V100.")


def took(hours: float) -> str:
    """Return the hours of a training in words: days from three on."""
    return f"{hours / 24:.0f} days" if hours >= 72 else f"{hours:.0f} hours"
