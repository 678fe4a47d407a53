"""The process group of the backend "hpdl": each of torch's collectives is begun in the background of a communicator.

main thread   backward: grad grad [bucket 1: allreduce] grad grad [bucket 2: allreduce] ... | wait 1, 2   | DDP's end
background                        all_reduce 1 ........           all_reduce 2 .............
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import world
from ..comm.base import Comm, Work
from ..comm.buffers import ADDED, dtype_name
from ..comm.hosts import SESSION
from ..comm.launcher import started_by
from ..comm.mpi.session import session_of_this_process
from ..comm.real import RealComm
from ..comm.torch.backward import before_backward_ends
from ..comm.torch.group import LOOPBACK_ADDRESS, gloo_on
from ..comm.torch.plain import plain_torch
from ..comm.torch.transport import from_process_group
from . import moves
from .work import HpdlWork, MessageWork, labelled

USE_GLOO = 'use gloo for this: dist.new_group(backend="gloo")'


class Rooted(Protocol):
    """torch's options of a collective with a root."""

    rootRank: int


class NewGroup(Protocol):
    """The fields of a new process group, as torch asks for it."""

    store: dist.Store
    group_rank: int
    group_size: int
    timeout: timedelta
    global_ranks_in_group: Sequence[int]  # [] of the default group


