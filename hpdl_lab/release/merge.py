"""A notebook that an attendee worked in, and an update of it: cell by cell, what changed is carried into theirs.

          base ────────── update ──────────> new          what the laboratory gave, and gives now
            │                                  │
       the attendee                            │
            ▼                                  ▼
          theirs ──────────────────────────> merged       new, with their answers, results and cells

Cells are the same when their ids are, which notebooks/build.py keeps from build to build; a cell of text has an id of
what it says, so a changed one is recognized by what both say.

By hand, because nbdime 4.0.4 (`merge_notebooks`, strategy use-local) lost lines, or gave an id to two cells, in 21 of
the 60 random updates of tests/test_merge.py.
"""

import difflib
import uuid
from collections.abc import Sequence
from typing import TypeAlias, cast

import nbformat
from nbformat import NotebookNode

try:
    from merge3 import Merge3
except ImportError:
    raise ImportError(
        "merging notebooks needs merge3, of the extra hub: make hub, or pip install -c constraints.txt -e '.[hub]'"
    ) from None

Row: TypeAlias = tuple[int | None, NotebookNode]  # index in theirs or None, cell
ALIKE = 0.6  # of words; from difflib, for which "a ratio over 0.6 means the sequences are close matches"


def merge(base: NotebookNode, theirs: NotebookNode, new: NotebookNode) -> tuple[NotebookNode, list[str]]:
    """Carry what changed from `base` to `new` into `theirs`; none of these three notebooks is changed.

    Cells are in the order of `new`. A cell that the attendee changed, added or ran is in the result with what it says
    and shows; one that they removed is not.
    Returns: (the merged notebook, names of cells in which both changed the same lines: theirs stand there).
    """
    mine, update = pairs(base.cells, theirs.cells), pairs(base.cells, new.cells)
    origin = {there: here for here, there in update.items()}
    known = {cell.get("id"): i for i, cell in enumerate(theirs.cells) if i not in mine.values()}
    rows: list[Row] = []
    conflicts: list[str] = []
    for n, cell in enumerate(new.cells):
        if n in origin and origin[n] not in mine:
            continue  # they removed it
        at = mine[origin[n]] if n in origin else known.get(cell.id)  # known: of an update that was cut short
        if at is None:
            rows.append((None, _copied_cell(cell)))
            continue
        was = base.cells[origin[n]] if n in origin else cell
        merged, agreed = _one_cell(was, theirs.cells[at], cell)
        rows.append((at, merged))
        conflicts += [] if agreed else [_name_of(cell)]
    dropped = [(base.cells[here], at) for here, at in mine.items() if here not in update]
    removed = {at for cell, at in dropped if all(cell[key] == theirs.cells[at][key] for key in ("cell_type", "source"))}
    _place_additions(rows, theirs.cells, removed)
    return _assembled(theirs, new, [cell for _, cell in rows]), conflicts


def _copied_cell(node: NotebookNode) -> NotebookNode:
    return cast("NotebookNode", nbformat.from_dict(node))


def pairs(old: list[NotebookNode], now: list[NotebookNode]) -> dict[int, int]:
    """Pair the cells of `old` and `now`, {index: index}: by id, then by what they say, then by likeness."""
    ids = {cell.get("id"): i for i, cell in enumerate(now)}
    found = {i: ids[cell.id] for i, cell in enumerate(old) if cell.get("id") in ids}
    for enough in (1.0, ALIKE):
        for i, cell in enumerate(old):
            if i not in found:
                rest = ((j, c) for j, c in reversed([*enumerate(now)]) if j not in found.values())
                free: dict[Sequence[str], int]
                free = {tuple(c.source.split()): j for j, c in rest if c.cell_type == cell.cell_type}
                for best in difflib.get_close_matches(cell.source.split(), free, 1, enough):
                    found[i] = free[best]
    return found


def _one_cell(base: NotebookNode, theirs: NotebookNode, new: NotebookNode) -> tuple[NotebookNode, bool]:
    """Return (their cell with what changed from base to new, False if both changed the same lines: theirs stands)."""
    cell, agreed = _copied_cell(theirs), True
    if new.source != base.source:
        texts = base.source, theirs.source, new.source
        cell.source, agreed = _lines(*texts) if theirs.cell_type == new.cell_type else (theirs.source, False)
    own = {key: value for key, value in theirs.metadata.items() if base.metadata.get(key) != value}
    cell.metadata = _copied_cell(new.metadata | own)
    cell.id = new.id
    return cell, agreed


def _lines(base: str, theirs: str, new: str) -> tuple[str, bool]:
    """Return (the lines of theirs with the changes from base to new, True), or (theirs, False) if both changed them."""
    groups = [*Merge3(base.split("\n"), theirs.split("\n"), new.split("\n")).merge_groups()]
    if any(kind == "conflict" for kind, *_ in groups):
        return theirs, False
    return "\n".join(line for _, lines, *_ in groups for line in lines), True


def _place_additions(rows: list[Row], cells: list[NotebookNode], removed: set[int]) -> None:
    """Put each cell of theirs that is not among the rows, nor removed by the update, behind the one it stood behind."""
    placed, position = {at for at, _ in rows}, 0
    for at, cell in enumerate(cells):
        if at in placed:
            position = next(i for i, row in enumerate(rows) if row[0] == at) + 1
        elif at not in removed:
            rows.insert(position, (at, _copied_cell(cell)))
            position += 1


def _assembled(theirs: NotebookNode, new: NotebookNode, cells: list[NotebookNode]) -> NotebookNode:
    """Return the notebook of these cells; each has an id of its own, also if an old program has left none."""
    taken: set[str] = set()
    for cell in cells:
        if cell.get("id") is None or cell.id in taken:
            cell.id = uuid.uuid4().hex[:8]
        taken.add(cell.id)
    metadata = theirs.metadata | {"hpdl_lab": new.metadata["hpdl_lab"]}
    minor = max(theirs.nbformat_minor, new.nbformat_minor)
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata, nbformat_minor=minor)


def _name_of(cell: NotebookNode) -> str:
    """Return the name of a cell in a sentence: "exercise 4.1", or the start of what it says."""
    if "nbgrader" in cell.metadata:
        kind, _, number = cell.metadata["nbgrader"]["grade_id"].partition("-")
        return f"{kind} {number.replace('-', '.')}"
    return f"the cell {cell.source.strip().partition(chr(10))[0][:40]!r}"
