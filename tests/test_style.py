"""`make lint` passes: ruff and mypy on Python, clang-format on C++, shellcheck, hadolint."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # mypy from nothing


def test_style():
    command = ["make", "lint", f"VENV={sys.prefix}"]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
