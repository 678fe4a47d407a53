"""What a notebook and an engine send each other: pickles, with the memory of large arrays and tensors beside them.

That memory goes from the array to the socket, and from the socket to the array, without a copy in between
(https://peps.python.org/pep-0574). A message: kind, how many buffers, length of the pickle; the length of each buffer;
the pickle; the buffers.
"""

import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from socket import socket
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from ..comm.buffers import is_tensor

HEADER = struct.Struct("<BIQ")
LARGE = 1 << 16  # bytes of a buffer that travels beside its pickle
ALIGNMENT = 64  # bytes
PIECE = 1 << 16  # bytes that are read at once of what is no large buffer


class Packed(NamedTuple):
    """A pickle, and the large buffers that travel beside it."""

    data: bytes
    buffers: list[Any]

    def value(self, device: str = "cpu") -> Any:
        """What was packed, with all tensors on `device`: arguments, a model's parameters, a function's globals."""
        if device == "cpu":
            return pickle.loads(self.data, buffers=self.buffers)
        return Moving(io.BytesIO(self.data), device, self.buffers).load()


def pack(value: Any) -> Packed:
    """Functions of a notebook by value, as cloudpickle does, and all tensors on the CPU: the other end may have no GPU.

    The memory of large arrays and tensors is not copied: it is read when the message is sent. As those that share their
    memory with NumPy, a tensor that has travelled cannot be resized in place.
    """
    memory, buffers = io.BytesIO(), []
    Pickler(memory, pickle.HIGHEST_PROTOCOL, keep_large(buffers)).dump(value)
    return Packed(memory.getvalue(), buffers)


def keep_large(buffers: list[Any]) -> Callable[[pickle.PickleBuffer], bool]:
    """A `buffer_callback` that moves large buffers to `buffers`; true for those that stay in the pickle."""

    def stays(buffer: pickle.PickleBuffer) -> bool:
        large = buffer.raw().nbytes >= LARGE
        if large:
            buffers.append(buffer)
        return not large

    return stays


class Pickler(cloudpickle.Pickler):
    """Tensors of a GPU go in as their copies on the CPU, and the memory of each tensor as a buffer."""

    def reducer_override(self, value: Any) -> Any:
        if is_tensor(value) and value.device.type == "cuda":
            return on_host(value).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if is_storage(value) and (memory := value._untyped_storage).device.type == "cpu" and len(memory):
            return storage_in, (pickle.PickleBuffer(memory_of(memory)), value.dtype)
        return super().reducer_override(value)


def on_host(tensor: Any) -> Any:
    """A copy on the CPU, a leaf as a tensor must be to be pickled; a model's parameter stays one."""
    copy = tensor.detach().cpu()
    Parameter = sys.modules["torch"].nn.Parameter
    return Parameter(copy, tensor.requires_grad) if isinstance(tensor, Parameter) else copy


def is_storage(value: Any) -> bool:
    """Whether `value` is what torch pickles of a tensor's memory; without importing torch."""
    torch = sys.modules.get("torch.storage")
    return torch is not None and isinstance(value, torch.TypedStorage)


def memory_of(storage: Any) -> memoryview:
    """The bytes of a torch.UntypedStorage on the CPU."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data


def storage_in(buffer: Any, dtype: Any) -> Any:
    """The torch.TypedStorage whose memory is `buffer`."""
    import torch

    memory = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)


class Moving(pickle.Unpickler):
    """Tensors come out on `device`."""

    def __init__(self, file: io.BytesIO, device: str, buffers: list[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self.device = device

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):  # by which torch pickles every dense tensor
            return lambda *args: self._moved(found(*args))
        return found

    def _moved(self, tensor: Any) -> Any:
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)


def room(nbytes: int) -> np.ndarray:
    """Memory for `nbytes` that begins where torch's own would."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    return memory[-memory.ctypes.data % ALIGNMENT :][:nbytes]


def pieces(kind: int, content: Any) -> list[Any]:
    """One message, as bytes to be sent one after the other. content: plain values, and Packed."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(content, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_large(buffers))
    memory = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(memory)}Q", *(part.nbytes for part in memory))
    return [HEADER.pack(kind, len(memory), len(data)) + sizes + data, *memory]


class Reader:
    """Reads the messages that come by one connection."""

    def __init__(self) -> None:
        self._read = bytearray()  # not yet taken apart
        self._begun: tuple[int, Packed] | None = None  # (kind, content) of the message whose buffers come next
        self._missing: list[memoryview] = []  # of those buffers

    def read(self, connection: socket) -> list[tuple[int, Any]] | None:
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

    def _whole(self) -> Iterator[tuple[int, Any]]:
        while self._begun or self._begins():
            while self._missing and self._read:
                part = self._read[: len(self._missing[0])]
                self._missing[0][: len(part)] = part
                del self._read[: len(part)]
                self._arrived(len(part))
            if self._missing:
                return
            (kind, content), self._begun = self._begun, None
            yield kind, content.value()

    def _arrived(self, count: int) -> None:
        """`count` more bytes of the first missing buffer are there."""
        self._missing[0] = self._missing[0][count:]
        if not self._missing[0]:
            del self._missing[0]

    def _begins(self) -> bool:
        """Take the next pickle, if it is there, and make room for its buffers."""
        if len(self._read) < HEADER.size:
            return False
        kind, count, nbytes = HEADER.unpack_from(self._read)
        start = HEADER.size + 8 * count
        stop = start + nbytes
        if len(self._read) < stop:
            return False
        buffers = [room(size) for size in struct.unpack_from(f"<{count}Q", self._read, HEADER.size)]
        self._begun = kind, Packed(bytes(memoryview(self._read)[start:stop]), buffers)
        self._missing = [buffer.data for buffer in buffers]
        del self._read[:stop]
        return True
