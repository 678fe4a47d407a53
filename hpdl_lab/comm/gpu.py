"""The GPU of one rank, seen through torch."""

import os

from .buffers import is_tensor


class Gpu:
    """GPU number `index` of this process, with a stream for communication beside the one that computes."""

    def __init__(self, index):
        import torch

        self.torch, self.index, self.name = torch, index, f"cuda:{index}"
        torch.cuda.set_device(index)
        self.stream = torch.cuda.Stream(index)

    @property
    def count(self):
        """GPUs that the ranks of this host can use."""
        return self.torch.cuda.device_count()

    @property
    def handle(self):
        """The stream, as CUDA knows it."""
        return self.stream.cuda_stream

    @property
    def identity(self):
        """The same for two ranks exactly where they use the same GPU of one host."""
        known = self.torch.cuda.get_device_properties(self.index)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return str(getattr(known, "uuid", f"{visible}:{self.index}"))

    def owns(self, x):
        """Is `x` in the memory of a GPU, so that it does not travel through MPI?"""
        return is_tensor(x) and x.device.type == "cuda"

    def tensor(self, memory):
        """A uint8 tensor over `memory`, of the compiled module, which lives as long as the tensor."""
        view = Memory(memory, (memory.nbytes,))
        return self.torch.as_tensor(view, device=self.name)

    def current(self):
        """`with gpu.current():` libraries find this GPU as the current one."""
        return self.torch.cuda.device(self.index)

    def follow(self):
        """What comes next on our stream waits for what the computation has been given so far."""
        self.stream.wait_stream(self.torch.cuda.current_stream(self.index))

    def mark(self):
        """An event that `query()`s as true when our stream has done all that it has been given."""
        event = self.torch.cuda.Event()
        event.record(self.stream)
        return event

    def mark_computed(self):
        """The same for the stream that computes."""
        event = self.torch.cuda.Event()
        event.record(self.torch.cuda.current_stream(self.index))
        return event


class Memory:
    """GPU memory as other libraries take it. Ref: CUDA Array Interface, version 3."""

    def __init__(self, memory, shape):
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "shape": shape,
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def gpu_of(session):
    """The Gpu that serves this rank: the ranks of a host take its GPUs by turns. Raises RuntimeError without a GPU."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        from ..features.gpu import why_no_gpu

        raise RuntimeError(f"rank {session.rank} has no GPU: {why_no_gpu()}")
    return Gpu(place_on_host(session) % count)


def place_on_host(session):
    """0 for the first rank of this host, 1 for the next, whatever runs they take part in."""
    return session.hosts[: session.rank].count(session.hosts[session.rank])
