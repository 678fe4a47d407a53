"""Tensors and arrays as plain memory: address, count, dtype, and the sentence for each that cannot be sent.

torch is looked at only if it is already loaded, so that engines can answer before their import of torch has ended.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import TypeIs

    Array: TypeAlias = Tensor | np.ndarray  # what a message carries

ArrayT = TypeVar("ArrayT", bound="Tensor | np.ndarray")  # a call that is given the one returns the same

ADD_FLOAT8 = "gather it and add in float32, comm.all_gather(x).float().sum(0)"
# Every dtype that is moved: its bytes, and what to do instead of a sum if there is none. At most 16, whose order is
# part of the wire format: a message's tag carries the index of its dtype (csrc/mpi.cpp).
TABLE: dict[str, tuple[int, str]] = {
    "float32": (4, ""),
    "float64": (8, ""),
    "bfloat16": (2, ""),
    "float16": (2, ""),
    "int32": (4, ""),
    "int64": (8, ""),
    "uint8": (1, ""),
    "bool": (1, "gather it as uint8 and take the maximum, comm.all_gather(x.to(torch.uint8)).amax(0)"),
    "int8": (1, ""),
    "int16": (2, ""),
    "uint16": (2, "add it as int32, comm.all_reduce(x.to(torch.int32))"),
    "complex64": (8, ""),
    "complex128": (16, ""),
    "float8_e4m3fn": (1, ADD_FLOAT8),
    "float8_e5m2": (1, ADD_FLOAT8),
}
DTYPES = tuple(TABLE)
ITEMSIZE = {name: nbytes for name, (nbytes, _) in TABLE.items()}
ADDED = tuple(name for name, (_, instead) in TABLE.items() if not instead)  # that sums know
SUMS = "reduce", "reduce_scatter"  # how the names of the collectives end that add


class Extent(NamedTuple):
    count: int  # type: ignore[assignment]
    dtype: str
    nbytes: int


class Buffer(NamedTuple):
    address: int
    count: int  # type: ignore[assignment]
    dtype: str
    nbytes: int


def is_tensor(x: object) -> TypeIs[Tensor]:
    """Return True for a torch tensor, without importing torch."""
    if type(x) is np.ndarray:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


@functools.cache  # NumPy and torch put the name together each time
def dtype_name(dtype: torch.dtype | np.dtype | str) -> str:
    """ "float32" for the dtype of an array or of a tensor."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def buffer_of(x: Array, verb: str = "send", device: str = "cpu") -> Buffer:
    """Return the memory of `x`, a contiguous tensor on `device` or, for the CPU, an array.

    Raises ValueError or TypeError that says what to do. verb: a collective that adds refuses more dtypes.
    """
    extent = extent_of(x, verb, device)
    return Buffer(x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr(), *extent)


def extent_of(x: Array, verb: str = "send", device: str = "cpu") -> Extent:
    """Return (count, dtype, bytes) of `x`, which may be sent: what `buffer_of` says, without the address."""
    if isinstance(x, np.ndarray):
        dtype = dtype_name(x.dtype)
        if not x.flags.c_contiguous:
            raise ValueError(f"cannot {verb} a non-contiguous array of shape {x.shape}: use np.ascontiguousarray(x)")
        if not x.dtype.isnative:
            raise ValueError(f"cannot {verb} {dtype} in the byte order of other machines: use x.astype({dtype!r})")
        count = x.size
    elif is_tensor(x):
        if str(x.device) != device if device != "cpu" else not x.is_cpu:
            moves = "this communicator moves CPU memory: use x.cpu()" if device == "cpu" else f"use x.to({device!r})"
            raise ValueError(f"cannot {verb} a tensor on {x.device}: {moves}")
        if x.is_nested or str(x.layout) != "torch.strided":
            kind = "nested" if x.is_nested else str(x.layout)[6:]
            raise ValueError(f"cannot {verb} a {kind} tensor, which is not one piece of memory")
        if not x.is_contiguous():
            raise ValueError(
                f"cannot {verb} a non-contiguous tensor of shape {tuple(x.shape)}, strides {x.stride()}: "
                "use x.contiguous()"
            )
        if x.is_neg():  # its memory holds the values with the other sign
            raise ValueError(f"cannot {verb} a tensor that is a negated view: use x.resolve_neg()")
        if x.is_conj():
            raise ValueError(f"cannot {verb} a tensor that is a conjugated view: use x.resolve_conj()")
        dtype, count = dtype_name(x.dtype), x.numel()
    else:
        raise TypeError(f"cannot {verb} a {type(x).__name__}: a message is a torch tensor or a NumPy array")
    if dtype not in ITEMSIZE:
        raise ValueError(f"cannot {verb} dtype {dtype}: one of {', '.join(DTYPES)} is needed")
    if dtype not in ADDED and verb.endswith(SUMS):
        raise ValueError(f"cannot {verb} {dtype}, which has no sum: {TABLE[dtype][1]}")
    return _extent(count, dtype)


