"""Messages between a notebook and an engine: pickles, with the memory of large arrays and tensors out of band.

That memory goes from the array to the socket, and from the socket to the array, without a copy in between
(https://peps.python.org/pep-0574). A message: kind, how many buffers, length of the pickle; the length of each buffer;
the pickle; the buffers.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from socket import socket
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypeAlias, TypedDict

import cloudpickle
import numpy as np

from ..comm.buffers import is_tensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import TypeIs

    from ..comm.errors import Wait
    from ..comm.inject import Injection

Function: TypeAlias = Callable[..., Any]  # of an attendee
Message: TypeAlias = tuple[int, Any]  # kind, content
Buffer: TypeAlias = "pickle.PickleBuffer | np.ndarray"
Address: TypeAlias = tuple[str, int]
Frame: TypeAlias = tuple[str, int, str]  # file, line, function

HEADER = struct.Struct("<BIQ")
LARGE = 1 << 16  # bytes of a buffer that travels out of band
ALIGNMENT = 64  # bytes
PIECE = 1 << 16  # bytes that are read at once of what is no large buffer


class Packed(NamedTuple):
    """A pickle, and the large buffers that travel out of band."""

    data: bytes
    buffers: Sequence[Buffer]

    def value(self, device: str = "cpu") -> Any:
        """Return what was packed, with all tensors on `device`: arguments, parameters, a function's globals."""
        if device == "cpu":
            return pickle.loads(self.data, buffers=self.buffers)
        return _Moving(io.BytesIO(self.data), device, self.buffers).load()


class Info(TypedDict):
    """An engine, described by itself: content of HELLO."""

    rank: int
    pid: int
    host: str
    machine: str
    cores: list[int]
    gpu: str
    master: Address  # for torch.distributed, if its rank is 0
    now_ns: NotRequired[int]  # until it is received


class RankTask(TypedDict):
    """A function for one rank of a run: content of TASK."""

    run: int
    ranks: list[int] | None
    deadline: float
    inject: Injection | None
    sys_path: list[str]
    task: Packed  # (fn, args, keywords)
    own: Packed | None  # {position or name: value}, of this rank alone
    master: Address


class EngineState(TypedDict):
    """An engine's own rank: content of STATE, and a part of an TaskOutcome."""

    slot: tuple[Any, ...]  # fields of comm.status.table.Slot
    px: bool  # True if it runs cells of %px
    now_ns: int  # on its own clock
    asked: NotRequired[tuple[int, int]]


class TaskFailure(TypedDict):
    """An exception of a task: see task._describe_failure."""

    kind: str
    type: str
    message: str
    frames: list[Frame]
    library: list[Frame]
    comm: NotRequired[tuple[str, str, tuple[Wait, ...]]]


class TaskOutcome(TypedDict):
    """The end of a task, in plain values: content of DONE."""

    rank: int
    t0_ns: int
    t1_ns: int
    events: list[tuple[int, int, str, int, int, int, int, str, str]]  # as trace.Event
    dropped: int
    value: NotRequired[Packed]
    failure: NotRequired[TaskFailure]
    state: NotRequired[EngineState]


def pack(value: object) -> Packed:
    """Pickle functions of a notebook by value, as cloudpickle does, and all tensors as on a CPU.

    The other end may have no GPU. The memory of large arrays and tensors is not copied: it is read when the message is
    sent. A tensor that has travelled cannot be resized in place, as one that shares its memory with NumPy.
    """
    memory = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(memory, pickle.HIGHEST_PROTOCOL, _keep_large(buffers)).dump(value)
    return Packed(memory.getvalue(), buffers)


