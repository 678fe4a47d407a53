"""One table of minutes and tracks: it names sections that exist, its plans add up, and pages and headers hold it."""

import ast
import builtins
import importlib
import pkgutil
import re
from pathlib import Path

import jupytext
import nbformat
import pytest

from hpdl_lab.verbs.exercises import exercises_until
from tests import answers
from tests.test_build import imported

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {path.stem: path for path in sorted((ROOT / "notebooks" / "source").glob("*.py"))}
TRACKS = imported(ROOT / "notebooks", "tracks")
KIT = (ROOT / "docs" / "teaching" / "README.md").read_text()
NO_TIME = re.compile(
    "Predict|Open issues|Part (one|two|three)|Question to discuss|Where to read|Recap|Homework|Appendix"
)
every_notebook = pytest.mark.parametrize("name", SOURCES)


def texts(name, kind="markdown"):
    return [cell.source for cell in jupytext.read(SOURCES[name], fmt="py:percent").cells if cell.cell_type == kind]


def headings(name):
    return re.findall(r"^##? (.+)$", "\n".join(texts(name)), re.M)


def test_the_table_has_every_notebook_and_marks_every_exercise():
    assert sorted(TRACKS.NOTEBOOKS) == sorted(SOURCES)
    for name, notebook in TRACKS.NOTEBOOKS.items():
        found = headings(name)
        assert found[0] == f"{name[:2]} · {notebook.title}"
        numbers = [number[1] for heading in found if (number := re.match(r"Exercise (\d+\.\d+)", heading))]
        assert [s.exercise for s in notebook.sections if s.exercise] == numbers


@every_notebook
def test_every_heading_has_its_minutes_or_needs_none(name):
    timed = tuple(section.heading for section in TRACKS.NOTEBOOKS[name].sections)
    assert [h for h in headings(name)[1:] if not h.startswith(timed) and not NO_TIME.match(h)] == []


@pytest.mark.parametrize("track", TRACKS.LENGTHS)
@every_notebook
def test_what_a_track_does_needs_no_cell_that_it_leaves_out(name, track):
    """But for functions of exercises: where these are needed, the text says which lab.catch_up defines them."""
    taught = TRACKS.NOTEBOOKS[name].of(track)
    left_out = tuple(s.heading for s in TRACKS.NOTEBOOKS[name].sections if s not in taught)
    if not taught or not left_out:
        return
    here, there, text, skipped = set(dir(builtins)), {}, "", False
    for cell in jupytext.read(SOURCES[name], fmt="py:percent").cells:
        if cell.cell_type == "markdown":
            found = re.findall(r"^##? (.+)", cell.source, re.M)
            skipped = found[-1].startswith(left_out) if found else skipped
            text += "" if skipped else cell.source
            continue
        needed, made = names_of(cell)
        if skipped:
            there.update(dict.fromkeys(made - here, cell.metadata.get("exercise")))
            continue
        for missing in needed & set(there) - here:
            assert there[missing], f"{missing} is made in a cell that the {track} leaves out"
            (caught,) = re.findall(r'`lab\.catch_up\("(.+?)"\)`', text)
            here |= {exercise.name for exercise in exercises_until(int(caught.split(".")[0]), caught.split(".")[1])}
        assert not needed & set(there) - here
        here |= made


def names_of(cell):
    """(names that a code cell needs, names that it makes)."""
    if role := cell.metadata.get("exercise") or cell.metadata.get("check"):
        name = {role.rpartition(":")[2]}
        return (set(), name) if "exercise" in cell.metadata else (name, set())
    plain = re.sub(r"^( *)(\w+ = )?[%!].*$", r"\1pass", cell.source, flags=re.M)
    nodes = [*ast.walk(ast.parse(plain))] if code(cell) else []
    names = [node for node in nodes if isinstance(node, ast.Name)]
    imported = {alias.asname or alias.name.partition(".")[0] for n in nodes for alias in getattr(n, "names", [])}
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)} | imported
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - made, made


