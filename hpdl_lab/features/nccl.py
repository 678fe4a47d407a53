"""The NCCL of torch's CUDA build: a wheel of its own, or linked into it."""

import glob
import re
from sysconfig import get_path

ONE_RANK_EACH = "Start one rank for each GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1 before the ranks start"
SHARES_A_GPU = (2, 30, 0)  # and newer: several ranks on one GPU, when asked


def installed() -> tuple[int, ...] | None:
    """Return the version of the nvidia-nccl wheel; None if there is none. Imports nothing."""
    found = glob.glob("nvidia_nccl_cu*-*.dist-info", root_dir=get_path("platlib"))
    return _parse(found[0].removesuffix(".dist-info").rpartition("-")[2]) if found else None


def version_of_torch() -> tuple[int, ...]:
    """Return the version that torch uses. Imports torch, which has CUDA."""
    import torch

    return tuple(torch.cuda.nccl.version()[:3])


def _parse(text: str) -> tuple[int, ...]:
    """Read a version: "2.32.3" -> (2, 32, 3)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def text_of(version: tuple[int, ...]) -> str:
    """Write a version: (2, 32, 3) -> "2.32.3"."""
    return ".".join(map(str, version))
