"""Hints: Markdown beside the notebook sources, notebooks/hints/NN.md.

## 4.1 reduce_scatter      an exercise
### bytes                  the invariant that failed; "any" serves every one that has no section
1. A nudge.                three hints, the last nearly the answer; a section with two ends like "any"
2. A push.
3. ```python
   lines to look at
   ```
"""

import re
import textwrap
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE.parents[1] / "notebooks" / "hints", HERE / "hints")  # of a clone; of a wheel, see CMakeLists.txt


@cache
def hints_of(exercise: str) -> dict[str, tuple[str, ...]]:
    """{invariant: three hints} of the exercise, such as "4.1"; "" for every invariant that is not named.

    Raises:  FileNotFoundError if the notebook has no file of hints; LookupError if that has none for the exercise.
    """
    name = f"{int(exercise.partition('.')[0]):02d}.md"
    path = next((folder / name for folder in FOLDERS if (folder / name).exists()), FOLDERS[0] / name)
    section = re.search(rf"^## {re.escape(exercise)} .*?$(.*?)(?=^## |\Z)", path.read_text(), re.M | re.S)
    if not section:
        raise LookupError(f"{path} has no hints for {exercise}")
    kinds = re.findall(r"^### (.+?)$(.*?)(?=^### |\Z)", section[1], re.M | re.S)
    found = {"" if kind == "any" else kind: levels(text) for kind, text in kinds}
    return {kind: texts + found[""][len(texts) :] for kind, texts in found.items()}


def levels(text: str) -> tuple[str, ...]:
    """The items of a numbered list; a fenced block keeps its lines, other text becomes one line."""
    items = re.findall(r"^\d\. (.*?)(?=^\d\. |\Z)", text, re.M | re.S)
    return tuple(code(item) if item.startswith("```") else " ".join(item.split()) for item in items)


def code(item: str) -> str:
    return textwrap.dedent("\n".join(item.rstrip().split("\n")[1:-1]))
