"""Waiting in Python as csrc/progress.cpp waits: look, give the core away, look again, and never block."""

import os
import time
from contextlib import suppress

IDLE_BEFORE_NAP = 500e-6  # s


class Polled:
    """Something under way. A subclass has `advance()`: do what can be done now, true when all is done."""

    progress = 0  # grows whenever a part has been done

    def wait(self, seconds, nap_s, crowded):
        """Advance for `seconds` at most; true when done. nap_s: 0 spins; crowded: spinning gives the core away."""
        return self.wait_among(seconds, nap_s, crowded, ())

    def wait_among(self, seconds, nap_s, crowded, others):
        """`wait`, in which `others`, compiled operations, are advanced as well."""
        if self.advance():
            return True
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < seconds:
            if nap_s and waited > IDLE_BEFORE_NAP:
                time.sleep(nap_s)
            elif crowded:
                os.sched_yield()
            for other in others:
                with suppress(ValueError):  # it is raised again where somebody waits for it
                    other.wait(0.0, 0.0, False)
            if self.advance():
                return True
        return False
