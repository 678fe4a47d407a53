"""A run: send the task to every rank, stream what they say, and bring them all back, whatever happens.

A run ends when every rank has answered. A rank that fails or dies leaves others waiting for it: after `GRACE` they are
interrupted. So they are at once when the attendee interrupts, or when the limit of the run has passed. A rank that
still has not answered `STUCK` seconds later is in compiled code that no interrupt reaches; the cluster replaces the
engines then. If a rank has died they have to be replaced anyway, so that is after `STUCK_AFTER_DEATH` seconds.
"""

import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..comm.base import OnRow, Row
from ..comm.errors import Wait, name_ranks
from ..comm.status.table import Slot
from . import client
from .messages import EngineState, RankTask, TaskOutcome

PATIENCE = 0.3  # seconds that a line waits for the other ranks to say the same


class Collapser:
    """A printer of the lines of `ranks`, in which equal lines are printed once.

    A line is printed when every rank that still runs has one to compare it with, or when it has waited for `PATIENCE`.
    """

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lines: dict[int, deque[tuple[float, str, str]]] = {rank: deque() for rank in ranks}  # (time, stream, line)
        self.running = set(ranks)

    def add(self, rank: int, stream: str, text: str) -> None:
        """Take `text` of `rank`, one or more lines for `stream`, "stdout" or "stderr"."""
        now = self.clock()
        for line in text.rstrip("\n").split("\n"):
            self.lines[rank].append((now, stream, line))

    def finish(self, rank: int) -> None:
        """Note that `rank` will say nothing more."""
        self.running.discard(rank)

    def flush(self, everything: bool = False) -> None:
        """Print what is ready."""
        if not any(self.lines.values()):
            return
        waiting = [len(queue) for rank, queue in self.lines.items() if queue or rank in self.running]
        common, limit = min(waiting), self.clock() - PATIENCE
        ready: dict[int, list[tuple[str, str]]] = {}
        for rank, queue in self.lines.items():
            count = len(queue) if everything else max(common, sum(t <= limit for t, _, _ in queue))
            ready[rank] = [queue.popleft()[1:] for _ in range(min(count, len(queue)))]
        for stream, text in _collapse(ready):
            print(text, file=getattr(sys, stream), flush=True)


