"""What the README says is so: its map, its notebooks and minutes, its example, its picture."""

import importlib.util
import re
import struct
from pathlib import Path

import pytest

from hpdl_lab import lab

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def table(heading):
    """The cells of the table below a heading."""
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_map_names_what_is_there():
    for where, _ in table("The map"):
        folder = ""
        for path in re.findall(r"`([^`]+)`", where):
            found = [base for base in ("", folder, "hpdl_lab/") if (ROOT / base / path).exists()]
            assert found, f"the map names {path}, which is not there"
            folder = str(Path(path).parent)


def test_the_map_names_every_room():
    named = " ".join(where for where, _ in table("The map"))
    for room in (ROOT / "hpdl_lab").iterdir():
        if room.is_dir() and not room.name.startswith("_"):
            assert f"{room.name}/" in named, f"the map does not name hpdl_lab/{room.name}/"


def test_every_verb_that_the_map_names_is_there():
    ((_, verbs),) = [row for row in table("The map") if row[0] == "`hpdl_lab/lab/`"]
    names = re.findall(r"`(\w+)`", verbs)
    assert "doctor" in names and "run" in names
    for name in names:
        assert name in lab.__all__ and callable(getattr(lab, name)), f"the map names lab.{name}, which is not there"


def test_notebooks_and_minutes_are_those_of_the_sources():
    listed = {name: minutes for name, _, minutes in table("What you will learn")}
    there = {}
    for source in sorted((ROOT / "notebooks" / "source").glob("*.py")):
        there[source.stem] = re.search(r"^# \| (\d+) \| ", source.read_text(), re.MULTILINE).group(1)
    assert listed == there


def test_what_documents_import_is_there():
    lines = "\n".join(path.read_text() for path in [*ROOT.glob("docs/*.md"), ROOT / "README.md"])
    found = re.findall(r"^from (hpdl_lab[\w.]*) import (.+?)(?: *#.*)?$", lines, re.MULTILINE)
    assert ("hpdl_lab.parallel.pipeline.model", "Pipeline") in found
    for module, names in found:
        for name in names.split(", "):
            there = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
            assert there, f"a document imports {name} from {module}, where it is not"


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), f"the README links to {target}"


def test_the_screenshot_is_a_real_one():
    data = (ROOT / "docs" / "notebook_04.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 800 and height >= 600


@pytest.mark.timeout(120)
def test_the_example_runs(cluster, capsys):
    """As a second program beside the one that has started the four engines of `cluster`: it takes those."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "example.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("tensor([6., 6.])") == 2
    assert cluster.run(lambda comm: comm.rank) == [0, 1, 2, 3]
