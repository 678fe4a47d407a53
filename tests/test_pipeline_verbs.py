"""Verbs of lessons 10 and 11: lab.schedule, lab.pipeline, lab.mesh, lab.search, lab.train(mesh=...)."""

from importlib import import_module

import pytest

from hpdl_lab import lab
from hpdl_lab.mesh import Grid
from hpdl_lab.models.mlp import mlp
from hpdl_lab.plots import animation, live
from hpdl_lab.schedules import Action, build
from hpdl_lab.schedules.gpipe import gpipe
from hpdl_lab.schedules.interleaved import interleaved

pytestmark = pytest.mark.timeout(150)  # engines import torch, on a busy machine


def backward_first(rank, ranks, micro_batches):
    """A schedule that deadlocks: the last rank's backward of 0 waits for nothing, the others' order is wrong."""
    forwards = [Action(rank, "F", i) for i in range(micro_batches)]
    backwards = [Action(rank, "B", i) for i in range(micro_batches)]
    return [forwards[0], backwards[0], *forwards[1:], *backwards[1:]] if rank == 0 else forwards + backwards


def loses_one(rank, ranks, micro_batches):
    return gpipe(rank, ranks, micro_batches)[:-1]


def not_written(rank, ranks, micro_batches):
    raise NotImplementedError("exercise 10.1: write gpipe")


@pytest.fixture
def four(cluster, monkeypatch):
    """The verbs of `lab` use the engines of this session."""
    monkeypatch.setattr(import_module("hpdl_lab.lab.cluster")._notebook, "_cluster", cluster)
    return cluster


@pytest.fixture
def alone(monkeypatch):
    """No engines run."""
    for module in ("cluster", "ranks", "mesh", "grid_subject"):
        monkeypatch.setattr(import_module(f"hpdl_lab.lab.{module}"), "running", lambda: None)


def texts(figure):
    axes = [t.get_text() for ax in figure.axes for t in (*ax.texts, ax.title, ax._right_title)]
    return " | ".join([t.get_text() for t in figure.texts] + axes)


# -- schedule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "makespan", "live"),
    [
        ({"schedule": "1f1b"}, 33, [4, 3, 2, 1]),
        ({"schedule": gpipe}, 33, [8, 8, 8, 8]),
        ({"schedule": interleaved}, 28.5, [11, 9, 7, 5]),
        ({"schedule": "zero_bubble_h1"}, 27, [4, 4, 4, 4]),
        ({"schedule": build("1f1b", 8, 16)}, 69, [8, 7, 6, 5, 4, 3, 2, 1]),
        ({"schedule": "1f1b", "forward": 2, "backward": 4}, 66, [4, 3, 2, 1]),
    ],
)
def test_a_schedule_is_drawn_with_its_numbers(asked, makespan, live):
    drawn = lab.schedule(**asked)
    assert (drawn.makespan, drawn.live) == (makespan, live) and 0 < drawn.bubble < 1
    assert f"{drawn.bubble:.1%}" in texts(drawn.figure) and f"{drawn.bubble:.1%}" in repr(drawn)


def test_a_drawn_schedule_can_be_saved(tmp_path):
    lab.schedule("1f1b").save(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("verb", [lab.schedule, lab.pipeline])
@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        (backward_first, ValueError, "deadlocks: rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1"),
        (loses_one, ValueError, "loses_one: no rank does 0B7"),
        (not_written, NotImplementedError, "exercise 10.1: write gpipe"),
        (lambda rank, ranks, micro_batches: None, TypeError, "returned None: a list of Action"),
        (
            lambda rank, ranks, micro_batches: [(0, "F", "a")],
            TypeError,
            "returned .*'a'.*: a list of Action",
        ),
        (max, TypeError, r"max is no function of a row: f\(rank, ranks, micro_batches\) is needed"),
        ("2f2b", ValueError, "no schedule is called '2f2b'"),
        (7, TypeError, "7 is no schedule: a name"),
    ],
)
def test_a_bad_schedule_is_refused_in_one_sentence_before_it_runs(verb, asked, error, text, alone):
    with pytest.raises(error, match=text) as caught:
        verb(asked)
    assert caught.value._render_traceback_() == [f"{error.__name__}: {caught.value}"], "no traceback in a notebook"


