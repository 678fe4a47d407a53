"""The reduction ladder of csrc/cuda/reduction.h on this GPU: each kernel checked against the CPU, then timed."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Protocol, cast

from ..comm.buffers import DTYPES, ITEMSIZE
from ..features import Missing, gpu

if TYPE_CHECKING:
    from torch import Tensor

    from ..comm.base import Row

FLOATS = ("float32", "bfloat16", "float16")
SIZES = (1 << 20, 256 << 20)  # bytes: within the caches of a GPU, and far beyond them
REPEATS = 20  # timed calls of each kernel, after
WARM_UP = 3
LARGEST = 8  # of the whole numbers that are added: small, so that every order of adding gives the same sum


class _Reductions(Protocol):
    """The functions of hpdl_lab._cuda that are used here."""

    def rungs(self) -> Sequence[tuple[str, str]]: ...

    def memory_bandwidth(self, device: int, /) -> float: ...

    def partials(self, rung: int, count: int, /) -> int: ...

    def time_reduce(
        self,
        rung: int,
        dtype: int,
        x: int,
        count: int,
        partial: int,
        out: int,
        stream: int,
        repeats: int,
        /,
    ) -> list[float]: ...


class Ladder:
    """The kernels, the GPU `device` and its bandwidth. Raises Missing if there is no GPU or no csrc/cuda."""

    def __init__(self, device: int = 0, cuda: _Reductions | None = None) -> None:
        """Use another module `cuda` than hpdl_lab._cuda if it is given."""
        if cuda is None:
            if reason := gpu.why_no_gpu():
                raise Missing(reason)
            cuda = cast(_Reductions, gpu.cuda_module())
        import torch

        self.cuda, self.torch, self.device = cuda, torch, device
        self.rungs = cuda.rungs()  # (name, change) from the lowest
        self.bandwidth = cuda.memory_bandwidth(device)

    def sum(self, rung: int, x: Tensor, repeats: int = 1) -> tuple[float, list[float]]:
        """Return (the sum of the flat GPU tensor x by rung `rung`, the microseconds of each of `repeats` calls)."""
        torch, where = self.torch, x.device
        partial = torch.empty(self.cuda.partials(rung, x.numel()), device=where)
        out = torch.full((1,), float("nan"), device=where)
        dtype = DTYPES.index(str(x.dtype).removeprefix("torch."))
        stream = torch.cuda.current_stream(where).cuda_stream if where.type == "cuda" else 0
        addresses = (x.data_ptr(), x.numel(), partial.data_ptr(), out.data_ptr())
        times_us = self.cuda.time_reduce(rung, dtype, *addresses, stream, repeats)
        return float(out), times_us

    def rows(self, sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = FLOATS) -> Iterator[Row]:
        """Yield one row per size, dtype and rung, as it comes: correct first, timed second."""
        for size in sizes:
            for dtype in dtypes:
                host = random_whole_numbers(size // ITEMSIZE[dtype], dtype)
                x, expected = self.on_gpu(host), float(host.double().sum())
                for rung, (name, change) in enumerate(self.rungs):
                    self.sum(rung, x, WARM_UP)
                    found, times_us = self.sum(rung, x, REPEATS)
                    time_us = statistics.median(times_us)
                    yield {
                        "size": size,
                        "count": x.numel(),
                        "type": dtype,
                        "rung": rung + 1,
                        "name": name,
                        "change": change,
                        "time_us": time_us,
                        "GBps": size / time_us / 1e3,
                        "of_bandwidth": size / (time_us * 1e-6) / self.bandwidth,
                        "wrong": int(found != expected),
                    }

    def on_gpu(self, host: Tensor) -> Tensor:
        return host.to(f"cuda:{self.device}")

    def about(self) -> Row:
        """Return the machine, the versions and the date."""
        return {
            "gpu": self.torch.cuda.get_device_name(self.device),
            "bandwidth_GBps": round(self.bandwidth / 1e9),
            "torch": self.torch.__version__,
            "cuda": self.torch.version.cuda,
            "system": f"{platform.system()} {platform.release()}",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def random_whole_numbers(n: int, dtype: str) -> Tensor:
    """Return an (n,) CPU tensor of numbers from -LARGEST to LARGEST, whose partial sums float32 holds exactly."""
    import torch

    generator = torch.Generator().manual_seed(n)
    return torch.randint(-LARGEST, LARGEST + 1, (n,), generator=generator).to(getattr(torch, dtype))
