"""Ctrl-C at a moment when obeying it would leave other ranks behind."""

from __future__ import annotations

import signal
import threading
from typing import Any


class DeferredInterrupt:
    """Within it, Ctrl-C in the main thread is only noted, in `came`."""

    def __enter__(self) -> DeferredInterrupt:
        self.came, self.handler = False, None
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is not None:  # None: not Python's to replace, nor to restore
            self.handler = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: Any, frame: Any) -> None:
        self.came = True

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.handler is not None:
            signal.signal(signal.SIGINT, self.handler)
