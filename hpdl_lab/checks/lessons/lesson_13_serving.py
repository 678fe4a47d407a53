"""Notebook 13: which requests run in the next step, pages of the cache, and what a draft is worth."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from ...inference.pages import reserve
from ...inference.scheduler import Lengths, schedule, schedule_static, virtual_steps
from ...inference.speculative import expected_tokens
from ...units import counted
from ..checkers import because, reason
from ..ranks import alone, capital, number, numbers_of, type_text
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason

Steps = list[dict[int, int]]
NEW = (20, 3, 6, 2, 4, 14, 3, 9, 2, 5, 12, 4, 6, 10, 3, 5)  # tokens to generate


class _Load(NamedTuple):
    """Requests for so many slots and so many tokens a step."""

    requests: Sequence[Lengths]
    slots: int
    budget: int

    def __str__(self) -> str:
        requests, slots = counted(len(self.requests), "request"), counted(self.slots, "slot")
        return f"with {requests}, {slots} and a budget of {self.budget}"


MIXED = _Load([Lengths(2, new) for new in NEW], 4, 64)
ALONE = _Load([Lengths(5, 3), Lengths(1, 2, 1)], 1, 64)
CHUNKS = _Load([Lengths(20, 4), Lengths(3, 6), Lengths(9, 3), Lengths(1, 5, 2), Lengths(14, 2, 9)], 3, 8)
NARROW = _Load([Lengths(1 + i % 3, 3 + i % 4) for i in range(8)], 5, 3)


SINGLE = (  # running, waiting, slots, budget: prompts of requests that had to give their pages back may come late
    ((9, 1), (4, 1), 3, 8),
    ((9, 1), (4, 1), 3, 1),
    ((1, 30, 5, 1), (), 4, 16),
    ((), (6, 2, 1), 4, 64),
    ((), (), 4, 64),
)


def _random_load(seed: int) -> _Load:
    rng = random.Random(seed)
    arrivals = sorted(rng.randrange(40) for _ in range(30))
    return _Load([Lengths(rng.randint(1, 30), rng.randint(1, 12), at) for at in arrivals], 5, 16)


class _Watched:
    """A scheduler whose every choice is looked at. idle: [(step, slots)] that were empty while requests waited.

    Raises:  Broken for a choice that may not be.
    """

    def __init__(self, fn: Answer) -> None:
        self.fn, self.idle, self.refills = fn, list[tuple[int, int]](), set[bool]()
        self.calls = 0

    def __call__(self, running: list[int], waiting: list[int], slots: int, budget: int) -> list[int]:
        given = [*running], [*waiting]
        counts = self.fn(running, waiting, slots, budget)
        if (running, waiting) != given:
            raise Broken("input: your function has changed running or waiting, which belong to its caller.")
        said = f"schedule({given[0]}, {given[1]}, {slots}, {budget}) returned {counts!r}"
        _check_counts(counts, *given, slots, budget, said)
        left = budget - sum(counts)
        idle = min(slots - len(counts), len(running) + len(waiting) - len(counts), left)
        if idle > 0:
            following = waiting[len(counts) - len(running)]
            if following > left:
                raise Broken(f"""chunks: {said}: {counted(left, "token")} of the budget are left, and no request gets
                    them. A longer prompt is read in parts: as much of it as fits.""")
            self.idle.append((self.calls, idle))
        if not any(counts) and running + waiting:
            raise Broken(f"stuck: {said}: no request reads anything, so this never ends.")
        if waiting and len(counts) > len(running):
            self.refills.add(bool(running))
        self.calls += 1
        return list(counts)


def _check_counts(
    counts: Sequence[int], running: list[int], waiting: list[int], slots: int, budget: int, said: str
) -> None:
    """Raise Broken for a choice that may not be, whatever comes next."""
    if not isinstance(counts, list | tuple) or not all(type(n) is int for n in counts):
        raise Broken(f"returns: {said}: return a list of ints, first one for each running request.")
    if len(counts) < len(running) or min(counts, default=0) < 0:
        raise Broken(f"""returns: {said}: there are {counted(len(running), "running request")}, and each gets a number,
            0 if it has to wait.""")
    if len(counts) > len(running) + len(waiting):
        raise Broken(f"returns: {said}: that is more than {counted(len(running) + len(waiting), 'request')}.")
    if len(counts) > slots:
        raise Broken(f"slots: {said}: {len(counts)} requests run, and there are {counted(slots, 'slot')}.")
    left = [*running, *waiting][: len(counts)]
    over = next((i for i, n in enumerate(counts) if n > left[i]), None)
    if over is not None:
        raise Broken(f"tokens: {said}: request {over} has {counted(left[over], 'token')} to read, not {counts[over]}.")
    if sum(counts) > budget:
        raise Broken(f"budget: {said}: that is {sum(counts)} tokens in a step, over a budget of {budget}.")
    decodes = [i for i, n in enumerate(running) if n == 1]
    spoke = sum(counts[i] for i in decodes)
    if spoke < min(len(decodes), budget):
        quiet = next(i for i in decodes if not counts[i])
        raise Broken(f"""decodes: {said}: request {quiet} decodes, and waits while prompts are read: its user sees
            the answer stop. Decodes come first.""")
    prompts = [i for i in range(len(counts)) if i not in decodes]
    for first, second in itertools.pairwise(prompts):
        if counts[first] < left[first] and counts[second]:
            raise Broken(f"""starvation: {said}: request {second} reads {counted(counts[second], "token")}, and request
                {first}, which came first, has not read all of its prompt: if enough others come later, it
                never will.""")
    short = next((i for i in prompts if counts[i] < left[i]), None)
    if short is not None and sum(counts) < budget:
        raise Broken(f"""chunks: {said}: {counted(budget - sum(counts), "token")} of the budget are left, and request
            {short} could read more of its prompt: as much as fits.""")
    if 0 in counts[len(running) :]:
        raise Broken(f"admit: {said}: a request is admitted without a token. It keeps its slot and does nothing in it.")


def _watched(fn: Answer, load: _Load) -> tuple[Steps, _Watched]:
    choose = _Watched(fn)
    return virtual_steps(*load, choose=choose), choose


def _check_schedule(fn: Answer) -> Passed:
    for load in (MIXED, ALONE, CHUNKS, NARROW, *map(_random_load, range(3))):
        steps, choose = alone(_watched, fn, load, where=str(load))
        if choose.idle:
            raise Broken(f"idle: {_told_idle(load, steps, choose)}")
    for running, waiting, slots, budget in SINGLE:
        where = f"for {list(running)} running and {list(waiting)} waiting, with {counted(slots, 'slot')},"
        choose = _Watched(fn)
        counts = alone(choose, [*running], [*waiting], slots, budget, where=where)
        if choose.idle:
            raise Broken(f"idle: a slot is free after {counts}, and requests wait for it.")
    runs, slots, least = compared(fn)
    static, steps = runs.values()
    return Passed(
        f"""steps: {len(steps)} for {len(NEW)} requests of {min(NEW)} to {max(NEW)} tokens on {slots} slots;
        ceil(sum of lengths / slots) = {least} are the least, static batching takes {len(static)}""",
        "idle slots: none while requests waited and the budget lasted",
        f"""budget: a prompt of {CHUNKS.requests[0].prompt} tokens is read in parts of at most {CHUNKS.budget},
        and requests that decode never wait for it""",
    )


def compared(fn: Answer = schedule) -> tuple[dict[str, Steps], int, int]:
    """Return ({how: steps} of static and of continuous batching by `fn`, slots, the least number of steps)."""
    runs = {"static batching": schedule_static, "yours": fn}
    least = math.ceil(sum(NEW) / MIXED.slots)
    return {how: virtual_steps(*MIXED, choose=choose) for how, choose in runs.items()}, MIXED.slots, least


def _told_idle(load: _Load, steps: Steps, choose: _Watched) -> str:
    """Return the cost of slots that were empty."""
    best, total = len(virtual_steps(*load)), sum(n for _, n in choose.idle)
    at, n = choose.idle[0]
    text = f"""{capital(str(load))}, {counted(total, "slot")} were idle while requests waited, first {n} of them in step
        {at}: {len(steps)} steps, where {best} are enough."""
    if choose.refills == {False}:
        return f"""{text} Requests are admitted only when none runs: that is static batching, in which all wait for
            the longest. A slot is free as soon as its request has ended."""
    return f"{text} A waiting request may take a free slot in the very next step."


# -- pages -------------------------------------------------------------------------------------------------------------

SIZE = 4
SMALL = (  # free, pages of the request, tokens
    ([3, 0, 5, 2], [7], 9),
    ([3, 0, 5, 2], [7], 8),
    ([3, 0, 5, 2], [], 1),
    ([3, 0, 5, 2], [], 16),
    ([3, 0], [7, 1], 16),
    ([3, 0], [7, 1], 17),
    ([], [7, 1], 8),
    ([], [7, 1], 9),
    ([3, 0, 5], [7, 1], 3),
    ([3, 0, 5], [], 0),
)
COUNT, ROUNDS = 48, 400


def _check_reserve(fn: Answer) -> Passed:
    for free, pages, tokens in SMALL:
        where = f"reserve({free}, {pages}, {tokens}, {SIZE})"
        after, held = [*free], [*pages]
        returned = alone(fn, after, held, tokens, SIZE, where=f"in {where}")
        if wrong := _misuse(returned, free, pages, after, held, tokens):
            raise because(wrong, f"{where}:")
    waste, refused, requests, scattered = alone(_worked, fn, where="in a random workload,")
    return Passed(
        f"""{len(SMALL)} small cases, and {ROUNDS} calls for requests that come, grow and go on {COUNT} pages: free +
        used = {COUNT} after each""",
        f"all or nothing: {refused} times too few pages were free, and nothing changed",
        f"waste: {waste / requests:.2f} pages a request on average, in its last page; {scattered:.0%} held scattered "
        "pages",
    )


def _misuse(returned: object, free: list[int], pages: list[int], after: list[int], held: list[int], tokens: int) -> str:
    """Return what is wrong with a call that has made after of free and held of pages: a Reason, or ""."""
    needed = math.ceil(tokens / SIZE)
    missing = max(0, needed - len(pages))
    now = f"free is {after} and pages are {held}"
    if not isinstance(returned, bool | type(None)) or returned is None:
        return f"returns: {type_text(type(returned).__name__)} was returned: return True or False."
    if not returned:
        if (sorted(after), held) != (sorted(free), pages):
            return f"""all or nothing: it says False, and yet {now}. The pages that it has taken are lost to other
                requests: count first, then take."""
        if missing > len(free):
            return ""
        why = f"{counted(missing, 'page')} would do, and {counted(len(free), 'page')} are free"
        return f"refuse: it says False, but {why}. Any free page will do, and the last one, too."
    if missing > len(free):
        return f"""short: it says True, but {counted(missing, "page")} are missing and {counted(len(free), "page")}
            free: {now}."""
    if len(held) * SIZE < tokens:
        return f"""short: it says True, but {counted(len(held), "page")} of {SIZE} hold {len(held) * SIZE} of {tokens}
            tokens."""
    if held[: len(pages)] != pages:
        return f"""lost: {now}: the pages that the request had, {pages}, hold its first tokens: leave them where they
            are."""
    if len(held) > max(needed, len(pages)):
        return f"""waste: {now}: {counted(len(held), "page")} for {counted(tokens, "token")}, where
            {max(needed, len(pages))} hold them. Less than one page of a request may be empty."""
    if both := sorted(set(after) & set(held)):
        return f"twice: {now}: page {both[0]} is free and in use, so that the next request writes over this one's keys."
    if gone := sorted(set(free + pages) - set(after + held)):
        return f"leak: {now}: page {gone[0]} is neither free nor in use: no request will ever take it."
    return "" if sorted(after + held) == sorted(free + pages) else f"twice: {now}: a page stands there twice."


def _worked(fn: Answer) -> tuple[float, int, int, float]:
    """Return (pages that were empty, refusals, requests, share of scattered ones) of a random workload."""
    rng, free, requests = random.Random(13), [*range(COUNT)], list[tuple[list[int], int]]()
    waste, refused, held, scattered = 0.0, 0, 0, 0
    for _ in range(ROUNDS):
        if requests and rng.random() < 0.3:
            free += requests.pop(rng.randrange(len(requests)))[0]
        grows = bool(requests) and rng.random() < 0.5
        pages, tokens = requests.pop(rng.randrange(len(requests))) if grows else ([], 0)
        more = tokens + rng.randint(1, 9)
        before = [*free], [*pages]
        returned = fn(free, pages, more, SIZE)
        if wrong := _misuse(returned, *before, free, pages, more):
            raise because(wrong, f"{len(before[0])} pages are free, and a request of {len(before[1])} asks {more}:")
        refused += not returned
        if returned:
            requests.append((pages, more))
        elif pages:
            requests.append((pages, tokens))
        for kept, n in requests:
            waste, held = waste + len(kept) - n / SIZE, held + 1
            scattered += any(b - a != 1 for a, b in zip(kept, kept[1:], strict=False))
    return waste, refused, held, scattered / held


# -- a draft -----------------------------------------------------------------------------------------------------------

ACCEPTANCES, GAMMAS, ITERATIONS = (0.8, 0.5, 0.0, 1.0), (3, 1, 7, 0), 20_000


def _check_expected_tokens(fn: Answer) -> Passed:
    for a in ACCEPTANCES:
        for gamma in GAMMAS:
            where = f"with an acceptance of {a:g} and γ = {gamma}"
            got = alone(fn, a, gamma, where=f"{where},")
            (value,), right = numbers_of(got, 1, where, "a float"), expected_tokens(a, gamma)
            if not math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-12):
                text = f"{capital(where)} an iteration brings {number(right)} tokens, and you say {number(value)}."
                rows = [(said, why) for said, why in _guesses(a, gamma) if not math.isclose(said, right)]
                raise because(reason(value, rows, math.isclose) or "value: ", text)
    drawn = _played(*DRAFT)
    return Passed(
        f"right for {len(ACCEPTANCES) * len(GAMMAS)} pairs of acceptance and γ, 0 and 1 among them",
        f"""{ITERATIONS:,} iterations, drawn at random with an acceptance of {DRAFT[0]} and γ = {DRAFT[1]}, bring
        {drawn:.3f} tokens each; you say {fn(*DRAFT):.3f}""",
    )


DRAFT = 0.8, 4


def _guesses(a: float, gamma: int) -> list[tuple[float, Reason]]:
    """Return Rows of what may be said, and what is wrong with it."""
    kept = sum(a**k for k in range(1, gamma + 1))
    return [
        (
            kept,
            "bonus: The model adds a token of its own in each iteration: in the place of the first rejected guess, "
            "or after all of them.",
        ),
        (
            kept + 1 - a**gamma,
            "bonus: If all guesses are accepted, the model adds one more: it has read them all.",
        ),
        (1 + a * gamma, "independent: A guess counts only if all before it were accepted, too."),
        (a * gamma, "independent: A guess counts only if all before it were accepted, too; and the model adds one."),
        (1 + gamma, "acceptance: That is the most, if all are accepted."),
        (1 + kept + a ** (gamma + 1), "gamma: One guess too many: the draft makes γ."),
        (1 / (1 - a) if a < 1 else 0.0, "gamma: That is a sum without an end: the draft makes only γ guesses."),
        (1 + a**gamma, "value: At least two, at least three ... tokens: every number of accepted guesses counts."),
    ]


def _played(a: float, gamma: int) -> float:
    """Return the tokens of an iteration on average, drawn at random."""
    rng, tokens = random.Random(5), 0
    for _ in range(ITERATIONS):
        tokens += 1 + next((k for k in range(gamma) if rng.random() >= a), gamma)
    return tokens / ITERATIONS


EXERCISES = (
    Exercise(
        "13.3",
        "the scheduler of continuous batching",
        schedule,
        3,
        _check_schedule,
        picture=Drawing("still", "who had which slot in each step", data=compared),
    ),
    Exercise("13.4", "pages without fragmentation", reserve, 1, _check_reserve),
    Exercise("13.5", "what a draft is worth", expected_tokens, 1, _check_expected_tokens),
)