def code(cell):
    return not {"take-home"} & set(cell.metadata.get("tags", [])) and "script" not in cell.metadata


@pytest.mark.parametrize("track", TRACKS.LENGTHS)
def test_the_minutes_of_a_plan_add_up_and_it_has_all_that_the_track_has(track):
    planned = TRACKS.planned(track)
    assert sum(minutes for _, minutes in planned) == TRACKS.LENGTHS[track]
    others = sum(minutes for what, minutes in planned if not what.startswith(tuple(TRACKS.NOTEBOOKS)))
    taught = sum(TRACKS.minutes(notebook.taught(track)) for notebook in TRACKS.NOTEBOOKS.values())
    assert taught + others == TRACKS.LENGTHS[track]
    assert planned[-1][1] >= 0.02 * TRACKS.LENGTHS[track], "no time is left for questions"


def test_the_tracks_have_what_was_promised():
    """An all-reduce, DDP, memory, a grid and a model that writes in half a day; each kind of parallelism in a day."""
    rows = {t: [row for row in TRACKS.PLANS[t] if isinstance(row, str)] for t in TRACKS.LENGTHS}
    assert [row[:2] for row in rows["half day"]] == ["00", "00", "01", "02", "03", "04", "06", "08", "11", "13"]
    assert dict(TRACKS.planned("half day"))["08_memory, part one: 8.1"]
    assert dict(TRACKS.planned("full day"))["10_pipeline_parallel, part one"]
    assert rows["full day"].index("02_parallel_gradient_descent 2") > rows["full day"].index("03_messages 2")
    second = "\n".join(what for what, _ in TRACKS.planned("two days"))
    assert all(f"{name}, part" in second for name in ("07_large_batch", "09_tensor_parallel", "12_large_models"))
    assert all(exercise in second for exercise in ("8.6", "9.2", "10.2", "12.2", "13.3")) and "15_race" in second


def test_part_one_of_02_uses_no_send_and_no_recv():
    """They are taught in 03."""
    source = SOURCES["02_parallel_gradient_descent"].read_text()
    one, two = source.split("# # Part two")
    code = "\n".join(line for line in one.split("\n") if not line.startswith("#"))
    assert not re.search(r"\b(send|recv|sendrecv)\b", code) and "exercise=" in one
    assert re.search(r"comm\.send", two)


def test_pages_hold_the_table_of_today():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        assert TRACKS.page(path.read_text()) == path.read_text(), f"{path.name}: run python notebooks/build.py"
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "instructor.md").read_text()
    assert all(made in pages for made in (TRACKS.overview(), *map(TRACKS.plan, TRACKS.LENGTHS)))


@every_notebook
def test_every_notebook_has_six_to_ten_slides(name, monkeypatch):
    slides = slides_module(monkeypatch)
    notebook = nbformat.read(ROOT / "notebooks" / "solutions" / f"{name}.ipynb", as_version=4)
    cells = [c for c in slides.deck(name, notebook).cells if c.metadata.slideshow.slide_type == "slide"]
    assert slides.LEAST <= len(cells) <= slides.MOST
    first = [re.search(r"^##? (.+)", cell.source, re.M)[1] for cell in cells]
    assert first[0].startswith(name[:2]) and first[-3:] == ["Question to discuss", "What to remember", "The words"]
    assert "<!--" not in "".join(cell.source for cell in cells)


@pytest.mark.slow
def test_a_deck_is_built_with_its_pictures_below_the_slides(tmp_path, monkeypatch):
    slides = slides_module(monkeypatch)
    monkeypatch.setattr(slides, "INTO", tmp_path)
    text = slides.write("00_why", execute=True).read_text()
    below = [part.count("<section") for part in re.split(r"<section>\s*<section>", text)[1:]]
    assert slides.LEAST <= len(below) <= slides.MOST and sum(below) >= 3
    assert "Three ways to share it" in text and 3 <= text.count("<img") <= sum(below) and "lab.show" not in text


