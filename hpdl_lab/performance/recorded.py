"""A table of the recording of `make frameworks`: one training by several frameworks on emulated hosts."""

from __future__ import annotations

from ..data import recorded

HEAD = ("trained by", "ms a step", "loss", "worker out", "in", "server out", "in")
QUIET = 10_000  # bytes: less in a step is no gradient


def table_of_frameworks() -> str:
    """Return the recording as lines of text: for each framework, the time of a step and the MB on the links."""
    found = recorded.load("frameworks")
    about = f"{recorded.machine_name(found)}, {found['date'][:10]}, Python {found['versions']['python']}"
    return "\n".join([f"{found['what']}:", "", *lines(found), "", f"Recorded on {about}, by: make frameworks"])


def lines(recording: recorded.Recording) -> list[str]:
    """Return the rows of this recording as lines of text."""
    rows = [HEAD, *map(_cells, recording["rows"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    found = []
    for name, *numbers in rows:
        cell_texts = "  ".join(f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True))
        found.append(f"{name:<{widths[0]}}  {cell_texts}")
    packages = dict.fromkeys(row["package"] for row in recording["rows"])
    foot = f"out, in: MB a step on the link of a host. All weights: {recording['nbytes'] / 1e6:.1f} MB"
    return [*found, foot, ", ".join(packages)]


def _cells(row: recorded.Recording) -> tuple[str, ...]:
    """Return the cells of a line, with the bytes on the first worker's link, and on the server's."""
    directions = [*row["links"][0], *row["links"][2]]
    links = (f"{nbytes / 1e6:.1f}" if nbytes > QUIET else "-" for nbytes in directions)
    return row["name"], f"{row['seconds'] * 1e3:.0f}", f"{row['loss']:.5f}", *links
