"""The actions of a pipeline in the event log: how they are called there, and the schedule that they came to."""

import re

from ...schedules import KINDS, Action, Timed

LETTERS = {word: letter for letter, word in KINDS.items()}
NAME = re.compile(rf"({'|'.join(LETTERS)}) (\d+) stage (\d+)")


def name_of(action):
    """How the event of an action is called: "forward 5 stage 2", of micro-batch 5."""
    return f"{KINDS[action.kind]} {action.micro_batch} stage {action.stage}"


def action_of(op):
    """The Action of an event that is called `op`; None where it is something else."""
    found = NAME.fullmatch(op)
    return found and Action(int(found[3]), LETTERS[found[1]], int(found[2]))


def timed_actions(events, ranks):
    """What each rank did and when: a list of schedules.Timed for each of `ranks` ranks, in s since the first action.

    `schedules.summary` makes makespan, bubble and live activations of it.   Args: events: of one step.
    """
    found = [(e, action) for e in events if (action := action_of(e.op))]
    origin = min((e.t0_ns for e, _ in found), default=0)
    rows = [[] for _ in range(ranks)]
    for e, action in sorted(found, key=lambda pair: (pair[0].t0_ns, pair[0].step)):
        rows[e.rank].append(Timed(action, (e.t0_ns - origin) / 1e9, (e.t1_ns - origin) / 1e9))
    return rows
