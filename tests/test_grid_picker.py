"""The picker of hybrid grids: what its sliders keep right, what it says, and what its buttons end in.

Its widgets in a notebook: tests/test_live.py.
"""

import os
import signal
import threading
import time

import pytest
from matplotlib.text import Text
from torch import nn

from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.parallel.grid.measure import bytes_over_axes, grid_steps, last_step, rows_over_pp
from hpdl_lab.plots import grid as drawing
from hpdl_lab.trace import seconds_text
from hpdl_lab.verbs.grid import Setting, followed, nearest_setting, subject_of
from hpdl_lab.verbs.picker import PICKERS, GridRun, GridTimes, Picker
from hpdl_lab.verbs.plain import sentence
from tests.wording import raises

KIND = {"model": "mlp", "machine": "laptop", "ranks": 4, "batch": 32}


@pytest.fixture
def alone(monkeypatch):
    """No engines run."""
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", None)
    for module in ("grid", "picker"):
        monkeypatch.setattr(f"hpdl_lab.verbs.{module}.running", lambda: None)


@pytest.fixture
def four(cluster, monkeypatch):
    """The verbs of `lab` use the engines of this session."""
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
    return cluster


def wait_for(picker, seconds=50):
    give_up = time.monotonic() + seconds
    while picker.under_way is not None:
        assert time.monotonic() < give_up
        time.sleep(0.02)


def texts(figure):
    return " | ".join(t.get_text() for t in figure.findobj(Text))


# -- what is picked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 12, 1024])
def test_the_product_stays_right_whatever_axis_is_moved(ranks):
    setting = Setting(ranks, 1, 1, 1)
    for axis in ("dp", "pp", "tp"):
        for size in (d for d in range(1, ranks + 1) if ranks % d == 0):
            setting = nearest_setting(setting, ranks, **{axis: size})
            assert setting.dp * setting.pp * setting.tp == ranks and getattr(setting, axis) == size


def test_as_little_follows_as_can_be_and_it_is_said():
    before = Setting(4, 2, 1, 4)
    after = nearest_setting(before, 8, tp=2)
    assert after[:3] == (4, 1, 2)
    assert followed(before, after, {"tp": 2}) == "pp 2 -> 1, so that 4 x 1 x 2 = 8 ranks"
    assert followed(before, nearest_setting(before, 8, recompute=True), {"recompute": True}) == ""


def test_what_does_not_fit_is_refused_with_the_numbers(alone):
    picker = Picker(subject_of(**KIND))
    before = picker.setting
    for wrong, says in (
        ({"dp": 3}, "dp=3 does not fit 4 ranks"),
        ({"dp": 2, "tp": 4}, "dp=2 x tp=4 does not fit 4 ranks"),
        ({"np": 2}, "no np: dp, pp, tp"),
        ({"cp": 3}, "cp=3 does not fit 4 ranks"),
        ({"zero": 4}, "zero .* got 4"),
        ({"micro_batches": 0}, "micro_batches .* got 0"),
        ({"dp": "2"}, "dp .* got '2'"),
        ({"schedule": "2f2b"}, "'2f2b': gpipe"),
        ({"recompute": "no"}, "got 'no'"),
    ):
        with pytest.raises(ValueError, match=says):
            picker.set(**wrong)
    assert picker.setting == before
    picker.set(dp=2, micro_batches=32)
    assert picker.prediction is None and picker.why.startswith("a batch of 32 cannot be cut into dp=2 shards of 32")
    assert "cannot be: a batch of 32" in repr(picker) and "this grid cannot be" in texts(picker.figure())
    with raises(ValueError, "32"):
        picker.run()
    assert picker.under_way is None


def test_numbers_follow_and_the_picture_shows_them(alone):
    picker = Picker(subject_of(**KIND, limit="100 kB"))
    whole = picker.prediction
    picker.set(pp=2)
    assert (
        picker.prediction.memory.parameters < whole.memory.parameters and picker.prediction.bubble > 0.1 + whole.bubble
    )
    assert "does NOT fit into 100 kB" in repr(picker) and "which is exceeded" in texts(picker.figure())
    picker.taken[picker.setting] = GridTimes("measured", "three steps", 0.5)
    assert "500 ms" in repr(picker) and "Dotted: three steps" in texts(picker.figure())
    picker.set(micro_batches=8)
    assert picker.measured is None, "measured was another setting"
    assert picker.set(micro_batches=4).measured.seconds == 0.5


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({"limit": "much"}, ValueError, ("'much'",)),
        ({"limit": 0}, ValueError, ("0",)),
        ({"ranks": 0}, ValueError, ("0",)),
        ({"model": "gpt3", "ranks": 10**9}, ValueError, ()),
        ({"model": nn.ReLU()}, ValueError, ("ReLU",)),
        ({"batch": 1.5}, ValueError, ("1.5",)),
        ({"machine": "vax"}, ValueError, ("'vax'", "dgx_a100")),
        ({"machine": 3}, TypeError, ("machine=3",)),
        ({"model": "gpt9"}, LookupError, ("gpt9",)),
        ({"batch": 10**6}, ValueError, ("1,000,000", "1,437 examples")),
    ],
)
def test_bad_questions_end_in_one_sentence(asked, error, says, alone):
    with raises(error, *says):
        lab.grid(**{**KIND, **asked})


