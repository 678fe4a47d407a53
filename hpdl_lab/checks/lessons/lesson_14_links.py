"""Notebook 14: the cheapest link that hides enough of an all-reduce, by the backward from which a link is accepted."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from ...collectives import cost
from ...performance.links import cheapest_link, offers
from ...units import amount_text
from ..checkers import because, reason
from ..ranks import alone, capital
from ..record import Answer, Broken, Exercise, Passed, Rows

Links = tuple[tuple[str, float, float], ...]
DEFAULT = 0.9  # of hidden
FAR, HALVINGS = 1e10, 36  # a backward is looked for up to this factor above and below the right one, in so many steps
NOTHING = 1e-9  # a factor in place of 0, by which an answer may divide
TOLERANCE = 1e-3  # relative: chunks may be rounded up to whole bytes
MADE_UP = (  # cheapest first: least bandwidth, most bandwidth, the right one, slowest that hides enough, fastest, last
    *(("copper", 1.25e9, 1e-5), ("satellite", 100e9, 0.3), ("glass", 40e9, 2e-6)),
    *(("old glass", 18e9, 2e-6), ("gold", 60e9, 5e-7), ("silver", 30e9, 1e-6)),
)


class LinkTask(NamedTuple):
    """The arguments of cheapest_link but for backward_s."""

    links: Links
    gradient_bytes: float
    ranks: int
    hidden: float = DEFAULT

    def seconds(self, i: int = 0) -> float:
        """Return how long the ring takes over link i."""
        price = cost.all_reduce(self.ranks, self.gradient_bytes)
        return price.seconds(self.links[i][2], 1 / self.links[i][1])


SINGLE = (
    LinkTask(tuple(offers(["ethernet_10"])), 1e6, 6),
    LinkTask(tuple(offers(["infiniband_ndr"])), 52e6, 16, 0.8),
    LinkTask(tuple(offers(["roce_100"])), 3e9, 64, 0.6),
    LinkTask(tuple(offers(["ethernet_1"])), 4e4, 4),
)


def _check_cheapest_link(fn: Answer) -> Passed:
    for task in SINGLE:
        _check_time(fn, task)
    rng, cases = random.Random(14), [(MADE_UP, 0.1), (MADE_UP, 1e-6)]
    cases += [(tuple(rng.sample(MADE_UP, 6)), rng.choice((0.031, 0.043, 0.061, 0.1, 2.0))) for _ in range(30)]
    for links, backward_s in cases:
        _check_choice(fn, links, backward_s)
    return Passed(
        f"the right seconds of backward for {len(SINGLE)} links; the cheapest link, or None, in {len(cases)} lists"
    )


def _answer(fn: Answer, task: LinkTask, backward_s: float, where: str) -> str | None:
    """Return the name that fn returns, or None."""
    more = () if task.hidden == DEFAULT else (task.hidden,)
    got = alone(fn, list(task.links), task.gradient_bytes, task.ranks, backward_s, *more, where=where)
    if got is None or (isinstance(got, str) and got in [name for name, *_ in task.links]):
        return got
    text = "return the name of one link in the list, or None if no link hides enough"
    raise Broken(f"returns: {capital(where)}, your function returned {got!r}: {text}.")


def _least_backward(fn: Answer, task: LinkTask, where: str) -> float:
    """Return the backward, in s, from which fn accepts the only link of task; 0 if always, inf if never."""
    low, high = (task.hidden * task.seconds() * factor for factor in (1 / FAR, FAR))
    shortest, longest = _answer(fn, task, low, where), _answer(fn, task, high, where)
    if shortest and not longest:
        raise Broken(f"direction: {capital(where)}, you accept {shortest} only if backward is short.")
    if shortest or not longest:
        return 0.0 if shortest else math.inf
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _answer(fn, task, middle, where) else (middle, high)
    return high


def _check_time(fn: Answer, task: LinkTask) -> None:
    """Raise Broken unless fn accepts the only link of task from the right backward on."""
    (_, n, p, hidden), ((name, bandwidth, latency),) = task, task.links
    link = f"{name} ({amount_text(bandwidth)}/s, {amount_text(latency, 's')})"
    where = f"with {p} ranks and {amount_text(n)} of gradients over {link}"
    right, got = hidden * task.seconds(), _least_backward(fn, task, where)
    if math.isclose(got, right, rel_tol=TOLERANCE):
        return
    parts = task._replace(gradient_bytes=n * NOTHING), task._replace(links=((name, bandwidth, latency * NOTHING),))
    factors = [_least_backward(fn, part, where) / (hidden * part.seconds()) for part in parts]
    why = (
        reason(factors, _reasons(p, hidden), _same) or "time: How many steps does the ring take, and how long is each?"
    )
    said = f"from {amount_text(got, 's')} on" if 0 < got < math.inf else "never" if got else "always"
    enough = f"a backward of {amount_text(right, 's')} hides {hidden:.0%}, and you accept the link {said}."
    raise because(why, f"{capital(where)}, {enough}")


def _same(got: list[float], row: list[float | None]) -> bool:
    pairs = zip(got, row, strict=True)
    return all(b is None or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE**2) for a, b in pairs)


def _reasons(p: int, hidden: float) -> Rows:
    """Return [([factor of the time of latencies, of bytes], what is wrong)], None for any factor."""
    bits = "units: Bandwidth and gradients are both counted in bytes: there are no bits."
    both = (
        (1, "sum: A message takes its latency, and then the time of its bytes. How long is that together?"),
        (0, "time: How long does the ring take over this link?"),
        (math.inf, "time: How many seconds does the ring take?"),
        ((1 - hidden) / hidden, f"hidden: Then {hidden:.0%} of the communication may be exposed."),
        (1 / hidden, f"hidden: You ask for all of the ring's time, but {hidden:.0%} is enough."),
        (1 / hidden**2, "hidden: `hidden` is a share of the ring's time, but you take a share of backward."),
        (DEFAULT / hidden, f"hidden: {DEFAULT} is only the default of `hidden`."),
        (1 / 2, "steps: That is reduce-scatter alone. All-gather comes after it."),
        (p / (p - 1), f"steps: How often is a chunk passed on until all {p} ranks have it?"),
    )
    return [([x, x], why) for x, why in both] + [
        ([None, 8], bits),
        ([None, 1 / 8], bits),
        ([None, p], "bytes: You send all gradients in each step, but the ring sends one chunk of them."),
        ([None, 1 / 2], "bytes: You count reduce-scatter alone, but all-gather sends as many bytes."),
        ([None, p / (2 * p - 2)], "bytes: You send all gradients once. What does a rank send in all steps together?"),
        (
            [None, p / (p - 1)],
            f"bytes: You send all gradients twice. How many of {p} chunks does a rank send each time?",
        ),
        ([0, None], "latency: You count bytes only. How long do messages without bytes take?"),
        ([1 / (2 * p - 2), None], "latency: You count it once, but each step of the ring is a message."),
    ]


def _check_choice(fn: Answer, links: Links, backward_s: float) -> None:
    """Raise Broken unless fn returns the first of several links that hides enough."""
    task = LinkTask(links, 1e9, 16)
    where = f"with 16 ranks, 1 GB of gradients, and {amount_text(backward_s, 's')} of backward"
    got, right = _answer(fn, task, backward_s, where), cheapest_link(*task[:3], backward_s)
    if got == right:
        return
    shares = {link: min(1.0, backward_s / task.seconds(i)) for i, link in enumerate(task.links)}
    listed = ", ".join(f"{link[0]} {share:.0%}" for link, share in shares.items())
    text = f"{capital(where)}, these shares are hidden, cheapest link first: {listed}. You say {got!r}."
    fit = [link for link, share in shares.items() if share >= task.hidden]
    if not fit:
        raise Broken(f"none: {text} No link hides {task.hidden:.0%}: return None.")
    by_speed = sorted(fit, key=lambda link: link[1])
    rows = [
        (None, "first: Some hide enough. Do you stop at a link that does not?"),
        (fit[-1][0], "first: That link hides enough, and so does a cheaper one. When do you stop?"),
        (by_speed[-1][0], "order: That is the fastest link. Which one is the cheapest that hides enough?"),
        (by_speed[0][0], "order: That is the slowest link that hides enough. Which one is the cheapest?"),
    ]
    raise because(reason(got, rows, lambda a, b: a == b) or "order: Begin with the cheapest link.", text)


EXERCISES = (Exercise("14.6", "the cheapest link", cheapest_link, 1, _check_cheapest_link),)