def test_a_schedule_too_large_for_a_picture_is_refused():
    with pytest.raises(ValueError, match="8,192 actions do not fit a picture"):
        lab.schedule("gpipe", ranks=64, micro_batches=64)
    with pytest.raises(ValueError, match="16,000,000,000,000 actions do not fit"):  # which nobody waits for
        lab.schedule("1f1b", ranks=10**6, micro_batches=8 * 10**6)
    assert "1 micro-batch:" in repr(lab.schedule("gpipe", micro_batches=1))


@pytest.mark.parametrize("times", [{"forward": -1}, {"backward": 0}, {"forward": [1, 2]}, {"weight": None}])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ValueError, match="a time above 0 is needed, or one for each of 4 stages"):
        lab.schedule("1f1b", **times)
    with pytest.raises(ValueError, match=r"transfer=\[1, 1, 1, 1\]: a time of a message, of at least 0, is needed"):
        lab.schedule("1f1b", transfer=[1, 1, 1, 1])


def test_a_row_may_be_written_as_torch_does():
    def row(rank, ranks, micro_batches):
        first, *others = gpipe(rank, ranks, micro_batches)
        return (item for item in [first, "", *map(str, others)])

    assert lab.schedule(row).makespan == 33
    with pytest.raises(ValueError, match="'forward 1' is no action"):
        lab.schedule(lambda rank, ranks, micro_batches: ["forward 1"])


def test_live_plays_every_moment_once(monkeypatch):
    shown = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "show", lambda *_, **__: None)
    monkeypatch.setattr(animation, "show", lambda draw, frames, *_, **__: shown.extend(frames))
    drawn = lab.schedule("gpipe", ranks=2, micro_batches=2, live=True)
    moments = [now for *_, now in shown]
    assert moments == sorted(set(moments)) and moments[-1] == drawn.makespan == 9
    lab.schedule("1f1b", ranks=4, micro_batches=32, live=True)
    assert len(shown) - len(moments) == 16 and shown[-1][-1] == 105


# -- pipeline ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble_h1", "gems_master"])
def test_simulated_ranks_take_what_was_planned(name, alone):
    run = lab.pipeline(name, seconds=(0.01, 0.02))
    assert run.measured.makespan == pytest.approx(run.predicted.makespan, rel=1e-3)  # messages take 1 us
    assert (
        run.measured.bubble == pytest.approx(run.predicted.bubble, abs=1e-3) and run.measured.live == run.predicted.live
    )


def test_a_guess_is_drawn_and_the_makespan_follows_from_the_bubble(alone):
    run = lab.pipeline("1f1b", prediction=0.5)
    assert run.guess["makespan"] == pytest.approx(0.48 / 0.5)  # a rank is busy for 8 x 0.06 s
    assert "the end that you expected, 960 ms" in texts(run.figure) and "you" in repr(run)
    assert lab.pipeline("1f1b", prediction={"makespan": 0.96}).guess["bubble"] == pytest.approx(0.5)


