"""The attendee's deeds, appended to one JSON-lines file in the attendee's home. Nothing leaves the machine."""

import functools
import json
import time
from pathlib import Path
from typing import Any, TypeAlias

from .. import system

Row: TypeAlias = dict[str, Any]  # of the progress file
FILE = "progress.jsonl"  # in the home folder


def read_rows(path: Path) -> list[object]:
    """Read the rows of a progress file, None for a damaged line; none if there is no such file.

    Raises:  OSError if the file cannot be read.
    """
    rows: list[object] = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):  # the latter: thousands of open brackets
            rows.append(None)
    return rows


class Progress:
    """Rows of this session, each also appended to `path` if that can be written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rows: list[Row] = []
        self.writable = True

    def add(self, kind: str, **row: object) -> None:
        """Keep one row: kind is "check", "guess", "hint", "measurement" ... Prints once if it cannot be written."""
        kept = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "kind": kind, **row}
        self.rows.append(kept)
        if not self.writable:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(json.dumps(kept) + "\n")
        except OSError as error:
            self.writable = False
            print(f"Your progress is kept only until this kernel ends: cannot write {self.path} ({error.strerror}).")

    def hints_opened(self, exercise: str, failed: str | None) -> int:
        """Count the hints of this exercise (its id) for this broken invariant that were shown in this session."""
        return sum(
            row["kind"] == "hint" and row["exercise"] == exercise and row["failed"] == failed for row in self.rows
        )

    def last_check(self, exercise: str | None = None) -> Row | None:
        """Return the row of the last check, of one exercise or of any; None if there was none."""
        checks = (r for r in reversed(self.rows) if r["kind"] == "check" and exercise in (None, r["exercise"]))
        return next(checks, None)


@functools.cache
def progress() -> Progress:
    """Return the progress of this process: $HPDL_HOME/progress.jsonl, by default in ~/.hpdl."""
    return Progress(system.home() / FILE)
