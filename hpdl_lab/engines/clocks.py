r"""Times of engines on other machines, as if they had been taken by the notebook's clock: what a timeline draws.

    notebook  before ---------------------------- after
                    \                            /
    engine           ------------- its time -----          both ways take about as long: theirs was in the middle

Each machine counts from its own start. Where an answer's time lies between question and answer by the notebook's clock
as well, the clocks count for the same one, or differ by less than can be told: then nothing is moved.
"""

import time

STALE = 10.0  # s: clocks of good machines drift apart by less than 0.1 ms meanwhile
QUESTIONS = 5


class Offset:
    """What to add to the times of one engine."""

    def __init__(self):
        self.ns = 0
        self.taken_at = None  # by time.monotonic(); None where the engine has the same clock

    @property
    def stale(self):
        """Is it time to ask again?"""
        return self.taken_at is not None and time.monotonic() - self.taken_at > STALE

    def take(self, answers):
        """Learn from `answers`: (before, theirs, after) in ns, of which that without delay tells most."""
        before, theirs, after = min(answers, key=lambda answer: answer[2] - answer[0])
        if before <= theirs <= after:
            self.ns, self.taken_at = 0, None
        else:
            self.ns, self.taken_at = (before + after) // 2 - theirs, time.monotonic()

    def moved(self, outcome):
        """The outcome of a task (task.py), with the notebook's times."""
        if not self.ns:
            return outcome
        events = [(*e[:3], e[3] + self.ns, e[4] + self.ns, *e[5:]) for e in outcome["events"]]  # as trace.Event
        return outcome | {"t0_ns": outcome["t0_ns"] + self.ns, "t1_ns": outcome["t1_ns"] + self.ns, "events": events}
