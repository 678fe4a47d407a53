"""The benchmark: the table, the file and bad input. What it measures is nobody's test."""

import json
from unittest import mock

import pytest
import torch

from hpdl_lab.bench import collectives as bench
from hpdl_lab.bench import launch, pipeline, timing
from hpdl_lab.bench.report import Report, put
from hpdl_lab.collectives import expected, table
from hpdl_lab.comm import sim
from tests.wording import raises

pytestmark = pytest.mark.timeout(120)

NAMES = ["speed of light", "registered", "any tensor", "compiled ring", "MPI in place", "MPI out of place", "gloo"]


def briefly(comm, collective, *arguments):
    """Few and short samples: what they measure is not asserted."""
    times = timing.in_turns
    with mock.patch.object(timing, "in_turns", lambda comm, runs, samples=None: times(comm, runs, 3, 10_000)):
        (bench.race_on_ranks if collective == "race" else bench.family_on_ranks)(
            comm, *([] if collective == "race" else [collective]), *arguments
        )


def test_a_race_of_one_element_on_engines(cluster):
    rows = cluster.run(briefly, "race", 4, ["mpi", "gloo"], ranks=[0, 1], deadline=30).rows
    assert [(row["name"], row["size"], row["wrong"]) for row in rows] == [(name, 4, 0) for name in NAMES]


def test_a_race(tmp_path, capfd):
    """On ranks of its own."""
    path = tmp_path / "rows.json"
    rows = bench.all_reduce(2, [4096], ("mpi", "gloo"), Report("hpdl bench all_reduce", str(path)))
    assert [(row["name"], row["size"]) for row in rows] == [(name, 4096) for name in NAMES]
    for row in rows:
        assert row["wrong"] == 0
        assert row["ranks"] == 2
        assert 0 < row["p25_us"] <= row["time_us"] <= row["p75_us"]
        assert row["busbw_GBps"] == pytest.approx(row["size"] / row["time_us"] / 1e3)  # 2(p-1)/p is 1 for 2 ranks
    written = json.loads(path.read_text())
    assert written["rows"] == rows
    assert written["command"] == "hpdl bench all_reduce"
    assert {"machine", "mpi", "versions", "date", "instructions"} <= set(written)
    table = capfd.readouterr().out
    assert table.count("any tensor") == 2  # the row, and the last line
    assert "4,096 bytes, registered:" in table


@pytest.mark.parametrize(
    ("arguments", "text"), [((0, [4]), ("1", "0")), ((2, [5]), ("5 bytes", "float32")), ((2, [4], ["nccl"]), ())]
)
def test_what_makes_no_sense(arguments, text):
    with raises(ValueError, *text):
        bench.all_reduce(*arguments)


def test_ranks_that_end_with_an_error(capfd):
    with raises(RuntimeError, "1"):
        list(launch.on_ranks(1, "none of the benchmarks", [[]]))
    assert "Traceback" in capfd.readouterr().err


