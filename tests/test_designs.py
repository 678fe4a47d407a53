"""Verbs of lesson 06: strategies as timelines of the same step, Horovod's timeline, and the two scripts behind it."""

import json

import pytest

from hpdl_lab import data, lab
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelOverlapped
from hpdl_lab.parallel.parameter_server import StaleSynchronous
from hpdl_lab.parallel.scaffe import SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction
from hpdl_lab.parallel.scripts import ddp_script, horovod_script
from hpdl_lab.parallel.zero import ZeRO1, ZeRO2, ZeRO3
from hpdl_lab.plots import timeline as drawing
from tests.wording import raises


def test_overlap_leaves_the_last_of_four_layers_to_be_seen():
    blocking, overlapped = lab.designs(
        DataParallel(ring.all_reduce), DataParallelOverlapped(ring.all_reduce, 300_000, 300_000)
    ).designs
    shows = [d.exposed * d.seconds for d in (blocking, overlapped)]
    assert shows[1] / shows[0] == pytest.approx(0.25, rel=0.05)
    assert blocking.seconds - overlapped.seconds == pytest.approx(shows[0] - shows[1], rel=0.01)
    assert {e.rank for e in overlapped.events} == {0} and {e.lane for e in overlapped.events} == {"", "background"}


def test_zero_holds_less_and_sends_the_same_or_half_as_much_again_but_for_the_last_layer():
    shards = [kind(ring.reduce_scatter, ring.all_gather) for kind in (ZeRO1, ZeRO2, ZeRO3)]
    found = lab.designs(DataParallel(ring.all_reduce), *shards)
    params = 4 * 256 * 257
    assert [sum(d.held.values()) / params for d in found.designs] == pytest.approx([16, 10, 7, 4], rel=0.001)
    one = 2 * 3 / 4 * 4 * params  # bytes of an all-reduce, from each of four ranks
    assert [d.sent / one for d in found.designs] == pytest.approx([1, 1, 1, 11 / 8], rel=0.001)
    assert found[0].exposed > found[2].exposed > found[3].exposed
    assert f"{found[3].sent:,}" in repr(found)


def test_a_guess_is_drawn_as_the_end_of_the_last_step():
    found = lab.designs(DataParallel(ring.all_reduce), DataParallel(ring.all_reduce), prediction=0.25)
    (guess,) = (line for line in found.figure.axes[1].lines if line.get_linestyle() == "--")
    shows = found[0].exposed * found[0].seconds
    assert guess.get_xdata()[0] == pytest.approx(1e3 * (found[0].seconds - 0.75 * shows))


def test_the_three_designs_of_s_caffe_take_what_their_formulas_say():
    found = lab.designs(SCaffe(), SCaffeOverlappedPropagation(), SCaffeOverlappedReduction())
    assert [d.seconds for d in found.designs] == pytest.approx([d.predicted for d in found.designs], rel=0.01)
    assert found[0].seconds > found[1].seconds > found[2].seconds
    assert "SC-OBR" in repr(found)
    assert found.figure.axes[2].get_title(loc="right").startswith("(b ∥ f) + (B ∥ r)")


@pytest.mark.parametrize(
    ("strategies", "ranks", "error"),
    [
        ((), 4, ValueError),
        (("a",), 4, TypeError),
        ((DataParallel,), 4, TypeError),
        ((StaleSynchronous(),), 4, ValueError),
        ((DataParallel(),), 1, ValueError),
        ((DataParallel(lambda comm, x: -ring.all_reduce(comm, x)),), 4, ValueError),
    ],
)
def test_a_design_needs_a_strategy_that_adds_up_and_company(strategies, ranks, error):
    with pytest.raises(error):
        lab.designs(*strategies, ranks=ranks)


def test_the_horovod_script_learns_and_its_timeline_has_a_row_for_every_gradient(tmp_path):
    run = sim.run(2, horovod_script, data.load("text"), 2, True)
    assert all(losses[1] < losses[0] for losses in run)
    path = tmp_path / "horovod.json"
    shown = lab.show(run, "horovod", save=str(path))
    rows = json.loads(path.read_text())
    names = drawing.gradients_of(rows)
    assert len(names) == 28 and "28 gradients" in repr(shown)
    assert [t.get_text() for t in shown.figure.axes[0].get_yticklabels()] == list(names.values())
    bars = [bar[0] for bar in drawing.activities(rows)]
    assert bars.count("NEGOTIATE_ALLREDUCE") == 28, "the second step is answered by the cache"
    assert bars.count("ALLREDUCE") == 56


def test_the_ddp_script_says_that_it_needs_processes():
    with raises(ValueError, "lab.run"):
        sim.run(2, ddp_script, data.load("text"), 1)
