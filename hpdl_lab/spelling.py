"""Calls of a communicator as mpi4py and torch.distributed spell them: errors say how they are spelled here."""

import re

from .plain_source import plain_signature

NAMES = (
    *("rank", "size", "send", "recv", "isend", "irecv", "sendrecv", "barrier", "split"),
    *("broadcast", "gather", "scatter", "all_gather", "reduce", "all_reduce", "reduce_scatter", "all_to_all"),
)
OTHERS = {  # what is not one of NAMES but for capitals, underscores and "get"
    "world_size": "size",
    "ssend": "send",
    "bcast": "broadcast",
    "reduce_scatter_block": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
}
PLAIN = {name.replace("_", ""): here for name, here in ({name: name for name in NAMES} | OTHERS).items()}
CLASSES = r"\w*Comm"  # in which communicators define these


def explain_spelling(error: Exception, comm: type) -> None:
    """Add to `error`, which a call of a communicator of class `comm` has raised, how that call is spelled here."""
    if type(error) is AttributeError and isinstance(error.obj, comm):
        text, name = str(error), error.name or ""
    elif type(error) is TypeError and (found := re.match(rf"{CLASSES}\.((\w+)\(\) .*)", str(error))):
        text, name = f"comm.{found[1]}", found[2]
    else:
        return
    if here := PLAIN.get(name.lower().replace("_", "").removeprefix("get")):
        method = getattr(comm, here, None)
        arguments = f"({', '.join(map(str, list(plain_signature(method).parameters.values())[1:]))})" if method else ""
        error.args = (f"{text}; here it is comm.{here}{arguments}",)