def slides_module(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    return imported(ROOT / "notebooks", "slides")


@every_notebook
def test_every_notebook_has_its_header_its_recap_and_its_links(name):
    from hpdl_lab.release import forms

    assert "<!-- tracks -->" in texts(name)[0]
    text = "\n".join(texts(name))
    built = forms.exercises()[f"{name}.ipynb"].decode()
    assert "| minutes | half day | full day | two days | you need |" in built
    names = [*TRACKS.NOTEBOOKS]
    at = names.index(name)
    neighbors = names[max(0, at - 1) : at] + names[at + 1 : at + 2]
    last = text.split("<!-- links -->")
    assert len(last) == 2 and not last[1].strip()
    assert all(f"]({other}.ipynb)" in TRACKS.links(name) for other in neighbors)
    recap = re.search(r"^## Recap\n(.*?)^## ", text + "\n## ", re.M | re.S)
    assert recap, "no section `## Recap`"
    assert len(re.findall(r"^\d\. ", recap[1], re.M)) == 5, "five points"
    for heading in ("**What you can do now:**", "<!-- terms -->"):
        assert heading in text, heading


# -- the teaching kit --------------------------------------------------------------------------------------------------


@every_notebook
def test_every_notebook_has_a_page_for_who_teaches_it(name):
    page = (ROOT / "docs" / "teaching" / f"{name}.md").read_text()
    parts = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert list(parts) == [
        "Minutes",
        "On the board",
        "The question to discuss",
        "What goes wrong, and what to say",
        "Who is late",
    ]
    assert TRACKS.marks(name) in parts["Minutes"] and all(len(text.split()) > 10 for text in parts.values())
    assert f"]({name}.md)" in KIT
    if any(section.exercise for section in TRACKS.NOTEBOOKS[name].sections):
        assert f'lab.catch_up("{name[:2]}")' in parts["Who is late"]


@every_notebook
def test_what_the_page_says_that_checks_say_is_said_by_a_check(name):
    """Each quoted message is one of a wrong answer that CI holds for this notebook."""
    page = (ROOT / "docs" / "teaching" / f"{name}.md").read_text()
    said = [wrong for e, table in all_wrong().items() if int(e.split(".")[0]) == int(name[:2]) for wrong in table]
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.M)
    assert len(quoted) >= 3 or not said or name in ("00_why", "15_race")
    for text in quoted:
        assert any(text in heading for heading in said), text


def all_wrong():
    """{exercise: the heads "invariant: message" of its wrong answers}."""
    modules = [importlib.import_module(f"tests.answers.{m.name}") for m in pkgutil.iter_modules(answers.__path__)]
    found = {}
    for number, text in (pair for module in modules for pair in getattr(module, "WRONG", {}).items()):
        heads = map(answers.HEAD.match, map(str.strip, text.split("\n")))
        found[number] = [f"{head['failed']}: {head['says']}" for head in heads if head]
    return found


def test_the_answers_to_the_five_questions_are_computed_from_the_questions():
    page = (ROOT / "docs" / "teaching" / "questions.md").read_text()
    day = 86_400
    ring, days, bubble = (
        [2 * 3 / 4 * 1, 2 * 7 / 8 * 2],
        [6 * 7e9 * 1e12 / (256 * 4e14) / day, 6 * 70e9 * 2e12 / (1024 * 4e14) / day],
        [3 / 7, 7 / 31],
    )
    assert f"before {ring[0]} GB, after {ring[1]} GB" in page
    assert f"before {days[0]:.1f} days, after {days[1]:.0f} days" in page
    assert f"3/7 = {bubble[0]:.0%}, after 7/31 = {bubble[1]:.0%}" in page
    assert len(re.findall(r"^\| \d \|", page, re.M)) == len(re.findall(r"^\d\. ", page, re.M)) == 5
