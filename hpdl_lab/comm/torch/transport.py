"""A process group of torch.distributed as a communicator: what runs on MPI ranks runs under torchrun too.

    torchrun --nproc-per-node 2 script.py          comm = hpdl_lab.comm.world()
    dist.init_process_group("gloo")                comm = from_process_group()

Collectives go through shared memory where all ranks are on one machine, as those of MPI ranks do; messages, and
collectives between machines, go through the process group.
"""

import pickle

from ..base import Comm
from ..buffers import buffer_of, is_tensor
from ..calls import begin
from ..parts import part_of
from ..real_comm import RealComm
from ..work import MpiWork
from .messages import GroupWork, Letters, as_tensor
from .place import TorchPlace, cuda_of, gloo_beside, gloo_in, group_of, initialize, new_number

NUMBER_NBYTES = 4


def from_process_group(group=None, deadline=10.0, on_row=None, trace=True, device=None):
    """The communicator of the ranks of `group`, a process group of torch.distributed. Collective over its ranks.

    A group that moves no CPU tensors, such as nccl alone, gets one of gloo beside it for what is said on the host, and
    the communicator is a device.DeviceComm.

    Args:    group: None is the default one. deadline: the longest that one wait may last, s.
             on_row, trace: as of MpiComm. device: of the tensors that a group without gloo moves, by default the
             current CUDA device.
    Raises:  ValueError for a group that moves neither; RuntimeError where there is no group, or this rank is not in it.
    """
    group = group_of(group)
    gloo = gloo_in(group)
    if gloo is not None:
        place = TorchPlace(gloo)
        return TorchComm(place, place.number, tuple(range(place.size)), place.waiting(deadline), on_row, trace)
    from ..device import DeviceComm

    device = device or cuda_of(group)
    place = TorchPlace(*gloo_beside(group))
    told = place, place.number, tuple(range(place.size)), place.waiting(deadline), on_row, trace
    return DeviceComm(*told, device_group=group, device=device)


def world(deadline=10.0):
    """The communicator of all ranks of this torchrun job. It initializes torch.distributed, with gloo, where needed."""
    initialize()
    return from_process_group(deadline=deadline)


class TorchWork(MpiWork):
    """One end of a message of a process group. Threads carry it, whatever its rank does meanwhile."""

    __slots__ = ()
    advances = False

    def _next(self):
        return None

    def _lying(self):
        return {}


class TorchComm(RealComm):
    """Messages through a process group.

    place: torch_place.TorchPlace. number: tells its messages from those of other communicators of the group.
    """

    def __init__(self, place, number, members, waiting, on_row=None, trace=True, beside=False):
        super().__init__(place, members, waiting, on_row, trace)
        self.group, self.number = place.group, number
        self.wire = place.wire(number, members, beside)

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x, dst):
        self._require_open()
        self.check_peer(dst, "sends to")
        buffer_of(x, "send")
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        return TorchWork(self, "send", self._post_send, x, dst)

    def irecv(self, x, src):
        self._require_open()
        self.check_peer(src, "receives from")
        buffer_of(x, "receive into")
        if not is_tensor(x) and not x.flags.writeable:
            raise ValueError("cannot receive into a read-only array: use x.copy()")
        return TorchWork(self, "recv", self._post_receive, x, src)

    def _post_send(self, work, group, x, dst):
        work.message = self.wire.send(x, dst)

    def _post_receive(self, work, group, x, src):
        work.message = self.wire.receive(x, src)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def split(self, color, key=0):
        """See Comm.split. color, key: anything that pickles to fewer than 100 bytes; keys can be compared."""
        step, t0, line = self._begin()
        begin(self, "split", line=line)
        notes = self.agree("split", note=new_number().to_bytes(NUMBER_NBYTES, "little") + pickle.dumps((color, key)))
        chosen = part_of([note[NUMBER_NBYTES:] for note in notes], self.rank)
        number = int.from_bytes(notes[chosen[0]][:NUMBER_NBYTES], "little")
        part = self._part(number, tuple(self.members[r] for r in chosen))
        self._adopt(part, color)
        part.connect()
        self.trace.add(step, "split", t0, self.trace.clock(), line=line)
        return part

    def _part(self, number, members):
        return TorchComm(self.place, number, members, self.waiting, self.on_row, self.trace)

    def can_double(self):
        return True

    def make_double(self, waiting, trace):
        return TorchComm(self.place, self.number, self.members, waiting, self.on_row, trace, beside=True)

    def _agreement(self, call, note):
        return Letters(self.wire, self.rank, call, note)

    # -- collectives ------------------------------------------------------------------------------------------------

    def ring_all_reduce(self, x):
        """all_reduce by the process group, which has a ring too. The same sum, in another order of adding."""
        return self._around_the_ring("ring_all_reduce", x)

    def mpi_all_reduce(self, x):
        raise ValueError("these ranks have no MPI, since torchrun has started them: use mpiexec")

    def _around_the_ring(self, op, x):
        """The process group's own all_reduce of all its ranks; by messages among some, and for floats of 16 bits."""
        if self.size < self.group.size() or buffer_of(x, op).dtype in ("float16", "bfloat16"):
            with self._agreed(op, x):
                return Comm.all_reduce(self, x)
        with self.together(op, x):
            work = GroupWork(self.group.allreduce([as_tensor(x)]))
            self._finish(work, op, self.others, buffer_of(x, op).nbytes)
        return x
