"""The collectives of this rank: from torch's flight recorder, and of messages and the back end "hpdl" from our own.

Torch records what its own back ends begin, also what DDP and FSDP begin in C++, but neither gloo's messages nor what a
process group in Python does.
"""

from __future__ import annotations

import pickle
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, TypeVar, cast

from .places import NotedPlace, Place, is_authors, line_at, place_of

if TYPE_CHECKING:
    from torch.distributed import Work

    from ..torch_backend.group import HpdlGroup

T = TypeVar("T")

MOST = 5000
HPDL = {  # methods of the process group "hpdl": the name of the collective, which arguments hold tensors
    "allreduce": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", 0),
}
DTYPES = {  # as the flight recorder calls them: as torch does
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


class Begun(TypedDict):
    """A collective or a message that was begun. sizes: shapes that go in; out: shapes that come out."""

    op: str  # "all_reduce"
    group: str  # its name
    seq: int  # its number in the group
    sizes: list[list[int]]
    out: list[list[int]]
    dtypes: list[str]  # "float32"
    time_ns: int  # when it was begun
    place: NotedPlace | None  # the author's line
    p2p: NotRequired[bool]  # it is a message
    peer: NotRequired[object]  # of a message


class Entry(Begun):
    done: bool  # it is over


class _Own(Begun):
    done: Callable[[], bool] | bool


class _Frame(TypedDict):
    """A line of a stack as the flight recorder has it."""

    filename: str
    line: int


OURS: deque[_Own] = deque(maxlen=MOST)
NUMBERS: Counter[str] = Counter()  # by group: how many OURS has had


def record_call(
    op: str,
    group: str,
    tensors: object,
    place: Place | None,
    done: Callable[[], bool] | bool,
    p2p: bool = False,
    peer: object = None,
) -> None:
    """Keep an entry of our own. done: it is over, or a function that returns that. p2p: a message, of `peer`."""
    flat = [x for x in _flattened(tensors) if hasattr(x, "dtype")]
    sizes = [list(x.shape) for x in flat]
    dtypes = [str(x.dtype).removeprefix("torch.") for x in flat]
    number = NUMBERS[group] = NUMBERS[group] + 1
    entry: _Own = {
        "op": op,
        "group": group,
        "seq": number,
        "sizes": sizes,
        "out": sizes,
        "dtypes": dtypes,
        "time_ns": time.time_ns(),
        "place": place,
        "done": done,
    }
    OURS.append({**entry, "p2p": True, "peer": peer} if p2p else entry)


def _flattened(tensors: object) -> list[Any]:
    return [x for part in tensors for x in _flattened(part)] if isinstance(tensors, list | tuple) else [tensors]


def entries() -> list[Entry]:
    """Return all that is known, in the order in which it was begun."""
    own = [cast("Entry", entry | {"done": _is_done(entry["done"])}) for entry in list(OURS)]
    return sorted([*recorded_by_torch(), *own], key=lambda entry: entry["time_ns"])


def _is_done(done: Callable[[], bool] | bool) -> bool:
    return done() if callable(done) else done


def recorded_by_torch() -> list[Entry]:
    """Return the entries of torch's flight recorder."""
    c10d = getattr(sys.modules["torch"]._C, "_distributed_c10d", None)
    dumps = [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]
    found = [entry for dump in dumps for entry in pickle.loads(dump(True, True, False)).get("entries", [])]
    return [
        {
            "op": entry["profiling_name"].rpartition(":")[2],
            "group": entry["process_group"][0],
            "seq": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            "sizes": entry["input_sizes"],
            "out": entry["output_sizes"],
            "dtypes": [DTYPES.get(name, name) for name in (*entry["input_dtypes"], *entry["output_dtypes"])],
            "time_ns": entry["time_created_ns"],
            "done": entry["retired"] or entry["state"] == "completed",
            "place": _place_in(entry["frames"]),
            "p2p": entry["is_p2p"],
        }
        for entry in found
    ]


def _place_in(frames: list[_Frame]) -> Place | None:
    """Return the innermost line of the author in a stack."""
    for frame in frames:
        if is_authors(frame["filename"]):
            return line_at(frame["filename"], frame["line"])
    return None


def message_recorded(function: Callable[..., T]) -> Callable[..., T]:
    """Return send, recv, isend or irecv of torch.distributed such that its messages are recorded."""

    @wraps(function)
    def wrapper(tensor: object, *args: object, **named: object) -> T:
        peer = args[0] if args else named.get("dst", named.get("src", named.get("group_dst", named.get("group_src"))))
        record_call(function.__name__, "messages", [tensor], place_of(sys._getframe(1)), True, p2p=True, peer=peer)
        return function(tensor, *args, **named)

    return wrapper


def install(folder: Path) -> None:
    """Record what process groups of the back end "hpdl" begin."""
    from ..torch_backend.group import HpdlGroup

    for name, (op, which) in HPDL.items():
        setattr(HpdlGroup, name, _hpdl_recorded(getattr(HpdlGroup, name), op, which))


def _over(reference: weakref.ref[Work]) -> Callable[[], bool]:
    """Return a function that returns True once a work is over. It does not keep the work, which holds tensors."""

    def is_over() -> bool:
        work = reference()
        return work is None or bool(work.get_future().done())

    return is_over


def _hpdl_recorded(method: Callable[..., Work], op: str, which: int) -> Callable[..., Work]:
    @wraps(method)
    def wrapper(self: HpdlGroup, *args: object, **named: object) -> Work:
        place = place_of(sys._getframe(1))
        work = method(self, *args, **named)
        tensors = args[which] if len(args) > which and op != "barrier" else []
        record_call(op, self.group_name or "0", tensors, place, _over(weakref.ref(work)))
        return work

    return wrapper
