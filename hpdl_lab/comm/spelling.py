"""Calls of a communicator as mpi4py and torch.distributed spell them: errors say how they are spelled here."""

import re

from ..plain_source import plain_signature

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


class Elsewhere:
    """An attribute that other libraries have: to read it raises an AttributeError that says how it is spelled here."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, comm: object, kind: type) -> object:
        text = f"{kind.__name__!r} object has no attribute {self.name!r}; here it is {spelled_here(kind, self.name)}"
        raise AttributeError(text, name=self.name, obj=comm)


def add_elsewhere(comm: type) -> type:
    """Give the class `comm` the attributes that answer for other spellings.

    Each by itself, since a class with `__getattr__` looks up all its attributes six times as slowly.
    """
    for name in (*NAMES, *OTHERS):
        words = {name, name.replace("_", "")}
        if name in ("rank", "size", "world_size"):
            words.add(f"get_{name}")
        for word in words | {word.capitalize() for word in words} | {name.title().replace("_", "")}:
            if word not in NAMES:
                setattr(comm, word, Elsewhere(word))
    return comm


def spelled_here(comm: type, name: str) -> str:
    """Return how `comm` spells what elsewhere is `name`: "comm.send(x, dst)" for "Send"; "" if nothing is known."""
    here = PLAIN.get(name.lower().replace("_", "").removeprefix("get"))
    if here is None:
        return ""
    if (method := getattr(comm, here, None)) is None:
        return f"comm.{here}"
    return f"comm.{here}({', '.join(map(str, list(plain_signature(method).parameters.values())[1:]))})"


def name_the_call(error: Exception, comm: type) -> None:
    """Add to an `error` about the arguments of a call of a communicator which arguments it has."""
    found = re.match(rf"{CLASSES}\.(\w+)(\(\) .*)", str(error)) if type(error) is TypeError else None
    if found and (here := spelled_here(comm, found[1])):
        error.args = (f"comm.{found[1]}{found[2]}; here it is {here}",)
