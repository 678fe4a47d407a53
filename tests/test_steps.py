"""lab.steps and lab.collectives: the picture shows what the schedule says, and that is what the function does."""

import functools
import inspect

import numpy as np
import pytest
from hpdl_lab.lab.steps import of_table
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.collectives.table import ALGORITHMS, find
from hpdl_lab.lab.watch import BASE, decoded, encoded, story_of
from hpdl_lab.plots import animation, eight, holdings, live, steps, style

RANKS = (2, 3, 5, 8)
PIPELINED = {"segments": 2}


def finished(story):
    """Whether every cell that the collective asks for holds what it asks for."""
    asked = story.wanted.any(axis=2)
    return np.array_equal(story.state(len(story.steps))[asked], story.wanted[asked])


def messages(story):
    """(source, dest, first element, bytes) of all messages, in any order."""
    return sorted(
        (m.source, m.dest, int(story.starts[m.first]), m.nbytes * 96 * story.p // story.nbytes)
        for step in story.steps
        for m in step.moves
    )


def options_of(function):
    return PIPELINED if "segments" in inspect.signature(function).parameters else {}


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_the_picture_of_a_schedule_is_the_picture_of_what_the_function_does(algorithm):
    for p in RANKS:
        drawn = of_table(algorithm, p, options_of(algorithm.steps))
        function = functools.partial(algorithm.function, **options_of(algorithm.function))
        watched = story_of(function, p, algorithm.collective)
        assert finished(drawn) and finished(watched), f"{algorithm} on {p} ranks"
        assert messages(drawn) == messages(watched), f"{algorithm} on {p} ranks"


def test_a_ring_on_four_ranks_move_by_move():
    story = of_table(find("ring"), 4, {})
    assert len(story.steps) == 6 and story.noun == "chunk" and story.vectors_sent().tolist() == [1.5] * 4
    assert [(m.source, m.dest, m.first, m.add) for m in story.steps[0].moves] == [
        (r, (r + 1) % 4, (r - 1) % 4, True) for r in range(4)
    ]
    counts = story.steps[2].held.sum(axis=2)  # after the reduce-scatter rank r owns the sum of chunk r
    assert all((counts[r, c] == 4) == (r == c) for r in range(4) for c in range(4))
    assert not any(m.add for step in story.steps[3:] for m in step.moves)


def test_the_attendees_own_function_is_drawn_from_its_messages():
    def my_all_reduce(comm, x):
        return ring.all_reduce(comm, x)

    assert repr(lab.steps(my_all_reduce, 4)) == "my_all_reduce on 4 ranks: 6 steps, a rank sends 1.5 vectors"


def test_a_sum_that_counts_a_rank_twice_shows_it_and_an_average_is_no_sum():
    def twice(comm, x):
        ring.all_reduce(comm, x)
        x += x

    def average(comm, x):
        ring.all_reduce(comm, x)
        x /= comm.size

    doubled, averaged = (story_of(fn, 3, "all_reduce") for fn in (twice, average))
    assert (doubled.steps[-1].held == 2).all() and not finished(doubled)
    assert (averaged.steps[-1].held == -1).all()
    text, face, color = steps.cell(doubled.steps[-1].held[0, 0], doubled.wanted[0, 0], True)
    assert text == "6" and face != style.GREEN and color == style.VERMILION
    assert steps.cell(averaged.steps[-1].held[0, 0], averaged.wanted[0, 0], True)[0] == "?"


def test_messages_from_buffers_of_their_own_are_drawn_with_their_bytes():
    def half_through_a_copy(comm, x):
        if comm.rank == 0:
            comm.send(x[: len(x) // 2].clone(), 1)
        else:
            comm.recv(x[: len(x) // 2], 0)

    story = story_of(half_through_a_copy, 2, "all_reduce")
    (move,) = story.steps[0].moves
    assert move.first == -1 and move.into == 0 and move.nbytes == 96
    assert steps.messages(story, 1) == ["0 → 1   96 B"]


def test_digits_say_who_contributes():
    held = np.array([[1, 0, 2], [0, 0, 0], [1, 1, 1]])
    assert encoded(held).tolist() == [1 + 2 * BASE**2, 0, 1 + BASE + BASE**2]
    assert np.array_equal(decoded(encoded(held), 3), held)
    assert (decoded([0.5, -1.0, float(BASE) ** 3, np.nan], 3) == -1).all()


def texts_of(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


def test_steps_that_find_no_place_are_left_out_and_counted():
    texts = texts_of(lab.steps("ring", 16).figure)
    assert "start" in texts and "step 1" in texts and "…  step 29" in texts and "step 30" in texts
    assert any("25 steps are not drawn" in t for t in texts)
    assert steps.spared(5, 5) == [0, 1, 2, 3, 4] and steps.spared(31, 6) == [0, 1, 2, 3, 29, 30]


def test_a_step_lists_who_sends_which_chunk_to_whom():
    story = of_table(find("halving_doubling"), 8, {})
    figure = style.new_figure(height=steps.step_height(story))
    with style.look():
        steps.draw_step(figure, story, 2)
    assert "0 → 2   chunks 2-3\n1 → 3   chunks 2-3" in "".join(texts_of(figure))
    assert "step 2 of 6" in texts_of(figure)
    arrows = [p for p in figure.axes[0].patches if type(p).__name__ == "FancyArrowPatch"]
    assert len(arrows) == 8


def test_in_a_notebook_the_steps_play(monkeypatch):
    played = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "publish", lambda *args: None)
    monkeypatch.setattr(animation, "show", lambda draw, frames, alt, height: played.append((frames, alt)))
    lab.steps("tree", 4)
    ((frames, alt),) = played
    assert [i for _, i in frames] == [0, 1, 2, 3, 4] and alt == "tree, step by step"


def test_an_animation_has_a_frame_per_step():
    story = of_table(find("tree"), 2, {})
    html = animation.html(steps.draw_step, [(story, i) for i in range(3)], "a tree", steps.step_height(story))
    assert html.startswith('<img width="840"') and 'alt="a tree"' in html


@pytest.mark.parametrize("ranks", [1, 17, 4.0, "4"])
def test_ranks_that_cannot_be_drawn_are_refused(ranks):
    with pytest.raises(ValueError, match="2 to 16 ranks can be drawn"):
        lab.steps("ring", ranks)


def test_what_has_no_steps_is_said():
    with pytest.raises(LookupError, match="no algorithm 'rong'"):
        lab.steps("rong")
    with pytest.raises(ValueError, match="tree has no option segments: none"):
        lab.steps("tree", 4, segments=3)
    with pytest.raises(ValueError, match="your function sent no message on 3 ranks"):
        lab.steps(lambda comm, x: x, 3)
    with pytest.raises(ValueError, match="no collective is called 'all'"):
        lab.steps(lambda comm, x: x, 3, "all")


@pytest.mark.parametrize("p", [2, 4, 6])
def test_the_eight_collectives(p):
    texts = texts_of(lab.collectives(p).figure)
    assert all(name in texts for name in holdings.COLLECTIVES)
    assert texts.count("Σ0") == 1 + 1 + p  # reduce, reduce_scatter, all_reduce
    assert texts.count("A0") == 2 * 8 - 3 + (p - 1) * 2  # the root's first chunk, where it is and where it is copied


def test_other_numbers_of_ranks_are_refused():
    with pytest.raises(ValueError, match="2 to 6 ranks, got 7"):
        lab.collectives(7)
    assert eight.letter(2) == "C"
