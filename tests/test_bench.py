"""The benchmark: the table, the file and bad input. What it measures is nobody's test."""

import json

import pytest

from hpdl_lab import bench


def test_a_race(tmp_path, capfd):
    path = tmp_path / "rows.json"
    rows = bench.all_reduce(2, [4, 4096], ("mpi", "gloo"), str(path))
    names = {"speed of light", "registered", "any tensor", "compiled ring", "MPI in place", "MPI out of place", "gloo"}
    assert {(row["name"], row["size"]) for row in rows} == {(name, size) for name in names for size in (4, 4096)}
    for row in rows:
        assert row["wrong"] == 0
        assert row["ranks"] == 2
        assert 0 < row["p25_us"] <= row["time_us"] <= row["p75_us"]
        assert row["busbw_GBps"] == pytest.approx(row["size"] / row["time_us"] / 1e3)  # 2(p-1)/p is 1 for 2 ranks
    written = json.loads(path.read_text())
    assert written["rows"] == rows
    assert written["command"] == "hpdl bench all_reduce --ranks 2 --sizes 4,4096 --against mpi,gloo"
    assert {"machine", "mpi", "versions", "date", "instructions"} <= set(written)
    table = capfd.readouterr().out
    assert table.count("any tensor") == 2 * 2  # rows, and the last lines
    assert "4,096 bytes, registered:" in table


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, [4]), "at least 1 rank, got 0"),
        ((2, [5]), "5 bytes are not a whole number of float32"),
        ((2, [4], ["nccl"]), "unknown: nccl; known: mpi, gloo"),
    ],
)
def test_what_makes_no_sense(arguments, text):
    with pytest.raises(ValueError, match=text):
        bench.all_reduce(*arguments)


def test_ranks_that_end_with_an_error(capfd):
    with pytest.raises(RuntimeError, match="-n 1 ended with exit code .*: see above"):
        bench.all_reduce(1, [4 << 56])
    assert "Traceback" in capfd.readouterr().err
