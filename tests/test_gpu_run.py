"""`make test-gpu`: what it says where it cannot test, and what it installs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
gpu_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_run)


def test_without_a_driver_nothing_is_tested_and_nothing_counts_as_passed(monkeypatch, capsys):
    monkeypatch.setattr(gpu_run.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(gpu_run.os.path, "exists", lambda path: False)
    assert gpu_run.main("nowhere", "nowhere") == 0
    said = capsys.readouterr().out
    assert said == "make test-gpu: nothing was tested: no NVIDIA driver: /dev/nvidia0 does not exist\n"
    assert "passed" not in said


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo '13.0 True'", ""),
        ("echo '13.0 False'", "has CUDA 13.0, but finds no GPU"),
        ("echo 'None False'", "was built without CUDA"),
        ("echo 'ModuleNotFoundError: no torch' >&2; exit 1", "cannot import torch: ModuleNotFoundError: no torch"),
    ],
)
def test_with_a_driver_torch_is_asked(monkeypatch, tmp_path, script, reason):
    monkeypatch.setattr(gpu_run.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    why = gpu_run.why_not(python)
    assert reason in why and bool(why) == bool(reason)


def test_the_environment_sees_the_packages_of_its_python(tmp_path):
    python = gpu_run.make_environment(tmp_path / "env")
    asked = "import sys, importlib.util; print(sys.prefix, importlib.util.find_spec('torch') is not None)"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=60)
    assert said.stdout.strip() == f"{tmp_path / 'env'} True", said.stderr
    assert gpu_run.missing(python, ("torch", "no_such_module", "mpich")) == ["no_such_module", "mpich"]
    assert gpu_run.missing(Path(sys.executable), ("mpich",)) == []


def test_what_cannot_be_installed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(gpu_run, "run", lambda command, check: False)
    gpu_run.install(Path(sys.executable), ("torch", "no_such_module"))
    assert capsys.readouterr().out == "no-such-module could not be installed: what needs it is skipped\n"