def test_stages_of_unequal_length(alone):
    run = lab.pipeline("gpipe", ranks=2, micro_batches=3, seconds=([0.1, 0.2], [0.1, 0.4]))
    assert run.predicted.makespan == pytest.approx(0.1 + 3 * 0.6 + 0.1)
    assert run.measured.makespan == pytest.approx(run.predicted.makespan, rel=1e-3)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"seconds": 3}, r"seconds are those of forward and backward, such as \(0.02, 0.04\), got 3"),
        ({"seconds": ([0.1], 0.2)}, "a number above 0, or one for each of 4 stages, is needed"),
        ({"seconds": (0, 1)}, "a number above 0"),
        ({"seconds": (None, 1)}, r"seconds=\(None, 1\): a number above 0"),
        ({"prediction": {"makespan": float("nan")}}, "a step takes more than 0 s, got makespan=nan"),
        ({"seconds": (30, 30)}, "this step would take 660 s"),
        ({"prediction": 1.5}, "a prediction is a bubble from 0 to 1"),
        ({"prediction": "half"}, "a prediction is a bubble from 0 to 1"),
        ({"prediction": {"makespan": 0}}, "a step takes more than 0 s"),
        ({"model": "mlp"}, r"real stages need engines, whose time is real: lab.start\(4\)"),
        ({"ranks": 0}, "ranks must be a whole number of at least 1"),
    ],
)
def test_bad_questions_end_in_one_sentence(asked, text, alone):
    with pytest.raises(ValueError, match=text) as caught:
        lab.pipeline("1f1b", **asked)
    assert hasattr(caught.value, "_render_traceback_")


def test_sleeping_stages_on_engines_are_streamed_and_near_the_plan(four, monkeypatch, within):
    frames = []
    monkeypatch.setattr(live.Live, "update", lambda self, plan, planned, measured, *_: frames.append(measured.makespan))
    run = lab.pipeline(gpipe, micro_batches=4, seconds=(0.02, 0.04))
    assert len(frames) == 32 and frames == sorted(frames), "after every action of every rank"
    assert run.predicted.makespan == pytest.approx(0.42) and run.measured.live == [4, 4, 4, 4]
    assert 0.42 <= run.measured.makespan < 0.42 + within(2)  # of which it is near, to an order of magnitude


def test_real_stages_on_engines_with_the_attendees_partition(four):
    def all_but(costs, stages):
        return [len(costs) - stages + 1] + [1] * (stages - 1)

    model = mlp((64, 32, 32, 32, 32, 10))
    run = lab.pipeline("1f1b", micro_batches=4, model=model, data="digits", ranks=2, partition=all_but, deadline=50)
    assert len(run.events) > 16 and run.measured.live == [2, 1] and "took in the step before" in texts(run.figure)


# -- mesh --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dp": 2, "pp": 2, "tp": 2}, ["4 dp groups of 2: add gradients", "4 tp groups of 2: share each layer"]),
        ({"dp": 4}, ["1 dp group of 4"]),
        ({"pp": 1}, ["No engines run"]),
        ({"dp": 8, "pp": 16, "tp": 8}, ["7 more tables like these", "64 pp groups of 16", "the first 8 groups"]),
        ({"cp": 2, "ep": 3}, ["cp 1", "ep 2", "3 cp groups of 2"]),
    ],
)
def test_a_mesh_is_drawn_with_its_groups(sizes, said, alone):
    shown = lab.mesh(**sizes)
    assert shown.text == str(Grid(**sizes)) and all(text in texts(shown.figure) for text in said)


def test_engines_stand_at_their_coordinates(four):
    told = texts(lab.mesh(Grid(dp=2, tp=2)).figure)
    assert told.count("core") >= 4 and "where its engine runs" in told
    assert "4 engines run, and the mesh has 8 places" in texts(lab.mesh(dp=8).figure)


@pytest.mark.parametrize(
    ("args", "sizes", "error", "text"),
    [
        ((), {}, ValueError, "a mesh needs the sizes of its axes"),
        ((Grid(dp=2),), {"tp": 2}, ValueError, "a Grid or the sizes of axes, not both"),
        ((4,), {}, TypeError, "4 is no grid"),
        ((), {"xp": 2}, ValueError, "no axis of a mesh is called 'xp'"),
        ((), {"dp": 10**7}, ValueError, r"^Grid\(dp=10000000\) has 10,000,000 ranks: at most 4,096 can be drawn$"),
    ],
)
def test_a_mesh_that_is_none_is_refused(args, sizes, error, text):
    with pytest.raises(error, match=text):
        lab.mesh(*args, **sizes)


# -- search ------------------------------------------------------------------------------------------------------------

