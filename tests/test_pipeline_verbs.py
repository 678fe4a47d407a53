"""lab.pipeline, lab.search, and lab.train(mesh=...) on engines."""

import pytest
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.mesh import Grid
from hpdl_lab.models.mlp import mlp
from hpdl_lab.plots import live
from hpdl_lab.schedules import Action
from hpdl_lab.schedules.gpipe import gpipe
from tests.wording import raises


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
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
    return cluster


@pytest.fixture
def alone(monkeypatch):
    """No engines run."""
    for module in ("world", "grid"):
        monkeypatch.setattr(f"hpdl_lab.verbs.{module}.running", lambda: None)


def texts(figure):
    return " | ".join(t.get_text() for t in figure.findobj(Text))


@pytest.mark.parametrize("verb", [lab.show, lab.pipeline])
@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        (backward_first, ValueError, ("rank 0", "0B0", "1B0", "rank 1", "1F1", "0F1")),
        (loses_one, ValueError, ("0B7",)),
        (not_written, NotImplementedError, ("exercise 10.1",)),
        (lambda rank, ranks, micro_batches: [(0, "F", "a")], TypeError, ("'a'",)),
    ],
)
def test_a_bad_schedule_is_refused_in_one_sentence_before_it_runs(verb, asked, error, says, alone):
    with raises(error, *says) as caught:
        verb(asked)
    assert caught.value._render_traceback_() == [f"{error.__name__}: {caught.value}"], "no traceback in a notebook"


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "dualpipe", "dualpipe_v"]
)
def test_simulated_ranks_take_what_was_planned(name, alone):
    run = lab.pipeline(name)
    assert run.measured.makespan == pytest.approx(run.predicted.makespan, rel=1e-3)  # messages take 1 us
    assert run.measured.bubble == pytest.approx(run.predicted.bubble, abs=1e-3)
    assert run.measured.live == run.predicted.live


def test_a_guess_is_drawn_and_the_makespan_follows_from_the_bubble(alone):
    run = lab.pipeline("1f1b", prediction=0.5)
    assert run.guess["makespan"] == pytest.approx(0.48 / 0.5)  # a rank is busy for 8 x 0.06 s
    assert "your guess, 960 ms" in texts(run.figure) and "you" in repr(run)
    run = lab.pipeline("1f1b", prediction={"bubble": 0.5, "live": 8})
    assert "your guess, 960 ms and 8 live on rank 0" in texts(run.figure) and run.guess["live"] == 8
    with raises(ValueError, "'bubbles'"):
        lab.pipeline("1f1b", prediction={"bubbles": 0.5})


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"micro_batches": 1000}, ("60 s",)),
        ({"prediction": 1.5}, ("0", "1", "1.5")),
        ({"prediction": "half"}, ("'half'",)),
        ({"model": "mlp"}, ("lab.start(4)",)),
        ({"ranks": 0}, ("1", "0")),
    ],
)
def test_bad_questions_end_in_one_sentence(asked, says, alone):
    with raises(ValueError, *says) as caught:
        lab.pipeline("1f1b", **asked)
    assert hasattr(caught.value, "_render_traceback_")


def test_sleeping_stages_on_engines_are_streamed_and_near_the_plan(four, monkeypatch, within):
    frames = []
    monkeypatch.setattr(live.Live, "update", lambda self, plan, planned, measured, *_: frames.append(measured.makespan))
    run = lab.pipeline(gpipe, micro_batches=4)
    assert len(frames) == 32 and frames == sorted(frames), "after every action of every rank"
    assert run.predicted.makespan == pytest.approx(0.42) and run.measured.live == [4, 4, 4, 4]
    assert 0.42 <= run.measured.makespan < 0.42 + within(2)  # of which it is near, to an order of magnitude


def test_real_stages_on_engines_with_the_attendees_partition(four):
    def all_but(costs, stages):
        return [len(costs) - stages + 1] + [1] * (stages - 1)

    model = mlp((64, 32, 32, 32, 32, 10))
    run = lab.pipeline("1f1b", micro_batches=4, model=model, ranks=2, partition=all_but, deadline=50)
    assert len(run.events) > 16 and run.measured.live == [2, 1] and "took in the step before" in texts(run.figure)


def test_a_training_on_a_mesh_of_engines_goes_on_from_a_checkpoint_of_another(four, tmp_path):
    course, path = {"dtype": "float64", "steps": 3, "batch": 24}, str(tmp_path / "mesh.pt")
    one = lab.train(**course, ranks=1)
    how = {"micro_batches": 2, "checkpoint": path, "deadline": 50}  # on a busy machine imports take their time
    lab.train(**{**course, "steps": 2}, mesh={"dp": 2, "pp": 2}, checkpoint_every=2, **how)
    rest = lab.train(**course, mesh={"dp": 2, "tp": 2}, resume=True, **how)
    assert rest.losses == pytest.approx(one.losses[2:], abs=1e-10)


# -- search -----------------------------------------------------------------------------------------------------------

ASKED = {"model": "mlp", "machine": "laptop", "ranks": 4, "batch": 32}


def test_a_search_marks_the_best_and_the_guess(alone):
    found = lab.search(**ASKED, limit="1 MB", prediction={"pp": 2, "tp": 2})
    assert found.best.seconds == min(row.seconds for row in found.rows if row.fits)
    assert found.guess.grid == Grid(dp=1, pp=2, tp=2) and {row.grid.size for row in found.rows} == {4}
    assert all(mark in repr(found) for mark in ("best", "yours"))
    assert "limit 1 MB per rank" in texts(found.figure)
    found = lab.search(**ASKED, limit="1 MB", prediction={"pp": 2, "tp": 2, "seconds": 7})
    assert 7 in [line.get_ydata()[0] for line in found.figure.axes[0].lines]


def test_a_search_in_which_nothing_fits_says_the_least(alone):
    found = lab.search(**ASKED, limit=10)
    assert found.best is None and "none fits into 10 B per rank" in repr(found)
    assert "Nothing fits" in texts(found.figure)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prediction": {"dp": 3}}, ("3", "1", "1 places", "4 ranks")),
        ({"prediction": 4}, ("4",)),
        ({"prediction": {"dp": "2"}}, ("'2'",)),
        ({"limit": "lots"}, ("'lots'",)),
    ],
)
def test_a_bad_search_ends_in_one_sentence(asked, says, alone):
    with raises(ValueError, *says):
        lab.search(**{**ASKED, **asked})
