"""Optimizer states in a file that is mapped into memory, updated in blocks: memory holds one block's.

    parameters, gradients   [ block 0 | block 1 | block 2 | ... ]    memory
                                         ^ |
                                  read m v | | write m v             8 + 8 bytes per parameter and step (AdamW)
                                         | v
    states                  [ m v 0   | m v 1   | m v 2   | ... ]    file, which has no name and so goes away by itself

An update computes each element from that element's states alone, so blocks change no bit of it. That holds for SGD,
Adam, AdamW and all others of torch that use no norm of a parameter.
Ref: Ren et al. 2021 (ZeRO-Offload), arXiv:2101.06840; Rajbhandari et al. 2021 (ZeRO-Infinity), arXiv:2104.07857.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..units import require_int
from .optimizer_state import OptimizerOf

if TYPE_CHECKING:
    from .checkpoint import StateDict

BLOCK = 1 << 20  # elements


class Bandwidth(NamedTuple):
    """Bytes per second between memory and the file system."""

    read: float
    write: float


def seconds_of_step(state_nbytes: int, bandwidth: Bandwidth) -> float:
    """Predict how long the states of a step take to come and go, without the update itself: each is read and written.

    A step that computes for longer can hide it: 7e9 parameters of AdamW are 56 GB, 22 s at 5 GB/s in each direction.
    """
    return state_nbytes / bandwidth.read + state_nbytes / bandwidth.write


class _Mapped:
    """A file of `nbytes` without a name, mapped into memory; it goes away with this object, or with the process."""

    def __init__(self, nbytes: int, directory: str | None) -> None:
        self.file = tempfile.TemporaryFile(dir=directory)
        self.file.truncate(max(1, nbytes))
        self.map = mmap.mmap(self.file.fileno(), 0)

    def tensor(self, offset: int, n: int, dtype: torch.dtype) -> Tensor:
        """Return the n numbers at these bytes."""
        return torch.frombuffer(self.map, dtype=dtype, count=n, offset=offset)

    def release(self, begin: int, end: int) -> None:
        """Write these bytes, whole pages, to storage, and give their memory back."""
        self.map.flush(begin, end - begin)
        self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        os.posix_fadvise(self.file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)


def measure_bandwidth(directory: str | None = None, blocks: int = 8) -> Bandwidth:
    """Read and write `blocks` of AdamW's states of BLOCK elements, one after the other as `Offloaded` does.

    Past the cache of the operating system, if it can be avoided.
    """
    n, seconds = 2 * BLOCK, {"read": 0.0, "write": 0.0}
    file, values, clock = _Mapped(4 * n * blocks, directory), torch.rand(n), time.perf_counter
    for first in (True, False):  # what the file does not hold yet cannot be read from storage
        for begin in range(0, 4 * n * blocks, 4 * n):
            states, start = file.tensor(begin, n, torch.float32), clock()
            states.sum()
            middle = clock()
            states.copy_(values)
            file.release(begin, begin + 4 * n)
            if not first:
                seconds["read"] += middle - start
                seconds["write"] += clock() - middle
    return Bandwidth(*(4 * n * blocks / spent for spent in seconds.values()))


class Offloaded:
    """An elementwise torch optimizer, whose states live in a file: Offloaded(params, torch.optim.AdamW).

    params:    parameters, on the CPU; make: f(parameters) -> torch optimizer, called once for each block.
    directory: of the file, on the storage that is meant; by default for temporary files.
    block:     elements that are updated at once.
    state_nbytes: bytes of states in the file, read and written by every step.
    Raises:    ValueError for a parameter that is not contiguous, or not on the CPU.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        make: OptimizerOf = torch.optim.AdamW,
        directory: str | None = None,
        block: int = BLOCK,
    ) -> None:
        require_int("block", block, 1)
        self.params = [p for p in params if p.requires_grad]
        for param in self.params:
            if not (param.is_cpu and param.is_contiguous()):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} on {param.device} is not contiguous memory of the CPU"
                )
        self.parts = [(p, slice(i, i + block)) for p in self.params for i in range(0, p.numel(), block)]
        self.blocks = [nn.Parameter(p.data.view(-1)[part]) for p, part in self.parts]
        self.optimizers = [make([mine]) for mine in self.blocks]
        self.names = _states_of(make)
        ends = [0, *accumulate(len(self.names) * _in_pages(mine.nbytes) for mine in self.blocks)]
        self.spans = list(pairwise(ends))  # bytes of each block in the file
        self.state_nbytes = len(self.names) * sum(mine.nbytes for mine in self.blocks)
        self.file = _Mapped(ends[-1], directory)

    @property
    def param_groups(self) -> list[StateDict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def step(self) -> None:
        """Update block by block: the states of a block come from the file, and go back to it."""
        for i, (param, part) in enumerate(self.parts):
            if param.grad is not None:
                self.blocks[i].data, self.blocks[i].grad = param.data.view(-1)[part], param.grad.reshape(-1)[part]
                self.optimizers[i].step()
                self.blocks[i].grad = None
                self._put_away(i)

    def _put_away(self, i: int) -> None:
        """Write the states of block i to storage, and give their memory back."""
        mine, (begin, end) = self.blocks[i], self.spans[i]
        state = self.optimizers[i].state[mine]
        for k, name in enumerate(self.names):
            kept = self.file.tensor(begin + k * _in_pages(mine.nbytes), mine.numel(), mine.dtype)
            if state[name].data_ptr() != kept.data_ptr():
                state[name] = kept.copy_(state[name])
        if end > begin:
            self.file.release(begin, end)

    def state_dict(self) -> StateDict:
        return {"blocks": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: StateDict) -> None:
        """Take the states of another run, with the same parameters and blocks, into the file."""
        for i, (optimizer, block) in enumerate(zip(self.optimizers, state["blocks"], strict=True)):
            optimizer.load_state_dict(block)
            if optimizer.state:
                self._put_away(i)


def measure_steps(n: int = 1 << 22, directory: str | None = None, steps: int = 3) -> tuple[float, float]:
    """Return the median seconds of a step of AdamW on n parameters: with its states in memory, and in a file."""
    medians = []
    for make in (torch.optim.AdamW, partial(Offloaded, directory=directory)):
        param, seconds = nn.Parameter(torch.zeros(n)), []
        optimizer, param.grad = make([param]), torch.ones(n)
        for _ in range(steps + 1):  # in the first one states are made
            begin = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        medians.append(statistics.median(seconds[1:]))
    return medians[0], medians[1]


def _states_of(make: OptimizerOf) -> list[str]:
    """Return the names of the states that an optimizer keeps for every element, by a step of one element."""
    one = nn.Parameter(torch.zeros(1))
    optimizer, one.grad = make([one]), torch.zeros(1)
    optimizer.step()
    return [name for name, value in optimizer.state[one].items() if isinstance(value, Tensor) and value.shape == (1,)]


def _in_pages(nbytes: int) -> int:
    """Round bytes up to whole pages, which are what can be written and given back."""
    return -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
