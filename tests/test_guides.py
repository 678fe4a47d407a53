"""What the guides for instructors and sites say is so: minutes, commands, messages, and the tests that they name."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from hpdl_lab import cli, lab

ROOT = Path(__file__).resolve().parent.parent
INSTRUCTOR, SECURITY = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("instructor", "security"))
GUIDES = {"instructor": INSTRUCTOR, "security": SECURITY}


def rows(text, first):
    """The rows, as lists of cells, of the table whose first column has this heading; and all of its headings."""
    lines = text.splitlines()
    (begin,) = (i for i, line in enumerate(lines) if line.startswith(f"| {first}"))
    table = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))])
    return table[2:], table[0]


# -- the plan of a day -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("day", ["half day", "full day"])
def test_a_day_is_as_long_as_it_says_and_notebooks_take_their_minutes(day):
    plan, (heading, _) = rows(INSTRUCTOR, f"{day}, ")
    assert sum(int(minutes) for _, minutes in plan) == int(re.search(r"\d+", heading)[0])
    listed = [(what, int(minutes)) for what, minutes in plan if re.match(r"\d\d_", what)]
    assert len(listed) >= 6
    for what, minutes in listed:
        name, _, part = what.partition(", ")
        source = (ROOT / "notebooks" / "source" / f"{name}.py").read_text()
        whole, tracks = re.search(r"^# \| (\d+) \| ([^|]+) \|", source, re.M).groups()
        if part:  # "half day: the first 35, to the zoo", "half day: part one, 60"
            words = part.removesuffix(str(minutes)).strip()
            assert re.search(rf"\b{minutes}\b", tracks) and words in tracks, (what, tracks)
        else:
            assert minutes == int(whole), what
        assert day in tracks or part, f"{name} is not for the {day}"


def test_all_notebooks_together():
    minutes = [
        re.search(r"^# \| (\d+) \| ", path.read_text(), re.M)[1] for path in (ROOT / "notebooks/source").glob("*.py")
    ]
    assert f"All notebooks together are {sum(map(int, minutes))} minutes" in INSTRUCTOR


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(text):
    """Every command line of a guide, in blocks and in sentences: ["hpdl plan --attendees 40", "make hub", ...]."""
    lines = re.findall(r"^    (?:\.venv/bin/)?(\S.*)$", text, re.M) + re.findall(r"`([^`]+)`", text)
    return [" ".join(line.split()) for line in lines if re.match(r"(hpdl|make) ", line)]


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_are_understood(guide, capsys):
    found = commands(GUIDES[guide])
    assert len(found) >= 3
    for line in found:
        program, *words = line.split()
        if program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M), f"there is no `{line}`"
            continue
        if words[-1:] == ["--help"]:
            continue
        try:
            cli.parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"`{line}`: {capsys.readouterr().err}")


@pytest.mark.parametrize("wrong", ["plan --atendees 40", "hub --users twelve", "relase x", "hub --address"])
def test_a_wrong_command_is_not(wrong, capsys):
    with pytest.raises(SystemExit):
        cli.parser().parse_args(wrong.split())


@pytest.mark.parametrize("guide", GUIDES)
def test_verbs_are_there(guide):
    for name in re.findall(r"`lab\.(\w+)\(", GUIDES[guide]):
        assert name in lab.__all__, f"{guide}.md names lab.{name}, which is not there"


@pytest.mark.parametrize("guide", GUIDES)
def test_files_that_are_named_are_there(guide):
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDES[guide]):
        assert (ROOT / "docs" / target).exists(), f"{guide}.md links to {target}"
    for path in re.findall(r"`((?:hpdl_lab|cluster|tests|docs)/[\w./]*)`", GUIDES[guide]):
        assert (ROOT / path).exists(), f"{guide}.md names {path}"


# -- messages ----------------------------------------------------------------------------------------------------------


@cache
def sentences():
    """Every string of the package and of cluster/, with what is filled in as "..."."""
    found = []
    for path in [*(ROOT / "hpdl_lab").rglob("*.py"), *(ROOT / "cluster").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def said_by_the_code(quote):
    """Whether one string of the code has all pieces of the quotation, in order."""
    pieces = [piece.strip() for piece in quote.split("...") if len(piece.strip()) > 2]
    pattern = re.compile(".*".join(map(re.escape, pieces)), re.S)
    return any(pieces[0] in sentence and pattern.search(sentence) for sentence in sentences())


@pytest.mark.parametrize("guide", GUIDES)
def test_messages_are_those_of_the_code(guide):
    quotes = [quote for quote in re.findall(r'"([^"\n]{12,})"', re.sub(r"`[^`]*`", "", GUIDES[guide])) if " " in quote]
    quotes += [row[0].strip('"') for row in rows(INSTRUCTOR, "somebody reads")[0]] if guide == "instructor" else []
    assert [quote for quote in quotes if not said_by_the_code(quote)] == []


def test_a_message_that_nobody_says_is_found():
    assert not said_by_the_code("a hub walks already on ...")
    assert not said_by_the_code("port ... of ... can not be used")


# -- claims about security ---------------------------------------------------------------------------------------------


def functions_of(path):
    """Names of the test functions of a file, in classes and outside."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_claim_names_a_test_that_is_there():
    claims = re.findall(r"^\|.*\| (.+?) \|$", SECURITY, re.M)
    named = 0
    for cell in claims:
        for path, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)`", cell):
            named += 1
            assert (ROOT / path).exists(), f"security.md names {path}"
            assert test in functions_of(ROOT / path), f"security.md names {test}, which is not in {path}"
    assert named >= 15


def test_every_claim_has_a_test():
    table, headings = rows(SECURITY, "claim")
    assert headings == ["claim", "shown by"]
    assert [claim for claim, shown in table if not claim.startswith("**") and "tests/" not in shown] == []
