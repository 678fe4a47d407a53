"""The communicator of ranks with GPUs: tensors on the GPU travel through NCCL, everything else through MPI.

MPI stays beside NCCL for what NCCL cannot do: before a collective the ranks agree on the host that all mean the same
one, so that a wrong program waits there, where an interrupt, the deadline and the report of who waits for whom reach
it, and nothing hangs on the GPU. What hangs there all the same is aborted at the deadline, and the next run connects
anew.
"""

import math
from contextlib import contextmanager, suppress

from . import gpu_memory
from .buffers import DTYPES, ITEMSIZE, buffer_of
from .errors import CommError
from .nccl_clique import Issuing
from .nccl_collectives import NcclCollectives
from .nccl_work import NcclWork, StagedReceive

MOST_TENSORS = 16  # kMaxTensors of csrc/cuda/one_pass.h


class NcclComm(NcclCollectives):
    """`device` is this rank's GPU. Operations have ended when they return: the host waits for the GPU."""

    def __init__(self, ranks, *arguments):
        """ranks: NcclRanks; arguments: of MpiComm."""
        super().__init__(*arguments)
        self.ranks, self.gpu, self.device = ranks, ranks.gpu, ranks.gpu.name
        self.clique = None  # also where NCCL refuses these ranks: then messages go through the host
        self.posted = []  # NcclWorks that wait to start as one group
        self.segments = []  # gpu_memory.Segments, in the order of `allocate`, the same on every rank

    def connect(self):
        self.clique = self.ranks.connect(self)

    def can_double(self):
        """No: what is given to `background` runs at once, since an operation here ends when the GPU has done it."""
        return False

    def _part(self, handles, members):
        return NcclComm(self.ranks, self.session, handles, members, self.waiting, self.on_row, self.trace)

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x, to):
        if not self.gpu.owns(x):
            return super().isend(x, to)
        if self.clique is None:
            buffer_of(x, "send", self.device)
            return super().isend(x.detach().cpu(), to)
        self._require_open()
        self.check_peer(to, "sends to")
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        return NcclWork(self, "send", self.core.send, x, to)

    def irecv(self, x, source):
        if not self.gpu.owns(x):
            return super().irecv(x, source)
        self._require_open()
        self.check_peer(source, "receives from")
        if self.clique is None:
            return StagedReceive(self, x, source)
        return NcclWork(self, "recv", self.core.receive, x, source)

    def launch_posted(self):
        """Let the messages that have been posted start, all of them as one group."""
        if not self.posted:
            return
        self._require_open()
        self._issue_last()
        works, self.posted = self.posted, []
        with self.aborting(works[0].op):
            launch = self.clique.submit([c for work in works for c in work.calls], [work.x for work in works], works)
        for work in works:
            work.launch = launch

    @property
    def busy(self):
        """True while NCCL cannot take another group."""
        last = self.clique.last
        return last is not None and not last.issued()

    def _issue_last(self):
        last = self.clique.last
        if last is not None and last.event is None:
            with self.aborting("launch"):
                self.waiting.finish(Issuing(last), "launch", self.others)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def barrier(self):
        self.launch_posted()
        super().barrier()

    def split(self, color, key=0):
        self.launch_posted()
        return super().split(color, key)

    def allocate(self, shape, dtype="float32"):
        """See Comm.allocate: a tensor on this rank's GPU, which all ranks reach where they are on one machine."""
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise ValueError(f"cannot allocate dtype {dtype}: one of {', '.join(DTYPES)} is needed")
        import torch

        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        shared = None
        if 1 < self.size == self.node_size and self.size <= MOST_TENSORS:
            self.launch_posted()
            shared = gpu_memory.allocate(self, self.ranks.cuda, math.prod(shape), dtype)
        if shared is None:
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
        mine, segment = shared
        self.segments.append(segment)
        return mine[: math.prod(shape) * ITEMSIZE[dtype]].view(getattr(torch, dtype)).reshape(shape)

    # -- what does not end well -------------------------------------------------------------------------------------

    @contextmanager
    def aborting(self, op):
        """What does not complete here is ended on the GPU: nothing of it may run on beside the next run."""
        self._require_open()
        try:
            yield
        except BaseException:
            self.clique.abort(op)
            raise

    # -- end --------------------------------------------------------------------------------------------------------

    def _release(self):
        with suppress(CommError, ValueError):
            if self.clique is not None:
                self.launch_posted()
        return super()._release()

    def close(self, error=None, line=""):
        if not self.closed:
            super().close(error, line)
            for comm in self._family():
                self.ranks.retire(comm.members, [segment.keep[comm.rank] for segment in comm.segments])
                comm.segments = []
                if comm.clique is not None:
                    self.ranks.keep(comm.members, comm.clique)
                    comm.clique = None

    def _family(self):
        """This communicator and all that were split from it, or from those."""
        return [self, *(comm for part in self.parts for comm in part._family())]
