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
    folder = Path(folder)
    found = {path.name: path.read_bytes() for path in sorted(folder.glob(NAMES))}
    found = {name: text for name, text in found.items() if form_of(text) == (name, "exercise")}
    if not found:
        raise RuntimeError(f"{folder} holds no exercise forms NN_name.ipynb: a clone has them in notebooks/")
    worked = [name for name, text in found.items() if worked_in(json.loads(text))]
    if worked:
        found |= built(folder, worked)
    return found


def built(folder, names):
    """The exercise forms of these names, built from folder/source, which takes some seconds."""
    with tempfile.TemporaryDirectory(prefix="hpdl-") as aside:
        command = [sys.executable, folder / "build.py", "--into", aside]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(
                f"{folder / names[0]} has been worked in, and {folder / 'build.py'} cannot build it anew ({why}): "
                "move your copy away and take the notebook from git again"
            )
        return {name: Path(aside, name).read_bytes() for name in names}


def form_of(text):
    """("00_engines.ipynb", "exercise") of what build.py has written; (None, None) of anything else."""
    try:
        made = json.loads(text)["metadata"]["hpdl_lab"]
        return f"{made['source'].removesuffix('.py')}.ipynb", made["form"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, None


def worked_in(notebook):
    """True for a notebook that differs from what was once built: somebody's answers or results are in it."""
    ran = any(cell.get("execution_count") for cell in notebook["cells"])
    return ran or digest(notebook["cells"]) != notebook["metadata"].get("hpdl_lab", {}).get("digest")


def digest(cells):
    """What the cells say, in 16 hex digits."""
    text = "\0".join(f"{cell['cell_type']}\n{''.join(cell['source'])}" for cell in cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
