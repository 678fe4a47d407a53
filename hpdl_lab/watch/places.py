"""The place of a thread of a script: the line of the author's own code, and the call into torch.distributed there."""

import linecache
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NotRequired, TypeAlias, TypedDict

LIBRARIES = tuple({*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))})
LIBRARIES += (str(Path(__file__).resolve().parent.parent),)
COMMUNICATION = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")  # files of torch.distributed
WRITERS = tuple(map(os.path.normpath, ("torch/serialization", "numpy/", "pandas/", "PIL/", "safetensors/", "yaml/")))
PEERS = ("dst", "src", "group_dst", "group_src")
TENSORS = ("tensor", "output", "output_tensor", "input", "input_tensor")
MEETING = ("init_process_group", "init_device_mesh", "new_group")

Place: TypeAlias = tuple[str, int, str]  # file, line, its text
NotedPlace: TypeAlias = Place | list[Any]  # a list once it has been through JSON


class CommCall(TypedDict):
    """A call into communication. number: tells it apart from others of the same name. tensor: [shape, dtype]."""

    name: str
    number: NotRequired[int]
    peer: NotRequired[int]
    tensor: NotRequired[list[object]]


@cache
def is_authors(filename: str) -> bool:
    """Return True if a file is by the script's author: not of Python, of an installed package, or of this one."""
    if filename.startswith(("<", *LIBRARIES)) or "site-packages" in filename:
        return False
    folder = Path(filename).parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return next(folder.glob("*.dist-info"), None) is None  # a folder that pip has installed into


def place_of(frame: FrameType | None) -> Place | None:
    """Return the line nearest to `frame`, outward, that is of the author; None if there is none."""
    while frame is not None:
        if is_authors(frame.f_code.co_filename):
            return line_at(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def writer_of(frame: FrameType | None) -> Place | None:
    """Return the author's line that writes a file, itself or through WRITERS; None if a library does so by itself."""
    while frame is not None:
        name = frame.f_code.co_filename
        if is_authors(name):
            return line_at(name, frame.f_lineno)
        if "site-packages" in name and not any(writer in name for writer in WRITERS):
            return None
        frame = frame.f_back
    return None


def line_at(filename: str, line: int) -> Place:
    text = linecache.getline(filename, line).strip()
    return os.path.abspath(filename), line, text.partition("  #")[0]


def caller_is_authors(depth: int = 2) -> Place | None:
    """Return the place of a hooked function's caller if that is the author's own code, and None otherwise."""
    frame = sys._getframe(depth)
    return line_at(frame.f_code.co_filename, frame.f_lineno) if is_authors(frame.f_code.co_filename) else None


def call_of(frame: FrameType | None) -> CommCall | None:
    """Return the outermost call into communication that the thread of `frame` is in, or None.

    {"name": "recv", "peer": 1, "tensor": [[4], "torch.float32"]}: as its arguments have it.
    """
    found = None
    while frame is not None and not is_authors(frame.f_code.co_filename):
        code = frame.f_code
        if code.co_filename.endswith(COMMUNICATION) and code.co_name != "wrapper":
            found = frame
        frame = frame.f_back
    return _described(found) if found else None


def _described(frame: FrameType) -> CommCall:
    arguments = frame.f_locals
    call: CommCall = {"name": frame.f_code.co_name.strip("_")}
    for name in PEERS:
        if isinstance(arguments.get(name), int):
            call["peer"] = arguments[name]
    for name in TENSORS:
        x = arguments.get(name)
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            call["tensor"] = [list(x.shape), str(x.dtype)]
            break
    return call
