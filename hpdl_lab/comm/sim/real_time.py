"""How long simulated ranks may run in real time, which is not their virtual time, and what does not count as running.

On a busy machine, such as a classroom's, most of the time that passes is not theirs: they are ready, and others have
the cores, or the machine itself, a virtual one, gets none for a while. Ranks that are threads feel it most, because
each hand-over waits for a core. So a right program would end at a deadline of which it has used a hundredth; here only
its own time counts.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...trace import line_of
from ..errors import CommTimeout
from .ending import waits_of

LOOK = 0.25  # s: between two looks at what has passed, of which a deadline has four at least
AGAIN = 0.5  # s: after the deadline it is raised again and again, because code that catches all may swallow the first


@contextmanager
def real_time_limit(seconds: float, scheduler: Any) -> Iterator[Any]:
    """Raise CommTimeout in whatever code runs once `seconds` of OwnTime have passed, also in a loop without messages.

    Only the main thread can be interrupted so (it is where notebooks and scripts run); elsewhere there is no limit.
    A timer that was set before is restored with what is left of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own, look, passed = OwnTime(scheduler.threads_of_ranks), min(LOOK, seconds / 4), False

    def stop(signum: int, frame: Any) -> None:
        nonlocal passed
        if scheduler.stopping or not passed and own.seconds(look) < seconds:
            return
        if not passed:
            signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
        passed = True
        code = scheduler.running_code()
        frames = frames_up(code.where(frame) if code else frame)
        line = next((line for f in frames if (line := line_of(f, f.f_lineno))), "")
        at = f", in {line}" if line else ""
        text = f"the simulated run did not end within {seconds:g} s of real time{at}"
        error = CommTimeout(text, waits_of(scheduler, line))
        scheduler.late = error
        if code is None:
            raise error
        code.give_up(error)

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, look, look)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 0.001), interval)


class OwnTime:
    """The real time since it was made, without that in which the main thread or one of others waited for a core.

    others: called for the other threads, as numbers of the system. Of all of them one works at a time.
    """

    def __init__(self, others: Callable) -> None:
        self.others, self.main = others, threading.get_native_id()
        self.own = 0.0
        self.looked, self.used = time.monotonic(), time.process_time()
        self.waited = {}  # thread -> s, at the last look; of the first look also those of before: most runs need none

    def seconds(self, look: float = float("inf")) -> float:
        """The seconds until now. look: when they were to be asked for again; where it got later, all was stopped."""
        now, used = time.monotonic(), time.process_time()
        waited = {thread: seconds_waited(thread) for thread in (self.main, *self.others())}
        waits = sum(max(0.0, s - self.waited.get(thread, 0.0)) for thread, s in waited.items())
        passed = now - self.looked
        worked = min(used - self.used, passed)  # two that wait at once for a moment count twice
        self.own += max(min(passed - waits, look), worked)
        self.looked, self.used, self.waited = now, used, waited
        return self.own


def seconds_waited(thread: int) -> float:
    """How long this thread has been ready without a core; 0 where it has ended, or where the system does not count."""
    with suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
        return int(file.read(100).split()[1]) / 1e9
    return 0.0


def frames_up(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back