def _keep_large(buffers: list[pickle.PickleBuffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Return a `buffer_callback` that moves large buffers to `buffers`; it is true for all that stay in the pickle."""

    def stays(buffer: pickle.PickleBuffer) -> bool:
        large = buffer.raw().nbytes >= LARGE
        if large:
            buffers.append(buffer)
        return not large

    return stays


class _Pickler(cloudpickle.Pickler):
    """A pickler that takes tensors of a GPU as their copies on the CPU, and the memory of each tensor as a buffer."""

    def reducer_override(self, obj: Any) -> Any:
        if is_tensor(obj) and obj.device.type == "cuda":
            return on_host(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if _is_storage(obj) and (memory := obj._untyped_storage).device.type == "cpu" and len(memory):
            return _storage_in, (pickle.PickleBuffer(_memory_of(memory)), obj.dtype)
        return super().reducer_override(obj)


def on_host(tensor: Tensor) -> Tensor:
    """Copy to the CPU, as a leaf, which a tensor must be to be pickled; a model's parameter stays one."""
    copy = tensor.detach().cpu()
    Parameter = sys.modules["torch"].nn.Parameter
    return Parameter(copy, tensor.requires_grad) if isinstance(tensor, Parameter) else copy


def _is_storage(value: object) -> TypeIs[torch.TypedStorage]:
    """Return True if `value` is what torch pickles of a tensor's memory; without importing torch."""
    torch = sys.modules.get("torch.storage")
    return torch is not None and isinstance(value, torch.TypedStorage)


def _memory_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage on the CPU."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data


def _storage_in(buffer: object, dtype: torch.dtype) -> torch.TypedStorage:
    """Return the torch.TypedStorage whose memory is `buffer`."""
    import torch

    memory = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


class _Moving(pickle.Unpickler):
    """An unpickler that puts tensors on `device`."""

    def __init__(self, file: io.BytesIO, device: str, buffers: Sequence[Buffer]) -> None:
        super().__init__(file, buffers=buffers)
        self.device = device

    def find_class(self, module: str, name: str) -> object:
        found = super().find_class(module, name)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):  # by which torch pickles every dense tensor
            return lambda *args: self._moved(found(*args))
        return found

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)


def room(nbytes: int) -> np.ndarray:
    """Return memory for `nbytes` that begins where torch's own would."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:nbytes]


def pieces(kind: int, content: object) -> list[bytes | memoryview]:
    """Return one message, as bytes to be sent one after the other. content: plain values, and Packed."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL, buffer_callback=_keep_large(buffers))
    memory = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(memory)}Q", *(part.nbytes for part in memory))
    return [HEADER.pack(kind, len(memory), len(data)) + sizes + data, *memory]


class MessageReader:
    """A reader of the messages that come by one connection."""

    def __init__(self) -> None:
        self._read = bytearray()  # not yet taken apart
        self._begun: tuple[int, Packed] | None = None  # (kind, content) of the message whose buffers come next
        self._missing: list[memoryview] = []  # of those buffers

    def read(self, connection: socket) -> list[Message] | None:
        """Read once, and return (kind, content) of every message that is now whole; None when the other end has gone.

        Raises: OSError, as the socket does.
        """
        if self._missing:
            count = connection.recv_into(self._missing[0])
            self._arrived(count)
        else:
            data = connection.recv(PIECE)
            count = len(data)
            self._read += data
        return list(self._whole()) if count else None

    def _whole(self) -> Iterator[Message]:
        while begun := self._begun or self._begins():
            while self._missing and self._read:
                part = self._read[: len(self._missing[0])]
                self._missing[0][: len(part)] = part
                del self._read[: len(part)]
                self._arrived(len(part))
            if self._missing:
                return
            (kind, content), self._begun = begun, None
            yield kind, content.value()

    def _arrived(self, count: int) -> None:
        """Count `count` more bytes of the first missing buffer."""
        self._missing[0] = self._missing[0][count:]
        if not self._missing[0]:
            del self._missing[0]

    def _begins(self) -> tuple[int, Packed] | None:
        """Take the next pickle, if it is there, and make room for its buffers."""
        if len(self._read) < HEADER.size:
            return None
        kind, count, nbytes = HEADER.unpack_from(self._read)
        start = HEADER.size + 8 * count
        stop = start + nbytes
        if len(self._read) < stop:
            return None
        buffers = [room(size) for size in struct.unpack_from(f"<{count}Q", self._read, HEADER.size)]
        self._begun = kind, Packed(bytes(memoryview(self._read)[start:stop]), buffers)
        self._missing = [buffer.data for buffer in buffers]
        del self._read[:stop]
        return self._begun
