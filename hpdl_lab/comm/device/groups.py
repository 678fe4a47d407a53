"""The process groups of NCCL that move tensors between GPUs: made by MPI ranks, or handed over under torchrun.

What hangs on a GPU is ended at the deadline, and the next run connects anew. A group that ended well is kept for the
next run of the same ranks: to make one takes NCCL a second.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ...features import Missing, nccl
from ...features.gpu import cuda_module, why_no_gpu
from ..errors import CommError, name_ranks
from ..mpi.session import session_of_this_process
from ..torch.group import store_of
from .comm import DeviceComm
from .host import HostGroup

if TYPE_CHECKING:
    from ..mpi.session import Session
    from .comm import Reached

SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}  # several ranks on one GPU, which NVLS excludes
FEW_BLOCKS = 2  # of a kernel, if ranks share a GPU: all kernels must be on it at once, since they wait for each other
FOREVER = timedelta(days=1)  # our own deadlines end what hangs


class MpiGroups:
    """The process groups of MPI ranks with GPUs: `session.comm(..., make=groups.comm)`."""

    shares_memory = True

    def __init__(
        self,
        session: Session,
        device: str | torch.device | None = None,
        make_group: Callable[..., Any] | None = None,
        cuda: ModuleType | Literal[False] | None = None,
        through_host: Callable[[list[int]], bool] | None = None,
    ) -> None:
        """device: by default the ranks of a host take its GPUs by turns. make_group: in place of `_nccl_group`.

        cuda: False is no module _cuda, None the one that is there.

        through_host: in place of `_nccl_refuses`.

        Raises: RuntimeError without a GPU, features.Missing without NCCL.
        """
        self.device = torch.device(device or _device_of(session))
        self.make_group, self.cuda = make_group or _nccl_group, cuda or None
        self.through_host = through_host or _nccl_refuses
        if cuda is None:
            with suppress(Missing):  # then nothing is shared between GPUs
                self.cuda = cuda_module()
        # members: (name, process group) that no communicator uses
        self.kept: dict[tuple[int, ...], tuple[str, Any]] = {}
        self.names: dict[Any, str] = {}  # process group: its name, of those in use
        self.retired: dict[tuple[int, ...], list[Reached]] = {}  # members: GPU memory that they have had open

    def comm(self, *arguments: Any) -> DeviceComm:
        """Return a communicator; called as RealComm is."""
        return DeviceComm(self, *arguments)

    def connect(self, comm: DeviceComm) -> Any:
        """Return the process group of the ranks of `comm`: one that all of them have kept, or a new one. Collective."""
        name, group = self.kept.pop(comm.members, ("", None))
        notes = [note.decode().split("|") for note in comm.agree("gpus", note=f"{name}|{self.identity}".encode())]
        self.retired.pop(comm.members, None)
        if group is not None:
            if all(kept == name for kept, _ in notes):
                self.names[group] = name
                return group
            group.abort()  # some rank has dropped its own
        hosts = [comm.session.hosts[r] for r in comm.members]
        places = [(host, gpu) for host, (_, gpu) in zip(hosts, notes, strict=True)]
        sharing = [rank for rank, place in enumerate(places) if places.count(place) > 1]
        if self.through_host(sharing):
            return HostGroup(comm)
        name = comm.agree("gpus", note=secrets.token_hex(6).encode())[0].decode()
        group = self.make_group(store_of(comm), comm.rank, comm.size, self.device, sharing)
        self.names[group] = name
        return group

    @property
    def identity(self) -> str:
        """Return the same for two ranks exactly if they use the same GPU of one host."""
        if self.device.type != "cuda":
            return secrets.token_hex(4)
        known = torch.cuda.get_device_properties(self.device)
        return str(getattr(known, "uuid", f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{self.device.index}"))

    def release(self, comm: DeviceComm) -> None:
        """Keep what the ranks of `comm`, which is closed, need again; a group that has failed is of no more use.

        Memory that others have opened is freed when all members have come to a later run: they have closed it then.
        CUDA leaves open what happens if it is freed before.
        """
        self.retired.setdefault(comm.members, []).extend(segment.keep[comm.rank] for segment in comm.segments)
        name = self.names.pop(comm.device_group, "") if comm.device_group is not None else ""
        if name and not comm.broken:
            self.kept[comm.members] = name, comm.device_group


@functools.cache
def mpi_groups() -> MpiGroups:
    """Return this process's MpiGroups: they keep process groups from one run to the next."""
    return MpiGroups(session_of_this_process())


def _device_of(session: Session) -> str:
    """Return the GPU that serves this rank. Raises RuntimeError without a GPU."""
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(f"rank {session.rank} has no GPU: {why_no_gpu()}")
    local_rank = session.hosts[: session.rank].count(session.hosts[session.rank])  # on this host
    torch.cuda.set_device(local_rank % count)
    return f"cuda:{local_rank % count}"


def _nccl_group(store: dist.Store, rank: int, size: int, device: torch.device, sharing: list[int]) -> dist.ProcessGroup:
    """Return a process group of NCCL that is not registered anywhere; sharing: see `nccl_options`."""
    options = nccl_options(sharing)
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(device, kind, dist.ProcessGroupNCCL(store, rank, size, options))
    return group


def _nccl_refuses(sharing: list[int]) -> bool:
    """Return True if the NCCL of this torch refuses ranks, because `sharing` share their GPU with another."""
    return bool(sharing) and nccl.version_of_torch() < nccl.SHARES_A_GPU


def nccl_options(sharing: list[int]) -> dist.ProcessGroupNCCL.Options:
    """Return the options that torch gives NCCL. sharing: ranks that share their GPU with another.

    Raises: CommError with the reason if this NCCL refuses them.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    if _nccl_refuses(sharing):
        found, needed = nccl.text_of(nccl.version_of_torch()), nccl.text_of(nccl.SHARES_A_GPU)
        raise CommError(
            f"{name_ranks(sharing)} share a GPU, which NCCL {found} of this torch refuses; "
            f"{needed} and newer allow it. Start one rank for each GPU"
        )
    if sharing:
        for name, value in SHARING.items():  # NCCL reads them once, at the first communicator
            os.environ.setdefault(name, value)
        options.config.max_ctas = FEW_BLOCKS
    return options
