"""The choice of requests for the next step: iteration-level scheduling, with prompts read in chunks.

Ref: Yu et al. 2022, "Orca", OSDI; Agrawal et al. 2023, "Sarathi", arXiv:2308.16369 (chunked prefill).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


def schedule(running: Sequence[int], waiting: Sequence[int], slots: int, budget: int) -> list[int]:
    """Choose how many tokens of each request the model reads in the next step.

    For each request you get a number: how many tokens it still has to read before its
    next token is chosen. A request that decodes has 1. A request in prefill
    has the rest of its prompt, and a waiting request has its whole prompt.

        slots = 3, budget = 8     to read   reads now
        running, in prefill          9          7      the rest of the budget
        running, decodes             1          1      decodes come first
        waiting, came first          4          -      one slot is free, no budget left
        waiting, came second         1          -      its prompt is short, but it waits

    First each request that decodes reads its token, so that no long prompt makes it
    wait. The rest of the budget goes to prompts, as much of each as fits: first to
    running requests, then to waiting requests, in order of arrival. A waiting request
    is admitted if a slot is free and the budget has at least one token left for it.
    When a request has ended, its slot is free in the very next step.

    Args:    running: tokens left to read, of each request with a slot, in order of
             admission: at most `slots` numbers, each at least 1.
             waiting: tokens left to read, of each request without a slot, in order of
             arrival.
             slots: how many requests run at once; budget: the most tokens of a step.
    Returns: a number for each running request, 0 if it has to wait in this step; then a
             number of at least 1 for each waiting request that is admitted. The
             arguments stay as they are.
    Tokens: at most the budget.
    Idle slots: none while requests wait and the budget lasts.
    """
    ### BEGIN SOLUTION
    left = [*running, *waiting[: slots - len(running)]]
    decodes = [i for i in range(len(running)) if left[i] == 1]
    prompts = [i for i in range(len(left)) if i not in decodes]
    counts = [0] * len(left)
    for i in decodes + prompts:
        counts[i] = min(left[i], budget)
        budget -= counts[i]
    while len(counts) > len(running) and counts[-1] == 0:
        counts.pop()
    return counts
    ### END SOLUTION


def schedule_static(running: Sequence[int], waiting: Sequence[int], slots: int, budget: int) -> list[int]:
    """Return the same for static batching: waiting requests are admitted when all of the batch before have ended."""
    return schedule(running, () if running else waiting, slots, budget)


class Lengths(NamedTuple):
    """A request in virtual steps: tokens of its prompt, tokens to generate, and the step before which it arrives."""

    prompt: int
    new: int
    arrival: int = 0


def virtual_steps(
    requests: Sequence[Lengths], slots: int, budget: int, choose: Callable[..., list[int]] = schedule
) -> list[dict[int, int]]:
    """Run a scheduler on requests of given lengths, without a model: {request: tokens read} of each step.

    Args:    requests: in order of arrival; choose: a function such as `schedule`.
    Returns: a dictionary a step, also of steps without requests; a request that has to wait has 0.
    Raises:  ValueError if `choose` lets none of several requests run.
    Steps: at least ceil(sum of new / slots).
    """
    left, new = [r.prompt for r in requests], [r.new for r in requests]
    running: list[int] = []
    steps: list[dict[int, int]] = []
    arrived = admitted = 0
    while admitted < len(requests) or running:
        while arrived < len(requests) and requests[arrived].arrival <= len(steps):
            arrived += 1
        waiting = range(admitted, arrived)
        counts = choose([left[i] for i in running], [left[i] for i in waiting], slots, budget)
        if not any(counts) and (running or waiting):
            raise ValueError(f"step {len(steps)}: no request runs, and {len(running)} have a slot, {len(waiting)} wait")
        more = len(counts) - len(running)
        running += range(admitted, admitted + more)
        admitted += more
        steps.append(dict(zip(running, counts, strict=True)))
        for i, count in steps[-1].items():
            left[i] -= count
            if not left[i]:
                left[i], new[i] = 1, new[i] - 1
        running = [i for i in running if new[i]]
    return steps
