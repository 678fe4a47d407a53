"""`hpdl bench pipeline`: both contenders come to the same gradients, and the table compares them."""

import pytest

from hpdl_lab.bench import launch
from hpdl_lab.bench import pipeline as bench
from hpdl_lab.bench.report import Report
from tests.wording import raises

pytestmark = pytest.mark.timeout(120)


def test_contenders_come_to_the_same_and_are_timed(cluster):
    for name in bench.SCHEDULES:
        rows = cluster.run(bench.on_ranks, "tiny", 4, 4, name, 3, ranks=[0, 1], deadline=30).rows
        assert [(row["schedule"], row["name"]) for row in rows] == [(name, "torch"), (name, "ours")]
        assert all(row["wrong"] == 0 and row["step_ms"][0] > 0 for row in rows)
        assert rows[0]["of_torch"] is None and rows[1]["of_torch"][0] > 0
    for who in ("ours", "torch"):
        (row,) = cluster.run(bench.memory_on_ranks, "tiny", 4, 4, "1f1b", who, ranks=[0, 1], deadline=30).rows
        first, last = row["saved_MiB"]
        assert 1.2 < first / last < 4  # two micro-batches live on rank 0, one on rank 1
        assert all(50 < peak < 5000 for peak in row["peak_MiB"])


def test_the_table_compares_with_torch(monkeypatch, tmp_path, capsys):
    about = {"mpi": "M", "machine": "C", "instructions": "I", "system": "S", "versions": {"torch": "2"}, "date": "D"}

    def on_ranks(ranks, kind, runs):
        yield {"about": about}
        for run in runs:
            if kind == "pipeline_memory":
                assert run == ["tiny", 8, 4, "1f1b", "torch"] or run == ["tiny", 8, 4, "1f1b", "ours"]
                yield {"saved_MiB": [2.0, 1.0], "peak_MiB": [301.4, 299.0]}
                continue
            row = {"schedule": run[3], "parameters": 1234, "wrong": 0}
            yield {**row, "name": "torch", "step_ms": [20.0, 19.0, 21.0], "of_torch": None}
            yield {**row, "name": "ours", "step_ms": [18.0, 17.5, 19.0], "of_torch": [0.9, 0.88, 0.95]}

    monkeypatch.setattr(launch, "on_ranks", on_ranks)
    report = Report("hpdl bench pipeline", tmp_path / "rows.json", tmp_path / "table.md")
    rows = bench.pipeline(2, "tiny", 8, 4, 5, ["1f1b"], report)
    said, table = capsys.readouterr().out, (tmp_path / "table.md").read_text()
    for text in (said, table):
        assert "1f1b: our step takes 0.90 times as long as torch's, median of the rounds." in text
        assert "2.0 / 1.0" in text and "301 / 299" in text and "1,234 parameters" in text
    assert [row["saved_MiB"] for row in rows] == [[2.0, 1.0]] * 2
    assert '"of_torch": [' in (tmp_path / "rows.json").read_text()


def test_arguments_that_make_no_sense_start_no_ranks(monkeypatch):
    monkeypatch.setattr(launch, "on_ranks", None)
    with raises(ValueError, "10", "4 micro-batches"):
        bench.pipeline(2, "tiny", 10, 4, 5)
    with raises(ValueError, "4 micro-batches", "4 ranks"):
        bench.pipeline(4, "tiny", 12, 6, 5)
    with raises(ValueError, "'fast'"):
        bench.pipeline(2, "tiny", 8, 4, 5, ["fast"])
    with raises(ValueError, "6 layers", "8 stages"):
        bench.pipeline(4, "tiny", 8, 8, 5)
