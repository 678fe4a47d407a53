"""How what runs beside a rank waits: by the same rules as the rank, but it tells nobody of it.

A rank has one slot on the board, which only its main thread writes. So a wait in the background is published by the
main thread, when that waits for the background itself; otherwise what the main thread does is what others want to read.
"""

import os
import time
from contextlib import suppress

from ...trace import now_ns
from .table import Slot
from .waiting import NAP, Waiting


class Corner:
    """The board as the background sees it: it reads all slots, and its own waits stay in `told` (a Slot, or None).

    line: on behalf of which line the background works, where no line of the attendee's leads to its wait.
    """

    def __init__(self, board, rank):
        self._board, self._rank = board, rank
        self.told, self.line = None, ""

    def __getattr__(self, name):
        return getattr(self._board, name)

    def publish(self, rank, state, run=0, op="", peers=(), nbytes=0, since_ns=0, until_ns=0, line="", facts=None):
        times = since_ns or now_ns(), until_ns
        self.told = Slot(os.getpid(), run, state, op, tuple(peers), nbytes, *times, line or self.line, facts or {})

    def end_wait(self, rank):
        self.told = self.told._replace(until_ns=now_ns())

    def exchange(self, members):
        """The main thread does that."""

    def slot(self, rank):
        return self.told if rank == self._rank and self.told else self._board.slot(rank)

    def waits(self, ranks=None, run=None):
        return type(self._board).waits(self, ranks, run)  # of the slots that are seen from here


class BesideWaiting(Waiting):
    """The waits of what runs beside the rank of `waiting`, in a thread of its own.

    Its naps are short and come soon, because the rank computes on the same core.
    """

    beside = True

    def __init__(self, waiting):
        corner = Corner(waiting.board, waiting.rank)
        super().__init__(corner, waiting.rank, waiting.members, waiting.run, waiting.deadline, crowded=True)
        self.calls, self.stopping = waiting.calls, False
        self.looks = 0  # at what it waits for

    def follow(self, waiting):
        """Take over what may have changed in `waiting`."""
        self.deadline, self.inject = waiting.deadline, waiting.inject

    def stop(self):
        """Every wait ends now."""
        self.stopping = True

    def _wait(self, operation, seconds, nap):
        if self.stopping:
            raise KeyboardInterrupt
        self.looks += 1
        return super()._wait(operation, seconds, nap or NAP)


class Ending:
    """The end of what another thread does, as an operation that can be waited for.

    event: set at the end. progress: a function; what it returns changes when that thread communicates.
    """

    def __init__(self, event, progress):
        self._event, self._progress = event, progress

    @property
    def progress(self):
        return self._progress()

    def wait(self, seconds, nap_s, crowded):
        return self._event.wait(seconds)

    def wait_among(self, seconds, nap_s, crowded, others):
        """`wait`, in which `others`, compiled operations, are advanced as well."""
        end = time.monotonic() + seconds
        while not self._event.wait(min(seconds, nap_s or NAP)):
            for other in others:
                with suppress(ValueError):  # it is raised again where somebody waits for it
                    other.wait(0.0, 0.0, False)
            if time.monotonic() > end:
                return False
        return True
