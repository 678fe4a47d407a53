"""Who takes part in a measurement: names become functions."""

from ..collectives import table
from ..features import gpu

PEERS = {  # of lab.measure: what the picture calls it, the all-reduce in collectives/native.py, who in rivals.py
    "compiled_ring": ("compiled ring", "ring_all_reduce", None),
    "shm": ("shared memory", "shm_all_reduce", "shared memory"),
    "mpi": ("MPI", "mpi_all_reduce", "MPI"),
    "gloo": ("gloo", "gloo_all_reduce", "gloo"),
}
GPU_PEERS = {  # the same on GPUs, where MPI and gloo go through the memory of the host
    "nccl": ("NCCL", "nccl_all_reduce", None),
    "shm": ("one pass", "shm_all_reduce", None),
    "mpi": ("MPI", "mpi_all_reduce", None),
    "gloo": ("gloo", "gloo_all_reduce", None),
}


def known_peers(where):
    """The compiled all-reduces of this kind of ranks."""
    return GPU_PEERS if where.device == "cuda" else PEERS


def peers(where, against, collective="all_reduce"):
    """{name: f(comm, x)} of what to race against; None: all of known_peers on engines, nothing on simulated ranks.

    Raises: ValueError for an unknown name, or for compiled code on simulated ranks.
    """
    if against is None:
        against = () if where.simulated else default_peers(where, collective)
    functions = {}
    for peer in (against,) if isinstance(against, str) or callable(against) else against:
        if callable(peer):
            functions[getattr(peer, "__name__", repr(peer))] = peer
        elif peer in table.names(collective):
            functions[peer] = table.find(peer, collective).function
        else:
            check_peer(peer, where, collective)
            name, function, rival = known_peers(where)[peer]
            functions[name] = compiled(function, rival, collective)
    return functions


def default_peers(where, collective):
    """The peers that can do `collective` here: shared memory needs ranks on one host, an old NCCL a GPU for each."""
    able = [name for name, (_, _, rival) in known_peers(where).items() if rival or collective == "all_reduce"]
    absent = {"shm": bool(where.link), "nccl": "nccl" in able and not gpu.nccl_serves(where.ranks)}
    return [name for name in able if not absent.get(name)]


def check_peer(peer, where, collective):
    """Raise ValueError where `peer` is no compiled peer, or cannot take part."""
    known = known_peers(where)
    if peer not in known:
        names = ", ".join(map(repr, [*table.names(collective), *known]))
        raise ValueError(f"no peer is called {peer!r}: there are {names}, and any f(comm, x)")
    if where.simulated:
        raise ValueError(f"{peer!r} is compiled code and needs engines: lab.start({where.ranks})")
    if collective != "all_reduce" and known[peer][2] is None:
        raise ValueError(f"{peer!r} knows only all_reduce, not {collective}")


def compiled(function, rival, collective):
    """The compiled function behind a line of PEERS."""
    from ..collectives import native, rivals  # compiled: simulated ranks must not need them

    return getattr(native, function) if collective == "all_reduce" else rivals.Rival(rival, collective)


def simulable(functions):
    """Those of {name: function} that simulated ranks can run: all but compiled code."""
    names = {name for peers in (PEERS, GPU_PEERS) for name, _, _ in peers.values()}
    return {name: function for name, function in functions.items() if name not in names}
