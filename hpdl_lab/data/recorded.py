"""Measurements of other machines that come with the package: one JSON file each, with machine, versions and date."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

from ..system import write_file

FOLDER = Path(__file__).with_name("recorded")
FORMAT = 1
MOST_PLAIN = 100_000  # bytes of a file that is not compressed
HEAD = {"format", "kind", "what", "machine", "date"}  # in every recording; "gpu" in one of a GPU

Recording = dict[str, Any]


def recording_names() -> list[str]:
    """Return the names of all recordings."""
    return sorted(path.name.partition(".")[0] for path in FOLDER.glob("*.json*"))


def save(name: str, recording: Recording, folder: Path) -> Path:
    """Write `recording`, in place of an earlier one of this name; returns the path. Raises OSError."""
    text = json.dumps({"format": FORMAT, **recording}, separators=(",", ":")).replace("},{", "},\n{") + "\n"
    large = len(text) > MOST_PLAIN
    path = folder / f"{name}.json{'.gz' * large}"
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, gzip.compress(text.encode(), mtime=0) if large else text)
    (folder / f"{name}.json{'' if large else '.gz'}").unlink(missing_ok=True)
    return path


def load(name: str) -> Recording:
    """Return the recording of this name.

    Raises: LookupError for an unknown name; ValueError for a path, a broken file, and a newer format.
    """
    if not isinstance(name, str) or not re.fullmatch(r"\w+", name):
        raise ValueError(
            f"{name!r} is no name of a recording: a name is not a path, and has letters, digits and _ only"
        )
    if name not in (known := recording_names()):
        raise LookupError(f"nothing is recorded as {name!r}: there are {', '.join(known) or 'no recordings'}")
    path = next(FOLDER.glob(f"{name}.json*"))
    try:
        found = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
        absent = HEAD - set(found)
    except (ValueError, TypeError, EOFError, OSError) as error:
        raise ValueError(f"{path.name} is broken: {error}") from None
    if absent:
        raise ValueError(f"{path.name} is broken: it has no {', '.join(sorted(absent))}")
    if found["format"] != FORMAT:
        raise ValueError(f"{path.name} has format {found['format']}, and this hpdl_lab reads {FORMAT}: update it")
    return found


def machine_name(recording: Recording) -> str:
    """Return the machine of a recording: the GPU, or the processor."""
    return recording.get("gpu") or recording["machine"]
