"""One run: send the task to every rank, stream what they say, and bring them all back, whatever happens.

A run ends when every rank has answered. A rank that fails, or dies, leaves others waiting for it: after `GRACE` they are
interrupted. So they are at once when the attendee interrupts. A rank that still has not answered `STUCK` seconds later is in
compiled code that no interrupt reaches; the cluster replaces the engines then.
"""

import selectors
import signal
import threading
import time
from contextlib import contextmanager

from . import frames
from .output import Collapser

GRACE = 1.0  # seconds for the others to fail in their own way, with the better message, once a rank has failed
AGAIN = 0.3  # seconds between two interrupts: a bare `except:` in the attendee's loop may have swallowed the first
STUCK = 1.5  # seconds from the first interrupt to giving a rank up


class Run:
    """A run on `engines` (connections, in the order of the run's ranks). `waits()` reads who waits for whom."""

    def __init__(self, number, engines, waits, on_row):
        self.number = number
        self.engines = {engine.rank: engine for engine in engines}
        self.pending = dict(self.engines)
        self.waits = waits
        self.on_row = on_row
        self.outcomes = {}  # rank -> outcome
        self.rows = []
        self.dead = []  # ranks whose connection closed
        self.picture = ()  # who waited for whom when the first rank failed or the attendee interrupted
        self.stopped = False  # by the attendee
        self.breakable = False  # an interrupt may raise here and now
        self.unsent = []  # ranks that got no task, because the attendee interrupted before
        self.raised = None  # an exception of on_row
        self.failed_at = self.interrupted_at = self.repeated_at = None
        self.output = Collapser(self.engines)

    @property
    def stuck(self):
        """Ranks that answer nothing, not even an interrupt."""
        return sorted(self.pending)

    def execute(self, messages):
        """Send each rank its message, {rank: bytes-like content}, and return when all have answered, or are given up."""
        with selectors.DefaultSelector() as selector, self._sigint_noted():
            for engine in self.engines.values():
                selector.register(engine, selectors.EVENT_READ, engine)
            self._send(messages)
            self._wait(selector)
        self.output.flush(everything=True)

    @contextmanager
    def _sigint_noted(self):
        """Turn the attendee's interrupt into a note that the loop reads: a KeyboardInterrupt could strike amid a message."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum, frame):
            self.stopped = True
            if self.breakable:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _send(self, messages):
        """Send the tasks. Interrupted meanwhile, the ranks that have no task yet are left out."""
        for rank, message in messages.items():
            engine = self.engines[rank]
            try:
                self.breakable = True
                if self.stopped:
                    raise KeyboardInterrupt
                engine.send(frames.TASK, message)
            except OSError:
                self._died(engine)
            except KeyboardInterrupt:  # half a task may be on its way: the engine drops it with the connection
                engine.close()
                self.unsent.append(rank)
                self.pending.pop(rank)
            finally:
                self.breakable = False

    def _wait(self, selector):
        for rank in self.unsent:
            selector.unregister(self.engines[rank])
        while self.pending:
            if self.stopped and self.interrupted_at is None:
                self._interrupt()
            for key, _ in selector.select(timeout=0.05):
                engine = key.data
                messages = engine.receive()
                if messages is None:
                    selector.unregister(engine)
                    self._died(engine)
                    continue
                for kind, content in messages:
                    self._take(engine, kind, content)
            self.output.flush()
            if self._given_up():
                return

    def _take(self, engine, kind, content):
        if kind == frames.TEXT:
            self.output.add(engine.rank, *content)
        elif kind == frames.ROW:
            self._row(content)
        elif kind == frames.DONE:
            self.outcomes[engine.rank] = content
            self.pending.pop(engine.rank, None)
            self.output.finish(engine.rank)
            if "failure" in content:
                self._failed()

    def _row(self, row):
        self.rows.append(row)
        if self.on_row is not None and self.raised is None:
            try:
                self.breakable = True
                self.on_row(row)
            except KeyboardInterrupt:
                pass  # noted
            except Exception as error:  # a plot, say: stop the ranks, then raise it
                self.raised = error
                self._interrupt()
            finally:
                self.breakable = False

    def _died(self, engine):
        self.pending.pop(engine.rank, None)
        self.output.finish(engine.rank)
        self.dead.append(engine.rank)
        self._failed()

    def _failed(self):
        if self.failed_at is None:
            self.failed_at = time.monotonic()
            self.picture = self.picture or self.waits()

    def _given_up(self):
        """Interrupt those who wait in vain; True when what is left answers nothing."""
        now = time.monotonic()
        if self.interrupted_at is None:
            if self.failed_at is not None and now - self.failed_at > GRACE:
                self._interrupt()
            return False
        if now - self.interrupted_at > STUCK:
            return True
        if now - self.repeated_at > AGAIN:
            self._interrupt()
        return False

    def _interrupt(self):
        self.picture = self.picture or self.waits()
        self.repeated_at = time.monotonic()
        self.interrupted_at = self.interrupted_at or self.repeated_at
        for engine in list(self.pending.values()):
            try:
                engine.send(frames.INTERRUPT, self.number)
            except OSError:
                pass  # it has died: its connection says so next
