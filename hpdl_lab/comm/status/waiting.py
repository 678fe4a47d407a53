"""The waits of a rank for others, each ended by an interrupt, by the deadline or by a peer's death."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from ...trace import caller_line, now_ns
from ..calls import Calls, Facts
from ..errors import CommError, CommTimeout, RankFailed, name_ranks
from .operation import Waitable
from .table import Slot, Status

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from ..inject import Injection
    from .report import Wait

Peers: TypeAlias = tuple[int, ...] | Callable[[], tuple[int, ...]]  # ranks that a rank waits for
FactsOf: TypeAlias = Callable[[], Facts]

SPIN = 0.001  # s: the first look at an operation spins, since most answers come at once
SLICE = 0.02  # s: afterwards, the longest time without a look at signals
NAP, LONG_NAP = 50e-6, 1e-3  # s: between two looks of the compiled code; the long one after PATIENCE
LONG, RARELY = 1.0, (0.05, 5e-3)  # s: after so long, SLICE and the nap are these: 1 % of a core instead of 4 %
OVERSUBSCRIBED = 20  # if ranks share cores, a nap is 1/20 of the wait so far: looking often costs others the core
PATIENCE = 0.2  # s: then also look for peers that have died
GRACE = 1.0  # s: for what a peer sent just before it finished or failed
START = 30.0  # s: the longest that ranks wait for each other when MPI starts
ABSENT = 0.2  # s: who has not looked for so long got no core, or was stopped, and those it waits for perhaps too


class _StallDetector:
    """The time for which nothing has moved, as far as this rank was there to see it.

    Each look is judged by the time at which it began: what had come by then is found before anybody gives up.
    """

    def __init__(self, now: int) -> None:
        self._progress: int | None = None
        self._moved, self._looked = now, now

    def seconds(self, progress: int | None, now: int) -> float:
        """Return them after a look that began at `now` (ns). progress: changes if something moves; None if it does."""
        if now - self._looked > ABSENT * 1e9:
            self._moved += now - self._looked
        if progress is None or progress != self._progress:
            self._progress, self._moved = progress, now
        self._looked = now
        return (now - self._moved) / 1e9


class Waiting:
    """The waits of one rank in one run.

    rank: of MPI_COMM_WORLD, as all ranks here. members: of the run, in the order in which reports number them.
    deadline: the longest that one wait may last without progress, in seconds.
    calls: what this rank has called in this run.
    """

    in_background = False  # are these the waits of what runs in the background of the rank?

    def __init__(
        self, status: Status, rank: int, members: tuple[int, ...], run: int, deadline: float, oversubscribed: bool
    ) -> None:
        self.status, self.rank, self.members = status, rank, members
        self.run, self.deadline, self.oversubscribed = run, deadline, oversubscribed
        self.calls = Calls()
        self.inject: Injection | None = None
        # id of a work: its message, of receives that have been posted and have not ended
        self.receives: dict[int, Waitable] = {}
        # the same of sends, which MPI's own calls advance: a wait for another thread makes none
        self.sends: dict[int, Waitable] = {}

    def finish(
        self,
        operation: Waitable,
        op: str,
        peers: Peers,
        nbytes: int = 0,
        line: str = "",
        stop: Callable[[], object] | None = None,
        facts: FactsOf = dict,
    ) -> None:
        """Wait until `operation` is done.

        Args:    op, nbytes, line: for the report. peers: the ranks that it waits for, or a function that says so.
                 stop: called between two looks; it may raise. facts: a function that tells more fields of errors.Wait.
        Raises:  CommTimeout, RankFailed with the waits of all ranks; KeyboardInterrupt; ValueError: ranks disagree.
        """
        try:
            done = self._wait(operation, SPIN, 0.0)
        except RuntimeError as error:
            self.explain(error, op, peers)
        if not done:
            self.go_on(operation, op, peers, nbytes, line, stop, facts)

    def _wait(self, operation: Waitable, seconds: float, nap: float) -> bool:
        """Advance `operation`, and the pending receives: large messages wait until their receiver asks for them."""
        return self._wait_among(operation, seconds, nap, self.receives)

    def _wait_among(self, operation: Waitable, seconds: float, nap: float, messages: dict[int, Waitable]) -> bool:
        others = [message for message in messages.values() if message is not operation]
        if not others:
            return operation.wait(seconds, nap, self.oversubscribed)
        return operation.wait_among(seconds, nap, self.oversubscribed, others)

    def go_on(
        self,
        operation: Waitable,
        op: str,
        peers: Peers,
        nbytes: int = 0,
        line: str = "",
        stop: Callable[[], object] | None = None,
        facts: FactsOf = dict,
    ) -> None:
        """`finish`, for an operation that has not ended by itself."""
        line, since = line or caller_line(), now_ns()
        try:
            self._look(operation, op, peers, nbytes, line, since, stop, facts)
        except ValueError:
            self.status.publish(self.rank, "running", self.run)
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.waits = tuple(self.waits())  # type: ignore[attr-defined]
            self.status.end_wait(self.rank)  # what it waited for stays to be read, also by ranks that give up later
            raise
        self.status.publish(self.rank, "running", self.run)

    def watch(self, operation: Waitable, what: str, described: Callable[[], Slot | None], line: str) -> None:
        """Wait for `operation`, which another thread of this rank does, and whose waits have deadlines of their own.

        Args:    what: its name. described: a function that gives the Slot of the other thread, or None: others
                 see it meanwhile. line: where it began, for a thread that computes.
        Raises:  CommTimeout if it neither ends nor communicates for as long as a wait may last; KeyboardInterrupt.
        """
        messages = self.receives | self.sends
        if self._wait_among(operation, SPIN, 0.0, messages):
            return
        computes = Slot(0, self.run, "running", "", (), 0, now_ns(), 0, line, {})
        shown, stall, next_exchange = None, _StallDetector(now_ns()), now_ns() + PATIENCE * 1e9
        try:
            while True:
                now = now_ns()
                slot = described() or computes
                slot = slot if slot.state == "waiting" and not slot.until_ns else computes
                if slot != shown:
                    shown = slot
                    self.status.publish(self.rank, slot.state, self.run, *slot[3:])
                if now >= next_exchange:
                    next_exchange = now + PATIENCE * 1e9
                    self.status.exchange(self.members)
                if self._wait_among(operation, SLICE, LONG_NAP, messages):
                    break
                if stall.seconds(operation.progress if slot is computes else None, now) > self.deadline:
                    ends_not = f"which has neither ended nor communicated for {self.deadline:g} s"
                    me = self._names([self.rank])
                    raise CommTimeout(f"{me} waits for {what} in the background, {ends_not}", self.waits())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                error.waits = tuple(self.waits())  # type: ignore[attr-defined]
            self.status.end_wait(self.rank)
            raise
        last = described()
        if last is None or last.state != "waiting":
            self.status.publish(self.rank, "running", self.run)
        elif last != shown:  # what it gave up waiting for stays to be read
            self.status.publish(self.rank, last.state, self.run, *last[3:])

    def missing(self, ranks: tuple[int, ...], op: str, place: FactsOf = dict) -> Callable[[], tuple[int, ...]]:
        """Return a function that says which of `ranks`, as the status table shows, have not come to `op`.

        place: a function that tells facts that a rank which has come shares, such as the communicator.
        """

        def look() -> tuple[int, ...]:
            info = {name: fact for name, fact in place().items() if fact != ""}  # as published
            here = ("waiting", op, self.run)
            slots = {r: self.status.slot(r) for r in ranks if r != self.rank}
            came = {r for r, s in slots.items() if (s.state, s.op, s.run) == here and info.items() <= s.facts.items()}
            return tuple(r for r in slots if r not in came)

        return look

    def _look(
        self,
        operation: Waitable,
        op: str,
        peers: Peers,
        nbytes: int,
        line: str,
        since: int,
        stop: Callable[[], object] | None,
        facts: FactsOf,
    ) -> None:
        whom: tuple[int, ...] = ()
        shown, stall, next_search = False, _StallDetector(since), since + PATIENCE * 1e9
        nap = NAP
        while True:
            now = now_ns()
            now_whom = peers() if callable(peers) else peers
            if now_whom != whom or not shown:
                whom, shown = now_whom, True
                self.status.publish(self.rank, "waiting", self.run, op, whom, nbytes, since, 0, line, facts())
            search = now >= next_search
            if search:
                nap, next_search = LONG_NAP, now + PATIENCE * 1e9
                self.status.publish(self.rank, "waiting", self.run, op, whom, nbytes, since, 0, line, facts())
                self.status.exchange(self.members)
            if stop is not None:
                stop()
            try:
                if self._wait(operation, *self._pace((now - since) / 1e9, nap)):
                    return
            except RuntimeError as error:
                self.explain(error, op, whom)
            still = stall.seconds(operation.progress, now)
            if search:
                self._search(operation, op, whom, still, now)
            if still > self.deadline:
                raise CommTimeout(f"no answer within {self.deadline:g} s: {self._me(op, whom)}", self.waits())

    def _pace(self, waited: float, nap: float) -> tuple[float, float]:
        """Return (s until the next look at signals, s of a nap between two looks at the operation) after `waited` s."""
        if waited > LONG:
            return RARELY
        if not self.oversubscribed:
            return SLICE, nap
        return min(SLICE, max(2 * SPIN, waited)), min(LONG_NAP, max(nap, waited / OVERSUBSCRIBED))

    def explain(self, error: BaseException, op: str, peers: Peers) -> NoReturn:
        """Raise RankFailed if a rank has died, which MPI may notice before we do and say in words of its own.

        The operation is not asked again: MPI has forgotten the request that failed, and says of it that it is done.
        """
        give_up = time.monotonic() + GRACE
        while time.monotonic() < give_up:
            time.sleep(SLICE)
            self._require_alive(op, peers() if callable(peers) else peers, error)
        raise error

    def require_reachable(self, to: int) -> None:
        """Raise RankFailed if a message to rank `to` of the run could not even be posted."""
        if self.status.is_unreachable(self.members[to]):
            self._require_alive("send", (self.members[to],))

    def _require_alive(self, op: str, whom: Sequence[int], error: BaseException | None = None) -> None:
        if died := [r for r in self.members if self.status.died(r)]:
            raise RankFailed(f"{self._names(died)} died: {self._me(op, whom)}", self.waits()) from error

    def _search(self, operation: Waitable, op: str, whom: tuple[int, ...], still: float, now: int) -> None:
        """Raise RankFailed or CommTimeout if one of the ranks waited for will never answer."""
        if any(self.status.died(r) for r in self.members):
            try:
                if self._wait(operation, 0.05, NAP):
                    return
            except RuntimeError as error:
                self.explain(error, op, whom)
            self._require_alive(op, whom)
        gone = [r for r in whom if op != "start" and self._left(r, now)]
        if gone and still > GRACE:
            failed = any(self.status.slot(r)[1:3] == (self.run, "failed") for r in gone)
            why = f"{self._names(gone)} {'failed' if failed else 'left the run'} and will not answer"
            raise (RankFailed if failed else CommTimeout)(f"{why}: {self._me(op, whom)}", self.waits())

    def _left(self, rank: int, now: int) -> bool:
        """Return True if `rank` has left this run, long enough ago for everything that it sent to have arrived."""
        slot = self.status.slot(rank)
        if slot.state in ("absent", "silent"):  # on another host, without news
            return False
        return (slot.run != self.run or slot.state in ("failed", "finished")) and now - slot.since_ns > GRACE * 1e9

    def end(self, error: BaseException | None, line: str) -> None:
        """Publish how this rank has left the run; but what it waited for when it gave up stays to be read."""
        if self.status.slot(self.rank).state == "waiting":
            return
        facts = self.calls.facts()
        op, last = facts.pop("op", ""), facts.pop("line", "")
        if error is not None:
            facts |= {"error": type(error).__name__, "message": str(error).partition("\n")[0]}
        state = "finished" if error is None else "failed"
        self.status.publish(self.rank, state, self.run, op, line=last if error is None else line, facts=facts)
        self.status.leave(self.members)

    def waits(self) -> list[Wait]:
        """Return what every rank of the run is doing."""
        return self.status.waits(self.members, self.run)

    def _me(self, op: str, whom: Sequence[int]) -> str:
        word = {"send": "to", "recv": "from"}.get(op, "with")
        return f"{self._names([self.rank])} waits in {op}" + (f" {word} {self._names(whom)}" if whom else "")

    def _names(self, ranks: Sequence[int]) -> str:
        return name_ranks(self.members.index(r) for r in ranks)


def finish_blindly(operation: Waitable, call: str) -> None:
    """Wait for `operation` while there is no status table that could say who is missing."""
    end = time.monotonic() + START
    while not operation.wait(SLICE, NAP, True):
        if time.monotonic() > end:
            raise CommError(f"{call}: the ranks have not met within {START:g} s")


class DeferredInterrupt:
    """Within it, Ctrl-C in the main thread is only noted, in `came`."""

    def __enter__(self) -> DeferredInterrupt:
        self.came, self.handler = False, None
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is not None:  # None: not Python's to replace, nor to restore
            self.handler = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGINT, self.handler)
