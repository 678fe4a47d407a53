"""Slides of every notebook, from the notebook itself: `make slides`, or notebooks/slides.py [--execute] [NAME ...].

A deck has the title, the sections of tracks.py that are no exercises, a list of the exercises, the question to
discuss, and the recap; what a section says behind its first code cell comes below its slide. With --execute the
solution form is run first, and its pictures come there, too. Decks are written to build/slides/; a browser shows
them, which loads reveal.js from the internet.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat
import tracks

HERE = Path(__file__).parent
INTO = HERE.parent / "build" / "slides"
LEAST, MOST = 6, 10  # slides of a deck, what is below them not counted
SMALL = """<style>
.reveal {font-size: 22px} .reveal h1 {font-size: 1.7em} .reveal h2 {font-size: 1.4em}
.reveal pre {font-size: 0.8em; width: 100%; box-shadow: none}
.reveal .jp-RenderedHTMLCommon table {font-size: 16px} .reveal table code {font-size: 14px}
.reveal table th, .reveal table td {padding: 3px 10px}
</style>

"""
REVEAL = {"reveal_scroll": True, "reveal_theme": "simple", "reveal_number": "c/t", "reveal_width": "1200"}
LEFT_OUT = re.compile("Measure|Diagnose|Take it home|Part ")
SHORT = 3  # line breaks: a text with fewer, below a slide, only speaks of the code next to it
CELL_SECONDS = 300


def sections(notebook):
    """[(heading, [its texts and code cells, in order])] of a notebook."""
    found = []
    for cell in notebook.cells:
        parts = re.split(r"^(?=##? )", cell.source, flags=re.MULTILINE) if cell.cell_type == "markdown" else [cell]
        for part in filter(None, parts):
            if isinstance(part, str) and (heading := re.match(r"##? (.+)", part)):
                found.append((heading[1], []))
            found[-1][1].append(part)
    return found


def chosen(name, notebook):
    """The sections that become slides."""
    lesson = tracks.NOTEBOOKS[name]
    taught = lesson.of("full day") or lesson.sections
    wanted = [s.heading for s in taught if not (s.exercise or LEFT_OUT.match(s.heading))]
    first, *rest = sections(notebook)
    return [first, *(s for s in rest if s[0].startswith((*wanted, "Question to discuss", "Recap")))]


def deck(name, notebook):
    """The slides of a notebook as a notebook, whose cells say what they are to nbconvert.

    A section is a slide; below it come its pictures, and what it says between its code cells.
    """
    cells = []
    for heading, (text, *more) in chosen(name, notebook):
        if heading == "Question to discuss" and (listed := exercises(notebook)):
            cells.append(slide(f"## What you write\n\n{listed}"))
        points, table, terms = text.replace("## Recap", "## What to remember").partition("| term |")
        cells.append(slide(points))
        if table:
            cells.append(slide(f"## The words\n\n{table}{terms}"))
        below = [slide(part, "subslide") if isinstance(part, str) else picture(part) for part in more]
        cells += [cell for cell in below if cell and (cell.cell_type == "code" or cell.source.count("\n") >= SHORT)]
    cells[0].source = SMALL + cells[0].source
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def exercises(notebook):
    """A list of what the notebook asks for."""
    titles = [re.match(r"Exercise (\d+\.\d+ ★+ .+)", heading) for heading, _ in sections(notebook)]
    return "\n".join(f"- {title[1]}" for title in titles if title)


def slide(text, kind="slide"):
    text = re.sub(r"^(Previous|Next): .*$|<!--.*-->", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]*)\]\([^)]*\.ipynb\)", r"\1", text)
    return nbformat.v4.new_markdown_cell(text.strip(), metadata={"slideshow": {"slide_type": kind}})


def picture(cell):
    """The last picture that a cell has shown, as a slide below; None if it has shown none."""
    pictures = [png for output in cell.outputs if (png := output.get("data", {}).get("image/png"))]
    if not pictures:
        return None
    shown = nbformat.v4.new_output("display_data", {"image/png": pictures[-1]})
    return nbformat.v4.new_code_cell(outputs=[shown], metadata={"slideshow": {"slide_type": "subslide"}})


def write(name, execute=False):
    """Write the deck of a notebook; returns its path."""
    from nbconvert import SlidesExporter
    from nbconvert.preprocessors import ExecutePreprocessor

    notebook = nbformat.read(HERE / "solutions" / f"{name}.ipynb", as_version=4)
    if execute:
        runner = ExecutePreprocessor(timeout=CELL_SECONDS)
        runner.preprocess(notebook, {"metadata": {"path": HERE / "solutions"}})
    exporter = SlidesExporter(exclude_input=True, **REVEAL)
    text, _ = exporter.from_notebook_node(deck(name, notebook), {"metadata": {"name": name}})
    INTO.mkdir(parents=True, exist_ok=True)
    path = INTO / f"{name}.html"
    path.write_text(text)
    return path


def main(argv=None):
    parser = argparse.ArgumentParser(description="Write the slides of notebooks to build/slides.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all, {', '.join(tracks.NOTEBOOKS)}")
    parser.add_argument("--execute", action="store_true", help="run the notebooks first, for their pictures")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(tracks.NOTEBOOKS):
        parser.error(f"no notebook is called {', '.join(sorted(unknown))}")
    for name in args.names or tracks.NOTEBOOKS:
        print(write(name, args.execute).relative_to(HERE.parent), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