class HpdlGroup(dist.ProcessGroup):
    """A process group of the ranks of `comm`, any communicator. owned: it is closed with the group.

    C++ calls the methods, with positions and not with names.
    """

    group_name = group_desc = ""  # torch's own are for groups of its own back ends

    def __init__(self, comm: Comm, owned: bool = False) -> None:
        super().__init__(comm.rank, comm.size)  # pyrefly: ignore[bad-argument-type, missing-argument]
        self.comm, self.owned = comm, owned
        self._begun: list[HpdlWork] = []  # without what is known to have ended

    def getBackendName(self) -> str:
        return "hpdl"

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def __repr__(self) -> str:
        return f"<process group hpdl: rank {self.comm.rank} of {self.comm.size}>"

    def _start(self, tensors: list[Tensor], opts: object, function: Callable[..., object], *args: object) -> HpdlWork:
        """Begin `function(comm, *args)`; after it `tensors` hold the result. Return its HpdlWork.

        Also what torch waits for at once goes to the background: another rank may ask for the same asynchronously.
        """
        work = HpdlWork(tensors)
        self._begun = [begun for begun in self._begun if not begun.get_future().done()]
        self._begun.append(work)
        with labelled("hpdl:begin"):
            self._begin(work, opts, function, *args)
        return work

    def _begin(self, work: HpdlWork, opts: object, function: Callable[..., object], *args: object) -> None:
        if torch._C._current_graph_task_id() != -1:  # within backward: what is compiled needs no Python meanwhile
            work.under_way = self.comm.background(function, *args)
            before_backward_ends(work.complete)
        elif not getattr(opts, "asyncOp", True):
            work.under_way = self.comm.background(function, *args)
        else:
            work.under_way = self.comm.background(work.run, function, *args)

    # -- sums -------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> HpdlWork:
        name = _name_of(opts)  # once: after backward, whose data fills the caches, every line of Python takes long
        if name in moves.FOLDS:
            return self._start(tensors, opts, moves.fold_each, tensors, name)
        _require_sum("all_reduce", tensors, name)
        if len(tensors) == 1 and tensors[0].is_contiguous():
            return self._start(tensors, opts, moves.all_reduce, tensors[0].detach())
        return self._start(tensors, opts, moves.all_reduce_each, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: object = None) -> HpdlWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Rooted) -> HpdlWork:
        _require_sum("reduce", tensors, _name_of(opts))
        return self._start(tensors, opts, moves.reduce, tensors[0], opts.rootRank)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: object = None) -> HpdlWork:
        _require_sum("reduce_scatter", outputs, _name_of(opts))
        return self._start(outputs, opts, moves.reduce_scatter, outputs[0], inputs[0])

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: object = None) -> HpdlWork:
        _require_sum("reduce_scatter", [x], _name_of(opts))
        return self._start([output], opts, moves.reduce_scatter, output, [x])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> HpdlWork:
        _require_sum("reduce_scatter", inputs, _name_of(opts))
        return self._start(outputs, opts, moves.each(moves.reduce_scatter), outputs, [[x] for x in inputs])

    # -- copies -----------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Rooted) -> HpdlWork:
        return self._start(tensors, opts, moves.broadcast_each, tensors, opts.rootRank)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> HpdlWork:
        return self._start(outputs[0], opts, moves.all_gather, outputs[0], inputs[0])

    def all_gather_single(self, output: Tensor, x: Tensor, opts: object = None) -> HpdlWork:
        return self._start([output], opts, moves.all_gather, [output], x)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> HpdlWork:
        return self._start(outputs, opts, moves.each(moves.all_gather), [[output] for output in outputs], inputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Rooted) -> HpdlWork:
        rows = outputs[0] if outputs else []
        return self._start(rows, opts, moves.gather, rows, inputs[0], opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Rooted) -> HpdlWork:
        rows = inputs[0] if inputs else []
        return self._start(outputs, opts, moves.scatter, outputs[0], rows, opts.rootRank)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> HpdlWork:
        return self._start(outputs, opts, moves.all_to_all, outputs, inputs)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_rows: list[int], input_rows: list[int], opts: object = None
    ) -> HpdlWork:
        """Start moving rows between all ranks. output_rows, input_rows: the rows of each rank; [] for equal parts."""
        if not output_rows and not input_rows:
            return self._start([output], opts, moves.all_to_all_single, output, x)
        even = [len(output) // self.comm.size], [len(x) // self.comm.size]
        outputs = list(output.split(list(output_rows) or even[0] * self.comm.size))
        return self.alltoall(outputs, list(x.split(list(input_rows) or even[1] * self.comm.size)), opts)

    # -- messages and meetings --------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> MessageWork:
        return self._message(self.comm.isend, tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> MessageWork:
        return self._message(self.comm.irecv, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> None:
        raise NotImplementedError(f'the backend "hpdl" receives from one rank, dist.recv(x, src=...); or {USE_GLOO}')

    def _message(self, post: Callable[[Tensor, int], Work], tensors: list[Tensor], peer: int, tag: int) -> MessageWork:
        if tag != 0:
            raise NotImplementedError(f'messages of the backend "hpdl" have no tags, got tag={tag}; or {USE_GLOO}')
        if not tensors[0].is_contiguous():
            raise ValueError(f"a message of shape {tuple(tensors[0].shape)} is not contiguous: use x.contiguous()")
        work = MessageWork(tensors)
        work.under_way = post(moves.flat_memory(tensors[0]), peer)
        return work

    def barrier(self, opts: object = None) -> HpdlWork:
        return self._start([], opts, moves.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks: it ends at the group's deadline and names all ranks that have not come."""
        self.barrier().wait()

    # -- end --------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End what is under way, for dist.destroy_process_group()."""
        for work in self._begun:  # some may have been waited for by their future alone
            if work.exception() is not None:
                break
        self.abort()

    def abort(self) -> None:
        self._begun = []
        if self.owned and isinstance(self.comm, RealComm):
            self.comm.close()

    # How torch before 2.13 calls them
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _name_of(opts: object) -> str:
    """Return how elements are put together: "SUM", "MAX", ..."""
    asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    return str(getattr(asked, "op", asked)).rpartition(".")[2]


def _require_sum(op: str, tensors: list[Tensor], name: str) -> None:
    """Raise NotImplementedError, ValueError unless `tensors` are to be added, as `name` of name_of says, and can be."""
    if name != "SUM":
        more = f", and {', '.join(moves.FOLDS)}" if op == "all_reduce" else ""
        remedy = "multiply first, and add" if name == "PREMUL_SUM" else USE_GLOO
        raise NotImplementedError(f'{op} of the backend "hpdl" adds (ReduceOp.SUM){more}; it has no {name}: {remedy}')
    for x in tensors:
        if dtype_name(x.dtype) not in ADDED:
            near = "torch.float32" if x.is_floating_point() else "torch.int64"
            remedy = USE_GLOO if x.dtype == torch.bool else f"nor does gloo; convert it, x.to({near})"
            raise ValueError(f"{op} adds {', '.join(ADDED)}, not {dtype_name(x.dtype)}: {remedy}")


MEETING = 30.0  # s: for all ranks of mpiexec to import this


def create(options: NewGroup, comm: object) -> HpdlGroup:
    """Return a new process group, for torch. Collective over its ranks.

    Args:    options: of torch. comm: pg_options of init_process_group, a communicator of the same ranks or None.
    """
    deadline = options.timeout.total_seconds()
    of_the_run = plain_torch().comm  # None but in lab.run
    if comm is None and of_the_run is not None and of_the_run.size == options.group_size:
        comm = None if options.global_ranks_in_group else of_the_run
    if isinstance(comm, Comm):
        group = HpdlGroup(comm)
    elif comm is not None:
        raise ValueError(f'pg_options of the backend "hpdl" is a communicator or None, not a {type(comm).__name__}')
    elif started_by() == "mpi" and not options.global_ranks_in_group and SESSION not in os.environ:
        group = HpdlGroup(world(deadline), owned=True)
    else:
        gloo = gloo_on(options.store, options.group_rank, options.group_size, options.timeout)
        group = HpdlGroup(from_process_group(cast(dist.ProcessGroup, gloo), deadline), owned=True)
    found, asked = (group.comm.rank, group.comm.size), (options.group_rank, options.group_size)
    if found != asked:
        group.abort()
        raise ValueError(f"rank {asked[0]} of {asked[1]} was asked for, but this is rank {found[0]} of {found[1]}")
    return group


def tell_torch_of_mpiexec(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set, under mpiexec, the environment as torchrun would, unless it is set. Collective over all ranks.

    init_process_group reads it, and rank 0 opens its store on that port. Engines have other ranks in each run.
    """
    if started_by(environment) != "mpi" or "RANK" in environment or SESSION in environment:
        return
    session = session_of_this_process()
    with world(MEETING) as comm:
        mine = ""
        if comm.rank == 0:
            near = comm.node_size == comm.size
            mine = f"{LOOPBACK_ADDRESS if near else socket.gethostname()} {_free_port()}"
        address, port = comm.agree("torch", note=mine.encode())[0].decode().split()
    info = {"RANK": session.rank, "WORLD_SIZE": session.size, "MASTER_ADDR": address, "MASTER_PORT": port}
    environment.update({name: str(value) for name, value in info.items()})


def _free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
