"""The works of the backend "hpdl" as torch wants them: torch.distributed.Work, with a future."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..comm.base import Comm, Done, Work


def labelled(name: str) -> AbstractContextManager[object]:
    """Name what happens within it for torch.profiler, if that records."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class HpdlWork(dist.Work):
    """An operation of a process group: under way in the background, or over.

    DDP waits for futures in C++, which no interrupt would end. So the future of a work that is begun within
    backward is fulfilled at its end (HpdlGroup, comm/torch/backward.py), by a wait in Python before DDP's.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.under_way: Work = Done()  # of the communicator, once it has begun
        self._tensors = tensors
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()

    def run(self, comm: Comm, function: Callable[..., object], *args: object) -> None:
        """Do it, if its future is the only way to wait for it."""
        try:
            function(comm, *args)
        except BaseException as error:
            failed = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._future.set_exception(failed)  # pyrefly: ignore[bad-argument-type]  # of torch's own annotation
            raise
        self._future.set_result(self._tensors)

    def complete(self) -> None:
        """Wait for it, and fulfill the future."""
        with labelled("hpdl:wait"):
            self.under_way.wait()
        if not self._future.done():
            self._future.set_result(self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, as long as the deadline of the group allows: torch's own `timeout` is not looked at."""
        self.complete()
        return True

    def synchronize(self) -> None:
        self.complete()

    def is_completed(self) -> bool:
        return self.under_way.test()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        try:
            self.complete()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class MessageWork(HpdlWork):
    """A message: the waits of its own rank carry it on, so no thread would fulfill a future."""

    def get_future(self) -> NoReturn:
        raise NotImplementedError('a message of the backend "hpdl" has no future: use its wait()')
