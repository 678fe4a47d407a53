"""Write both forms of every notebook from notebooks/source/NN_name.py (jupytext py:percent).

    python notebooks/build.py            write what has changed
    python notebooks/build.py --check    write nothing; exit 1 and name what is out of date
    python notebooks/build.py --into DIR    write all of them there, and nothing here

Source cells that are more than text or code:

    # %% exercise="hpdl_lab.collectives.ring:reduce_scatter"     the library function itself: the solution
    # %% check="hpdl_lab.collectives.ring:reduce_scatter"        the cell that checks it
    # %% shown="hpdl_lab.parallel.scripts:ddp_script"             a library function, to be seen and changed
    # %% script="train_ddp"                                      a file: the one-rank script, to be converted
    # %% check_script="train_ddp"                                the cell that launches and checks it
    # %% [markdown]
    # %%writefile train.sbatch                                   a cell of code that is no Python (##! stands for #!)
    # %% guess=[20, 5000]                                        the numbers that `...` stands for, in their order
    # <!-- csrc/shm.cpp: ShmGroup::rest -->                      in Markdown: the function itself, from csrc/
    # ## Exercise 2.3 ★★ Gossip <!-- 2 homework 16 -->           part, track and minutes of a section: tracks.py

The solution form (solutions/NN_name.ipynb) holds the function; the exercise form (NN_name.ipynb) holds its signature,
its docstring, the lines outside BEGIN/END SOLUTION and a NotImplementedError; or, in an exercise of repair, the broken
program; and `...` in the place of guesses. Both carry nbgrader's metadata and markers, from which release/course.py
makes nbgrader's source.

tracks.py makes the tables of minutes and tracks, which stand in the place of `<!-- tracks -->` and `<!-- links -->` in
the sources, and between their marks in README.md and docs/; the terms of docs/glossary.md stand at `<!-- terms -->`.
"""

import argparse
import hashlib
import importlib
import re
import sys
from functools import cache
from pathlib import Path

import jupytext
import nbformat
import tracks
from stubs import import_lines, solution_source, stub_source

from hpdl_lab.features.freed_memory import uncollected

with uncollected():  # a quarter of the time
    from hpdl_lab.checks import exercises
    from hpdl_lab.checks.scripts.table import script_of
    from hpdl_lab.plain_source import plain_source
    from hpdl_lab.release.forms import digest, worked_in

HERE = Path(__file__).parent
ROOT = HERE.parent
FORMS = {"exercise": HERE, "solution": HERE / "solutions"}
SOURCES = sorted((HERE / "source").glob("[0-9][0-9]_*.py"))
PAGES = [HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md"))]  # with tables of tracks.py
HIDDEN = re.compile(r"^[ \t]*### BEGIN HIDDEN TESTS\n.*?^[ \t]*### END HIDDEN TESTS\n", re.DOTALL | re.MULTILINE)
NBGRADER_SCHEMA = 3


def build(source, form):
    """The notebook of `form` ("exercise" or "solution") as text, from the path of its source."""
    cells, seen, defined = [], {}, set()
    for cell in cells_of(source.read_text()):
        cells.append(build_cell(cell, form, defined))
        if cells[-1].cell_type == "markdown":
            cells[-1].source = quoted(tracks.filled(source.stem, cell.source))
        text = cell.metadata.get("script", tracks.MARK.sub("", cell.source))
        cells[-1]["id"] = cell_id(cells[-1], text, source.stem, seen)
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "hpdl_lab": {"form": form, "source": source.name, "digest": digest(cells)},
    }
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.validate(notebook)
    return nbformat.writes(notebook, indent=1, sort_keys=True) + "\n"


@cache
def cells_of(text):
    """The cells of a source, which both forms are built from."""
    return jupytext.reads(text, fmt="py:percent").cells


def build_cell(cell, form, defined):
    """One notebook cell. `defined` holds the library functions that earlier exercise cells have defined; it grows."""
    if cell.source.startswith("%%writefile") and cell.cell_type == "markdown":
        return nbformat.v4.new_code_cell(cell.source, metadata={"tags": ["take-home"]})
    if cell.cell_type == "markdown":
        return nbformat.v4.new_markdown_cell(cell.source)
    if "exercise" in cell.metadata:
        exercise = exercises.find(cell.metadata["exercise"])
        return exercise_cell(exercise, form, defined)
    if "check" in cell.metadata:
        exercise = exercises.find(cell.metadata["check"])
        return check_cell(exercise, form, f"lab.check({exercise.name})")
    if "shown" in cell.metadata:
        return shown_cell(cell.metadata["shown"], defined)
    if "script" in cell.metadata:
        return script_cell(exercises.find(cell.metadata["script"]), form)
    if "check_script" in cell.metadata:
        script = exercises.find(cell.metadata["check_script"])
        return check_cell(script, form, f'lab.check_script("{script.file}")')
    if "guess" in cell.metadata:
        source = cell.source if form == "exercise" else guessed(cell)
        return nbformat.v4.new_code_cell(source, metadata={"tags": ["guess"]})
    tags = cell.metadata.get("tags")
    return nbformat.v4.new_code_cell(cell.source, metadata={"tags": list(tags)} if tags else {})


