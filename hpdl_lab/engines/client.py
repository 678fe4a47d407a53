r"""The notebook's connections to the engines, and the lock that lets one run at a time use them.

The messages (messages.py) between a notebook's kernel and an engine:

kernel -> engine   TASK {run, ranks, deadline, inject, sys_path, task, own, master}   INTERRUPT run   STATE question
                   PX address   DEAD rank
engine -> kernel   HELLO {rank, pid, host, ..., now_ns}    ROW row    TEXT (stream, text)    DONE outcome
                   STATE {slot, px, now_ns, asked}

Times of engines on other machines, as if they had been taken by the notebook's clock: what a timeline draws.

    notebook  before ---------------------------- after
                    \                            /
    engine           ------------- its time -----          the times of the two ways are about equal

Each machine counts from its own start. If an answer's time lies between question and answer by the notebook's clock
as well, the clocks are the same, or differ by less than can be measured: then nothing is moved.
"""

import fcntl
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from ..system import until
from . import session_dir
from .errors import EngineError, EngineMute
from .messages import Info, Message, MessageReader, TaskOutcome, pieces

TASK, INTERRUPT, HELLO, ROW, TEXT, DONE, STATE, PX, DEAD = range(9)

STALE = 10.0  # s: clocks of good machines drift apart by less than 0.1 ms meanwhile
QUESTIONS = 5


class Offset:
    """A number of ns to add to the times of one engine."""

    def __init__(self) -> None:
        self.ns = 0
        self.taken_at: float | None = None  # by time.monotonic(); None if the engine has the same clock

    @property
    def stale(self) -> bool:
        """True when it is time to ask again."""
        return self.taken_at is not None and time.monotonic() - self.taken_at > STALE

    def take(self, answers: list[tuple[int, int, int]]) -> None:
        """Estimate the offset from (sent, remote, received) samples in ns; the shortest is the most accurate."""
        sent, remote, received = min(answers, key=lambda answer: answer[2] - answer[0])
        if sent <= remote <= received:
            self.ns, self.taken_at = 0, None
        else:
            self.ns, self.taken_at = (sent + received) // 2 - remote, time.monotonic()

    def moved(self, outcome: TaskOutcome) -> TaskOutcome:
        """Return the outcome of a task (task.py), with the notebook's times."""
        if not self.ns:
            return outcome
        events = [(*e[:3], e[3] + self.ns, e[4] + self.ns, *e[5:]) for e in outcome["events"]]  # as trace.Event
        return {**outcome, "t0_ns": outcome["t0_ns"] + self.ns, "t1_ns": outcome["t1_ns"] + self.ns, "events": events}


HELLO_SECONDS = 10.0  # an engine that imports may be slow to answer
CLOCK_SECONDS = 1.0  # for an answer of a few bytes
FIRST_RUN = 1 << 20  # `comm.world()` in a cell of %px numbers its runs from 1


class EngineConnection:
    """A connection to one engine. `info` is how the engine has described itself."""

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self.reader = MessageReader()
        self.clock = Offset()
        self._address = session_dir.engine_socket(path, rank)
        self._made = made(self._address)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(HELLO_SECONDS)
        try:
            before = time.monotonic_ns()
            self.socket.connect(self._address)
            self.info: Info
            ((_, self.info),) = self._first()
            self.clock.take([(before, self.info.pop("now_ns"), time.monotonic_ns())])
            if self.clock.ns:
                self.set_clock()
        except BaseException:
            self.socket.close()
            raise
        self.socket.settimeout(None)

    def _first(self) -> list[Message]:
        while True:
            if (messages := self.reader.read(self.socket)) is None:
                raise ConnectionResetError(f"engine {self.rank} closed the connection")
            if messages:
                return messages

    def set_clock(self) -> None:
        """Ask an engine with another clock for its time. Raises OSError when it is gone, or does not answer."""
        answers: list[tuple[int, int, int]] = []
        for _ in range(QUESTIONS):
            before = time.monotonic_ns()
            self.send(STATE, None)
            ((_, answer),) = self._first()
            answers.append((before, answer["now_ns"], time.monotonic_ns()))
        self.clock.take(answers)

    def refresh_clock(self) -> None:
        """Ask again, before a run, if clocks may have drifted apart; an engine that is silent fails in the run."""
        if self.clock.stale:
            self.socket.settimeout(CLOCK_SECONDS)
            with suppress(OSError):
                self.set_clock()
            self.socket.settimeout(None)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: int, content: object) -> None:
        """Send one message. Raises OSError when the engine is gone."""
        for piece in pieces(kind, content):
            self.socket.sendall(piece)

    def receive(self) -> list[Message] | None:
        """Return the messages that have arrived: [(kind, content)]; None when the engine is gone."""
        try:
            return self.reader.read(self.socket)
        except OSError:
            return None

    def is_closed(self) -> bool:
        """Return True when the engine is gone, or this end was closed."""
        if self.socket.fileno() < 0:
            return True
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def is_replaced(self) -> bool:
        """Return True when the socket is another one than it was, or gone: a notebook has restarted the engines."""
        return made(self._address) != self._made

    def close(self) -> None:
        self.socket.close()


class RunLock:
    """A lock for one run at a time on the engines of a session, in all notebooks; it numbers the runs."""

    def __init__(self, path: str) -> None:
        self._file = os.open(os.path.join(path, "run.lock"), os.O_RDWR | os.O_CREAT, 0o600)

    @contextmanager
    def held(self) -> Generator[int]:
        """Wait for the engines to be free; yield the number of this run, never used before in this session."""
        self._lock()
        try:
            number = int(os.pread(self._file, 20, 0) or FIRST_RUN) + 1
            os.pwrite(self._file, b"%020d" % number, 0)
            yield number
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> None:
        def locked() -> bool:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        if not until(locked, 1.0, every=0.02):
            print("Another notebook uses the engines: waiting for its run to end.", flush=True)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def close(self) -> None:
        os.close(self._file)


def made(path: str) -> tuple[int, int] | None:
    """Return (inode, time) of the file at `path`, by which it differs from earlier ones; None if there is none."""
    with suppress(FileNotFoundError):
        status = os.stat(path)
        return status.st_ino, status.st_mtime_ns
    return None


def connect(path: str, n: int) -> list[EngineConnection]:
    """Connect to the `n` engines of the session at `path`, in rank order.

    Raises: EngineError when one is gone, EngineMute when it does not answer.
    """
    connections: list[EngineConnection] = []
    try:
        for rank in range(n):
            connections.append(EngineConnection(path, rank))
    except OSError as error:
        for connection in connections:
            connection.close()
        who = f"engine {len(connections)} of {n}"
        if isinstance(error, TimeoutError):
            raise EngineMute(
                f"{who} lives and does not answer within {HELLO_SECONDS:g} s, as in compiled code that blocks Python: "
                "wait for its end, or call lab.restart() for new engines"
            ) from None
        raise EngineError(f"{who} does not answer ({error}): call lab.restart()") from None
    return connections
