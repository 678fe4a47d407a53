"""Something under way, and how a rank waits for it: what csrc/progress.h is for compiled operations."""

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar, cast

IDLE_BEFORE_NAP = 500e-6  # s
NAP = 50e-6  # s: between two looks of compiled code
LOOK = 1e-3  # s: between two looks at what a thread has ended with an error that is not raised yet

T = TypeVar("T")


class Waitable(Protocol):
    """Something under way, of Python (Operation) or compiled (_core.Operation)."""

    @property
    def progress(self) -> int: ...

    def wait(self, seconds: float, nap_s: float, oversubscribed: bool) -> bool: ...

    def wait_among(self, seconds: float, nap_s: float, oversubscribed: bool, others: Any) -> bool: ...

    def calls(self) -> list[tuple[str, int, int, int]]: ...


class PolledOperation(ABC):
    """An operation that is advanced by looks: it never blocks where no interrupt reaches the rank."""

    @property
    def progress(self) -> int:
        """Return a number that grows whenever a part has been done."""
        return 0

    def calls(self) -> list[tuple[str, int, int, int]]:
        """Return (op, count, index of the dtype, root) of every rank if they have called different things; else []."""
        return []

    @abstractmethod
    def advance(self) -> bool:
        """Do what can be done now; returns whether all is done. Raises what went wrong."""

    def rest(self, waited: float, left: float, nap_s: float, oversubscribed: bool) -> None:
        """Between two looks: nap when it lasts, or give the core to others. waited, left: s, so far and at most."""
        if nap_s and waited > IDLE_BEFORE_NAP:
            time.sleep(nap_s)
        elif oversubscribed:
            os.sched_yield()

    def wait(self, seconds: float, nap_s: float, oversubscribed: bool) -> bool:
        """Advance for `seconds` at most; true when done. nap_s: 0 spins."""
        return self.wait_among(seconds, nap_s, oversubscribed, ())

    def wait_among(self, seconds: float, nap_s: float, oversubscribed: bool, others: Iterable[Waitable]) -> bool:
        """`wait`, in which `others`, compiled operations, are advanced as well."""
        if self.advance():
            return True
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < seconds:
            self.rest(waited, seconds - waited, nap_s, oversubscribed)
            for other in others:
                with suppress(ValueError):  # it is raised again where somebody waits for it
                    other.wait(0.0, 0.0, False)
            if self.advance():
                return True
        return False


class OfThread(PolledOperation):
    """Work of a thread of this rank, which sets `ended` at its end."""

    error: BaseException | None = None

    def __init__(self) -> None:
        self.ended = threading.Event()

    def advance(self) -> bool:
        if self.ended.is_set() and self.error is not None:
            raise self.error
        return self.ended.is_set()

    def wait(self, seconds: float, nap_s: float, oversubscribed: bool) -> bool:
        if self.ended.wait(seconds) and not self.advance():
            time.sleep(seconds)
        return self.advance()

    def rest(self, waited: float, left: float, nap_s: float, oversubscribed: bool) -> None:
        if self.ended.wait(min(left, nap_s or NAP)) and not self.advance():
            time.sleep(min(left, LOOK))


class InThread(OfThread, Generic[T]):
    """`function()`, a call that can only block, in a thread of its own, which stays where it hangs."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._result: T | None = None
        self._function = function
        threading.Thread(target=self._run, daemon=True, name="hpdl-blocking").start()

    def wait_among(self, seconds: float, nap_s: float, oversubscribed: bool, others: Iterable[Waitable]) -> bool:
        """`wait`: MPI looks after `others` while it is in the call of the thread, and may not be for two threads."""
        return self.wait(seconds, nap_s, oversubscribed)

    @property
    def result(self) -> T:
        """The return value of the function, after the end."""
        return cast(T, self._result)

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self.error = error
        self.ended.set()
