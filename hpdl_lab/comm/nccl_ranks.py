"""NCCL communicators of this process: made by all their ranks together, kept for the next run, dropped when broken."""

import os
from contextlib import suppress
from typing import NamedTuple

from ..features import Missing, nccl
from ..features.gpu import cuda_module
from .errors import CommError, name_ranks
from .gpu import gpu_of
from .nccl import NcclComm
from .nccl_api import ID_NBYTES, Config, Nccl, one_gpu
from .nccl_clique import Clique, Connecting

FEW_BLOCKS = 2  # of a kernel, where ranks share a GPU: all kernels must be on it at once, since they wait for another
HALF = ID_NBYTES // 2  # a note of `agree` has 120 bytes
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}  # several ranks on one GPU, which NVLS excludes


class Note(NamedTuple):
    """What ranks tell each other before they connect: a clique that they have kept, their NCCL, their GPU."""

    clique: str
    version: str
    gpu: str

    def packed(self):
        return "|".join(self).encode()[:120]

    @classmethod
    def of(cls, packed):
        return cls(*packed.decode().split("|"))


class NcclRanks:
    """What `session` needs to make communicators: `session.comm(..., make=ranks.comm)`."""

    def __init__(self, session, api=None, gpu=None, cuda=None):
        """Raises RuntimeError without a GPU, features.Missing without NCCL.

        api, gpu, cuda (the compiled module): others than those found here.
        """
        self.gpu = gpu or gpu_of(session)
        self.api = api or Nccl(nccl.find().path, session.rank)
        self.cuda = cuda
        if cuda is None:
            with suppress(Missing):  # then nothing is shared between GPUs
                self.cuda = cuda_module()
        self.retired = {}  # members: GPU memory that they have had open
        self.refusal = ""  # why NCCL does not serve these ranks
        self.kept = {}  # members: [Clique] that no communicator uses
        here = session.hosts.count(session.hosts[session.rank])
        if self.api.version >= nccl.SHARES_A_GPU and here > self.gpu.count:
            for name, value in SHARING.items():  # NCCL reads them once, at the first communicator
                os.environ.setdefault(name, value)

    def comm(self, *arguments):
        """A communicator; called as MpiComm is."""
        return NcclComm(self, *arguments)

    def connect(self, comm):
        """A Clique of the ranks of `comm`: one that all of them have kept, or a new one. Collective.

        None, and one sentence on the screen, where they share a GPU and this NCCL refuses that.
        """
        kept = self.kept.get(comm.members, [])
        clique = kept.pop() if kept else None
        note = Note(clique.name if clique else "", str(self.api.version), self.gpu.identity)
        notes = [Note.of(told) for told in comm.agree("nccl", note=note.packed())]
        self.retired.pop(comm.members, None)
        if clique is not None:
            if all(told.clique == clique.name for told in notes):
                return clique
            clique.abort("run")  # some rank has dropped its own
        require_one_version(notes)
        sharing = ranks_on_one_gpu(notes, [comm.session.hosts[r] for r in comm.members])
        if sharing and self.api.version < nccl.SHARES_A_GPU:
            return self._refuse(comm, f"{name_ranks(sharing)} share a GPU. {one_gpu(self.api.version)}")
        clique = Clique(self.api, self.gpu, comm.rank, comm.size, self._unique_id(comm), config_for(sharing))
        try:
            comm.waiting.finish(Connecting(clique), "nccl", comm.others)
        except BaseException:
            clique.abort("start")
            raise
        return clique

    def keep(self, members, clique):
        """`clique` is used no more: the next run of `members` can take it, unless it was left in the middle."""
        if clique.idle:
            self.kept.setdefault(members, []).append(clique)
        else:
            clique.abort("run")

    def retire(self, members, memory):
        """Free `memory`, which others have opened, when all `members` have come to a later run: they have closed it.

        CUDA leaves open what happens where memory is freed before.
        """
        self.retired.setdefault(members, []).extend(memory)

    def _refuse(self, comm, refusal):
        if comm.rank == 0 and not self.refusal:
            print(f"{refusal}. Until then their tensors travel through the host.", flush=True)
        self.refusal = refusal

    def _unique_id(self, comm):
        """128 bytes that rank 0 has made. Raises CommError on every rank where it cannot."""
        made, reason = b"", ""
        if comm.rank == 0:
            try:
                made = self.api.unique_id()
            except CommError as error:
                reason = error.args[0]
        (why, *_) = comm.agree("nccl", note=reason.encode()[:120])
        if why:
            raise CommError(reason or why.decode(errors="replace"))
        halves = [comm.agree("nccl", note=made[at : at + HALF])[0] for at in (0, HALF)]
        return b"".join(halves)


def require_one_version(notes):
    """Raise CommError where the ranks have different versions of NCCL, which do not talk to each other."""
    versions = [told.version for told in notes]
    if len(set(versions)) > 1:
        told = ", ".join(f"rank {rank} has {nccl.text_of(int(version))}" for rank, version in enumerate(versions))
        raise CommError(f"the ranks load different versions of NCCL: {told}")


def ranks_on_one_gpu(notes, hosts):
    """The ranks that share their GPU with another."""
    places = [(host, told.gpu) for host, told in zip(hosts, notes, strict=True)]
    return [rank for rank, place in enumerate(places) if places.count(place) > 1]


def config_for(sharing):
    """Few thread blocks where ranks share a GPU: a kernel that waits for another must leave room for it."""
    return Config.of(FEW_BLOCKS) if sharing else Config.of()
