"""The notebooks as built: exercise forms as an attendee gets them, and how a form is told from one worked in."""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"  # of the clone that this package runs from
NAMES = "[0-9][0-9]_*.ipynb"


def exercises(folder=NOTEBOOKS):
    """The exercise forms of a folder, {"00_engines.ipynb": its bytes}, in order.

    Notebooks of the clone in which somebody has worked, an instructor perhaps, are built again in a folder aside.
    Raises: RuntimeError, one sentence, where there are none, or where one is worked in and cannot be built.
    """
    folder, found, again = Path(folder), {}, []
    for path in sorted(folder.glob(NAMES)):
        found[path.name] = path.read_bytes()
        try:
            notebook = json.loads(found[path.name])
            if made_as(notebook) != (path.name, "exercise"):
                del found[path.name]
            elif worked_in(notebook):
                again.append(path.name)
        except (ValueError, KeyError, TypeError):  # what is no notebook any more
            again.append(path.name)
    if not found:
        raise RuntimeError(f"{folder} holds no exercise forms NN_name.ipynb: a clone has them in notebooks/")
    return found | (built(folder, again) if again else {})


def built(folder, names):
    """The exercise forms of these names, built from folder/source, which takes some seconds."""
    with tempfile.TemporaryDirectory(prefix="hpdl-") as aside:
        command = [sys.executable, folder / "build.py", "--into", aside]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{folder / names[0]} has been worked in, and building it anew failed "
                f"({done.stderr.strip().rpartition(chr(10))[2]}): move it away, and take it from git again"
            )
        return {name: Path(aside, name).read_bytes() for name in names}


def made_as(notebook):
    """("00_engines.ipynb", "exercise") of what build.py has written; (None, None) of anything else."""
    made = notebook["metadata"].get("hpdl_lab")
    return (f"{made['source'].removesuffix('.py')}.ipynb", made["form"]) if made else (None, None)


def worked_in(notebook):
    """True for a notebook that differs from what was once built: somebody's answers or results are in it."""
    return changed(notebook) or any(cell.get("execution_count") for cell in notebook["cells"])


def changed(notebook):
    """True for a notebook whose cells say something else than when it was built."""
    made = notebook["metadata"].get("hpdl_lab")
    return not isinstance(made, dict) or made.get("digest") != digest(notebook["cells"])


def digest(cells):
    """What the cells say, in 16 hex digits."""
    text = "\0".join(f"{cell['cell_type']}\n{''.join(cell['source'])}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