def quoted(text):
    """Markdown with the C++ or CUDA function itself in the place of each mark `<!-- csrc/shm.cpp: name -->`.

    Raises:  LookupError where the file has no such function, or several.
    """

    def function(mark):
        found = re.findall(
            rf"(?:^//.*\n)*(?:^template.*\n)?^\S.*\b{re.escape(mark[2])}\(.*\{{\n(?:.*\n)*?}}\n",
            (ROOT / mark[1]).read_text(),
            re.M,
        )
        if len(found) != 1:
            raise LookupError(f"{mark[1]} has {len(found)} functions {mark[2]}, which a notebook quotes")
        return f"```cpp\n{found[0]}```"

    return re.sub(r"<!-- (csrc/\S+): (\S+) -->", function, text)


def guessed(cell):
    """The source of a cell with each `...` replaced by a number."""
    numbers = [*map(repr, cell.metadata["guess"]), ""]
    return "".join(text + number for text, number in zip(cell.source.split("..."), numbers, strict=True))


def exercise_cell(exercise, form, defined):
    needed = import_lines(exercise.reference, defined)
    if exercise.scaffold is not None:
        needed += [line for line in import_lines(exercise.scaffold, defined) if line not in needed]
    imports = sorted(needed, key=lambda line: (line.startswith("from "), line))
    defined.add(exercise.reference.__qualname__)
    if form == "solution":
        text = solution_source(exercise.reference)
    else:
        title = f"exercise {exercise.id}: write {exercise.name}"
        text = stub_source(exercise.reference, title, exercise.scaffold)
    nbgrader = {"grade": False, "grade_id": f"exercise-{number(exercise)}", "locked": False, "solution": True}
    return graded_cell("\n".join(imports) + "\n\n\n" + text if imports else text, nbgrader)


def shown_cell(path, defined):
    """A function of the library as an attendee would have written it."""
    module, _, name = path.partition(":")
    function = getattr(importlib.import_module(module), name)
    imports = sorted(import_lines(function, defined), key=lambda line: (line.startswith("from "), line))
    defined.add(name)
    text = "\n".join(imports) + "\n\n\n" + plain_source(function)
    return nbformat.v4.new_code_cell(text, metadata={"tags": ["script"]})


def script_cell(script, form):
    """A file: in the solution form the converted script, in the exercise form the one-rank script."""
    text = script.solution if form == "solution" else script_of(script.alone).read_text()
    return nbformat.v4.new_code_cell(f"%%writefile {script.file}\n{text.rstrip()}", metadata={"tags": ["script"]})


def check_cell(exercise, form, call):
    text = f"result = {call}\n### BEGIN HIDDEN TESTS\nassert result, result.message\n### END HIDDEN TESTS\nresult"
    nbgrader = {
        "grade": True,
        "grade_id": f"check-{number(exercise)}",
        "locked": True,
        "points": exercise.stars,
        "solution": False,
    }
    return graded_cell(text if form == "solution" else HIDDEN.sub("", text), nbgrader)


def number(exercise):
    """Its id as nbgrader allows it, without a dot: "4-1"."""
    return exercise.id.replace(".", "-")


def graded_cell(text, nbgrader):
    return nbformat.v4.new_code_cell(
        text, metadata={"nbgrader": nbgrader | {"schema_version": NBGRADER_SCHEMA, "task": False}}
    )


def cell_id(cell, text, stem, seen):
    """An id that depends on what the cell is in the source, not on form, time, or how many stand before it."""
    if "nbgrader" in cell.metadata:
        return cell.metadata["nbgrader"]["grade_id"]
    name = hashlib.sha256(f"{stem}\n{cell.cell_type}\n{text}".encode()).hexdigest()[:8]
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def main(argv=None):
    parser = argparse.ArgumentParser(description="Write both forms of every notebook from notebooks/source.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a notebook is out of date")
    parser.add_argument("--into", type=Path, metavar="DIR", help="write all of them there, and nothing here")
    args = parser.parse_args(argv)
    if args.into:
        for form, folder in FORMS.items():
            place = args.into / folder.relative_to(HERE)
            place.mkdir(parents=True, exist_ok=True)
            for source in SOURCES:
                (place / f"{source.stem}.ipynb").write_text(build(source, form))
        return 0
    stale = []
    for source in SOURCES:
        for form, folder in FORMS.items():
            path, text = folder / f"{source.stem}.ipynb", build(source, form)
            if path.exists() and path.read_text() == text:
                continue
            stale.append(path)
            if args.check:
                print(f"{path.relative_to(HERE.parent)} is out of date: run python notebooks/build.py")
            elif path.exists() and worked_in(nbformat.read(path, as_version=4)):
                print(
                    f"{path.relative_to(HERE.parent)} has been worked in and is kept: move it away, then run this again"
                )
            else:
                folder.mkdir(exist_ok=True)
                path.write_text(text)
                print(f"wrote {path.relative_to(HERE.parent)}")
    for path in PAGES:
        if path.exists() and (text := tracks.page(path.read_text())) != path.read_text():
            stale.append(path)
            if args.check:
                print(f"{path.relative_to(HERE.parent)} is out of date: run python notebooks/build.py")
            else:
                path.write_text(text)
                print(f"wrote {path.relative_to(HERE.parent)}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
