"""Command line and environment of engines on the nodes of a Slurm job, each below its outpost."""

import os
import sys

from .. import features
from .launch import THREAD_VARIABLES
from .session_dir import profile_dir

# Of the request for the job. The one task by which mpiexec starts its daemon on a node must not be held to one task's
# share of the node: all ranks of the node are its children.
REQUEST_OF_ONE_TASK = ("SLURM_CPU_BIND", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK")
BOOTSTRAP = {
    "SLURM_CPU_BIND": "none",
    "SLURM_MPI_TYPE": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": "node:oversubscribe",  # Open MPI would start all on the first node
}

# As between emulated hosts (launch.BETWEEN_HOSTS), and for the same reason; who knows better sets them in the notebook.
BETWEEN_NODES = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_MAX_SAVED": str(10**6),
}
INTERFACES = ("FI_TCP_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")  # MPICH, Open MPI, others
RANKS_HERE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def argv(file, step, n):
    """mpiexec with `n` outposts. Raises Missing where there is no mpiexec."""
    return [features.mpiexec(), "-n", str(n), sys.executable, "-m", "hpdl_lab.engines.outpost", file, str(step), str(n)]


def launch_environment(interface):
    """The environment of mpiexec in the job; see `environment` for interface."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(REQUEST_OF_ONE_TASK)}
    if interface is not None:
        env.setdefault("HYDRA_IFACE", interface)  # by its address: nodes need not know each other by name
    return env | features.launch_environment() | BOOTSTRAP


def rank():
    """The MPI rank of this process, before MPI has started in it; None where no mpiexec has started it."""
    return next((int(os.environ[name]) for name in RANK if name in os.environ), None)


def environment(path, n, node, interface):
    """The environment of an engine on `node`, of `n`, with its sockets in the folder `path` of that node.

    interface: the network interface by which this node is joined to the others; None where it has no name.
    """
    here = next((int(os.environ[name]) for name in RANKS_HERE if name in os.environ), 1)
    cores = min(features.cores(), int(os.environ.get("SLURM_CPUS_ON_NODE", features.cores())))  # of the job
    threads = str(max(1, cores // here))
    preset = dict.fromkeys(THREAD_VARIABLES, threads) | BETWEEN_NODES
    if interface is not None:
        preset |= dict.fromkeys(INTERFACES, interface)
    own = {
        "HPDL_SESSION": path,
        "HPDL_KEEPER": str(os.getpid()),
        "HPDL_SIZE": str(n),
        "HPDL_HOST_ID": node,
        "IPP_PROFILE_DIR": profile_dir(path),
        "IPYTHONDIR": os.path.join(path, "ipython"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    return preset | os.environ | own


def interface_of(address):
    """The name of the network interface that has `address`; None where none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address == known.address.partition("%")[0] for known in addresses):
            return name
    return None
