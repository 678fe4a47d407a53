"""A GPU that ranks can use, or the reason why there is none; nothing heavy is imported."""

import glob
import importlib
import os
import re
import shutil
from types import ModuleType

from . import Missing, folders, nccl


def why_no_gpu() -> str:
    """Return the first thing that is missing for tensors on a GPU, in one sentence; "" if nothing is."""
    return no_driver() or _no_torch_with_cuda() or _no_visible_device()


def require_gpu_transfer() -> None:
    """Raise Missing, with the reason, unless tensors on a GPU can travel between ranks here."""
    if reason := why_no_gpu():
        raise Missing(reason)


def nccl_serves(ranks: int) -> bool:
    """Return True if NCCL serves `ranks` ranks of this machine: before 2.30 it refuses ranks that share a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(glob.glob("/dev/nvidia[0-9]*")) if visible is None else len(visible.split(","))
    return ranks <= gpus or (nccl.installed() or ()) >= nccl.SHARES_A_GPU


def no_driver() -> str:
    """Return why the driver shows no GPU, or ""."""
    if glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/dev/dxg"):  # dxg: the driver of Windows, seen from WSL
        return ""
    return "no NVIDIA driver: /dev/nvidia0 does not exist"


def _no_torch_with_cuda() -> str:
    """Return why torch cannot use a GPU, or "", read from its files."""
    for folder in folders("torch"):
        with open(os.path.join(folder, "version.py")) as file:
            built_for = re.search(r"^cuda\b.*=\s*(\S+)", file.read(), re.MULTILINE)
        if built_for is None or built_for[1] == "None":
            return "this torch was built without CUDA: install torch from PyTorch's index of CUDA wheels"
        return ""
    return "torch is not installed: make install"


def _no_visible_device() -> str:
    """Return why the environment hides all GPUs, or ""."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU: unset it"
    return ""


def cuda_module() -> ModuleType:
    """Return the compiled module hpdl_lab._cuda. Raises Missing with the reason if csrc/cuda was not compiled."""
    try:
        return importlib.import_module("hpdl_lab._cuda")
    except ModuleNotFoundError:
        nvcc = shutil.which("nvcc", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin")
        remedy = f"nvcc is at {nvcc}: make install" if nvcc else "put nvcc on PATH, then make install"
        raise Missing(f"csrc/cuda was not compiled, because the build found no working nvcc: {remedy}") from None
    except ImportError as error:
        raise Missing(f"the compiled CUDA module does not load: {error}") from None
