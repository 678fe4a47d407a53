"""What the backend "hpdl" has begun, as torch wants it: torch.distributed.Work, with a future."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ..comm.base import Comm


def labelled(name: str) -> AbstractContextManager[Any]:
    """Name what happens within it for torch.profiler, if that records."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


class HpdlWork(dist.Work):
    """One operation of a process group: under way in the background, or over.

    DDP waits for futures in C++, where no interrupt would reach it. So the future of what is begun within backward is
    fulfilled at the end of backward (HpdlGroup, comm/torch/backward.py), by a wait in Python that comes before DDP's.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.under_way: Any = None  # the Work of the communicator
        self._tensors, self._future = tensors, torch.futures.Future()

    def run(self, comm: Comm, function: Callable, *args: Any) -> None:
        """Do it where nobody may ever wait for it but by its future."""
        try:
            function(comm, *args)
        except BaseException as error:
            self._future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        self._future.set_result(self._tensors)

    def settle(self) -> None:
        """Wait for it, and fulfill the future."""
        with labelled("hpdl:wait"):
            self.under_way.wait()
        if not self._future.done():
            self._future.set_result(self._tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Wait, as long as the deadline of the group allows: torch's own `timeout` is not looked at."""
        self.settle()
        return True

    def synchronize(self) -> None:
        self.settle()

    def is_completed(self) -> bool:
        return self.under_way.test()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        try:
            return self.settle()
        except Exception as error:
            return error

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> Any:
        return self._future


class MessageWork(HpdlWork):
    """A message: the waits of its own rank carry it on, so nobody would fulfill a future."""

    def get_future(self) -> None:
        raise NotImplementedError('a message of the backend "hpdl" has no future: use its wait()')
