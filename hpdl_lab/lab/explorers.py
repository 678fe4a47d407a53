"""`lab.explore`: what the notebooks let attendees play with. All of it is a model or virtual time: answers are instant.

An entry of EXPLORERS is named controls, and a function of their values that returns a Picture.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..data import diabetes
from ..optim.gradient_descent import descend_in_batches, loss
from ..parallel.grid.machine import PEAKS
from ..parallel.grid.spec import TRAININGS
from ..plots import explore as drawing
from ..plots.landscape import Bowl
from ..trace import number_text
from ..units import amount_text, counted
from .explore import Control, Explored, doublings, logarithmic, require_known
from .result import Picture, drawn

Explorer = tuple[dict[str, Control], Callable[..., Picture]]


def percent(share: float) -> str:
    return f"{share:.0%}"


def in_words(value: float) -> str:
    """1.75e11 -> "175 billion"."""
    scale, word = next(pair for pair in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")) if value >= pair[0])
    return f"{number_text(value / scale)} {word}"


# -- 00_why: days of training -----------------------------------------------------------------------------------------

COUNTS = doublings(1, 2**17)
MEMORY = 80e9  # bytes of an accelerator
STATE = sum(TRAININGS["mixed adam"][:3])  # bytes per parameter


def days(parameters: float, tokens: float, accelerators: int, hardware: str, share_of_peak: float) -> Picture:
    """6 N D operations, a multiplication and an addition counting as two. Ref: Kaplan et al. 2020, section 2.1."""
    flops, speed = 6 * parameters * tokens, PEAKS[hardware] * share_of_peak
    least = math.ceil(STATE * parameters / MEMORY)
    counts = np.union1d(COUNTS, [min(least, COUNTS[-1]), accelerators])
    took = flops / speed / accelerators / drawing.DAY
    text = f"6 N D = {flops:.3g} operations: {number_text(took)} days on {accelerators:,} {hardware}; one "
    text += f"takes {number_text(flops / speed / drawing.YEAR)} years. The state, {STATE} bytes per parameter, is "
    text += f"{amount_text(STATE * parameters)}, and fills {counted(least, 'accelerator')} of {amount_text(MEMORY)}."
    title = (
        f"{in_words(parameters)} parameters, {in_words(tokens)} tokens, {hardware} at {share_of_peak:.0%} of its peak"
    )
    args = counts, flops / speed / counts, accelerators, least, title
    return drawn(drawing.days, *args, text=text, height=drawing.HEIGHT)


# -- 00_why and 01: gradient descent ----------------------------------------------------------------------------------

BATCHES = (*doublings(1, 256), 442)
STEPS, EPOCHS = 60, 5


@functools.cache
def patients() -> tuple[np.ndarray, np.ndarray, Bowl]:
    x, y = diabetes.load()
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    return x, y, Bowl(lambda w: loss(w, x, y), best, 1.6 * float(np.abs(best).max()))


def descent(rate: float, batch: int, seed: int, epochs: int = 0) -> Picture:
    """A walk of so many epochs, of which a small batch makes many steps, or of STEPS steps of any batch."""
    x, y, bowl = patients()
    each = math.ceil(len(y) / batch)  # steps of an epoch
    steps = epochs * each or STEPS
    with np.errstate(all="ignore"):  # diverging is part of the lesson
        path = np.array(list(descend_in_batches(x, y, rate, batch, steps, seed)))
        above = np.nan_to_num(((path @ x.T - y) ** 2).mean(axis=1) / 2 - bowl.least, nan=np.inf)
    rest = np.median(above[-max(1, len(above) // 4) :])
    name = "the whole batch" if batch == len(y) else f"mini-batches of {batch}"
    text = f"{counted(steps, 'step')} on {name}, {counted(each, 'step')} an epoch: "
    ends = f"in the last quarter the loss is {number_text(rest)} above the least"
    text += ends if rest < above[0] else "it diverges"
    at = np.arange(steps + 1) / (each if epochs else 1)
    args = bowl, path, at, above, "epochs" if epochs else "steps", f"rate {number_text(rate)}, {name}"
    return drawn(drawing.descent, *args, text=text, height=drawing.HEIGHT)


SEEDS = tuple(range(10))
DESCENT = {
    "rate": Control(logarithmic(0.005, 2), 0.3, number_text),
    "batch": Control(BATCHES, 442, lambda n: "all 442" if n == 442 else str(n)),
    "seed": Control(SEEDS, 0),
}

EXPLORERS: dict[str, Explorer] = {
    "days": (
        {
            "parameters": Control(logarithmic(1e8, 1e13), 175e9, in_words),
            "tokens": Control(logarithmic(1e9, 1e14), 300e9, in_words),
            "accelerators": Control(COUNTS, 1024, "{:,}".format),
            "hardware": Control(tuple(PEAKS), "A100"),
            "share_of_peak": Control(tuple(k / 100 for k in range(5, 75, 5)), 0.35, percent),
        },
        days,
    ),
    "batch": (
        {**DESCENT, "batch": DESCENT["batch"]._replace(start=32)},
        functools.partial(descent, epochs=EPOCHS),
    ),
    "rate": (DESCENT, descent),
}


def explore(name: str, **start: Any) -> Explored:
    """Play with a model: sliders above a picture, and its numbers in one line; in a plain terminal the line is printed.

        lab.explore("rate")                           gradient descent: learning rate and batch
        lab.explore("days", parameters=70e9)          ... which starts at this value
        lab.explore("rate").set(rate=0.5)             the same in a terminal

    Args:    name: of EXPLORERS; start: {name of a slider: value}.
    Returns: Explored, with .values, .text, .set(...), .save(path).
    Raises:  LookupError for an unknown name, ValueError for a value or a slider that is none.
    """
    if name not in EXPLORERS:
        raise LookupError(f"nothing to explore is called {name!r}: {', '.join(EXPLORERS)}")
    controls, answer = EXPLORERS[name]
    for key in start:
        require_known(name, controls, key)
    begun = {key: controls[key].at(key, value) for key, value in start.items()}
    explored = Explored(name, controls | begun, answer)
    explored.show()
    return explored
