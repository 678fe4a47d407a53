"""How many bytes autograd keeps for backward, counted while it keeps them."""

import torch


class SavedBytes:
    """The most bytes that autograd has kept for backward at once, within it; parameters are not counted."""

    def __init__(self, params):
        self.params = {p.untyped_storage().data_ptr() for p in params}
        self.live, self.now, self.most = {}, 0, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor)

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception):
        self.hooks.__exit__(*exception)

    def pack(self, tensor):
        return Kept(self, tensor)

    def add(self, storage, sign):
        """One more tensor, or one less, needs this storage."""
        key, nbytes = storage.data_ptr(), storage.nbytes()
        if key in self.params:
            return
        before = self.live.get(key, 0)
        self.live[key] = before + sign
        if not before or not self.live[key]:
            self.now += sign * nbytes
            self.most = max(self.most, self.now)
        if not self.live[key]:
            del self.live[key]


class Kept:
    """A tensor as long as autograd keeps it, without its graph, which would otherwise hold itself."""

    def __init__(self, counter, tensor):
        self.counter, self.tensor = counter, tensor.detach()
        counter.add(tensor.untyped_storage(), 1)

    def __del__(self):
        self.counter.add(self.tensor.untyped_storage(), -1)
