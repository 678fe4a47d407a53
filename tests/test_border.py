"""Bad input at the border of Python and C++: a slice of what `make sanitize` does."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hpdl_lab import features

BORDER = Path(__file__).resolve().parent / "border"


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("border_run", BORDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stub_is_that_of_the_build():
    built = Path(importlib.util.find_spec("hpdl_lab._core").origin).parent / "_core.pyi"
    kept = Path(features.__file__).parents[1] / "_core.pyi"
    assert kept.read_text() == built.read_text(), f"csrc has changed what it binds: cp {built} {kept}"


@pytest.mark.slow
def test_a_slice_of_the_cases_under_sanitizers():
    done = subprocess.run(
        [sys.executable, BORDER / "run.py", "--sanitize", "--cases", "1000"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1,100 cases under AddressSanitizer" in done.stdout


def test_a_part_that_fails_says_at_which_case(runner, tmp_path):
    fault = runner.run(runner.Part("alone", 5, ("--torch", "--size", "x")), 3, None, tmp_path)
    assert fault.startswith("exit code 2") and "invalid int value" in fault


@pytest.mark.parametrize(
    ("report", "found"),
    [
        ("==7==ERROR: AddressSanitizer: heap-use-after-free on address 0x6\n    #0 0x7 in MPI_Irecv", 1),
        ("WARNING: ThreadSanitizer: data race (pid=7)\n  Write of size 4 at 0x7f by thread T1 (mutexes: write M4):", 1),
        ("csrc/reduce.cpp:3:4: runtime error: load of misaligned address 0x1 for type 'const float'", 1),
        ("==7==ERROR: LeakSanitizer: detected memory leaks\n\n"
         "Direct leak of 8 byte(s) in 1 object(s) allocated from:\n"
         "    #0 0x7f in operator new(unsigned long) new.cpp:99\n"
         "    #1 0x7f in hpdl::SharedMemory::create(unsigned long) /x/csrc/shm.cpp:3\n\n", 1),
        ("==7==ERROR: LeakSanitizer: detected memory leaks\n\n"
         "Direct leak of 8 byte(s) in 1 object(s) allocated from:\n"
         "    #0 0x7f in malloc asan_malloc_linux.cpp:69\n    #1 0x7f in PyObject_Malloc Objects/obmalloc.c:1\n\n", 0),
    ],
)  # fmt: skip
def test_what_a_sanitizer_reports(runner, report, found, tmp_path):
    """Python's own leaks are not ours."""
    (tmp_path / "report.7").write_text(report)
    assert len(runner.reports(tmp_path)) == found


def test_the_stub_has_every_bound_name():
    core = features.compiled_module()
    stub = ast.parse(Path(core.__file__).with_name("_core.pyi").read_text())
    names = {node.name for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert names == {name for name in vars(core) if not name.startswith("_")}
