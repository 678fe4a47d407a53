"""ZeRO in two functions: each rank keeps 1/p of what data parallelism keeps p times, and gathers it when it is needed.

An all-reduce is a reduce-scatter and an all-gather. Stages 1 and 2 update between the two, each rank its own chunk, and
gather parameters in the place of gradients. Stage 3 gathers parameters twice, before forward and before backward.
zero.py has the strategies, for any module and optimizer, and what each stage holds and sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..collectives.chunks import chunk
from ..collectives.ring import all_gather, reduce_scatter
from ..comm.base import Comm

if TYPE_CHECKING:
    from torch import Tensor


def sharded_step(
    comm: Comm,
    params: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    update: Callable[[Tensor, Tensor, dict[str, Tensor]], object],
) -> None:
    """Take a step with the mean gradient, each rank with 1/p of the optimizer state (ZeRO-1).

        p = 3      rank 0          rank 1          rank 2
        grad       [ a0 a1 a2 ]    [ b0 b1 b2 ]    [ c0 c1 c2 ]    of its own examples
        mean       [ m0 .. .. ]    [ .. m1 .. ]    [ .. .. m2 ]
        params     [ q0 p1 p2 ]    [ p0 q1 p2 ]    [ p0 p1 q2 ]    with state 0, 1, 2
        params     [ q0 q1 q2 ]    [ q0 q1 q2 ]    [ q0 q1 q2 ]

    Args:    params: (N,) float tensor, the same on every rank, overwritten.
             N need not be a multiple of p.
             grad: (N,) tensor, different per rank, which may be overwritten.
             state: dict, the optimizer state of this rank. It is empty in the first step,
             and `update` fills it for the next step.
             update: update(x, g, state) changes the tensor x in place, by its gradient g.
             It stores tensors of the length of x in `state`: Adam stores two.
    Returns: None.
    Steps: 2(p - 1).   Bytes per rank: 2(p - 1)/p * N * itemsize.
    Ref: Rajbhandari et al. 2020 (ZeRO).
    """
    ### BEGIN SOLUTION
    mean = reduce_scatter(comm, grad)
    mean /= comm.size
    update(chunk(params, comm.size, comm.rank), mean, state)
    all_gather(comm, params)
    ### END SOLUTION


class ShardedLayer:
    """The parameters of a layer as one flat vector of n elements; this rank keeps a chunk of it.

    shard: this rank's chunk, (ceil(n/p),) at most; whole: (n,) tensor from `allocate` to `release`, else None.
    """

    def __init__(self, comm: Comm, flat: Tensor) -> None:
        """Keep this rank's chunk of `flat`, (n,)."""
        self.size, self.rank, self.n = comm.size, comm.rank, len(flat)
        self.shard = chunk(flat, self.size, self.rank).clone()
        self.whole: Tensor | None = None

    def allocate(self) -> Tensor:
        """Take memory for all n elements; returns `whole`, in which only this rank's chunk has its values."""
        self.whole = self.shard.new_full((self.n,), float("nan"))
        chunk(self.whole, self.size, self.rank).copy_(self.shard)
        return self.whole

    def release(self) -> None:
        """Give the memory of `whole` back; the chunk stays."""
        self.whole = None


def gather_and_release(comm: Comm, layers: Sequence[ShardedLayer], use: Callable[[ShardedLayer], object]) -> None:
    """Gather each layer, call use(layer), and release the layer (ZeRO-3).

        background   gather 0 | gather 1 | gather 2 |
        this rank             | use 0    | use 1    | use 2    |
        whole        0          0 1        1 2        2          two layers at most

    Args:    layers: at least one, in the order of their use. In forward the first layer of
             the model comes first, in backward the last.
             layer.allocate() takes memory for the whole layer, copies this rank's chunk
             into its place, and returns the tensor, (n,).
             layer.release() gives this memory back.
             use: use(layer) computes with layer.whole, the tensor that allocate made. This
             call takes as long as a gather, or longer.
    Returns: None; no layer is whole any more.
    Bytes per rank: (p - 1)/p * n * itemsize for each layer.
    Ref: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (PyTorch FSDP).
    """
    ### BEGIN SOLUTION
    gathering = comm.background(all_gather, layers[0].allocate())
    for i, layer in enumerate(layers):
        gathering.wait()
        if i + 1 < len(layers):
            gathering = comm.background(all_gather, layers[i + 1].allocate())
        use(layer)
        layer.release()
    ### END SOLUTION
