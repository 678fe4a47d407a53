"""The input of a training: storages as data, a throttled reader, and the workers and batches that a step needs."""

from __future__ import annotations

import os
import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

PIECE = 2**14  # bytes that the throttled reader reads at a time


class _Storage(NamedTuple):
    """A storage. Its `total` bytes/s are published; seconds to open a file, and bytes/s of one reader, are made up.

    Both are of a usual order of magnitude on a quiet machine; on a busy one a file may take 100 times as long to open.
    """

    name: str
    example: str
    open_s: float
    per_reader: float
    total: float
    source: str

    def seconds(self, files: int, nbytes: float) -> float:
        """Return how long a single reader takes for so many files with `nbytes` bytes in all."""
        return files * self.open_s + nbytes / self.per_reader


STORAGES = (
    _Storage("node-local NVMe", "Frontier, one node", 20e-6, 2e9, 5.5e9, "OLCF, Frontier User Guide, peak; 2023"),
    _Storage(
        "burst buffer", "Cori, DataWarp", 0.2e-3, 1e9, 1.7e12, "NERSC documentation, Cori Burst Buffer, peak; to 2023"
    ),
    _Storage("shared file system", "Orion, Lustre, disks", 1e-3, 1e9, 5.5e12, "OLCF, storage of Frontier, peak; 2021"),
)


def table_of_storages() -> str:
    """Return STORAGES as lines of text, with the time to read 1,000 examples of 100 kB, one in a file or all in one."""
    lines = [f"{'':20}{'for example':22}{'GB/s in all':>11}{'open, ms':>10}{'1,000 files, s':>16}{'one shard, s':>14}"]
    for s in STORAGES:
        files, shard = s.seconds(1000, 1e8), s.seconds(1, 1e8)
        lines.append(f"{s.name:20}{s.example:22}{s.total / 1e9:11,.1f}{s.open_s * 1e3:10.2f}{files:16.2f}{shard:14.2f}")
    return "\n".join(lines)


def trace(seed: int, batches: int = 600, slow: float = 0.03, times: float = 6, storm: int = 0) -> list[float]:
    """Make up the seconds that reading each batch of an epoch takes: about 0.1, with jitter.

    A share `slow` of them, and the first `storm`, take up to `times` as long.
    """
    rng = random.Random(seed)
    reads = []
    for i in range(batches):
        seconds = 0.1 * rng.lognormvariate(0, 0.25)
        reads.append(seconds * rng.uniform(times / 2, times) if i < storm or rng.random() < slow else seconds)
    return reads


class Played(NamedTuple):
    """Virtual seconds at which the read of each batch begins and ends, and at which the step takes the batch."""

    begins: list[float]
    ends: list[float]
    taken: list[float]

    @property
    def seconds(self) -> float:
        """Time from the first batch to the last."""
        return self.taken[-1] - self.taken[0]

    def waiting(self, step: float) -> float:
        """Return the waits after the first batch as a share of the time of the steps."""
        return max(0.0, self.seconds / (step * (len(self.taken) - 1)) - 1)


def play(reads: Sequence[float], step: float, workers: int, prefetch: int, late: float = 0) -> Played:
    """Run an epoch in virtual time, in the order in which torch's DataLoader reads and delivers.

    late: seconds after the step has taken a batch, at which its place is free.
    """
    played = Played([], [], [])
    for i, seconds in enumerate(reads):
        free = played.ends[i - workers] if i >= workers else 0.0
        place = played.taken[i - workers * prefetch] + late if i >= workers * prefetch else 0.0
        played.begins.append(max(free, place))
        played.ends.append(played.begins[i] + seconds)
        played.taken.append(max(played.ends[i], played.taken[i - 1] + step) if i else played.ends[i])
    return played


def workers_and_prefetch(reads: Sequence[float], step: float, cores: int, room: int) -> tuple[int, int] | None:
    """Find the fewest workers, then the least prefetch, for a step that hardly waits.

        worker 0   [ 0][   2    ][ 4 ]        2 workers, prefetch 1: 2 places
        worker 1   [ 1 ]   [ 3]      [ 5]     3 gets its place when the step takes 1
        step           [ 0][ 1]..[ 2][ 3][ 4] the step waits for 2, though 3 is ready

    Simulate a measured epoch in virtual time: compute all times, and do not wait.
    Workers get batches in turn: with 2 workers, worker 0 reads batches 0, 2, 4 and so
    on. A worker reads its batches one after the other. The step takes batches in the
    order of their numbers. It takes a batch when this batch is ready and the step
    before is done.

    Memory has `prefetch` places for each worker. A batch needs a place before its read
    can begin. Batches get places in the order of their numbers. A place becomes free
    when the step takes its batch.

    The wait for the first batch does not count. From there to the last batch, the waits
    may add 1% to the time of the steps.

    Args:    reads: seconds to read each batch of the epoch, in order of the numbers;
             step: seconds of a step; cores: cores that no rank uses; each worker takes
             one; room: batches that fit in memory, all places together.
    Returns: (workers, prefetch), or None if no pair within cores and room is enough.
    Ref: torch.utils.data.DataLoader with its num_workers and prefetch_factor.
    """
    most = 1.01 * step * (len(reads) - 1)
    for workers in range(1, cores + 1):
        for prefetch in range(1, room // workers + 1):
            ends: list[float] = []
            taken: list[float] = []
            for i, seconds in enumerate(reads):
                free = ends[i - workers] if i >= workers else 0
                place = taken[i - workers * prefetch] if i >= workers * prefetch else 0
                ends.append(max(free, place) + seconds)
                taken.append(max(ends[i], taken[i - 1] + step) if i else ends[i])
            if taken[-1] - taken[0] <= most:
                return workers, prefetch
    return None


class Throttled(Dataset[torch.Tensor]):
    """Batches of `nbytes` bytes of a file; reading batch i takes reads[i] seconds, if the real storage is faster."""

    def __init__(self, path: str, reads: Sequence[float], nbytes: int) -> None:
        self.path, self.reads, self.nbytes = path, reads, nbytes

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Read a batch piece by piece; a token bucket lets no more through than its bytes/s allow."""
        start, data, file = time.perf_counter(), bytearray(), os.open(self.path, os.O_RDONLY)
        while len(data) < self.nbytes:
            data += os.pread(file, min(PIECE, self.nbytes - len(data)), index * self.nbytes + len(data))
            time.sleep(max(0, start + self.reads[index] * len(data) / self.nbytes - time.perf_counter()))
        if hasattr(os, "posix_fadvise"):  # macOS has none, and reads the next epoch from memory
            os.posix_fadvise(file, index * self.nbytes, self.nbytes, os.POSIX_FADV_DONTNEED)
        os.close(file)
        return torch.frombuffer(data, dtype=torch.uint8)


def measure_loader(reads: Sequence[float], step: float, workers: int, prefetch: int, nbytes: int = 2**16) -> float:
    """Read a file with torch's DataLoader, sleep for `step` at each batch, and return the seconds from the first on."""
    taken = []
    with tempfile.NamedTemporaryFile() as file, warnings.catch_warnings():
        file.write(os.urandom(nbytes) * len(reads))
        file.flush()
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they only sleep
        dataset = Throttled(file.name, reads, nbytes)
        for _ in DataLoader(dataset, None, num_workers=workers, prefetch_factor=prefetch):
            taken.append(time.perf_counter())
            time.sleep(step)
    return taken[-1] - taken[0]
