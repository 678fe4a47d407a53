"""MPI ranks with GPUs: tensors on the GPU travel through NCCL, by torch's process group; everything else through MPI.

    GpuComm.allocate     memory that all ranks of a machine reach by CUDA IPC; its all_reduce: gpu_memory.py

What hangs on a GPU is ended at the deadline, and the next run connects anew. A group that ended well is kept for the
next run of the same ranks: to make one takes NCCL a second.
"""

import math
import os
import secrets
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ..features import Missing, nccl
from ..features.gpu import cuda_module, why_no_gpu
from . import gpu_memory
from .buffers import DTYPES, ITEMSIZE, buffer_of
from .device import OnDevice
from .errors import CommError, name_ranks
from .mpi.transport import MpiComm
from .torch.group import store_of

SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}  # several ranks on one GPU, which NVLS excludes
FEW_BLOCKS = 2  # of a kernel, if ranks share a GPU: all kernels must be on it at once, since they wait for each other
FOREVER = timedelta(days=1)  # our own deadlines end what hangs
MOST_TENSORS = 16  # kMaxTensors of csrc/cuda/one_pass.h


class GpuRanks:
    """What `session` needs to make communicators of ranks with GPUs: `session.comm(..., make=ranks.comm)`."""

    def __init__(self, session, device=None, make_group=None, cuda=None):
        """device: by default the ranks of a host take its GPUs by turns. make_group: in place of `nccl_group`.

        Raises: RuntimeError without a GPU, features.Missing without NCCL.
        """
        self.device = torch.device(device or device_of(session))
        self.make_group, self.cuda = make_group or nccl_group, cuda
        if cuda is None:
            with suppress(Missing):  # then nothing is shared between GPUs
                self.cuda = cuda_module()
        self.kept = {}  # members: (name, process group) that no communicator uses
        self.retired = {}  # members: GPU memory that they have had open

    def comm(self, *arguments):
        """A communicator; called as MpiComm is."""
        return GpuComm(self, *arguments)

    def connect(self, comm):
        """(name, process group) of the ranks of `comm`: one that all of them have kept, or a new one. Collective."""
        name, group = self.kept.pop(comm.members, ("", None))
        notes = [note.decode().split("|") for note in comm.agree("gpus", note=f"{name}|{self.identity}".encode())]
        self.retired.pop(comm.members, None)
        if group is not None:
            if all(kept == name for kept, _ in notes):
                return name, group
            group.abort()  # some rank has dropped its own
        hosts = [comm.session.hosts[r] for r in comm.members]
        places = [(host, gpu) for host, (_, gpu) in zip(hosts, notes, strict=True)]
        sharing = [rank for rank, place in enumerate(places) if places.count(place) > 1]
        name = comm.agree("gpus", note=secrets.token_hex(6).encode())[0].decode()
        return name, self.make_group(store_of(comm), comm.rank, comm.size, self.device, sharing)

    @property
    def identity(self):
        """The same for two ranks exactly if they use the same GPU of one host."""
        if self.device.type != "cuda":
            return secrets.token_hex(4)
        known = torch.cuda.get_device_properties(self.device)
        return str(getattr(known, "uuid", f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{self.device.index}"))

    def retire(self, members, memory):
        """Free `memory`, which others have opened, when all `members` have come to a later run: they have closed it.

        CUDA leaves open what happens if memory is freed before.
        """
        self.retired.setdefault(members, []).extend(memory)


def device_of(session):
    """The GPU that serves this rank. Raises RuntimeError without a GPU."""
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError(f"rank {session.rank} has no GPU: {why_no_gpu()}")
    place = session.hosts[: session.rank].count(session.hosts[session.rank])  # on this host
    torch.cuda.set_device(place % count)
    return f"cuda:{place % count}"


def nccl_group(store, rank, size, device, sharing):
    """A process group of NCCL that is not registered anywhere. sharing: ranks that share their GPU with another.

    Raises: CommError with the reason if this NCCL refuses ranks that share a GPU.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    if sharing:
        version = nccl.version_of_torch()
        if version < nccl.SHARES_A_GPU:
            raise CommError(
                f"{name_ranks(sharing)} share a GPU, which NCCL {nccl.text_of(version)} of this torch refuses; "
                f"{nccl.text_of(nccl.SHARES_A_GPU)} and newer can. Start one rank for each GPU"
            )
        for name, value in SHARING.items():  # NCCL reads them once, at the first communicator
            os.environ.setdefault(name, value)
        options.config.max_ctas = FEW_BLOCKS
    group, kind = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(device, kind, dist.ProcessGroupNCCL(store, rank, size, options))
    return group


class GpuComm(OnDevice, MpiComm):
    """`device` is this rank's GPU. Operations have ended when they return: the host waits for the GPU."""

    def __init__(self, ranks, *arguments):
        """ranks: GpuRanks; arguments: of MpiComm."""
        super().__init__(*arguments)
        self.ranks = ranks
        self.use(ranks.device)
        self.post_send, self.post_receive = self.core.send, self.core.receive
        self.group_name, self.segments = "", []  # gpu_memory.Segments, in the order of `allocate`, the same everywhere

    def connect(self):
        self.group_name, self.device_group = self.ranks.connect(self)

    def _part(self, handles, members):
        return GpuComm(self.ranks, self.session, handles, members, self.waiting, self.on_row, self.trace)

    def barrier(self):
        self.launch_posted()
        super().barrier()

    def split(self, color, key=0):
        self.launch_posted()
        return super().split(color, key)

    # -- memory that all ranks reach --------------------------------------------------------------------------------

    def allocate(self, shape, dtype="float32"):
        """See Comm.allocate: a tensor on this rank's GPU, which all ranks reach if they are on one machine."""
        dtype = str(dtype).removeprefix("torch.")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        shared = None
        if dtype in ITEMSIZE and 1 < self.size == self.node_size and self.size <= MOST_TENSORS:
            self.launch_posted()
            shared = gpu_memory.allocate(self, self.ranks.cuda, math.prod(shape), dtype)
        if shared is None:
            return super().allocate(shape, dtype)
        mine, segment = shared
        self.segments.append(segment)
        return mine[: math.prod(shape) * ITEMSIZE[dtype]].view(getattr(torch, dtype)).reshape(shape)

    def all_reduce(self, x, async_op=False):
        if not async_op and self.segments and self._on_device("all_reduce", x) and self._one_pass(x):
            return x
        return super().all_reduce(x, async_op)

    def _one_pass(self, x):
        """all_reduce of `x` if it lies in memory that all ranks reach, at one place on all of them; else False."""
        buffer = buffer_of(x, "all_reduce", self.device)
        count, dtype = buffer.count, DTYPES.index(buffer.dtype)
        self.launch_posted()
        step, t0, line = self._begin()
        self.waiting.finish(gpu_memory.Computed(), "all_reduce", (), line=line)
        number, offset = gpu_memory.place_of(self.segments, self.rank, x)
        places = self.agree("all_reduce", count, dtype, note=f"{number},{offset}".encode())
        if number < 0 or len(set(places)) > 1:
            return False
        first, mine = gpu_memory.slice_of(count, self.rank, self.size)
        tensors = [address + offset for address in self.segments[number].addresses]
        self.ranks.cuda.one_pass(tensors, first, mine, dtype, torch.cuda.current_stream().cuda_stream)
        self.waiting.finish(gpu_memory.Computed(), "all_reduce", (), line=line)
        self._meet(("all_reduce", count, dtype, -1), line)
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)
        return True

    # -- end --------------------------------------------------------------------------------------------------------

    def close(self, error=None, line=""):
        if not self.closed:
            super().close(error, line)
            for comm in self._family():
                self.ranks.retire(comm.members, [segment.keep[comm.rank] for segment in comm.segments])
                if comm.device_group is not None and not comm.broken:
                    self.ranks.kept[comm.members] = comm.group_name, comm.device_group
                comm.segments, comm.device_group = [], None

    def _family(self):
        """This communicator and all that were split from it, or from those."""
        return [self, *(comm for part in self.parts for comm in part._family())]
