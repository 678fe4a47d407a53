"""The notebooks as built, exercise and solution forms, and how a form differs from one that was worked in."""

import hashlib
import json
import subprocess
import sys
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

Forms: TypeAlias = dict[str, bytes]  # by their paths in a folder
Json: TypeAlias = dict[str, Any]  # a notebook, or a cell

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"  # of the clone that this package runs from
NAMES = "[0-9][0-9]_*.ipynb"


def exercises(folder: str | PathLike[str] = NOTEBOOKS) -> Forms:
    """Return the exercise forms of a folder, {"00_engines.ipynb": its bytes}, in order.

    Notebooks of the clone in which somebody has worked, an instructor perhaps, are built again in a folder aside.
    Raises: RuntimeError, one sentence, if there are none, or if one is worked in and cannot be built.
    """
    return read(Path(folder), "exercise", Path(folder))


def solutions(clone: str | PathLike[str] = NOTEBOOKS) -> Forms:
    """Return the solution forms of a clone, as `exercises` does the exercise forms."""
    return read(Path(clone, "solutions"), "solution", Path(clone))


def read(folder: Path, form: str, clone: Path) -> Forms:
    found: Forms = {}
    again: list[str] = []
    for path in sorted(folder.glob(NAMES)):
        found[path.name] = path.read_bytes()
        try:
            notebook = json.loads(found[path.name])
            if _made_as(notebook) != (path.name, form):
                del found[path.name]
            elif worked_in(notebook):
                again.append(path.name)
        except (ValueError, KeyError, TypeError):  # what is no notebook any more
            again.append(path.name)
    if not found:
        raise RuntimeError(f"{folder} holds no {form} forms NN_name.ipynb: a clone has them in notebooks/")
    return found | _built(clone, folder, again) if again else found


def _built(clone: Path, folder: Path, names: list[str]) -> Forms:
    """Build forms of `folder` anew, from clone/source in a folder aside; it takes some seconds."""
    with tempfile.TemporaryDirectory(prefix="hpdl-") as aside:
        command = [sys.executable, clone / "build.py", "--into", aside]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{folder / names[0]} has been worked in, and building it anew failed "
                f"({done.stderr.strip().split(chr(10))[-1]}): move it away, and take it from git again"
            )
        return {name: Path(aside, folder.relative_to(clone), name).read_bytes() for name in names}


def _made_as(notebook: Json) -> tuple[str, str] | tuple[None, None]:
    """Return ("00_engines.ipynb", "exercise") for what build.py has written; (None, None) for anything else."""
    made = notebook["metadata"].get("hpdl_lab")
    return (f"{made['source'].removesuffix('.py')}.ipynb", made["form"]) if made else (None, None)


def worked_in(notebook: Json) -> bool:
    """Return True for a notebook that differs from what was once built: somebody's answers or results are in it."""
    return is_edited(notebook) or any(cell.get("execution_count") for cell in notebook["cells"])


def is_edited(notebook: Json) -> bool:
    """Return True for a notebook whose cells say something else than when it was built."""
    made = notebook["metadata"].get("hpdl_lab")
    return not isinstance(made, dict) or made.get("digest") != digest(notebook["cells"])


def digest(cells: list[Json]) -> str:
    """Return 16 hex digits for what the cells say."""
    text = "\0".join(f"{cell['cell_type']}\n{''.join(cell['source'])}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