def test_a_cell_that_runs_again_shows_what_was_picked_there(alone, capsys):
    PICKERS.clear()
    picker = lab.grid(**KIND)
    assert "mlp on digits, 4 ranks, batch of 32" in capsys.readouterr().out, "in a plain terminal it is a table"
    picker.set(tp=2)
    assert lab.grid(**KIND) is picker and picker.setting.tp == 2
    assert lab.grid(**{**KIND, "batch": 64}) is not picker


def test_cp_ep_and_zero_are_picked_and_shown_where_they_are_asked_for(alone):
    picker = Picker(subject_of("deepseek_v3", ranks=2048)).set(pp=16, ep=64)
    assert picker.setting[:3] == (2, 16, 1) and picker.prediction.grid["ep"] == 64
    assert "bytes sent over ep" in repr(picker) and "bytes sent over cp" not in repr(picker)
    shown = texts(picker.figure())
    assert f"ep {seconds_text(picker.prediction.parts['ep'])}" in shown and "waiting" in shown and "cp" not in shown
    optimizer = picker.prediction.memory.optimizer
    picker.set(zero=1, cp=2, pp=16)
    assert str(picker.setting) == "dp=1, pp=16, tp=1, cp=2, ep=64, ZeRO-1"
    assert picker.said == "dp 2 -> 1, so that 1 x 16 x 1 x 2 x 64 = 2,048 ranks"
    assert picker.prediction.memory.optimizer < optimizer / 2
    assert "ZeRO-1" in texts(picker.figure()) and "cp" in texts(picker.figure())
    picker.set(zero=3)
    assert picker.why.startswith("zero=3 with pp=16") and "cannot be: zero=3" in repr(picker)
    with raises(ValueError, "'np'", "dp, pp, tp, cp, ep, zero"):
        lab.grid(**KIND, axes=("dp", "np"))


def test_a_search_tries_the_axes_and_the_stages_of_zero_that_it_is_told(alone):
    asked = {"ranks": 16, "batch": 64, "machine": "dgx_h100", "ep": (1, 8), "zero": (0, 1)}
    found = lab.search("deepseek_v3", **asked, limit="3 TB", prediction={"dp": 2, "ep": 8})
    assert {row.grid["ep"] for row in found.rows} == {1, 8} and {row.zero for row in found.rows} == {0, 1}
    assert found.best.fits and found.guess.grid["ep"] == 8
    assert "ZeRO-1" in repr(found) and "ep 8" in repr(found) and "ep 8" in texts(found.figure)
    for wrong, told in (({"cp": 2}, "cp=2"), ({"ep": (0,)}, "ep"), ({"zero": (4,)}, "zero")):
        with raises(ValueError, told):
            lab.search("gpt3", **wrong)


# -- run it, without engines ------------------------------------------------------------------------------------------


def test_without_engines_it_says_what_to_start(alone):
    picker = Picker(subject_of(**KIND))
    with raises(EngineError, "lab.start(4)"):
        picker.run()
    picker.start()
    wait_for(picker)
    assert picker.said == "no engine cluster is running: call lab.start(4)" and picker.measured is None


def test_a_model_of_1024_ranks_says_so_and_is_simulated(alone, monkeypatch):
    picker = Picker(subject_of("gpt3"))
    assert picker.prediction.fits and picker.setting.tp == 8 and picker.subject.ranks == 1024
    said = []
    picker.changed.append(lambda: said.append(picker.said))
    monkeypatch.setattr("hpdl_lab.verbs.picker.simulate_step", lambda *_, **__: 26.0)
    assert picker.run().kind == "simulated" and picker.measured.seconds == 26.0
    assert said[0].startswith("This grid needs 1,024 engines and none run: simulating it instead")
    assert "simulated" in repr(picker) and "in virtual time" in texts(picker.figure())


def test_pressed_twice_and_stopped(alone, monkeypatch):
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr("hpdl_lab.verbs.picker.simulate_step", lambda *_, **__: begun.set() or ended.wait(20))
    picker = Picker(subject_of("gpt3"))
    picker.stop()
    assert picker.said == "Nothing of this picker is running."
    picker.start()
    with raises(EngineError, "Stop"):
        picker.start()
    picker.set(recompute=True)  # sliders move meanwhile
    assert begun.wait(20)
    picker.stop()
    wait_for(picker)
    ended.set()
    assert picker.said == "Stopped." and not picker.taken


def test_a_grid_without_engines_is_simulated(alone):
    ranks = {**KIND, "ranks": 8}
    subject = subject_of(**ranks)
    told = []
    run = GridRun(subject_of(subject.spec, ranks=8, batch=32, machine="laptop"), Setting(2, 2, 2, 4), told.append, None)
    measured = run.result()
    assert 0.3 < measured.seconds / Picker(subject).set(dp=2, pp=2).prediction.seconds < 3
    assert told[0].startswith("This grid needs 8 engines and none run")
    refused = GridRun(run.subject, Setting(1, 8, 1, 4), told.append, None)
    with raises(ValueError, "8 stages"):
        refused.result()


