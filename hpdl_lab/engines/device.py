"""Engines with a GPU: what a task brings moves to the engine's GPU when it is unpickled, and its result comes back.

So the same function, with the same arguments, runs on CPU engines and on GPU engines: `x` and `comm` are on one device.
"""

import io
import os
import pickle
import sys

import cloudpickle

from ..comm.buffers import is_tensor
from ..comm.mpi import kind

DEVICE = "HPDL_DEVICE"  # environment variable: "cpu" or "cuda", from lab.start(n, device=...)


def kind_of_this_engine():
    """What makes its communicators, for Session.comm. Raises RuntimeError where "cuda" cannot be had."""
    return kind(os.environ.get(DEVICE, "cpu"))


def load(data, device):
    """pickle.loads, with all tensors on `device`: arguments, a model's parameters, what the function's globals hold."""
    return pickle.loads(data) if device == "cpu" else Moving(io.BytesIO(data), device).load()


def dump(value):
    """cloudpickle.dumps, with all tensors on the CPU: the notebook may have no GPU."""
    memory = io.BytesIO()
    Returning(memory).dump(value)
    return memory.getvalue()


class Moving(pickle.Unpickler):
    """Tensors come out on `device`."""

    def __init__(self, file, device):
        super().__init__(file)
        self.device = device

    def find_class(self, module, name):
        found = super().find_class(module, name)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):  # by which torch pickles every dense tensor
            return lambda *args: self._moved(found(*args))
        return found

    def _moved(self, tensor):
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)


class Returning(cloudpickle.Pickler):
    """Tensors of a GPU go in as their copies on the CPU."""

    def reducer_override(self, value):
        if is_tensor(value) and value.device.type == "cuda":
            return on_host(value).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def on_host(tensor):
    """A copy on the CPU, a leaf as a tensor must be to be pickled; a model's parameter stays one."""
    copy = tensor.detach().cpu()
    Parameter = sys.modules["torch"].nn.Parameter
    return Parameter(copy, tensor.requires_grad) if isinstance(tensor, Parameter) else copy
