"""Frameworks on emulated hosts: what was recorded adds up, and a few steps of all of them today add up as well."""

import json
import subprocess
import sys

import pytest

from hpdl_lab.cli.frameworks import COLUMNS
from hpdl_lab.data import recorded
from hpdl_lab.engines import launch, layout
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.performance.frameworks_run import net
from hpdl_lab.performance.recorded import table_of_frameworks

ALONE, ASYNCHRONOUS = "one process", "TensorFlow ParameterServer, async"
SERVED = (ASYNCHRONOUS, "parameter server over gRPC")


def require_all(recording):
    """Every column, with the loss of one process, and on each link the bytes that the algorithm needs."""
    rows, vector, p = {row["name"]: row for row in recording["rows"]}, recording["nbytes"], net.WORKERS
    assert list(rows) == list(COLUMNS)
    assert all(row["seconds"] > 0 and row["package"].split()[1] for row in rows.values())
    for name in rows.keys() - {ASYNCHRONOUS}:
        assert rows[name]["loss"] == pytest.approx(rows[ALONE]["loss"], rel=1e-4)
    assert rows[ASYNCHRONOUS]["loss"] > 0
    assert max(max(row["links"][2]) for row in rows.values() if row["name"] not in SERVED) < vector / 100
    for name in rows.keys() - {ALONE}:
        each = 1 if name in SERVED else 2 * (p - 1) / p
        workers, server = rows[name]["links"][:p], rows[name]["links"][p]
        assert [*workers[0], *workers[1]] == pytest.approx([each * vector] * 4, rel=0.02)  # headers included
        if name in SERVED:
            assert server == pytest.approx([p * vector] * 2, rel=0.02)


def test_what_is_recorded_adds_up():
    recording = recorded.load("frameworks")
    require_all(recording)
    rows = {row["name"]: row for row in recording["rows"]}
    assert rows["parameter server over gRPC"]["seconds"] > 1.5 * rows["PyTorch DDP"]["seconds"]


def test_the_table_has_a_line_for_each_and_says_where_it_is_from():
    text = table_of_frameworks()
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in COLUMNS)
    assert recorded.load("frameworks")["machine"] in text and "make frameworks" in text


@pytest.mark.slow  # emulated hosts; installs JAX and TensorFlow
def test_a_few_steps_today_add_up_as_well(tmp_path, monkeypatch):
    try:
        launch.check_layout(layout.wanted(3, where="emulated"))
    except EngineError as refused:
        pytest.skip(str(refused))
    monkeypatch.setenv("STEPS", "5")
    module = "hpdl_lab.cli.frameworks"
    subprocess.run([sys.executable, "-m", module, str(tmp_path)], check=True, timeout=900)
    require_all(json.loads((tmp_path / "frameworks.json").read_text()))
