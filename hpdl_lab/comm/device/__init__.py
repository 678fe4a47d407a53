"""Communicators of ranks whose tensors are on a device, such as a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..real import RealComm


def comm_class(device: str) -> Callable[..., RealComm]:
    """Return what makes communicators for Session.comm: "cpu" or "cuda". Raises RuntimeError without a GPU or NCCL."""
    from ..real import RealComm

    if device == "cpu":
        return RealComm
    if device != "cuda":
        raise ValueError(f'device={device!r}: "cpu" or "cuda" is needed')
    from .groups import mpi_groups

    return mpi_groups().comm