ASKED = {"model": "mlp", "machine": "laptop", "ranks": 4, "batch": 32}


def test_a_search_marks_the_best_and_the_guess(alone):
    found = lab.search(**ASKED, limit="1 MB", prediction={"pp": 2, "tp": 2})
    assert found.best.seconds == min(row.seconds for row in found.rows if row.fits)
    assert found.guess.grid == Grid(dp=1, pp=2, tp=2) and "yours" in repr(found) and "best" in repr(found)
    assert {row.grid.size for row in found.rows} == {4}
    told = texts(found.figure)
    assert "best" in told and "yours" in told and "limit 1 MB per rank" in told


def test_a_search_in_which_nothing_fits_says_the_least(alone):
    found = lab.search(**ASKED, limit=10)
    assert found.best is None and "none fits into 10 B per rank: the least is" in repr(found)
    assert "Nothing fits" in texts(found.figure)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"prediction": {"dp": 3}}, "the grid that you expect has 3 x 1 x 1 places, and there are 4 ranks"),
        ({"prediction": 4}, "a prediction is a grid such as"),
        ({"prediction": {"dp": "2"}}, "the size of an axis is a whole number of at least 1, got '2'"),
        ({"schedules": ("1f1b", "x")}, "no schedule is called 'x'"),
        ({"schedules": 3}, "no schedule is called 3"),
        ({"recompute": "both"}, r"recompute is True, False, or \(False, True\) to try both, got 'both'"),
        ({"limit": "lots"}, "limit='lots': bytes per rank are needed"),
    ],
)
def test_a_bad_search_ends_in_one_sentence(asked, text, alone):
    with pytest.raises(ValueError, match=text):
        lab.search(**{**ASKED, **asked})


# -- train -------------------------------------------------------------------------------------------------------------

COURSE = {"dtype": "float64", "steps": 3, "batch": 24}


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ({"dp": 2, "pp": 2}, {"micro_batches": 2}),
        (Grid(pp=2, tp=2), {"micro_batches": 4, "recompute": True}),
        ({"pp": 2}, {"schedule": "zero_bubble_h1", "micro_batches": 3}),
    ],
)
def test_a_training_on_a_mesh_takes_the_steps_of_one_rank(mesh, more, alone):
    one = lab.train(**COURSE, ranks=1)
    many = lab.train(**COURSE, mesh=mesh, **more)
    assert many.losses == pytest.approx(one.losses, abs=1e-10) and many.drift == 0
    assert many.test_loss == pytest.approx(one.test_loss, abs=1e-10)


def test_a_training_on_a_mesh_of_engines_goes_on_from_a_checkpoint_of_another(four, tmp_path):
    path = str(tmp_path / "mesh.pt")
    one = lab.train(**COURSE, ranks=1)
    how = {"micro_batches": 2, "checkpoint": path, "deadline": 50}  # on a busy machine imports take their time
    lab.train(**{**COURSE, "steps": 2}, mesh={"dp": 2, "pp": 2}, checkpoint_every=2, **how)
    rest = lab.train(**COURSE, mesh={"dp": 2, "tp": 2}, resume=True, **how)
    assert rest.losses == pytest.approx(one.losses[2:], abs=1e-10)


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"mesh": 3}, TypeError, "mesh=3: sizes such as"),
        ({"mesh": {}}, TypeError, "mesh={}: sizes such as"),
        ({"mesh": {"dp": 2}, "ranks": 3}, ValueError, r"Grid\(dp=2\) has 2 places, and ranks=3"),
        ({"mesh": {"dp": 2}, "all_reduce": print}, ValueError, "give a mesh or all_reduce, not both"),
        ({"mesh": {"dp": 3}, "batch": 16}, ValueError, "a batch of 16 cannot be cut into dp=3 shards"),
    ],
)
def test_a_training_on_a_mesh_that_cannot_be(asked, error, text, alone):
    with pytest.raises(error, match=text):
        lab.train(**asked)
