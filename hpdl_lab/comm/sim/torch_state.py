"""State that torch keeps per thread, kept per simulated rank. torch is looked at only if it is already loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import ModuleType

    import torch as torch_types  # "torch" is what may be loaded

DEVICES = ("cpu", "cuda")
MOST_WORKERS = 256  # OpenMP ends the process if the machine has no more threads
OUTSIDE_BACKWARD = -1  # as torch numbers the graphs through which autograd goes


def _loaded_torch() -> ModuleType | None:
    """Return torch if it is loaded; None if it is not, or not completely."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "is_grad_enabled") else None


@contextmanager
def one_thread(torch: ModuleType) -> Generator[None]:
    """Limit torch to one thread inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def bounded_workers(threads: int) -> Generator[None]:
    """Give `threads` new threads at most MOST_WORKERS workers of torch in all inside: each has a pool of its own.

    With fewer workers the last bits of long sums may differ.
    """
    torch = _loaded_torch()
    if torch is None or threads * torch.get_num_threads() <= MOST_WORKERS:
        yield
        return
    with one_thread(torch):
        yield


class TorchState(NamedTuple):
    """Grad mode; autocast: per device whether it is on and its dtype, how deep it is nested, whether casts are kept.

    inference: True in torch.inference_mode. leave: the context manager that was entered to leave that mode, or
    to enter it, when the rank paused; its exit puts the thread back into it.
    """

    grad_mode: bool
    autocast: tuple[tuple[bool, torch_types.dtype], ...]
    nesting: int
    cache: bool
    inference: bool
    leave: AbstractContextManager[object] | None = None

    @classmethod
    def read(cls, torch: ModuleType) -> TorchState:
        """Return the state of this thread."""
        autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES)
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        cache, inference = torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled()
        return cls(torch.is_grad_enabled(), autocast, nesting, cache, inference)

    def apply(self, torch: ModuleType) -> AbstractContextManager[object] | None:
        """Give this thread this state. Returns the context manager that was entered for it, if any: see `leave`."""
        entered = None
        if self.leave is not None:
            self.leave.__exit__(None, None, None)
        before = TorchState.read(torch)
        if before.inference != self.inference:
            entered = torch._C._InferenceMode(self.inference)
            entered.__enter__()  # this changes the grad mode as well
            before = TorchState.read(torch)
        if before.grad_mode != self.grad_mode:
            torch.set_grad_enabled(self.grad_mode)
        if before[1:4] != self[1:4]:
            self._apply_autocast(torch, before)
        return entered

    def _apply_autocast(self, torch: ModuleType, before: TorchState) -> None:
        torch.set_autocast_cache_enabled(self.cache)
        for device, (enabled, dtype) in zip(DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        for _ in range(before.nesting, self.nesting):
            torch.autocast_increment_nesting()
        for _ in range(self.nesting, before.nesting):
            torch.autocast_decrement_nesting()


class Outside:
    """The state of torch around a run, to which it returns whenever a rank pauses.

    torch, state, autocast: from the first look that finds torch; until then torch is None and the others are not there.
    graph_task(): the number of the graph through which autograd goes backward in this thread, or OUTSIDE_BACKWARD.
    """

    state: TorchState
    autocast: bool

    def __init__(self) -> None:
        self.torch: ModuleType | None = None
        self.graph_task: Callable[[], int] = self._first_look

    def look(self) -> ModuleType | None:
        """Return torch as soon as it is loaded; None until then."""
        torch = _loaded_torch()
        if torch is not None:
            self.state, self.autocast = TorchState.read(torch), torch._C._is_any_autocast_enabled()
            self.torch, self.graph_task = torch, torch._C._current_graph_task_id
        return torch

    @contextmanager
    def begun(self) -> Generator[None]:
        """Keep this thread, which is new, in this state inside."""
        torch = self.torch or self.look()
        entered = self.state.apply(torch) if torch else None
        try:
            yield
        finally:
            if entered is not None:
                entered.__exit__(None, None, None)

    def left(self, torch: ModuleType) -> bool:
        """Return True if this thread may be in another state."""
        return (
            torch.is_grad_enabled() is not self.state.grad_mode
            or self.autocast
            or torch._C._is_any_autocast_enabled()
            or torch.is_inference_mode_enabled() is not self.state.inference
        )

    def restore(self, torch: ModuleType) -> TorchState | None:
        """Give this thread this state when a rank pauses. Returns the state of the rank if it differs, else None."""
        state = TorchState.read(torch)
        if state == self.state:
            return None
        return state._replace(leave=self.state.apply(torch))

    def _first_look(self) -> int:
        return OUTSIDE_BACKWARD if self.look() is None else self.graph_task()
