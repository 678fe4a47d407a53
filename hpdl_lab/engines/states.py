"""What every rank of a run is doing, as the engines tell it themselves: no file is shared, and no host either.

A thread of each engine answers while the main thread waits, computes or is stuck in compiled code; and every outcome
carries what its rank was doing last.
"""

import time
from contextlib import suppress

from ..comm.board import Slot
from ..comm.errors import Wait
from . import client

ANSWER = 1.0  # s: on a busy machine a thread waits for a core; one whose interpreter compiled code holds never answers


class States:
    """The slots (comm/board.py) of the ranks of run `number`; rank i of it is engines[i]."""

    def __init__(self, number, engines):
        self.number, self.engines = number, engines
        self.slots = {}  # rank -> Slot
        self.with_px = set()  # ranks that are engines of ipyparallel by now
        self.expected = set()  # ranks that have been asked and have not answered
        self.asked_at = None
        self.question = (number, 0)  # the last one: an answer to an earlier one may come when much has changed

    def ask(self, ranks):
        """Ask `ranks` what they are doing."""
        self.asked_at, self.expected = time.monotonic(), set(ranks)
        self.question = (self.number, self.question[1] + 1)
        for rank in ranks:
            with suppress(OSError):  # it has died: its connection says so next
                self.engines[rank].send(client.STATE, self.question)

    def take(self, rank, told):
        """A rank has answered, or has ended. told: see `told_by`; an answer says to which question it is, "asked"."""
        if told.get("asked", self.question) != self.question:
            return
        self.expected.discard(rank)
        self.slots[rank] = Slot(*told["slot"]).moved(time.monotonic_ns() - told["now_ns"])
        if told["px"]:
            self.with_px.add(rank)

    def settled(self, gone=()):
        """True when all that were asked have answered, or will not; `gone` will not."""
        return not self.expected - set(gone) or time.monotonic() - self.asked_at > ANSWER

    def has_begun(self, rank):
        """False where a rank has said that it is doing something else than this run."""
        return rank not in self.slots or self.slots[rank].run == self.number

    def is_behind_a_cell(self, rank):
        """True where what keeps a rank from this run is a cell of %px, and not only that it gets no core."""
        return rank in self.with_px and not self.has_begun(rank)

    def waits(self, dead=()):
        """What the ranks are doing, as list[Wait] in rank order. dead: ranks that have closed their connection."""
        number = {engine.rank: i for i, engine in enumerate(self.engines)}
        waits = []
        for rank in range(len(self.engines)):
            if rank in dead:
                waits.append(Wait(rank, "dead"))
            elif rank not in self.slots:
                waits.append(Wait(rank, "running"))  # it answers nothing
            elif not self.has_begun(rank):
                waits.append(Wait(rank, "idle"))
            else:
                waits.append(self.slots[rank].wait(rank, number))
        return waits


def told_by(board, rank, px):
    """What an engine tells of its rank: plain values, with the time on its own clock. px: does it run cells of %px?"""
    return {"slot": tuple(board.slot(rank)), "px": px, "now_ns": time.monotonic_ns()}
