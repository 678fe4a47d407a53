"""The attendee's folder: exercise forms and nothing else; updates merge; nothing that an attendee did is ever lost."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest

from hpdl_lab.release import course, forms, merge, update
from tests.wording import raises

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
HELLO, RING = "00_engines.ipynb", "04_ring_all_reduce.ipynb"
STUB, ANSWER = 'raise NotImplementedError("exercise 4.1: write reduce_scatter")', "return my_answer"
NOBODY = 65534


@pytest.fixture
def source(tmp_path):
    """Two exercise forms that a test may update."""
    folder = tmp_path / "laboratory"
    folder.mkdir()
    for name in (HELLO, RING):
        shutil.copy(NOTEBOOKS / name, folder)
    return folder


@pytest.fixture
def given(source, tmp_path):
    """The folder of an attendee who was given them."""
    folder = tmp_path / "attendee"
    update.write_notebooks(folder, source)
    return folder


def edit(path, change):
    """Do `change(notebook)` to a notebook, as JupyterLab saves it; in a form, as build.py would have built it."""
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    if path.parent.name == "laboratory":
        notebook.metadata.hpdl_lab.digest = forms.digest(notebook.cells)
    nbformat.write(notebook, path)


def cell(notebook, which):
    return next(c for c in notebook.cells if c.id == which or which in c.source)


def says(folder, name=RING):
    """What the cells of a notebook say."""
    return [c.source for c in nbformat.read(folder / name, as_version=4).cells]


def answered(folder, name=RING):
    return any(ANSWER in text for text in says(folder, name))


def answer(notebook):
    stub = cell(notebook, "exercise-4-1")
    assert STUB in stub.source
    stub.source = stub.source.replace(STUB, ANSWER)


def work(notebook):
    """What an attendee does: an answer, a try below it, a prediction, a cell run, one removed."""
    answer(notebook)
    at = notebook.cells.index(cell(notebook, "exercise-4-1"))
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell("my_try = 1"))
    guess = cell(notebook, "my_bytes = ")
    guess.source = guess.source.replace("...", "77", 1)
    race = cell(notebook, "race = lab.measure")
    race.execution_count, race.outputs = 7, [nbformat.v4.new_output("stream", text="my race")]
    notebook.cells.remove(cell(notebook, "## Question to discuss"))


def improve(notebook):
    """What an update of the laboratory does: text, a docstring, a check, a new cell, one that is gone."""
    text = cell(notebook, "## Train with it")
    text.source, text.id = text.source.replace("digits", "numerals"), "feedc0de"
    stub = cell(notebook, "exercise-4-1")
    first = stub.source.split('"""')[1].split("\n")[0]
    stub.source = stub.source.replace(first, "Updated first line.")
    cell(notebook, "check-4-1").source += "  # updated check"
    at = notebook.cells.index(cell(notebook, "check-4-1"))
    notebook.cells.insert(at, nbformat.v4.new_markdown_cell("A new paragraph."))
    notebook.cells.remove(cell(notebook, "lab.show(trained)"))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_a_folder_gets_the_exercise_forms_and_nothing_else(tmp_path):
    folder = tmp_path / "new" / "folder"
    said = update.write_notebooks(folder)
    names = [path.name for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))]
    assert sorted(os.listdir(folder)) == [update.HIDDEN, *names]
    assert said == [f"{name}: written" for name in names]
    for name in names:
        text = (folder / name).read_text()
        assert json.loads(text)["metadata"]["hpdl_lab"]["form"] == "exercise"
        assert "BEGIN SOLUTION" not in text and "HIDDEN TESTS" not in text
    assert not list(folder.rglob("*.py"))


def test_a_second_time_nothing_is_touched(given, source):
    edit(given / RING, work)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in given.rglob("*")}
    assert update.write_notebooks(given, source) == []
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in given.rglob("*")} == before


def test_solutions_are_never_given_out(tmp_path):
    with raises(RuntimeError, "NN_name.ipynb"):
        update.write_notebooks(tmp_path, NOTEBOOKS / "solutions")
    assert os.listdir(tmp_path) == []


