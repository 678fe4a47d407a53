"""The notebooks as built, exercise and solution forms, and how a form differs from one that was worked in."""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"  # of the clone that this package runs from
NAMES = "[0-9][0-9]_*.ipynb"


def exercises(folder: Any = NOTEBOOKS) -> dict:
    """The exercise forms of a folder, {"00_engines.ipynb": its bytes}, in order.

    Notebooks of the clone in which somebody has worked, an instructor perhaps, are built again in a folder aside.
    Raises: RuntimeError, one sentence, if there are none, or if one is worked in and cannot be built.
    """
    return read(Path(folder), "exercise", Path(folder))


def solutions(clone: Any = NOTEBOOKS) -> dict:
    """The solution forms of a clone, as `exercises` has the exercise forms."""
    return read(Path(clone, "solutions"), "solution", Path(clone))


def read(folder: Any, form: str, clone: Any) -> dict:
    found, again = {}, []
    for path in sorted(folder.glob(NAMES)):
        found[path.name] = path.read_bytes()
        try:
            notebook = json.loads(found[path.name])
            if made_as(notebook) != (path.name, form):
                del found[path.name]
            elif worked_in(notebook):
                again.append(path.name)
        except (ValueError, KeyError, TypeError):  # what is no notebook any more
            again.append(path.name)
    if not found:
        raise RuntimeError(f"{folder} holds no {form} forms NN_name.ipynb: a clone has them in notebooks/")
    return found | built(clone, folder, again) if again else found


def built(clone: Any, folder: Any, names: list) -> dict:
    """{name: its bytes} of forms of `folder`, built anew from clone/source in a folder aside; it takes some seconds."""
    with tempfile.TemporaryDirectory(prefix="hpdl-") as aside:
        command = [sys.executable, clone / "build.py", "--into", aside]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{folder / names[0]} has been worked in, and building it anew failed "
                f"({done.stderr.strip().split(chr(10))[-1]}): move it away, and take it from git again"
            )
        return {name: Path(aside, folder.relative_to(clone), name).read_bytes() for name in names}


def made_as(notebook: dict) -> tuple:
    """("00_engines.ipynb", "exercise") of what build.py has written; (None, None) of anything else."""
    made = notebook["metadata"].get("hpdl_lab")
    return (f"{made['source'].removesuffix('.py')}.ipynb", made["form"]) if made else (None, None)


def worked_in(notebook: dict) -> bool:
    """True for a notebook that differs from what was once built: somebody's answers or results are in it."""
    return changed(notebook) or any(cell.get("execution_count") for cell in notebook["cells"])


def changed(notebook: dict) -> bool:
    """True for a notebook whose cells say something else than when it was built."""
    made = notebook["metadata"].get("hpdl_lab")
    return not isinstance(made, dict) or made.get("digest") != digest(notebook["cells"])


def digest(cells: list) -> str:
    """What the cells say, in 16 hex digits."""
    text = "\0".join(f"{cell['cell_type']}\n{''.join(cell['source'])}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
