"""A backend of torch.distributed that stands in for nccl: it moves only the tensors that it is shown as those of a GPU.

It has one order of messages per pair of ranks and knows no tags; whoever does not match waits for ever, until `abort`.
What it carries is counted, so that a test sees what went another way.
"""

import threading

import torch.distributed as dist

NAME = "fakenccl"


class FakeWork(dist.Work):
    """One operation, which can be asked, as NCCL's can."""

    def __init__(self, job):
        super().__init__()
        self.error, self.ended = None, threading.Event()
        threading.Thread(target=self._run, args=(job,), daemon=True).start()

    def _run(self, job):
        try:
            job()
        except Exception as error:
            self.error = error
        self.ended.set()

    def is_completed(self):
        return self.ended.is_set()

    def wait(self, timeout=None):
        self.ended.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error))
        return True


class FakeNccl(dist.ProcessGroup):
    """carried: names of the operations so far; aborted: has it been ended?"""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("fake", store), rank, size, timeout)
        self.carried, self.aborted = [], False

    def getBackendName(self):
        return NAME

    def _set_group_name(self, name):
        self._name = name

    def _set_group_desc(self, description):
        pass

    group_name = property(lambda self: self._name)
    group_desc = ""

    def _do(self, name, *args):
        self.carried.append(name)
        if self.aborted:
            raise RuntimeError("the communicator was aborted")
        work = getattr(self.gloo, name)(*args)
        return FakeWork(work.wait)

    def send(self, tensors, to, tag=0):
        return self._do("send", tensors, to, 0)

    def recv(self, tensors, source, tag=0):
        return self._do("recv", tensors, source, 0)

    def allreduce(self, *args):
        return self._do("allreduce", *args)

    def broadcast(self, *args):
        return self._do("broadcast", *args)

    def reduce(self, *args):
        return self._do("reduce", *args)

    def gather(self, *args):
        return self._do("gather", *args)

    def scatter(self, *args):
        return self._do("scatter", *args)

    def all_gather_single(self, *args):
        return self._do("_allgather_base", *args)

    def reduce_scatter_single(self, *args):
        return self._do("_reduce_scatter_base", *args)

    def all_to_all_single(self, *args):
        return self._do("alltoall_base", *args)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def abort(self):
        self.aborted = True

    def shutdown(self):
        pass


def create(options, _):
    return FakeNccl(options.store, options.group_rank, options.group_size, options.timeout)


def register():
    """Make it known to torch, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
