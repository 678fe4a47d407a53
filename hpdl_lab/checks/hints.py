"""Hints and explanations: Markdown next to the notebook sources, notebooks/hints/NN.md.

## 4.1 reduce_scatter      an exercise; the paragraph below is said about a right answer
### bytes                  the invariant that failed; "any" serves every one that has no section
1. A nudge.                three hints, the last nearly the answer; a section with two ends like "any"
2. A push.
3. ```python
   lines to look at
   ```
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE.parents[1] / "notebooks" / "hints", HERE / "hints")  # of a clone; of a wheel, see CMakeLists.txt


@cache
def _section_of(exercise: str) -> str:
    """Return the text about the exercise, such as "4.1", in the notebook's file.

    Raises:  FileNotFoundError if the notebook has no file of hints; LookupError if that says nothing about it.
    """
    name = f"{int(exercise.partition('.')[0]):02d}.md"
    path = next((folder / name for folder in FOLDERS if (folder / name).exists()), FOLDERS[0] / name)
    section = re.search(rf"^## {re.escape(exercise)} .*?$(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S)
    if not section:
        raise LookupError(f"{path} has no hints for {exercise}")
    return section[1]


@dataclass(frozen=True)
class Hinted:
    """An exercise, by what every kind of them has: an explanation and hints."""

    id: str

    @property
    def explanation(self) -> str:
        """The paragraph about a right answer."""
        return " ".join(_section_of(self.id).partition("\n###")[0].split())

    @property
    def hints(self) -> dict[str, tuple[str, ...]]:
        """{invariant: three hints}; "" serves every invariant that is not named."""
        kinds = re.findall(r"^### (.+?)$(.*?)(?=^### |\Z)", _section_of(self.id), re.M | re.S)
        found = {"" if kind == "any" else kind: _levels(text) for kind, text in kinds}
        return {kind: texts + found[""][len(texts) :] for kind, texts in found.items()}

    def hints_for(self, failed: str | None) -> tuple[str, ...]:
        return self.hints.get(failed or "", self.hints[""])


def _levels(text: str) -> tuple[str, ...]:
    """Return the items of a numbered list; a fenced block keeps its lines, other text becomes one line."""
    items = re.findall(r"^\d\. (.*?)(?=^\d\. |\Z)", text, re.M | re.S)
    return tuple(_code(item) if item.startswith("```") else " ".join(item.split()) for item in items)


def _code(item: str) -> str:
    return textwrap.dedent("\n".join(item.rstrip().split("\n")[1:-1]))
