"""The README and docs/: commands are understood, the example runs, and the files, verbs and tests named are there."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from hpdl_lab import cli, lab

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
every_page = pytest.mark.parametrize("page", PAGES)


@every_page
def test_commands_are_understood(page, capsys):
    lines = re.findall(r"^    (?:\.venv/bin/)?(\S.*)$", PAGES[page], re.M) + re.findall(r"`([^`\n]+)`", PAGES[page])
    for line in lines:
        line = re.split(r"  +|\s#", line)[0]  # less what explains it
        program, *words = line.split() or [""]
        if program == "make" and words and re.fullmatch(r"[a-z-]+", words[0]):
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M), f"there is no `{line}`"
        if program == "hpdl" and len(words) > 1 and not {"--help", "..."} & set(words):
            try:
                cli.parser().parse_args(words)
            except SystemExit:
                pytest.fail(f"`{line}`: {capsys.readouterr().err}")


@every_page
def test_what_is_named_is_there(page):
    text, folder = PAGES[page], (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (folder / target).exists(), f"link to {target}"
    for path in re.findall(r"`((?:hpdl_lab|cluster|tests|docs|notebooks|csrc)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    for verb in re.findall(r"`lab\.(\w+)\(", text):
        assert verb in lab.__all__, f"lab.{verb}"
    for module, names in re.findall(r"^from (hpdl_lab[\w.]*) import (.+?)(?: *#.*)?$", text, re.M):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}"), name
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        tests = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert test in tests, f"{path}::{test}"


def test_each_step_of_the_walks_is_there():
    steps = re.findall(r"`(\w[\w/]*\.py):([\w.]+)`", PAGES["docs/house.md"])
    assert len(steps) > 25
    for path, name in steps:
        body = ast.parse((ROOT / "hpdl_lab" / path).read_text()).body
        for part in name.split("."):
            found = [node for node in body if getattr(node, "name", "") == part]
            assert found, f"{path}:{name}"
            body = getattr(found[-1], "body", [])


def test_every_claim_about_security_names_a_test():
    cells = re.findall(r"^\|.*\|(.+?)\|$", PAGES["docs/security.md"].split("## ")[0], re.M)
    rows = [cell for cell in cells if cell.strip(" -") not in ("", "shown by")]
    assert len(rows) > 15 and all("tests/" in row for row in rows)


def test_the_example_runs(cluster, capsys):
    """As a second program beside the one that has started the four engines of `cluster`: it takes those."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "example.py", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("tensor([6., 6.])") == 2
    assert cluster.run(lambda comm: comm.rank) == [0, 1, 2, 3]
