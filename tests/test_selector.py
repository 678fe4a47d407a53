"""An algorithm for every message size: the syntax, its faults, the tuner, and the selection as an all-reduce."""

import pickle

import numpy as np
import pytest
import torch

from hpdl_lab import lab
from hpdl_lab.collectives.selector import Selection, fastest
from hpdl_lab.collectives.table import algorithm_names, find_algorithm
from hpdl_lab.comm import PerRank, sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.data_parallel import DataParallel
from tests.traffic import calls, posted
from tests.wording import raises

TEXT = "recursive_doubling:0-8192;double_tree:8193-1048576;ring:1048577-max"


def test_every_size_has_its_algorithm():
    selection = Selection.parse(TEXT)
    assert [selection.name_for(n) for n in (0, 8192, 8193, 1 << 20, (1 << 20) + 1, 1 << 40)] == [
        *["recursive_doubling"] * 2,
        *["double_tree"] * 2,
        *["ring"] * 2,
    ]
    assert str(selection) == TEXT and eval(repr(selection)) == selection


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("ring", "ring:0-max"),
        (" tree : 0 - 99 ; ring:100-max; ", "tree:0-99;ring:100-max"),
        ("ring:100-max;tree:0-99", "tree:0-99;ring:100-max"),
        ("native", "native:0-max"),
    ],
)
def test_what_may_be_written_differently(text, same):
    assert str(Selection.parse(text)) == same


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", ("nothing is selected by ''",)),
        ("rnig:0-max", ("'rnig:0-max'", "'rnig'", "segmented_ring")),
        ("ring:0-1;;tre:2-max", ("'tre:2-max'", "'tre'")),
        ("ring:0..8192", ("'ring:0..8192'", "FIRST-LAST", "0-8192", "FIRST-max", "'0..8192'")),
        ("ring:0-8KiB;tree:8193-max", ("'ring:0-8KiB'", "FIRST-LAST")),
        ("ring;tree:8193-max", ("'ring'", "FIRST-LAST", "0-8192", "FIRST-max")),
        ("ring:-5-max", ("'ring:-5-max'",)),
        ("ring:9-8;tree:10-max", ("'ring:9-8'", "8 bytes", "9")),
        ("ring:0-8192;tree:9000-max", ("8,193", "8,999 bytes", "'ring:0-8192'", "'tree:9000-max'")),
        ("ring:5-max", ("0", "4 bytes", "'ring:5-max'")),
        ("tree:0-8;ring:9-8192", ("8,193 bytes", "ring:9-max")),
        ("ring:0-8192;tree:8000-max", ("'ring:0-8192'", "'tree:8000-max'", "8,000", "8,192 bytes")),
        ("ring:0-max;tree:8000-9000", ("'ring:0-max'", "'tree:8000-9000'", "8,000", "9,000 bytes")),
        ("ring:0-max;tree:8-max", ("'ring:0-max'", "'tree:8-max'", "8 bytes")),
        ("ring:0-99;tree:7-8;tree:100-max", ("'ring:0-99'", "'tree:7-8'", "7", "8 bytes")),
    ],
)
def test_a_fault_is_quoted(text, fault):
    with raises(ValueError, *fault):
        Selection.parse(text)


def test_it_is_an_all_reduce_that_chooses():
    selection = Selection.parse("tree:0-80;ring:81-800;native:801-max")
    for n, name in ((0, "tree"), (10, "tree"), (11, "ring"), (100, "ring")):
        run = sim.run(3, selection, PerRank([np.full(n, float(r)) for r in range(3)]))
        assert all((x == 3).all() for x in run)
        assert posted(run.events, 3) == calls(find_algorithm(name).steps(3, n), 3, 8)
    run = sim.run(3, selection, PerRank([torch.full((101,), float(r), dtype=torch.float64) for r in range(3)]))
    assert all((x == 3).all() for x in run)


def test_it_travels_and_is_kept_in_a_file(tmp_path):
    selection = Selection.parse(TEXT)
    assert pickle.loads(pickle.dumps(selection)) == selection
    selection.save(tmp_path / "chosen.txt", remark="4 ranks\nof a laptop")
    assert (tmp_path / "chosen.txt").read_text() == f"# 4 ranks\n# of a laptop\n{TEXT}\n"
    assert Selection.load(tmp_path / "chosen.txt") == selection
    (tmp_path / "chosen.txt").write_text("ring:5-max\n")
    with raises(ValueError, "chosen.txt", "0", "4 bytes"):
        Selection.load(tmp_path / "chosen.txt")
    assert "ring:0-max" in repr(DataParallel(Selection.parse("ring")))


