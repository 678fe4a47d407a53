"""Updates that are merged into an attendee's notebook, whatever either of the two did: no line is lost, no id twice."""

import copy
import random
import uuid
from pathlib import Path

import nbformat
import pytest

from hpdl_lab.release import merge

RING = Path(__file__).resolve().parent.parent / "notebooks" / "04_ring_all_reduce.ipynb"


@pytest.fixture
def base():
    """Twelve cells of notebook 04: text, predictions, exercises and their checks."""
    form = nbformat.read(RING, as_version=4)
    form.cells = form.cells[6:18]
    return form


def random_form(rng, form):
    """An update: cells changed, added, removed, moved."""
    new = copy.deepcopy(form)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(new.cells))
        if rng.random() < 0.4:
            random_line(rng, new.cells[at])
            if "nbgrader" not in new.cells[at].metadata:
                new.cells[at].id = f"{rng.getrandbits(32):08x}"
        elif rng.random() < 0.4:
            new.cells.insert(at, nbformat.v4.new_markdown_cell(f"new {rng.random()}"))
        elif rng.random() < 0.5:
            del new.cells[at]
        else:
            new.cells.insert(rng.randrange(len(new.cells)), new.cells.pop(at))
    return new


def random_work(rng, form):
    """What an attendee does to a form; at times in an editor that makes all ids anew."""
    mine = copy.deepcopy(form)
    for _ in range(rng.randrange(6)):
        at = rng.randrange(len(mine.cells))
        if rng.random() < 0.5:
            random_line(rng, mine.cells[at])
        elif rng.random() < 0.6:
            mine.cells.insert(at, nbformat.v4.new_code_cell(f"own {rng.random()}"))
        else:
            mine.cells.insert(rng.randrange(len(mine.cells)), mine.cells.pop(at))
    for c in mine.cells if rng.random() < 0.2 else ():
        c.id = uuid.UUID(int=rng.getrandbits(128)).hex[:8]
    return mine


def random_line(rng, target):
    lines = target.source.split("\n")
    at = rng.randrange(len(lines))
    lines[at : at + rng.randrange(2)] = [f"line {rng.random()}"]
    target.source = "\n".join(lines)


@pytest.mark.parametrize("seed", range(60))
def test_no_line_of_either_is_ever_lost(base, seed):
    rng = random.Random(seed)
    mine, new = random_work(rng, base), random_form(rng, base)
    merged, conflicts = merge.merge(base, mine, new)
    nbformat.validate(merged)
    lines = {line for c in merged.cells for line in c.source.split("\n")}
    old = {line for c in base.cells for line in c.source.split("\n")}
    assert {line for c in mine.cells for line in c.source.split("\n")} - old <= lines
    if not conflicts:
        assert {line for c in new.cells for line in c.source.split("\n")} - old <= lines
    once_more = merge.merge(base, merged, new)[0]  # as after a run that was cut short
    assert [c.source for c in once_more.cells] == [c.source for c in merged.cells]


def changed(form, at, source, **what):
    other = copy.deepcopy(form)
    other.cells[at].update(source=source, **what)
    return other


def test_nothing_is_changed_in_what_was_given(base):
    mine, new = changed(base, 0, "mine"), changed(base, 1, "theirs")
    before = copy.deepcopy((base, mine, new))
    merge.merge(base, mine, new)
    assert (base, mine, new) == before


def test_a_conflict_is_named_by_its_exercise_or_by_how_the_cell_starts(base):
    exercise = next(i for i, c in enumerate(base.cells) if c.get("id") == "exercise-4-1")
    text = next(i for i, c in enumerate(base.cells) if c.cell_type == "markdown")
    mine = changed(changed(base, exercise, "my answer"), text, "my text")
    new = changed(changed(base, exercise, "another stub"), text, "# Another text")
    merged, conflicts = merge.merge(base, mine, new)
    assert sorted(conflicts) == ["exercise 4.1", "the cell '# Another text'"]
    assert [merged.cells[i].source for i in (exercise, text)] == ["my answer", "my text"]
    emptied = copy.deepcopy(base)
    emptied.cells[text].source = ""
    assert merge.merge(base, changed(base, text, "my text"), emptied)[1] == ["the cell ''"]


def test_a_cell_that_was_made_text_stays_so_and_an_update_of_it_is_a_conflict(base):
    at = next(i for i, c in enumerate(base.cells) if c.get("id") == "check-4-1")
    mine = copy.deepcopy(base)
    mine.cells[at] = nbformat.v4.new_markdown_cell(base.cells[at].source, id="check-4-1")
    assert merge.merge(base, mine, base)[1] == []
    merged, conflicts = merge.merge(base, mine, changed(base, at, "another check"))
    assert conflicts == ["check 4.1"] and merged.cells[at].cell_type == "markdown"


def test_what_each_of_both_changed_in_the_metadata_of_a_cell_is_kept(base):
    mine, new = copy.deepcopy(base), copy.deepcopy(base)
    mine.cells[0].metadata.collapsed = True
    base.cells[0].metadata.tags, mine.cells[0].metadata.tags = ["old"], ["old"]
    new.cells[0].metadata.tags = ["new"]
    assert merge.merge(base, mine, new)[0].cells[0].metadata == {"collapsed": True, "tags": ["new"]}


def test_a_notebook_of_an_old_program_without_ids_gets_them(base):
    mine = changed(base, 0, "mine")
    mine.nbformat_minor = 4
    for c in mine.cells:
        del c["id"]
    merged, conflicts = merge.merge(base, mine, changed(base, 2, "# Another text"))
    nbformat.validate(merged)
    assert conflicts == [] and merged.cells[0].source == "mine"
    assert [c.id for c in merged.cells][1:] == [c.id for c in base.cells][1:]  # of "mine" nobody knows what it was


def test_a_text_that_both_changed_is_recognized_under_another_id_but_not_as_code(base):
    text = nbformat.v4.new_markdown_cell("# A ring\n\nEach rank sends one chunk.\n\nThen it receives one.")
    base.cells.insert(3, text)
    mine, new = changed(base, 3, text.source + "\n\nMine."), changed(base, 3, text.source.replace("ring", "tree"))
    new.cells[3].id = "feedc0de"
    merged, conflicts = merge.merge(base, mine, new)
    assert conflicts == [] and len(merged.cells) == len(base.cells)
    assert merged.cells[3].source.startswith("# A tree") and merged.cells[3].source.endswith("Mine.")
    assert merge.pairs([text], [nbformat.v4.new_code_cell(text.source)]) == {}
