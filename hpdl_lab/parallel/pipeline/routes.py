"""Which messages a rank of a pipeline sends and receives, and in which order: all of it follows from the schedule.

Messages between two ranks arrive in the order in which they were sent, whatever stages and micro-batches they are for.
So the receiver expects them in the order of the sender's row, and needs no tags to tell them apart.
"""

from functools import lru_cache
from typing import NamedTuple

from ...schedules import validate


class Arrival(NamedTuple):
    """What a stage waits for: the inputs of a forward, kind "F", or the gradients of a backward, kind "B"."""

    stage: int
    kind: str
    micro_batch: int


class Message(NamedTuple):
    """One message: what it is, the ranks, and the places in their rows where it is made and where it is used."""

    arrival: Arrival
    source: int
    to: int
    made: int
    used: int


class Routes:
    """The messages of one rank in `schedule`.

    incoming: {rank: [Message]} in the order in which that rank sends them; outgoing: [Message or None] for each action
    of the row. last: {stage: place of its last backward in the row}.
    """

    def __init__(self, schedule, rank):
        self.row = schedule.rows[rank]
        used = {needed_by(action): place for row in schedule.rows for place, action in enumerate(row)}
        self.outgoing = [self._message(schedule, rank, place, used) for place in range(len(self.row))]
        self.incoming = {}
        for peer in range(schedule.ranks):
            sent = (self._message(schedule, peer, place, used) for place in range(len(schedule.rows[peer])))
            mine = [message for message in sent if message is not None and message.to == rank != peer]
            if mine:
                self.incoming[peer] = mine
        self.source_of = {message.arrival: peer for peer, mine in self.incoming.items() for message in mine}
        self.last = {action.stage: place for place, action in enumerate(self.row) if action.kind in "BW"}

    @staticmethod
    def _message(schedule, rank, place, used):
        """What the action at `place` of the row of `rank` sends; None where nobody waits for its result."""
        arrival = result_of(schedule, schedule.rows[rank][place])
        if arrival is None:
            return None
        return Message(arrival, rank, schedule.rank_of(arrival.stage), place, used[arrival])


def needed_by(action):
    """The Arrival that `action` waits for; None for the second half of a backward."""
    kind = {"F": "F", "B": "B", "I": "B"}.get(action.kind)
    return kind and Arrival(action.stage, kind, action.micro_batch)


def result_of(schedule, action):
    """The Arrival that `action` makes possible; None where its result goes nowhere."""
    if action.kind == "W":
        return None
    stage = schedule.next(action.stage) if action.kind == "F" else schedule.previous(action.stage)
    return None if stage is None else Arrival(stage, "F" if action.kind == "F" else "B", action.micro_batch)


@lru_cache(maxsize=64)
def routes(schedule, rank):
    """The Routes of one rank in a schedule that has been found valid.

    Raises:  ValueError, one sentence, for a schedule that is not: the same on every rank, before any message.
    """
    return Routes(validate(schedule), rank)
