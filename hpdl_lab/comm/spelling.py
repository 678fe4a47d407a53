"""Calls of a communicator as mpi4py and torch.distributed spell them: errors say how they are spelled here."""

import re

from ..plain_source import plain_signature

NAMES = (
    *("rank", "size", "send", "recv", "isend", "irecv", "sendrecv", "barrier", "split"),
    *("broadcast", "gather", "scatter", "all_gather", "reduce", "all_reduce", "reduce_scatter", "all_to_all"),
)
OTHERS = {  # what is not one of NAMES but for capitals, underscores and "get"
    "worldsize": "size",
    "ssend": "send",
    "bcast": "broadcast",
    "reducescatterblock": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "allgatherintotensor": "all_gather",
    "alltoallsingle": "all_to_all",
}
PLAIN = {name.replace("_", ""): name for name in NAMES} | OTHERS
CLASSES = r"\w*Comm"  # in which communicators define these


def spelled_here(comm: type, name: str) -> str:
    """How the class `comm` calls what elsewhere is `name`: "comm.send(x, dst)" for "Send"; "" if nothing is known."""
    here = PLAIN.get(name.lower().replace("_", "").removeprefix("get"))
    if here is None:
        return ""
    if (method := getattr(comm, here, None)) is None:
        return f"comm.{here}"
    return f"comm.{here}({', '.join(map(str, list(plain_signature(method).parameters.values())[1:]))})"


def name_the_call(error: Exception, comm: type) -> None:
    """Where `error` says that a call of a communicator has other arguments, have it say which these are."""
    found = re.match(rf"{CLASSES}\.(\w+)(\(\) .*)", str(error)) if type(error) is TypeError else None
    if found and (here := spelled_here(comm, found[1])):
        error.args = (f"comm.{found[1]}{found[2]}; here it is {here}",)