def _collapse(said: dict[int, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return what to print for {rank: [(stream, line)]}: [(stream, text)].

    Lines are compared by position. Neighboring lines that are shared by the same ranks stay together.
    """
    blocks: list[dict[tuple[tuple[int, ...], str], list[str]]] = []  # {(ranks, stream): lines} of equal agreement
    for position in range(max(map(len, said.values()))):
        agreeing: dict[tuple[str, str], list[int]] = {}
        for rank, lines in said.items():
            if position < len(lines):
                agreeing.setdefault(lines[position], []).append(rank)
        block = {(tuple(ranks), stream): [line] for (stream, line), ranks in agreeing.items()}
        if blocks and blocks[-1].keys() == block.keys():
            for who, lines in block.items():
                blocks[-1][who] += lines
        else:
            blocks.append(block)
    parts = [(stream, ranks, lines) for block in blocks for (ranks, stream), lines in block.items()]
    return [(stream, _attributed(ranks, lines)) for stream, ranks, lines in parts if any(map(str.strip, lines))]


def _attributed(ranks: Sequence[int], lines: list[str]) -> str:
    """Write "ranks 0-2 say hello", and several lines below each other."""
    who = f"{name_ranks(ranks)} {'says' if len(ranks) == 1 else 'say'}"
    return f"{who} {lines[0]}" if len(lines) == 1 else "\n".join([f"{who}:", *(f"    {line}" for line in lines)])


ANSWER = 1.0  # s: on a busy machine a thread waits for a core; one whose interpreter compiled code holds never answers


class States:
    """The slots (comm/status/table.py) of the ranks of run `number`; rank i of it is engines[i]."""

    def __init__(self, number: int, engines: list[client.EngineConnection]) -> None:
        self.number, self.engines = number, engines
        self.slots: dict[int, Slot] = {}
        self.with_px: set[int] = set()  # ranks that are engines of ipyparallel by now
        self.expected: set[int] = set()  # ranks that have been asked and have not answered
        self.asked_at: float | None = None
        self.question = (number, 0)  # the last one: an answer to an earlier one may come when much has changed

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask `ranks` what they are doing."""
        self.asked_at, self.expected = time.monotonic(), set(ranks)
        self.question = (self.number, self.question[1] + 1)
        for rank in ranks:
            with suppress(OSError):  # it has died: its connection says so next
                self.engines[rank].send(client.STATE, self.question)

    def take(self, rank: int, description: EngineState) -> None:
        """Take the answer of a rank, or its state at its end; "asked" in it is the question that it answers."""
        if description.get("asked", self.question) != self.question:
            return
        self.expected.discard(rank)
        self.slots[rank] = Slot(*description["slot"]).moved(time.monotonic_ns() - description["now_ns"])
        if description["px"]:
            self.with_px.add(rank)

    def complete(self, gone: Iterable[int] = ()) -> bool:
        """Return True when all that were asked have answered, or will not; `gone` will not."""
        return not self.expected - set(gone) or time.monotonic() - (self.asked_at or 0) > ANSWER

    def has_begun(self, rank: int) -> bool:
        """Return False if a rank has said that it is doing something else than this run."""
        return rank not in self.slots or self.slots[rank].run == self.number

    def is_behind_a_cell(self, rank: int) -> bool:
        """Return True if what keeps a rank from this run is a cell of %px, and not only that it gets no core."""
        return rank in self.with_px and not self.has_begun(rank)

    def waits(self, dead: Collection[int] = ()) -> list[Wait]:
        """Return what the ranks are doing, in rank order. dead: ranks that have closed their connection."""
        number = {engine.rank: i for i, engine in enumerate(self.engines)}
        waits: list[Wait] = []
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


GRACE = 1.0  # seconds for the others to fail in their own way, with the better message, once a rank has failed
AGAIN = 0.3  # seconds between two interrupts: a bare `except:` in the attendee's loop may have swallowed the first
BUSY = 2.0  # seconds after which a rank that has not begun is worth a word
SLOW = 1.5  # seconds from the first interrupt to a word about ranks that do not react
STUCK = 5.0  # seconds from the first interrupt to giving them up: a busy machine, or an import, may take some
STUCK_AFTER_DEATH = 2.5  # seconds likewise, if a rank has died


class Run:
    """Run `number` on `engines` (connections: rank i of the run is engines[i])."""

    def __init__(
        self,
        number: int,
        engines: list[client.EngineConnection],
        on_row: OnRow | None,
        limit: float | None = None,
    ) -> None:
        self.number = number
        self.limit = limit  # seconds for all of it
        self.engines = engines
        self.pending = set(range(len(engines)))
        self.states = States(number, engines)
        self.on_row = on_row
        self.outcomes: dict[int, TaskOutcome] = {}  # by rank, in the order in which they came
        self.rows: list[Row] = []
        self.dead: list[int] = []  # ranks whose connection closed
        self.unsent: list[int] = []  # ranks that got no task, because the attendee interrupted before
        # Who waited for whom just before the first interrupt, or when a run that failed had ended.
        self.picture: Sequence[Wait] = ()
        self.stopped = False  # by the attendee
        self.late = False  # the limit has passed, and no rank had failed
        self.breakable = False  # an interrupt may raise here and now
        self.raised: Exception | None = None  # an exception of on_row
        self.seconds = 0.0  # from the start to the first interrupt
        self.announced_busy = self.announced_slow = self.looking = False
        self.started_at = self.repeated_at = 0.0
        self.failed_at: float | None = None
        self.interrupted_at: float | None = None
        self.output = Collapser(self.pending)

    @property
    def stuck(self) -> list[int]:
        """Ranks that answer nothing, not even an interrupt."""
        return sorted(self.pending)

    def execute(self, tasks: list[RankTask]) -> None:
        """Send rank i the task tasks[i] and return when all have answered, or are given up."""
        self.started_at = time.monotonic()
        with selectors.DefaultSelector() as selector, self._sigint_noted():
            for rank, engine in enumerate(self.engines):
                selector.register(engine, selectors.EVENT_READ, rank)
            self._send(tasks, selector)
            self._wait(selector)
        if self.failed_at is not None:
            self.picture = self.picture or self.states.waits(self.dead)
        self.output.flush(everything=True)

    @contextmanager
    def _sigint_noted(self) -> Generator[None]:
        """Turn the attendee's interrupt into a note for the loop: a KeyboardInterrupt could strike amid a message."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: object) -> None:
            self.stopped = True
            if self.breakable:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _send(self, tasks: list[RankTask], selector: selectors.BaseSelector) -> None:
        """Send the tasks. Interrupted meanwhile, the ranks that have no task yet are left out."""
        for rank, task in enumerate(tasks):
            try:
                self.breakable = True
                if self.stopped:
                    raise KeyboardInterrupt
                self.engines[rank].send(client.TASK, task)
            except OSError:
                continue  # it has died: its connection says so next
            except KeyboardInterrupt:  # half a task may be on its way: the engine drops it with the connection
                selector.unregister(self.engines[rank])
                self.engines[rank].close()
                self.unsent.append(rank)
                self.pending.discard(rank)
            finally:
                self.breakable = False

    def _wait(self, selector: selectors.BaseSelector) -> None:
        while self.pending:
            for key, _ in selector.select(timeout=0.01 if self.looking else 0.05):
                rank = key.data
                messages = self.engines[rank].receive()
                if messages is None:
                    selector.unregister(self.engines[rank])
                    self._died(rank)
                    continue
                for kind, content in messages:
                    self._take(rank, kind, content)
            self.output.flush()
            self._announce_busy()
            if self._given_up():
                return

    def _take(self, rank: int, kind: int, content: Any) -> None:
        if kind == client.TEXT:
            self.output.add(rank, *content)
        elif kind == client.ROW:
            self._row(content)
        elif kind == client.STATE:
            self.states.take(rank, content)
        elif kind == client.DONE:
            self.outcomes[rank] = self.engines[rank].clock.moved(content)
            self.states.take(rank, content["state"])
            self.pending.discard(rank)
            self.output.finish(rank)
            if "failure" in content:
                self._failed()

    def _row(self, row: Row) -> None:
        self.rows.append(row)
        if self.on_row is not None and self.raised is None and not self.stopped:
            try:
                self.breakable = True
                self.on_row(row)
            except KeyboardInterrupt:
                pass  # noted
            except Exception as error:  # a plot, say: stop the ranks, then raise it
                self.raised = error
            finally:
                self.breakable = False

    def _died(self, rank: int) -> None:
        self.pending.discard(rank)
        self.output.finish(rank)
        self.dead.append(rank)
        for other in self.pending:  # on another host, a rank does not see it
            with suppress(OSError):
                self.engines[other].send(client.DEAD, self.engines[rank].rank)
        self._failed()

    def _failed(self) -> None:
        if self.failed_at is None:  # no picture yet: the others may be about to wait
            self.failed_at = time.monotonic()

    def _announce_busy(self) -> None:
        """Say that a rank is in a cell of %px, and has not begun: the attendee may wonder why nothing happens."""
        if self.announced_busy or time.monotonic() - self.started_at < BUSY:
            return
        if self.states.asked_at is None:
            self.states.ask(self.pending)
        if not self.states.complete(self.dead):
            return
        self.announced_busy = True
        busy = [rank for rank in self.pending if self.states.is_behind_a_cell(rank)]
        if busy:
            who = f"{name_ranks(busy)} {'is' if len(busy) == 1 else 'are'}"
            print(f"{who} busy with an earlier cell of %px: waiting for its end. The stop button ends it.", flush=True)

    def _given_up(self) -> bool:
        """Interrupt ranks that wait in vain; return True when the others do not answer."""
        now = time.monotonic()
        if self.interrupted_at is None:
            if self.limit is not None and self.failed_at is None and now - self.started_at > self.limit:
                self.late = True
            failed = self.failed_at is not None and now - self.failed_at > GRACE
            if self.stopped or self.raised or self.late or failed:
                self._look_and_interrupt()
            return False
        patience = STUCK_AFTER_DEATH if self.dead else STUCK
        if now - self.interrupted_at > patience:
            return True
        if now - self.interrupted_at > SLOW and not self.announced_slow:
            self.announced_slow = True
            who = f"{name_ranks(self.pending)} {'does' if len(self.pending) == 1 else 'do'}"
            print(f"{who} not react yet: waiting {patience - SLOW:g} s more.", flush=True)
        if now - self.repeated_at > AGAIN:
            self._interrupt()
        return False

    def _look_and_interrupt(self) -> None:
        """Ask what the ranks are doing, and interrupt them when they have said it."""
        if not self.looking:
            self.looking = True
            self.states.ask(self.pending)
        elif self.states.complete(self.dead):
            self.picture = tuple(self.states.waits(self.dead))
            self._interrupt()

    def _interrupt(self) -> None:
        self.repeated_at = time.monotonic()
        self.interrupted_at = self.interrupted_at or self.repeated_at
        self.seconds = self.seconds or self.repeated_at - self.started_at
        for rank in self.pending:
            with suppress(OSError):  # it has died: its connection says so next
                self.engines[rank].send(client.INTERRUPT, self.number)