@functools.lru_cache(maxsize=4096)  # messages of one program have few lengths, and to put this together takes longer
def _extent(count: int, dtype: str) -> Extent:
    """Return the Extent of `count` elements."""
    return Extent(count, dtype, count * ITEMSIZE[dtype])


def to_numpy(x: Array) -> np.ndarray:
    """Return the values of a tensor, wherever it is, or of an array as an array; of a CPU tensor the same memory."""
    return x.detach().cpu().numpy() if is_tensor(x) else x


def synchronize(x: object) -> None:
    """Return when what has been asked of tensor `x` is done: a GPU works on when its caller has gone on."""
    if is_tensor(x) and x.device.type == "cuda":
        sys.modules["torch"].cuda.current_stream(x.device).synchronize()


def copy_of(x: ArrayT) -> ArrayT:
    """Return a copy of the values of `x` that no gradient flows through."""
    if isinstance(x, np.ndarray):
        return x.copy()
    return x.detach().clone() if x.requires_grad else x.clone()  # pyrefly: ignore[bad-return]


def copy_into(y: Array, x: Array) -> None:
    """y[...] = x for the same count and dtype, whatever the shapes; a tensor and an array may be mixed."""
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and x.shape == y.shape:
        y[...] = x
    elif is_tensor(y):
        source = x if is_tensor(x) else sys.modules["torch"].from_numpy(x)
        y = y.detach() if y.requires_grad else y
        if y.shape == source.shape:
            y.copy_(source)
        else:
            y.reshape(-1).copy_(source.reshape(-1))
    else:
        y.reshape(-1)[...] = x.numpy().reshape(-1) if is_tensor(x) else x.reshape(-1)


def payload_of(x: Array, nbytes: int) -> bytes | np.ndarray:
    """Return the values of `x`, whose `nbytes` may be sent, on their way: bytes, which cost a third of a new tensor."""
    return ctypes.string_at(x.data_ptr(), nbytes) if is_tensor(x) else x.copy()


def deliver(payload: bytes | np.ndarray, y: Array) -> None:
    """Put what `payload_of` made of a tensor or array into `y`, of the same count and dtype, which may be received."""
    if not isinstance(payload, bytes):
        copy_into(y, payload)
    elif is_tensor(y):
        ctypes.memmove(y.data_ptr(), payload, len(payload))
    else:
        y.reshape(-1)[...] = np.frombuffer(payload, y.dtype)


def new_like(x: ArrayT, shape: int | Sequence[int]) -> ArrayT:
    """Return an uninitialised tensor or array of `shape`, same kind and dtype as `x`."""
    if isinstance(x, np.ndarray):
        return np.empty(shape, x.dtype)  # pyrefly: ignore[bad-return]
    return x.new_empty(shape)  # pyrefly: ignore[bad-return]
