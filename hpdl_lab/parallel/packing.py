"""Buckets: gradients packed one after the other into one flat tensor, so that one message carries many of them.

    parameters    w1 (64, 128)    b1 (128,)    w2 (128, 10)    b2 (10,)
    a bucket      [ w1 ........ | b1 | w2 .... | b2 | flag ]          (N + 1,)

The flag is 0 on a rank where all is well, so it costs one element and no message to know that all is well everywhere:
see parallel/verdict.py.
"""

import torch


class Bucket:
    """The gradients of `params`, of one dtype, in one flat tensor that the ranks of a node share where they can.

    indices: which parameters of the model these are; flat: (N + 1,); views[i]: the part of params[i], in its shape.
    """

    def __init__(self, comm, params, indices, beside=False):
        """Collective: every rank packs the same parameters. beside: will it be sent by comm.background?"""
        self.params, self.indices = params, indices
        self.flat = (allocate_beside if beside else allocate)(comm, sum(p.numel() for p in params) + 1, params[0].dtype)
        self.views = self.views_of(self.flat)
        self.empty = False  # is one of the gradients missing?
        self.flag = None  # that of this rank, once packed

    def views_of(self, flat):
        """`flat`, cut into parts that have the shapes of the parameters."""
        parts = flat[:-1].split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def put(self, i):
        """Copy the gradient of params[i] into its place: or zeros, as every rank sends the same sizes."""
        grad = self.params[i].grad
        if grad is None:
            self.empty = True
            self.views[i].zero_()
        elif grad.layout is not torch.strided:
            raise ValueError(
                f"a gradient of layout {grad.layout} cannot be packed: make it dense, as sparse=False does"
            )
        else:
            self.views[i].copy_(grad)

    def packed(self):
        """The flat tensor with its flag, once every gradient has been put: to be added over ranks."""
        wide = torch.float64 if self.flat.dtype == torch.float64 else torch.float32
        # 0 times a finite sum is 0; NaN or infinity anywhere makes it NaN, on this rank and by the sum on every rank.
        self.flag = 0 * self.flat[:-1].sum(dtype=wide) + float(self.empty)
        self.flat[-1] = self.flag
        self.empty = False
        return self.flat

    def hand_back(self, total):
        """Make the sums over ranks the parameters' gradients, without a copy. total: (N + 1,)."""
        views = self.views if total is self.flat else self.views_of(total)
        for param, view in zip(self.params, views, strict=True):
            param.grad = view


def allocate(comm, n, dtype):
    """(n,) zeros, in memory that the ranks of a node share, where they do: comm's all_reduce on it copies nothing."""
    return comm.allocate((n,), str(dtype).removeprefix("torch."))


def allocate_beside(comm, n, dtype):
    """The same for what comm.background does, whose memory is its own."""
    return comm.background(allocate, n, dtype).wait()


def by_dtype(params):
    """{dtype: indices of its parameters}: a flat tensor has one dtype."""
    groups = {}
    for index, param in enumerate(params):
        groups.setdefault(param.dtype, []).append(index)
    return groups
