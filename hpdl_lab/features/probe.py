"""MPI and torch asked about themselves: run as a script, it prints one line of JSON.

It is a process of its own because a broken MPI library can end the process that loads it, and because importing torch
takes seconds that a notebook must not spend on a question.
"""

import gc
import json
from typing import TypedDict


class Answers(TypedDict, total=False):
    """Versions and paths. Without MPI or torch there is only the reason, `mpi_error` or `torch_error`."""

    mpi: str
    mpi_path: str
    mpi_error: str
    torch: str
    cuda: str | None
    gpus: list[str]
    nccl: list[int]
    gloo: bool
    torch_error: str


def _answers() -> Answers:
    """Import MPI, without starting it, and torch: {"mpi": "MPICH 5.0.2", "torch": "2.13.0", ...}, or an "..._error"."""
    return {**_mpi_answers(), **_torch_answers()}


def _mpi_answers() -> Answers:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {"mpi_error": _first_line(error)}
    name, version = MPI.get_vendor()
    return {"mpi": f"{name} {'.'.join(map(str, version))}", "mpi_path": _loaded_library("libmpi") or MPI.__file__}


def _torch_answers() -> Answers:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a shared library of the wheel is missing
        return {"torch_error": _first_line(error)}
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "nccl": list(torch.cuda.nccl.version()[:3]) if dist.is_available() and dist.is_nccl_available() else [],
        "gloo": dist.is_available() and dist.is_gloo_available(),
    }


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _loaded_library(name: str) -> str | None:
    """Return the path of the loaded shared library whose file name starts with `name`; None if it is not known."""
    try:
        with open("/proc/self/maps") as file:
            paths = [line.split(maxsplit=5)[-1].strip() for line in file if f"/{name}" in line]
    except OSError:
        return None
    return paths[0] if paths else None


if __name__ == "__main__":
    gc.disable()  # it would go over all that torch makes, again and again: a third of the time
    print(json.dumps(_answers()))
    gc.freeze()  # and once more at the end
