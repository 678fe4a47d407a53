"""The result of a check: a truth value that can show itself, in a notebook and in a terminal."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..trace import Event


GREEN, ORANGE, BLUE = "#1b7f3b", "#b45309", "#1d4ed8"  # which the words say as well, never by color alone


class _Card:
    """Something with a title and sections that shows itself in a notebook (HTML) and in a terminal (text).

    A section is (kind, text): "text" is wrapped, "lines" is shown as it is, "html" is shown in notebooks only.
    """

    title = ""
    color = BLUE

    def sections(self) -> Iterable[tuple[str, str]]:
        return ()

    def __str__(self) -> str:
        parts = [self.title]
        for kind, text in self.sections():
            if kind == "text":
                parts.append(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  "))
            elif kind == "lines":
                parts.append(textwrap.indent(text.strip("\n"), "  "))
        return "\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        styles = {
            "html": "{}",
            "text": "<div style='margin:.4em 0;max-width:60em;line-height:1.45'>{}</div>",
            "lines": "<pre style='margin:.5em 0;padding:0;background:none;line-height:1.35;"
            "white-space:pre-wrap'>{}</pre>",
        }
        shown = {"html": str, "lines": html.escape, "text": _with_code}
        body = "".join(styles[kind].format(shown[kind](text.strip("\n"))) for kind, text in self.sections())
        return (
            f"<div style='border-left:5px solid {self.color};padding:.3em 0 .3em 1em;margin:.3em 0'>"
            f"<div style='font-weight:600;font-size:1.08em'>{html.escape(self.title)}</div>{body}</div>"
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def _with_code(text: str) -> str:
    """Return a text as HTML, with `code` in the typeface of code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


@dataclass(repr=False)
class CheckResult(_Card):
    """The result of a check, true if the answer passed.

    failed:  the invariant that broke, such as "sum", "bytes", "deadlock"; None when passed.
    message: what is wrong, where, and why; or that it is correct.
    detail:  lines under it: who waits for whom, what the function printed.
    facts:   what was found in a right answer.
    events:  of the run that a picture can show, on `size` ranks; expected: events of a right answer in the same run.
    outdated: a sentence if a later cell was to define the function that was checked, and did not.
    picture: HTML of the picture; next_step: the sentence about hints, or about what comes next.
    """

    exercise: str  # "4.1 reduce_scatter"
    failed: str | None
    message: str
    detail: str = ""
    facts: tuple[str, ...] = ()
    events: list[Event] = field(default_factory=list)
    expected: list[Event] = field(default_factory=list)
    size: int = 0
    outdated: str = ""
    picture: str = ""
    next_step: str = ""

    def __bool__(self) -> bool:
        return self.failed is None

    __str__ = __repr__ = _Card.__str__

    @property
    def title(self) -> str:  # pyrefly: ignore[bad-override]
        return f"{self.exercise}: correct" if self else f"{self.exercise}: not yet ({self.failed})"

    @property
    def color(self) -> str:  # pyrefly: ignore[bad-override]
        return GREEN if self else ORANGE

    def sections(self) -> Iterable[tuple[str, str]]:
        if self.outdated:
            yield "text", self.outdated
        if self.facts:
            yield "lines", "\n".join(self.facts)
        if not self:
            yield "text", self.message
        if self.detail:
            yield "lines", self.detail
        if self.picture:
            yield "html", self.picture
        if self.next_step:
            yield "text", self.next_step


@dataclass(repr=False)
class Note(_Card):
    """A titled text, with code or tables in `lines`: a hint, a solution."""

    title: str
    text: str = ""
    lines: str = ""

    __str__ = __repr__ = _Card.__str__

    def sections(self) -> Iterable[tuple[str, str]]:
        if self.text:
            yield "text", self.text
        if self.lines:
            yield "lines", self.lines
