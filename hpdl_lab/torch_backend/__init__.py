"""`import hpdl_lab.torch_backend; dist.init_process_group("hpdl")`: PyTorch's DDP on this package's collectives.

    torchrun --nproc-per-node 2 train.py
    mpiexec -n 2 python train.py
    lab.run(f)                                with process_group(comm, "hpdl"): DDP(model) ...

torch's collectives run in the background of a communicator (Comm.background), in the order in which it is asked for:
compiled, in shared memory, if all ranks are on one machine. Under mpiexec messages travel by MPI, otherwise by gloo.
Waits obey Ctrl-C and the timeout of init_process_group, and a rank that dies is named.
"""

import torch.distributed as dist

from ..comm.torch.group import process_group
from .group import HpdlGroup, create, tell_torch_of_mpiexec
from .work import HpdlWork

__all__ = ["HpdlGroup", "HpdlWork", "process_group"]

dist.Backend.register_backend("hpdl", create, extended_api=True, devices=["cpu"])
tell_torch_of_mpiexec()
