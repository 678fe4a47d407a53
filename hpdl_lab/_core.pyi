"""
Messages over whichever MPI is loaded, and collectives in shared memory. Nothing here blocks for long.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Call:
    """What a rank is about to do; all ranks must mean the same."""

    def __init__(self, name: str, count: int, dtype: int, root: int) -> None:
        """dtype: index in buffers.DTYPES. root: -1 if there is none."""

class Operation:
    """Something under way that depends on other ranks."""

    def wait(self, seconds: float, nap_s: float, oversubscribed: bool) -> bool:
        """
        Advance for `seconds` at most; true when done. nap_s: 0 spins, else sleep so long between looks at nothing new.
        """

    def wait_among(self, seconds: float, nap_s: float, oversubscribed: bool, others: Sequence[Operation]) -> bool:
        """
        `wait`, in which a list of other operations is advanced as well; what they raise, they raise again.
        """

    @property
    def progress(self) -> int:
        """Grows whenever a part has been done."""

    def calls(self) -> list[tuple[str, int, int, int]]:
        """
        (name, count, index in buffers.DTYPES, root or -1) that every rank meant, if they disagreed; else [].
        """

    def missing(self) -> list[int]:
        """The ranks that it waits for, as far as that is known."""

class Task(Operation):
    """
    An operation in the background. A rank that waits for it also advances it.
    """

    @property
    def ended(self) -> bool: ...

    @property
    def t0_ns(self) -> int: ...

    @property
    def t1_ns(self) -> int: ...

    def transfers(self) -> list[tuple[str, int, int, int, int]]:
        """Those of the ring, if there was one; after the end."""

class Progress:
    """
    A thread that advances tasks, one after the other, and needs no Python.
    """

    def __init__(self) -> None: ...

    def all_reduce_in_memory(self, group: object, x: object) -> Task:
        """
        Append an all_reduce of a ShmGroup that nobody else uses until it has ended.
        """

    def all_reduce_by_messages(self, group: object, call: Call, x: object, segment: int, traced: bool) -> Task:
        """
        Append a ring all_reduce, for which all ranks first compare `call`; see Ring.
        """

    def stop(self) -> bool:
        """
        End the thread. Tasks that have not ended keep their memory as long as this lives; true if MPI may still write to that.
        """

class MpiError(RuntimeError):
    pass

class Mpi:
    """The MPI library that mpi4py has loaded."""

    def __init__(self, loaded_by: str, rank: int, constants: dict) -> None: ...

class Group:
    """A communicator and its inner duplicate, by their handles."""

    def __init__(self, mpi: Mpi, comm: int, inner: int, rank: int, size: int) -> None: ...

    @property
    def comm(self) -> int: ...

    @property
    def inner(self) -> int: ...

class mpi:
    """
    The MPI library's own collectives, which block: no signal reaches them.
    """

    @staticmethod
    def all_reduce(group: Group, x: object, out: object) -> None: ...

    @staticmethod
    def reduce_scatter(group: Group, x: object, out: object) -> None: ...

    @staticmethod
    def all_gather(group: Group, x: object, out: object) -> None: ...

    @staticmethod
    def all_to_all(group: Group, x: object, out: object) -> None: ...

    @staticmethod
    def broadcast(group: Group, x: object, root: int) -> None: ...

    @staticmethod
    def reduce(group: Group, x: object, out: object | None, root: int) -> None: ...

    @staticmethod
    def gather(group: Group, x: object, out: object | None, root: int) -> None: ...

    @staticmethod
    def scatter(group: Group, x: object | None, out: object, root: int) -> None: ...

class Message(Operation):
    """One message under way. Its tensor must be kept until it is done."""

    @property
    def nbytes(self) -> int: ...

    @property
    def sent(self) -> tuple[int, int] | None:
        """
        (count, index in buffers.DTYPES) of what had been sent, if it was not what was expected; else None.
        """

    def cancel(self) -> bool:
        """Give up; true when MPI will not touch the tensor again."""

def send(work: object, group: Group, x: object, dst: int) -> None:
    """Begin to send `x`, as `work.message`. `work` keeps `x` and `group`."""

def receive(work: object, group: Group, x: object, src: int) -> None:
    """
    Begin to receive into `x`, as `work.message`. `work` keeps `x` and `group`.
    """

class Consensus(Operation):
    """All ranks exchange their calls, and a few bytes, through MPI."""

    def __init__(self, group: Group, call: Call, note: bytes) -> None: ...

    def notes(self) -> list[bytes]: ...

class Duplicates(Operation):
    """Two duplicates of a communicator in the making."""

    def __init__(self, mpi: Mpi, comm: int) -> None: ...

    @property
    def first(self) -> int: ...

    @property
    def second(self) -> int: ...

class Rendezvous(Operation):
    """Some ranks wait until all of them are here."""

    def __init__(self, group: Group, ranks: Sequence[int], number: int) -> None: ...

    def give_up(self, seconds: float) -> bool:
        """
        Stop waiting; true if that is too late, because the others go on and this rank has to.
        """

class Ring(Operation):
    """
    A ring all-reduce under way, in segments. Its tensor must be kept until it is done.
    """

    def __init__(self, group: Group, x: object, segment: int, traced: bool) -> None:
        """segment: bytes of a message at most. traced: keep `transfers`."""

    @property
    def nbytes(self) -> int: ...

    def transfers(self) -> list[tuple[str, int, int, int, int]]:
        """
        (op, peer, nbytes, t0_ns, t1_ns) of each step's chunk sent and received; after completion, if traced.
        """

class SharedMemory:
    """Memory of all ranks of a machine, freed with the last of them."""

    @staticmethod
    def create(nbytes: int) -> SharedMemory: ...

    @staticmethod
    def open(name: str, nbytes: int) -> SharedMemory: ...

    def reserve(self, offset: int, nbytes: int) -> None: ...

    def seal(self) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def address(self) -> int: ...

    def array(self, offset: int, nbytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """The bytes as a NumPy array, which keeps the memory mapped."""

class ShmGroup(Operation):
    """Ranks that share memory. Every collective returns true when done."""

    def __init__(self, memory: SharedMemory, rank: int, size: int, takes_turns: bool = False) -> None: ...

    @staticmethod
    def nbytes_for(size: int) -> int: ...

    @staticmethod
    def seats_nbytes_for(size: int) -> int: ...

    def add(self, memory: SharedMemory, part: int) -> None: ...

    def all_reduce(self, x: object, seconds: float, oversubscribed: bool) -> bool: ...

    def broadcast(self, x: object, root: int, seconds: float, oversubscribed: bool) -> bool: ...

    def all_gather(self, x: object, out: object, seconds: float, oversubscribed: bool) -> bool: ...

    def reduce_scatter(self, x: object, out: object, seconds: float, oversubscribed: bool) -> bool: ...

    def all_to_all(self, x: object, out: object, seconds: float, oversubscribed: bool) -> bool: ...

    def reduce(self, x: object, out: object | None, root: int, seconds: float, oversubscribed: bool) -> bool: ...

    def gather(self, x: object, out: object | None, root: int, seconds: float, oversubscribed: bool) -> bool: ...

    def scatter(self, x: object | None, out: object, root: int, seconds: float, oversubscribed: bool) -> bool: ...

    @staticmethod
    def path(size: int, takes_turns: bool) -> str:
        """
        How this process, as rank 0 of so many, has found that tensors of any origin are best staged.
        """

    @staticmethod
    def forget(size: int) -> None:
        """Forget what was measured, and measure again. For tests."""

    @staticmethod
    def play(size: int, ns: int) -> None:
        """
        Play a state of the machine in which probes take so long; 0: the true one. For tests.
        """

    def barrier(self, call: Call, seconds: float, oversubscribed: bool) -> bool: ...

    @property
    def nbytes(self) -> int:
        """Of the tensor of the last collective."""

def dtypes() -> list:
    """
    (name, bytes, what to do instead of a sum) of each dtype, as buffers.TABLE.
    """

def instructions() -> list[str]:
    """
    The sets of instructions that sums can be taken with here, the one in use first.
    """

class Sum:
    """
    Adds the tensors `sources` and stores the sum to all `destinations`, at every call.
    """

    def __init__(self, instructions: str, sources: list, destinations: list) -> None: ...

    def __call__(self) -> None: ...
