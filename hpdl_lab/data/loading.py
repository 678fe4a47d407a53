"""The input pipeline of one rank: its next examples, the time to read them, and reading ahead.

    ahead = 0   | input 0 | step 0 | input 1 | step 1 | input 2 | step 2      every step waits for its examples
    ahead = 1   | input 0 | step 0 | step 1 | step 2 |                        ... unless they were read during the last
                          | read 1 | read 2 |        next to the rank         step, and the step takes longer than that

Training takes its examples inside a span "input", so that the timeline shows how long each step waited for them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from numbers import Integral, Real
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from ..comm.base import Comm

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor, int]  # x and y of a rank, and the examples over all ranks
Order: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, int, int, int, torch.Tensor]  # the arguments of shard_of


@dataclass(frozen=True)
class Reader:
    """The way of the examples of a step to a rank.

    seconds: s per example that the storage takes: slept on real ranks, virtual time on simulated ones.
    ahead:   steps that are read before they are asked for, by one thread of the rank.
    prepare: f(x, numbers) -> x, decodes or augments: x (b, ...) of this rank, and for each example a random number,
             (b,) int64, which is the same on any number of ranks. See `shifted`.
    """

    seconds: float = 0.0
    ahead: int = 0
    prepare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.seconds, Real) and isinstance(self.ahead, Integral)):
            raise TypeError(f"seconds={self.seconds!r}, ahead={self.ahead!r}: a number and a whole number are needed")
        if not 0 <= self.seconds < math.inf or self.ahead < 0:
            raise ValueError(
                f"an input pipeline of {self.seconds!r} s per example and {self.ahead!r} steps ahead: "
                "both must be at least 0"
            )
        if self.prepare is not None and not callable(self.prepare):
            raise TypeError(f"prepare={self.prepare!r}: a function prepare(x, numbers) is needed")

    def shards(
        self,
        comm: Comm,
        x: torch.Tensor,
        y: torch.Tensor,
        schedule: Iterable[tuple[int, torch.Tensor]],
        seed: int = 0,
    ) -> Generator[Batch]:
        """Yield (x, y, batch) of one step after another: this rank's shard, and the examples over all ranks.

        Args:    x, y: the training set, (n, ...); schedule: (step, indices) of each. The same on every rank.
                 seed: of the random numbers for `prepare`.
        """
        read = self.read_simulated if comm.simulated else self.read_in_thread
        yield from read(comm, ((x, y, comm.rank, comm.size, seed, step, indices) for step, indices in schedule))

    def shard_of(
        self, x: torch.Tensor, y: torch.Tensor, rank: int, size: int, seed: int, step: int, indices: torch.Tensor
    ) -> Batch:
        """Return (x, y, batch) of one step."""
        mine = shard_indices(indices, rank, size)
        x, y = x[mine], y[mine]
        if self.prepare is not None:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            numbers = torch.randint(2**62, (len(indices),), generator=generator)
            x = self.prepare(x, shard_indices(numbers, rank, size))
        return x, y, len(indices)

    def read_in_thread(self, comm: Comm, orders: Iterable[Order]) -> Generator[Batch]:
        """Yield on real ranks: read in the rank's own thread, or, if anything is read ahead, in a second thread."""

        def read(order: Order) -> Batch:
            x, y, batch = self.shard_of(*order)
            if self.seconds:
                time.sleep(self.seconds * len(x))
            return x, y, batch

        if not self.ahead:
            yield from map(read, orders)
            return
        reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        try:
            coming: deque[Future[Batch]] = deque()
            for order in orders:
                coming.append(reader.submit(read, order))
                if len(coming) > self.ahead:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            reader.shutdown(wait=False, cancel_futures=True)

    def read_simulated(self, comm: Comm, orders: Iterable[Order]) -> Generator[Batch]:
        """Yield on simulated ranks: read at once, and then wait in virtual time until a reader would have had it."""
        coming: deque[tuple[float, Batch]] = deque()  # (virtual ns at which the reader has it, the batch)
        ready: float = 0

        def handed_out() -> Batch:
            due, what = coming.popleft()
            early = due - comm.trace.clock()
            if early > 0:
                comm.compute(early / 1e9)
            return what

        for order in orders:
            what = self.shard_of(*order)
            ready = max(ready, comm.trace.clock()) + self.seconds * len(what[0]) * 1e9
            coming.append((ready, what))
            if len(coming) > self.ahead:
                yield handed_out()
        while coming:
            yield handed_out()


def shifted(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return every image (b, c, h, w) moved by up to one pixel in each direction, as its number (b,) says.

    Dark pixels come in at one edge, and pixels that are moved over the other edge are gone.
    """
    h, w = images.shape[2:]
    framed = pad(images, (1, 1, 1, 1))  # (b, c, h + 2, w + 2)
    out = torch.empty_like(images)
    for down, right in product(range(3), range(3)):
        chosen = numbers % 9 == 3 * down + right
        out[chosen] = framed[chosen, :, down : down + h, right : right + w]
    return out


def batch_indices(n: int, batch: int, seed: int = 0, start: int = 0) -> Iterator[torch.Tensor]:
    """Yield the indices of one global batch after another, epoch after epoch, forever. The same on every rank.

    The batch of a step depends on the seed and the number of the step alone, so that a training can go on at step
    `start`, on any number of ranks, as if it had not been interrupted.

    Args:    n: examples in the training set; batch: examples per step, over all ranks; seed: of the shuffling.
             start: batches that are left out at the beginning.
    Yields:  (batch,) int64 tensor of indices in [0, n); the last one of an epoch holds the n mod batch that remain.
    Raises:  ValueError if n or batch is less than 1, or start less than 0.
    """
    if n < 1 or batch < 1 or start < 0:
        raise ValueError(
            f"cannot make batches of {batch} from {n} examples after step {start}: both must be at least 1, start 0"
        )
    generator = torch.Generator().manual_seed(seed)
    epochs, steps = divmod(start, -(-n // batch))
    for _ in range(epochs):
        torch.randperm(n, generator=generator)  # moves the generator on, as the epoch did
    while True:
        yield from torch.randperm(n, generator=generator).split(batch)[steps:]
        steps = 0


def shard_indices(indices: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the part of a global batch for `rank` of `size`: sizes differ by one at most, the longer ones first.

    Args:    indices: (b,) tensor, the same on every rank.
    Returns: view of it, (ceil(b / size),) at most. The shards of all ranks, one after the other, are `indices`.
    """
    return indices.tensor_split(size)[rank]


def check_batch(n: int, batch: int, size: int) -> None:
    """Raise ValueError if some of `size` ranks would never see an example: n in the training set, `batch` in a step."""
    if min(n, batch) < size:
        few = f"a batch of {batch}" if batch <= n else f"a training set of {n}"
        raise ValueError(
            f"{few} examples is too small for {size} ranks: some of them would never see an example. "
            f"Take at most {min(n, batch)} ranks, or {'a larger batch' if batch <= n else 'more data'}"
        )
