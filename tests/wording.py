"""What errors say: their type and facts stand in the tests, their wording in tests/wording/, which a command rewrites.

    with raises(ValueError, "5 bytes", "float32"):       the type, and the facts, in this order
        count_of(5, "float32")

`make wording` writes tests/wording/test_x.txt anew, the first line of each error that tests/test_x.py provokes; whoever
changes a sentence reads the difference. Numbers, paths and the machine's name are left out: they are facts, or chance;
lists of names as well, which grow with the library.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_suffix("")
WRITING = os.environ.get("HPDL_WORDING") == "write"
NAME = r"(?!and\b|or\b)'?(?=[\w#]*[A-Za-z])[\w#]{2,}'?(?: \(#\))?"  # ring, '1f1b', reduce_scatter (4.1)
LIST = re.compile(rf"(?<![\w#]){NAME}(?:, {NAME}){{3,}}(?![\w#-])")
heard: dict[str, list[str]] = {}  # {name of the test file: lines "test: sentence", in the order of the tests}


@contextlib.contextmanager
def raises(kind, *facts: str) -> Iterator[pytest.ExceptionInfo]:
    """As pytest.raises; the error's text holds `facts` in this order, and is worded as in tests/wording/."""
    with pytest.raises(kind) as found:
        yield found
    text = str(found.value)
    assert re.search(".*".join(map(re.escape, facts)), text, re.DOTALL), f"{facts} are not in this order in: {text}"
    require_wording(text)


def require_wording(text: str) -> None:
    """Compare a text with the line that is kept for the test that runs; remember it if lines are being written."""
    path, _, test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)").partition("::")
    line = f"{test.partition('[')[0]}: {without_numbers(text)}"
    name = Path(path).stem
    lines = heard.setdefault(name, [])
    if line not in lines:
        lines.append(line)
    if not WRITING and line not in kept(name):
        pytest.fail(f"new wording; if it is better, `make wording` keeps it in {FOLDER.name}/{name}.txt:\n{line}")


def kept(name: str) -> list[str]:
    path = FOLDER / f"{name}.txt"
    return path.read_text().splitlines() if path.exists() else []


def without_numbers(text: str) -> str:
    """The first line: "#" stands for numbers, PATH for paths, HOST for this machine, NAMES for four names or more."""
    text = re.sub(r"(?<![\w.])(?:/[\w.+-]+){2,}", "PATH", text)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
    text = re.sub(r"\d[\d,.]*(?<=\d)|0x[0-9a-f]+", "#", " ".join(text.partition("\n")[0].split()))
    return LIST.sub("NAMES", text)


def write() -> None:
    """Write the files of all tests that ran, for `make wording`; tests that were skipped keep their lines."""
    FOLDER.mkdir(exist_ok=True)
    for name, lines in heard.items():
        source = FOLDER.with_name(f"{name}.py").read_text()
        ran = {line.partition(":")[0] for line in lines}
        others = [line for line in kept(name) if line.partition(":")[0] not in ran]
        skipped = [line for line in others if f"def {line.partition(':')[0]}(" in source]
        (FOLDER / f"{name}.txt").write_text("\n".join(sorted(lines + skipped)) + "\n")
