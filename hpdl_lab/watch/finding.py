"""A sentence of the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .records import line_name

if TYPE_CHECKING:
    from .places import NotedPlace

KINDS = ("hang", "wrong", "note", "slow", "memory")  # in the order of the report; the first two count for --strict


@dataclass
class Finding:
    """A fault or a fact that `hpdl watch` found.

    kind: of KINDS. name: short, "same data". text: sentences with ranks, numbers and a remedy. place: the author's
    line. lines: shown below the text as they are. time_ns: when it happened, 0 if that does not matter.
    """

    kind: str
    name: str
    text: str
    ranks: list[int] = field(default_factory=list)
    place: NotedPlace | None = None
    lines: list[str] = field(default_factory=list)
    time_ns: int = 0

    def __post_init__(self) -> None:
        self.text = " ".join(self.text.split())
        if ":" not in self.text.split(" ")[0].rstrip(":"):  # train.py:12 stays as it is
            self.text = self.text[:1].upper() + self.text[1:]

    def as_dict(self) -> dict[str, object]:
        where = {"file": self.place[0], "line": self.place[1]} if self.place else {}
        return {
            "kind": self.kind,
            "name": self.name,
            "text": self.text,
            "ranks": self.ranks,
            **where,
            "lines": self.lines,
        }

    def __str__(self) -> str:
        at = f" ({line_name(self.place)})" if self.place and line_name(self.place) not in self.text else ""
        return "\n".join([f"{self.name}{at}: {self.text}", *(f"    {line}" for line in self.lines)])
