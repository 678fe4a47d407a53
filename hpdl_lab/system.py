"""Waiting for a condition, and writing a file at once: the two small things that every process needs."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float, every: float = 0.01) -> T:
    """Return the first true value of `condition()`, called `every` seconds, or its last one after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(every, left))
    return found


def home() -> Path:
    """Return the folder of what is kept for this user: $HPDL_HOME, by default ~/.hpdl."""
    return Path(os.environ.get("HPDL_HOME") or os.path.expanduser("~/.hpdl"))


def write_file(path: str | Path, text: str | bytes, mode: int = 0o666, sync: bool = False) -> None:
    """Write all of the file or nothing: readers see the old content or the new.

    mode: permissions, less umask. sync: also if the machine crashes now; this waits for the disk.
    Raises: OSError with `path`; then the file is as it was.
    """
    new = f"{path}.{os.getpid()}.new"
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        if os.path.exists(new):
            os.remove(new)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # not the unfinished file's name
        raise
