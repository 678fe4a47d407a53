"""The benchmark: the table, the file and bad input. What it measures is nobody's test."""

import json
from unittest import mock

import pytest
import torch

from hpdl_lab.bench import collectives as bench
from hpdl_lab.bench import launch, timing
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