def row(name, size, time_us, p75_us=None):
    return {"name": name, "size": size, "time_us": time_us, "p75_us": p75_us or time_us}


def test_the_tuner_takes_the_fastest_and_sets_borders_between():
    rows = [row("tree", n, 1 + n) for n in (1, 100, 10_000)] + [row("ring", n, 20 + n / 10) for n in (1, 100, 10_000)]
    assert str(fastest(rows)) == "tree:0-10;ring:11-max"
    assert str(fastest(rows[:3])) == "tree:0-max"
    with pytest.raises(ValueError, match="nothing was measured"):
        fastest([])


def test_noise_makes_no_borders():
    rows = [row("tree", 1, 5), row("ring", 1, 9), row("tree", 100, 10), row("ring", 100, 9, p75_us=11)]
    assert str(fastest(rows)) == "tree:0-max"
    rows[-1]["p75_us"] = 9.5
    assert str(fastest(rows)) == "tree:0-10;ring:11-max"


def test_tuned_on_simulated_ranks(capsys):
    """What the cost model says: few steps for few bytes, few bytes for many."""
    network = Switch(alpha=1e-5, beta=1e-9)
    algorithms = ["ring", "tree", "recursive_doubling", "halving_doubling"]
    chosen = lab.tune(algorithms, ["4", "4KiB", "4MiB"], ranks=8, network=network)
    for nbytes in (4, 4096, 4 << 20):
        prices = {
            name: find_algorithm(name).cost(8, nbytes).seconds(network.alpha, network.beta) for name in algorithms
        }
        assert chosen.name_for(nbytes) == min(prices, key=prices.get)
    assert len({part.name for part in chosen.ranges}) == 2
    out = capsys.readouterr().out
    assert "8 simulated ranks" in out and "4 MiB  halving_doubling" in out


def test_tuned_for_a_cluster_that_nobody_has_here(capsys):
    chosen = lab.tune(["tree", "ring", "double_tree"], ["4", "64MiB"], ranks=1024, network=Switch())
    assert [part.name for part in chosen.ranges] == ["tree", "ring"]
    assert "1,024 simulated ranks" in capsys.readouterr().out


def test_tuned_without_engines_and_predicted_is_the_same(monkeypatch, capsys):
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: None)
    algorithms, sizes = ["ring", "tree", "grid", "halving_doubling"], ["4", "64KiB", "512KiB"]
    measured = lab.tune(algorithms, sizes, ranks=6)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert measured == lab.tune(algorithms, sizes, ranks=6, network=Switch())
    assert lines == capsys.readouterr().out.splitlines()[1:]


def test_wrong_requests_to_the_tuner_end_before_anything_runs():
    with raises(LookupError, "'rnig'"):
        lab.tune(["rnig"], network=Switch())
    with raises(ValueError, "5 bytes", "float32"):
        lab.tune(["ring"], [5], network=Switch())
    with raises(LookupError, "'native'"):
        lab.tune(["native"], network=Switch())
    with pytest.raises(ValueError, match="no algorithm to measure"):
        lab.tune([], network=Switch())


def test_a_selection_on_engines(cluster):
    """It travels, and every algorithm of the table sums rightly there."""
    for name in algorithm_names():
        for x in cluster.run(Selection.parse(name), PerRank([torch.full((1001,), float(r)) for r in range(4)])):
            assert (x == 6).all(), name


def test_tuned_on_engines(cluster, monkeypatch, capsys, tmp_path):
    """What was fastest is an all-reduce there; 15 messages in a row never are, for 4 bytes."""
    monkeypatch.setattr("hpdl_lab.verbs.world.running", lambda: cluster)
    monkeypatch.setattr("hpdl_lab.verbs.world.run", cluster.run)
    chosen = lab.tune(["segmented_ring", "native"], "4")
    assert "all-reduce on 4 engines: the fastest of 2" in capsys.readouterr().out
    assert str(chosen) == "native:0-max"
    chosen.save(tmp_path / "chosen.txt")
    xs = PerRank([torch.full((1001,), float(r)) for r in range(4)])
    assert all((x == 6).all() for x in cluster.run(Selection.load(tmp_path / "chosen.txt"), xs))
