"""Where NCCL is: in the wheel that torch's CUDA build brings, inside torch, or on the system. Found at run time."""

import ctypes
import os
from typing import Any, NamedTuple

from . import Missing, folders

NAME = "libnccl.so.2"
OLDEST = 21800  # 2.18: a communicator that neither blocks nor hides what went wrong
SHARES_A_GPU = 23000  # 2.30: several ranks on one GPU, when asked
ONE_RANK_EACH = "Start one rank for each GPU, or set NCCL_MULTI_RANK_GPU_ENABLE=1 before the ranks start"


class Found(NamedTuple):
    """path: what dlopen takes; where: in words; version: NCCL's own code, such as 23203 for 2.32.3."""

    path: str
    where: str
    version: int


def find() -> Any:
    """The NCCL library that ranks will use. Raises Missing with the reason for every place where it is not."""
    reasons = []
    for where, look in (
        ("the nvidia-nccl wheel", in_wheel),
        ("torch", in_torch),
        ("the system's libraries", on_system),
    ):
        path, reason = look()
        if path:
            try:
                version = version_of(path)
            except (OSError, AttributeError, Missing) as error:
                reason = str(error)
            else:
                if version >= OLDEST:
                    return Found(path, where, version)
                reason = f"{path} is {text_of(version)}, {text_of(OLDEST)} or newer is needed"
        reasons.append(f"{where}: {reason}")
    raise Missing("no NCCL in " + "; nor in ".join(reasons))


def in_wheel() -> tuple:
    """(path, "") of what pip installs as nvidia-nccl-cu12 or -cu13, or ("", reason)."""
    for folder in folders("nvidia"):
        path = os.path.join(folder, "nccl", "lib", NAME)
        if os.path.exists(path):
            return path, ""
    return "", "it is not installed"


def in_torch() -> tuple:
    """(path, "") of a library that torch brings, by itself or linked into its own, or ("", reason)."""
    for folder in folders("torch"):
        for name in (NAME, "libtorch_cuda.so"):
            path = os.path.join(folder, "lib", name)
            if os.path.exists(path):
                return path, ""
        return "", "this torch was built without CUDA"
    return "", "it is not installed"


def on_system() -> tuple:
    """(name, "") where the dynamic linker finds the library, or ("", reason)."""
    try:
        ctypes.CDLL(NAME)
    except OSError as error:
        return "", str(error)
    return NAME, ""


def version_of(path: str) -> int:
    """NCCL's version code. Raises OSError or AttributeError where `path` is no NCCL, Missing where it will not say."""
    number = ctypes.c_int()
    code = ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    if code != 0:
        raise Missing(f"{path}: ncclGetVersion failed with code {code}")
    return number.value


def text_of(version: int) -> str:
    """23203 -> "2.32.3"; up to 2.8 the code had fewer digits: 2708 -> "2.7.8"."""
    major = 1000 if version < 10_000 else 10_000
    return f"{version // major}.{version % major // 100}.{version % 100}"
