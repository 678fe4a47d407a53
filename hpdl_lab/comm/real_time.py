"""How long simulated ranks may run in real time, which is not their virtual time, and what does not count as running.

On a busy machine, such as a classroom's, most of the time that passes is not theirs: they are ready, and others have
the cores. Ranks that are threads feel it most, because each hand-over waits for a core. So a right program would end at
a deadline of which it has used a hundredth; here only its own time counts.
"""

import signal
import threading
import time
from contextlib import contextmanager, suppress

from ..trace import line_of
from .ending import waits_of
from .errors import CommTimeout

SHORTEST = 0.05  # s: between two looks at what is left
AGAIN = 0.5  # s: after the deadline it is raised again and again, because code that catches all may swallow the first


@contextmanager
def real_time_limit(seconds, scheduler):
    """Raise CommTimeout in whatever code runs once `seconds` of OwnTime have passed, also in a loop without messages.

    Only the main thread can be interrupted so (it is where notebooks and scripts run); elsewhere there is no limit.
    A timer that was set before is restored with what is left of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own, passed = OwnTime(scheduler.threads_of_ranks), False

    def stop(signum, frame):
        nonlocal passed
        if scheduler.stopping:
            return
        left = 0.0 if passed else seconds - own.seconds()
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, max(left, SHORTEST), AGAIN)
            return
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
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
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

    def __init__(self, others):
        self.others, self.main = others, threading.get_native_id()
        self.began, self.used_before = time.monotonic(), time.process_time()
        self.waited_before = seconds_waited(self.main)

    def seconds(self):
        passed, used = time.monotonic() - self.began, time.process_time() - self.used_before
        waited = seconds_waited(self.main) - self.waited_before + sum(map(seconds_waited, self.others()))
        return max(passed - waited, min(used, passed))  # two that wait at once for a moment count twice


def seconds_waited(thread):
    """How long this thread has been ready without a core; 0 where it has ended, or where the system does not count."""
    with suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def frames_up(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
