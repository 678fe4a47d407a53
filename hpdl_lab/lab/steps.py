"""`lab.steps`: a collective drawn as steps, who sends which chunk to whom; `lab.collectives`: what each is for."""

import inspect

from ..collectives.table import find
from ..plots import animation, eight, live
from ..plots import steps as drawing
from ..plots.holdings import of_rounds
from .picture import picture
from .watch import PER_CHUNK, story_of

SEGMENTS = 2  # in the picture of a pipelined algorithm: enough to see that one follows the other
MOST_FRAMES = 32  # of an animation: half a minute
MOST_EIGHT = 6  # ranks in the picture of the eight


def steps(algorithm, ranks=8, collective="all_reduce", **options):
    """Draw a collective step by step, and play it: who sends which chunk to whom, and whose data each chunk holds.

        lab.steps("halving_doubling", 8)          any algorithm of collectives/table.py
        lab.steps("tree", 8, "broadcast")
        lab.steps(my_all_reduce, 4)               yours, from its messages on simulated ranks

    Args:    algorithm: a name of the table, or f(comm, x); ranks: 2 to 16; collective: what it does.
             options: of the algorithm, such as segments=4, where it has any.
    Returns: Picture.
    Raises:  LookupError for a name that is not in the table, ValueError for too many ranks, what your function raises.
    """
    if not isinstance(ranks, int) or not 2 <= ranks <= drawing.MOST_RANKS:
        raise ValueError(f"the steps of 2 to {drawing.MOST_RANKS} ranks can be drawn readably, got ranks={ranks!r}")
    if callable(algorithm):
        story = story_of(algorithm, ranks, collective)
    else:
        story = of_table(find(algorithm, collective), ranks, options)
    if not story.steps:
        raise ValueError(f"{story.name} sent no message on {ranks} ranks: there is no step to draw")
    if live.in_notebook():
        animation.show(*played(story))
    return picture(drawing.draw, story, text=drawing.title_of(story), height=drawing.Sheet(story).height)


def played(story):
    """The arguments of animation.html and animation.show that play a Story."""
    frames = [(story, i) for i in drawing.spared(len(story.steps) + 1, MOST_FRAMES)]
    return drawing.draw_step, frames, f"{story.name}, step by step", drawing.step_height(story)


def of_table(algorithm, p, options):
    """The Story of a record of the table on p ranks."""
    known = inspect.signature(algorithm.steps).parameters
    if unknown := set(options) - set(known):
        raise ValueError(f"{algorithm} has no option {', '.join(sorted(unknown))}: {', '.join([*known][2:]) or 'none'}")
    if "segments" in known:
        options = {"segments": SEGMENTS} | options
    n = PER_CHUNK * p
    return of_rounds(str(algorithm), algorithm.collective, algorithm.steps(p, n, **options), p, n)


def collectives(ranks=4):
    """Draw the eight collectives, before and after: whose data every rank holds. Returns Picture.

    Args:    ranks: 2 to 6.
    """
    if not isinstance(ranks, int) or not 2 <= ranks <= MOST_EIGHT:
        raise ValueError(f"the eight collectives are drawn for 2 to {MOST_EIGHT} ranks, got {ranks!r}")
    text = f"Eight collectives on {ranks} ranks, before and after"
    return picture(eight.draw, ranks, text=text, height=eight.height(ranks))