def test_the_family(cluster, monkeypatch, tmp_path, capfd):
    """On engines, which have imported torch."""

    def on_ranks(ranks, kind, runs):
        for job in [(bench.report_about,), *((briefly, *arguments) for arguments in runs)]:
            yield from cluster.run(*job, ranks=list(range(ranks)), deadline=30).rows

    monkeypatch.setattr(launch, "on_ranks", on_ranks)
    path, page = tmp_path / "rows.json", tmp_path / "page.md"
    page.write_text("# Mine\n\nText.\n")
    put(page, "2 ranks on one machine", "An earlier table.")  # which the new one replaces
    rows = bench.collectives(2, [4, 4096], ("all_reduce", "scatter"), Report("hpdl ...", str(path), str(page)))
    found = {(row["collective"], row["size"], row["name"], row["place"]) for row in rows}
    assert len(found) == len(rows)
    for algorithm in table.ALGORITHMS:
        if algorithm.collective in ("all_reduce", "scatter"):
            assert {size for c, size, n, _ in found if (c, n) == (algorithm.collective, algorithm.name)} >= {4096}
    for name in ("MPI", "gloo", "shared memory"):
        assert ("scatter", 8, name, "out") in found  # 4 bytes are no element for each rank
    for place in ("in", "out"):
        assert ("all_reduce", 4, "MPI", place) in found
    assert {(row["collective"], row["redop"], row["root"], row["wrong"]) for row in rows} == {
        ("all_reduce", "sum", -1, 0),
        ("scatter", "none", 0, 0),
    }
    for row in rows:
        factor = 1.0 if row["collective"] == "all_reduce" else 0.5
        assert row["busbw_GBps"] == pytest.approx(factor * row["size"] / row["time_us"] / 1e3)
        assert 0 < row["p25_us"] <= row["time_us"] <= row["p75_us"]
    assert json.loads(path.read_text())["rows"] == rows
    text = page.read_text()
    assert text.startswith("# Mine\n\nText.\n") and text.count("## 2 ranks on one machine") == 1
    assert "earlier" not in text
    assert text.count("| float32 |") == len(rows) and "`hpdl ...`" in text
    assert "size (B) | count (elements) |    type | redop | root | name" in text
    assert "# scatter" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, [4]), ("1", "0")), ((2, [6]), ("6 bytes", "float32")), ((2, [4], ["all_sum"]), ("all_sum", "all_reduce"))],
)
def test_what_makes_no_sense_of_the_family(arguments, text):
    with raises(ValueError, *text):
        bench.collectives(*arguments)


def test_a_wrong_result_is_counted():
    """On one rank of this process: the check is no formality."""

    def check(comm, collective, change):
        x = torch.zeros(12)
        return bench.check(comm, collective, bench.Candidate("mine", lambda: change(x), x))

    def alone(comm):
        right = [check(comm, name, lambda x: x) for name in expected.COLLECTIVES]
        return right, check(comm, "all_reduce", lambda x: x.mul_(2)), check(comm, "all_gather", lambda x: x[:5])

    assert sim.run(1, alone)[0] == ([0] * 8, 11, 12)


def test_contenders_come_to_the_same_and_are_timed(cluster):
    for name in pipeline.SCHEDULES:
        rows = cluster.run(pipeline.on_ranks, "tiny", 4, 4, name, 3, ranks=[0, 1], deadline=30).rows
        assert [(row["schedule"], row["name"]) for row in rows] == [(name, "torch"), (name, "ours")]
        assert all(row["wrong"] == 0 and row["step_ms"][0] > 0 for row in rows)
        assert rows[0]["of_torch"] is None and rows[1]["of_torch"][0] > 0
    for who in ("ours", "torch"):
        (row,) = cluster.run(pipeline.memory_on_ranks, "tiny", 4, 4, "1f1b", who, ranks=[0, 1], deadline=30).rows
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
    rows = pipeline.pipeline(2, "tiny", 8, 4, 5, ["1f1b"], report)
    said, table = capsys.readouterr().out, (tmp_path / "table.md").read_text()
    for text in (said, table):
        assert "1f1b: our step takes 0.90 times as long as torch's, median of the rounds." in text
        assert "2.0 / 1.0" in text and "301 / 299" in text and "1,234 parameters" in text
    assert [row["saved_MiB"] for row in rows] == [[2.0, 1.0]] * 2
    assert '"of_torch": [' in (tmp_path / "rows.json").read_text()


def test_arguments_that_make_no_sense_start_no_ranks(monkeypatch):
    monkeypatch.setattr(launch, "on_ranks", None)
    with raises(ValueError, "10", "4 micro-batches"):
        pipeline.pipeline(2, "tiny", 10, 4, 5)
    with raises(ValueError, "4 micro-batches", "4 ranks"):
        pipeline.pipeline(4, "tiny", 12, 6, 5)
    with raises(ValueError, "'fast'"):
        pipeline.pipeline(2, "tiny", 8, 4, 5, ["fast"])
    with raises(ValueError, "6 layers", "8 stages"):
        pipeline.pipeline(4, "tiny", 8, 8, 5)
