"""`make lint` passes: ruff and mypy on Python, clang-format on C++."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # lint

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*"))


@pytest.mark.parametrize(
    "command",
    [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], ["clang-format", "--dry-run", "-Werror", *SOURCES]],
    ids=["ruff check", "ruff format", "mypy", "clang-format"],
)
def test_style(command):
    done = subprocess.run([TOOLS / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