def test_the_laboratorys_own_folder_is_no_attendees(source):
    for folder in (source, source / "solutions"):
        with raises(RuntimeError, f"{folder}"):
            update.write_notebooks(folder, source)


def test_where_the_instructor_has_worked_the_notebook_is_built_anew(tmp_path):
    clone = tmp_path / "notebooks"
    shutil.copytree(NOTEBOOKS, clone, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("csrc", "docs"):  # functions that 05 shows, and the glossary
        (tmp_path / name).symlink_to(NOTEBOOKS.parent / name)
    edit(clone / RING, work)
    (clone / HELLO).write_text("<<<<<<< HEAD")
    update.write_notebooks(tmp_path / "attendee", clone)
    for name in (HELLO, RING):
        assert (tmp_path / "attendee" / name).read_bytes() == (NOTEBOOKS / name).read_bytes()
    assert "my_try = 1" in says(clone)


def test_what_cannot_be_built_anew_is_said_and_given_to_nobody(source, tmp_path):
    edit(source / RING, work)
    (source / RING).write_text((source / RING).read_text().replace('"digest"', '"digests"'))
    with raises(RuntimeError, "04_ring_all_reduce.ipynb"):
        update.write_notebooks(tmp_path / "attendee", source)
    assert not (tmp_path / "attendee").exists()


# -- updates -----------------------------------------------------------------------------------------------------------


def test_an_untouched_notebook_is_replaced(given, source):
    edit(source / RING, improve)
    assert update.write_notebooks(given, source) == [f"{RING}: updated, there was nothing of yours in it"]
    assert (given / RING).read_bytes() == (source / RING).read_bytes()


def test_an_update_is_merged_cell_by_cell(given, source):
    edit(given / RING, work)
    edit(source / RING, improve)
    before = (given / RING).read_bytes()
    assert update.write_notebooks(given, source) == [f"{RING}: updated, with all that you did in it"]
    merged = nbformat.read(given / RING, as_version=4)
    nbformat.validate(merged)
    texts = [c.source for c in merged.cells]
    at = texts.index("my_try = 1")
    assert texts[at + 1 : at + 3] == ["A new paragraph.", cell(merged, "check-4-1").source]
    assert cell(merged, "check-4-1").source.endswith("# updated check")
    assert any(text.startswith("my_bytes = ") and ", 77)" in text for text in texts)
    assert cell(merged, "race = lab.measure").outputs[0].text == "my race"
    assert "numerals" in cell(merged, "## Train with it").source
    assert not any(gone in text for text in texts for gone in ("## Question to discuss", "lab.show(trained)"))
    assert (given / update.HIDDEN / "before" / RING).read_bytes() == before
    assert not list(given.glob("*.new*"))
    assert update.write_notebooks(given, source) == []


def test_a_new_docstring_stands_above_an_answer_that_kept_the_old_one(given, source):
    edit(given / RING, answer)
    edit(source / RING, improve)
    update.write_notebooks(given, source)
    merged = cell(nbformat.read(given / RING, as_version=4), "exercise-4-1").source
    assert '"""Updated first line.' in merged and merged.endswith(f"    {ANSWER}")


def test_where_both_changed_the_same_lines_theirs_stand_and_the_new_form_is_beside(given, source):
    def rewrite(notebook):
        cell(notebook, "exercise-4-1").source = "def reduce_scatter(comm, x, chunks):\n    ..."

    edit(given / RING, work)
    edit(source / RING, rewrite)
    (given / "04_ring_all_reduce.new.ipynb").write_text("mine, by chance")
    said = update.write_notebooks(given, source)
    assert said == [
        f"{RING}: updated, but in exercise 4.1 you and the update changed the same lines: yours stand, "
        "the new ones are in 04_ring_all_reduce.new-2.ipynb"
    ]
    assert answered(given)
    assert (given / "04_ring_all_reduce.new-2.ipynb").read_bytes() == (source / RING).read_bytes()
    assert (given / "04_ring_all_reduce.new.ipynb").read_text() == "mine, by chance"
    assert update.write_notebooks(given, source) == []


def test_ids_that_another_editor_made_anew_are_no_hindrance(given, source):
    def other_editor(notebook):
        work(notebook)
        for i, c in enumerate(notebook.cells):
            c.id = f"other-{i}"

    edit(given / RING, other_editor)
    edit(source / RING, improve)
    assert update.write_notebooks(given, source) == [f"{RING}: updated, with all that you did in it"]
    texts = says(given)
    assert "my_try = 1" in texts and "A new paragraph." in texts
    assert len(texts) == len(says(source)) + 1 - 1  # their try more, the cell that they removed less


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_ended_at_any_moment_nothing_is_lost_and_the_next_run_does_the_rest(given, source, tmp_path, monkeypatch):
    edit(given / RING, work)
    edit(source / RING, improve)
    edit(source / HELLO, lambda notebook: notebook.cells.append(nbformat.v4.new_markdown_cell("More.")))
    whole = shutil.copytree(given, tmp_path / "whole")
    update.write_notebooks(whole, source)
    rename, ended = os.replace, 0
    while True:  # ends before the first rename, before the second one, ...
        cut = shutil.copytree(given, tmp_path / f"cut-{ended}")
        left = iter(range(ended))

        def failing(here, there, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            rename(here, there)

        monkeypatch.setattr(os, "replace", failing)
        try:
            update.write_notebooks(cut, source)
            break
        except KeyboardInterrupt:
            ended += 1
        monkeypatch.setattr(os, "replace", rename)
        assert answered(cut) and "my_try = 1" in says(cut) and says(cut, HELLO)
        update.write_notebooks(cut, source)
        for name in (HELLO, RING):
            assert says(cut, name) == says(whole, name)
        assert sorted(os.listdir(cut)) == sorted(os.listdir(whole))
    assert ended == 5  # before, RING, given/RING; HELLO, given/HELLO


def test_a_full_disk_ends_in_one_sentence_and_changes_nothing(given, source):
    edit(given / RING, work)
    edit(source / RING, improve)
    before = {path: path.read_bytes() for path in given.rglob("*.ipynb")}
    limited = (
        "import resource, signal, sys; from hpdl_lab.cli import main; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (9000, {resource.RLIM_INFINITY})); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", limited, "release", given, "--from", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "File too large. Nothing is lost" in done.stderr and done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in given.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "text", ['{"cells": [', "", "[]", "{}", '{"nbformat": 4, "cells": 3}', "\x00\xff", "[" * 99999]
)
def test_a_broken_notebook_is_left_alone_and_a_fresh_one_put_beside(given, source, text):
    (given / RING).write_text(text, encoding="latin-1")
    for _ in range(2):  # and no third one
        said = update.write_notebooks(given, source)
        assert len(said) == 1 and said[0].startswith(f"{RING} cannot be read as a notebook (")
        assert said[0].endswith("): left alone; a fresh one is 04_ring_all_reduce.new.ipynb") and "\n" not in said[0]
        assert (given / RING).read_text(encoding="latin-1") == text
        assert [path.name for path in given.glob("*.new*")] == ["04_ring_all_reduce.new.ipynb"]
    assert (given / "04_ring_all_reduce.new.ipynb").read_bytes() == (source / RING).read_bytes()


def test_a_notebook_that_was_deleted_or_renamed_is_written_anew(given, source):
    edit(given / RING, work)
    (given / RING).rename(given / "mine.ipynb")
    assert update.write_notebooks(given, source) == [f"{RING}: was missing, written anew"]
    assert (given / RING).read_bytes() == (source / RING).read_bytes()
    assert answered(given, "mine.ipynb")


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_what_is_no_file_is_left_alone(given, source, tmp_path, kind):
    (given / RING).unlink()
    if kind == "folder":
        (given / RING).mkdir()
    else:
        (given / RING).symlink_to(tmp_path / "elsewhere.ipynb")
    if kind == "link":
        (tmp_path / "elsewhere.ipynb").write_text("precious")
    edit(source / RING, improve)
    said = update.write_notebooks(given, source)
    assert said == [f"{RING} is {'no file' if kind == 'folder' else 'a symbolic link'}: left alone"]
    assert (given / RING).is_dir() if kind == "folder" else (given / RING).is_symlink()
    assert kind != "link" or (tmp_path / "elsewhere.ipynb").read_text() == "precious"


def test_without_the_hidden_folder_what_was_only_run_is_merged_and_what_was_changed_is_left_alone(given, source):
    def run(notebook):
        notebook.cells[1].execution_count = 4

    edit(given / HELLO, run)
    edit(given / RING, work)
    edit(source / HELLO, lambda notebook: notebook.cells.append(nbformat.v4.new_markdown_cell("More.")))
    shutil.rmtree(given / update.HIDDEN)
    assert update.write_notebooks(given, source) == [
        f"{HELLO}: updated, with all that you did in it",
        f"{RING} was here before: left alone; the one of the laboratory is 04_ring_all_reduce.new.ipynb",
    ]
    assert says(given, HELLO)[-1] == "More." and answered(given)


def test_a_notebook_that_is_saved_meanwhile_is_left_alone(given, source, monkeypatch):
    merged = merge.merge

    def slow(*notebooks):
        edit(given / RING, lambda notebook: notebook.cells.append(nbformat.v4.new_code_cell("saved just now")))
        return merged(*notebooks)

    edit(given / RING, work)
    edit(source / RING, improve)
    monkeypatch.setattr(merge, "merge", slow)
    with raises(RuntimeError, RING):
        update.write_notebooks(given, source)
    assert says(given)[-1] == "saved just now" and answered(given)
    monkeypatch.undo()
    assert update.write_notebooks(given, source) == [f"{RING}: updated, with all that you did in it"]
    assert says(given)[-1] == "saved just now" and "A new paragraph." in says(given)


def test_a_file_where_the_folder_should_be_is_one_sentence(tmp_path, source):
    (tmp_path / "taken").write_text("")
    with raises(RuntimeError, "taken/.hpdl-release"):
        update.write_notebooks(tmp_path / "taken", source)


# -- other accounts ----------------------------------------------------------------------------------------------------


@pytest.fixture
def home(source):
    """A home, of another account where root runs this; with the forms, where that account may read them."""
    place = Path(tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp"))
    place.chmod(0o755)
    shutil.copytree(source, place / "laboratory")
    home = place / "home"
    home.mkdir(0o700)
    if os.getuid() == 0:
        os.chown(home, NOBODY, NOBODY)
    yield home
    shutil.rmtree(place)


def test_a_folder_that_cannot_be_written_is_one_sentence(home):
    home.chmod(0o500)
    with raises(RuntimeError, "home/notebooks"):
        update.write_notebooks(home / "notebooks", home.parent / "laboratory")
    home.chmod(0o700)


def test_a_notebook_that_its_owner_closed_is_left_alone_and_the_others_are_written(home):
    folder, laboratory = home / "notebooks", home.parent / "laboratory"
    update.write_notebooks(folder, laboratory)
    (folder / HELLO).chmod(0)
    (folder / RING).unlink()
    assert update.write_notebooks(folder, laboratory) == [
        f"{HELLO} may not be read by you: left alone",
        f"{RING}: was missing, written anew",
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes for others")
def test_root_writes_as_the_account_that_owns_the_home(home):
    folder, laboratory = home / "notebooks", home.parent / "laboratory"
    assert update.write_notebooks(folder, laboratory) == [f"{HELLO}: written", f"{RING}: written"]
    assert {path.stat().st_uid for path in [folder, *folder.rglob("*")]} == {NOBODY}
    edit(folder / RING, work)
    edit(laboratory / RING, improve)
    assert update.write_notebooks(folder, laboratory) == [f"{RING}: updated, with all that you did in it"]
    assert {path.stat().st_uid for path in [folder, *folder.rglob("*")]} == {NOBODY}
    assert answered(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes for others")
def test_root_writes_a_course_as_the_account_that_owns_the_home(home):
    assert course.write_course(home / "course")[0] == f"{course.CONFIG}: written"
    assert {path.stat().st_uid for path in (home / "course").rglob("*")} == {NOBODY}


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes for others")
@pytest.mark.parametrize("link", ["notebooks", f"notebooks/{update.HIDDEN}"])
def test_links_of_an_account_lead_root_nowhere(home, link):
    secret = home.parent / "secret"
    secret.mkdir(0o700)
    (home / link).parent.mkdir(exist_ok=True)
    (home / link).symlink_to(secret)
    os.chown(home / "notebooks", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(RuntimeError, match="(Permission denied|Not a directory). Nothing is lost"):
        update.write_notebooks(home / "notebooks", home.parent / "laboratory")
    assert os.listdir(secret) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes for others")
def test_a_link_of_roots_into_a_home_is_followed_as_the_account_only(home):
    link = home.parent / "class"
    link.symlink_to(home)
    update.write_notebooks(link / "notebooks", home.parent / "laboratory")
    assert {path.stat().st_uid for path in (home / "notebooks").rglob("*")} == {NOBODY}


@pytest.mark.skipif(os.getuid() != 0, reason="only root is led astray")
@pytest.mark.parametrize(("mode", "group"), [(0o777, 0), (0o1777, 0), (0o775, NOBODY)])
@pytest.mark.parametrize("below", [".", "inside"])
def test_root_releases_nothing_where_others_may_lay_links(home, mode, group, below):
    """Attack: a link under the name that a notebook has while it is written; it had root overwrite the file."""
    if below == "inside" and mode & 0o1000:
        pytest.skip("in such a folder, as /tmp is, what is root's stays root's")
    folder, precious = home.parent / "shared", home.parent / "precious"
    precious.write_text("precious")
    (folder / below).mkdir(parents=True)
    (folder / below / f".{HELLO}.part").symlink_to(precious)
    os.chown(folder, 0, group)
    folder.chmod(mode)
    with raises(RuntimeError, f"{folder}", f"{folder}"):
        update.write_notebooks(folder / below, home.parent / "laboratory")
    assert precious.read_text() == "precious" and os.listdir(folder / below) == [f".{HELLO}.part"]


# -- attacks that need no other account to be tried --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_lies_under_the_old_name_of_a_file_being_written_is_not_opened(tmp_path, source, kind):
    folder, precious = tmp_path / "attendee", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("precious")
    planted = folder / f".{HELLO}.part"
    planted.symlink_to(precious) if kind == "link" else os.mkfifo(planted)
    assert update.write_notebooks(folder, source) == [f"{HELLO}: written", f"{RING}: written"]
    assert precious.read_text() == "precious" and (folder / HELLO).read_bytes() == (source / HELLO).read_bytes()


@pytest.mark.parametrize("place", ["", f"{update.HIDDEN}/given/"])
def test_a_pipe_in_place_of_a_notebook_is_not_waited_for(given, source, place):
    (given / place / RING).unlink()
    os.mkfifo(given / place / RING)
    with pytest.raises(update.LeftAlone, match="is no file"):
        update.contents(given / place / RING)
    assert update.write_notebooks(given, source) == [f"{RING} is no file: left alone"]


def test_a_huge_notebook_is_not_read(given, source):
    with open(given / RING, "wb") as file:
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert update.write_notebooks(given, source) == [f"{RING} is larger than 64 MiB: left alone"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_a_lock_that_is_held_is_not_waited_for(given, source):
    with update.exclusively(given / update.HIDDEN, given):
        with raises(RuntimeError):
            update.write_notebooks(given, source)
    assert update.write_notebooks(given, source) == []