def test_what_a_step_waits_for_is_not_called_the_bubble(alone):
    picker = Picker(subject_of("gpt3", machine="laptop", ranks=4, batch=32)).set(dp=2, pp=2)
    parts = picker.prediction.parts
    assert parts["cores"] > 0 and sum(parts.values()) == pytest.approx(picker.prediction.seconds)
    assert "waiting for a core" in texts(picker.figure()) and "waiting for stages" in texts(picker.figure())
    picker = Picker(subject_of("gpt3"))
    assert picker.prediction.parts["cores"] == 0 and "waiting for a core" not in texts(picker.figure())


def test_errors_are_told_in_their_first_line():
    assert sentence(EngineError("engine 1 was killed\n more")) == "engine 1 was killed"
    assert (
        sentence(KeyError("x")) == "KeyError: 'x'" and sentence(RuntimeError()) == "RuntimeError: no reason was given"
    )


# -- what a step held and sent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "sizes", "schedule"),
    [
        ("mlp", {"dp": 2, "pp": 2}, "1f1b"),
        ("mlp", {"pp": 2, "tp": 2}, "1f1b"),
        ("mlp", {"dp": 2, "tp": 2}, "1f1b"),
        ("mlp", {"dp": 2, "pp": 2}, "gems_master"),  # replicas along pp
        ("gpt", {"dp": 2, "pp": 2}, "1f1b"),  # a table that two stages share
        ("gpt", {"dp": 2, "cp": 2}, "1f1b"),
    ],
)
def test_what_is_measured_is_what_is_predicted(model, sizes, schedule, alone):
    subject = subject_of(**{**KIND, "model": model})
    picker = Picker(subject).set(**sizes, schedule=schedule)
    costs = [layer.flops for layer in subject.spec.layers]
    options = {**picker.setting.options, "costs": costs, "all_reduce": ring.all_reduce}
    args = (subject.model, picker.setting.grid, subject.x, subject.y, options, 1)
    run = sim.run(4, grid_steps, *args, threads=True)
    fullest, row = max((taken.held for taken in run), key=lambda held: held.total), picker.prediction
    assert fullest[:3] == pytest.approx(row.memory[:3], rel=0.01)
    assert fullest.activations == pytest.approx(row.memory.activations, rel=0.1)
    sent, told = bytes_over_axes(run, picker.setting.grid), drawing.sent_over(row.links)
    assert [sent[axis] for axis in told if axis in sent] == pytest.approx([told[axis] for axis in sent], rel=0.02)
    rows = rows_over_pp(last_step(run), picker.setting.grid)
    assert [len(row) for row in rows] == [8] * sizes.get("pp", 1)


# -- run it, on engines -----------------------------------------------------------------------------------------------


def test_on_engines_the_measurement_is_laid_beside_the_prediction(four):
    picker = Picker(subject_of(**KIND))
    seen = []
    picker.changed.append(lambda: seen.append(picker.measured and picker.measured.how))
    measured = picker.set(pp=2).run()
    row = picker.prediction
    assert measured is picker.measured and measured.kind == "measured" and measured.seconds > 0
    assert measured.memory.parameters == pytest.approx(row.memory.parameters, rel=0.01) and 0 < measured.bubble < 1
    assert measured.links["pp"] == pytest.approx(row.links["pp"]) and measured.links["dp"] > 0
    assert any(how and how.startswith("the first 2 of 5 steps") for how in seen), "it streams"
    assert "measured" in repr(picker) and "2 x 2 x 1" not in repr(picker)


def test_on_engines_stop_ends_it_and_another_run_is_refused_in_one_sentence(four, monkeypatch):
    monkeypatch.setattr("hpdl_lab.verbs.picker.STEPS", 100_000)
    picker, other = Picker(subject_of(**KIND)), Picker(subject_of(**KIND))
    picker.start()
    while picker.measured is None:  # its first step
        assert picker.under_way is not None, picker.said
        time.sleep(0.02)
    with raises(EngineError):
        lab.run(lambda comm: comm.rank)
    other.start()
    wait_for(other)
    assert other.said.startswith("a run is under way in this notebook")
    picker.stop()
    wait_for(picker)
    assert picker.said == "Stopped." and picker.measured is None
    assert lab.run(lambda comm: comm.rank) == [0, 1, 2, 3], "the same engines answer"


def test_a_dead_engine_is_one_sentence(four):
    picker = Picker(subject_of(**KIND))
    os.kill(lab.run(lambda comm: os.getpid())[1], signal.SIGKILL)
    for _ in range(2):  # while it dies, and when it is dead
        picker.start()
        wait_for(picker)
        assert " 1 was killed by signal 9" in picker.said and "\n" not in picker.said and "lab.restart()" in picker.said
    four.restart(4)
    assert lab.run(lambda comm: comm.rank) == [0, 1, 2, 3]
