"""Fewer messages: ranks take steps on their own, and meet now and then: local SGD, DiLoCo, gossip, a tournament.

    data parallel   step + step + step + step +        +  all ranks add their gradients
    local SGD       step   step   step   step *        *  all ranks average their parameters
    DiLoCo          step   step   step   step o        o  their mean is a gradient of an outer optimizer
    gossip          step ~ step ~ step ~ step ~        ~  a rank averages with its neighbors
    tournament      step   step   step   step x        x  two ranks exchange models, and each keeps the better one

A rank's gradient is its own shard's. Replicas differ between the meetings; `finish` makes them one model. The
optimizer's own state, such as momentum, never travels. A checkpoint holds the replica of rank 0.
"""

import random
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..comm.base import Comm
from ..comm.buffers import new_like
from ..data.loading import shard_indices
from ..units import require_int, require_number
from .consensus import is_finite
from .data_parallel import DataParallel, broadcast_buffers
from .gossip import GRAPHS, gossip_step, graph, one_peer_step
from .reducer import AllReduce, result_of

ONE_PEER = "one_peer"  # the exponential graph, one neighbor in each step


def local_sgd(comm: Comm, w: Tensor, gradient: Callable[[Tensor], Tensor], steps: int, lr: float, every: int) -> Tensor:
    """Take steps of SGD on this rank, and average the parameters every few steps.

        every = 3, 7 steps     step step step *  step step step *  step *     *: average

    A block has `every` steps, and the last block may have fewer. Every block ends with
    an average, the last block too.

    Args:    w: (N,) float tensor, the same on every rank, overwritten.
             gradient: f(w) -> (N,) the gradient of this rank's next batch, different
             per rank; call it once per step.
             steps: of SGD, at least 1; lr: the learning rate.
             every: steps between two averages, at least 1.
    Returns: w, the same on every rank.
    Steps: ceil(steps / every) all_reduces.
    Bytes per rank: as in ceil(steps / every) all_reduces of N numbers.
    Ref: Stich 2019; McMahan et al. 2017 (FedAvg).
    """
    ### BEGIN SOLUTION
    for step in range(1, steps + 1):
        w -= lr * gradient(w)
        if step % every == 0 or step == steps:
            comm.all_reduce(w)
            w /= comm.size
    return w
    ### END SOLUTION


class _LocalSteps(DataParallel):
    """Replicas that step on their own and meet after every `every` steps; a subclass says what they do there.

    Gradients stay on their rank, p times what they are of the global batch: that is the mean over the own shard, if all
    shards are of one size. The losses are of replicas that differ.
    """

    synchronous = False

    def __init__(self, every: int = 1, all_reduce: AllReduce | None = None) -> None:
        super().__init__(all_reduce)
        self.every = require_int("every", every, 1)

    def start(self, comm: Comm, model: nn.Module) -> None:
        super().start(comm, model)
        self.taken = 0

    @abstractmethod
    def meet(self, comm: Comm, model: nn.Module) -> None:
        """Do what ranks do together after every `every` steps."""

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        """Keep this rank's gradients. Raises FloatingPointError, on this rank only, if one has NaN or infinity."""
        self.require_started(model)
        for name, param in zip(self.names, self.params, strict=True):
            if not is_finite(param.grad):
                raise FloatingPointError(f"rank {comm.rank} has NaN or infinity in the gradient of {name}")
            if param.grad is not None:
                param.grad *= comm.size

    def after_step(self, comm: Comm, model: nn.Module) -> None:
        self.taken += 1
        if self.taken % self.every == 0:
            with comm.trace.span("meet"), torch.no_grad():
                self.meet(comm, model)

    def finish(self, comm: Comm, model: nn.Module) -> None:
        """Make all replicas one model: their mean, and rank 0's buffers."""
        with comm.trace.span("finish"), torch.no_grad():
            self.unpack(self.means(comm))
            broadcast_buffers(comm, model)

    def packed(self) -> list[Tensor]:
        """Return the parameters of this rank, (N,) for each dtype, in memory that the ranks share if they can."""
        for bucket in self.require_begun().buckets:
            for param, view in zip(bucket.params, bucket.grads, strict=True):
                view.copy_(param.detach())
        return [bucket.flat[:-1] for bucket in self.require_begun().buckets]

    def unpack(self, flats: list[Tensor]) -> None:
        """Make what `packed` has returned, after changes, the parameters."""
        for bucket, flat in zip(self.require_begun().buckets, flats, strict=True):
            parts = flat.split([param.numel() for param in bucket.params])
            for param, part in zip(bucket.params, parts, strict=True):
                param.copy_(part.view(param.shape))

    def means(self, comm: Comm) -> list[Tensor]:
        """Return the means over ranks of what `packed` returns."""
        return [result_of(self.all_reduce, comm, flat) / comm.size for flat in self.packed()]


class LocalSGD(_LocalSteps):
    """An average of all ranks' parameters after every `every` steps. With every=1 and SGD it is data parallelism.

    Steps: one all-reduce per dtype and meeting.   Bytes per rank: as in an all_reduce of N elements, 1/every as often.
    Ref: Stich 2019; Lin et al. 2020.
    """

    def __init__(self, every: int = 10, all_reduce: AllReduce | None = None) -> None:
        super().__init__(every, all_reduce)

    def meet(self, comm: Comm, model: nn.Module) -> None:
        self.unpack(self.means(comm))


class DiLoCo(LocalSGD):
    """Local SGD whose meeting is a step of an outer optimizer: Nesterov's momentum on the way that the mean has gone.

        outer gradient = parameters after the last meeting - mean over ranks of the parameters now

    The inner optimizer is the one of the training, AdamW in the paper. outer_lr=1, outer_momentum=0: LocalSGD.
    Bytes: as LocalSGD.   Ref: Douillard et al. 2023: every=500, outer_lr=0.7, outer_momentum=0.9.
    """

    def __init__(
        self,
        every: int = 10,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        all_reduce: AllReduce | None = None,
    ) -> None:
        super().__init__(every, all_reduce)
        self.outer_lr = require_number("outer_lr", outer_lr, above=0)
        self.outer_momentum = require_number("outer_momentum", outer_momentum, 0)

    def start(self, comm: Comm, model: nn.Module) -> None:
        super().start(comm, model)
        self.outer: torch.optim.SGD | None = None

    def add_gradients(self, comm: Comm, model: nn.Module) -> None:
        super().add_gradients(comm, model)
        if self.outer is None:  # at the first step, not in `start`: a checkpoint may come between
            self.begun = [nn.Parameter(flat.clone()) for flat in self.packed()]
            options = {"momentum": self.outer_momentum, "nesterov": self.outer_momentum > 0}
            self.outer = torch.optim.SGD(self.begun, self.outer_lr, **options)

    def meet(self, comm: Comm, model: nn.Module) -> None:
        assert self.outer is not None
        for begun, mean in zip(self.begun, self.means(comm), strict=True):
            begun.grad = begun - mean
        self.outer.step()
        self.unpack([begun.detach() for begun in self.begun])


class Gossip(_LocalSteps):
    """Decentralized SGD: after each step a rank averages its parameters with its neighbors' on a graph.

    graph: a name of gossip.GRAPHS, or "one_peer": one rank only, 1, 2, 4, ... places further on, in turn.
    Steps and bytes: as gossip.gossip_step, or gossip.one_peer_step, of N elements.
    Ref: Lian et al. 2017 (D-PSGD); Assran et al. 2019; Ying et al. 2021.
    """

    def __init__(self, graph: str = "ring", seed: int = 0, every: int = 1) -> None:
        super().__init__(every)
        if graph not in (*GRAPHS, ONE_PEER):
            raise LookupError(f"no graph is called {graph!r}: {', '.join((*GRAPHS, ONE_PEER))}")
        self.graph, self.seed = graph, seed

    def meet(self, comm: Comm, model: nn.Module) -> None:
        flats = self.packed()
        for flat in flats:
            if self.graph == ONE_PEER:
                one_peer_step(comm, flat, self.taken // self.every - 1)
            else:
                gossip_step(comm, flat, graph(self.graph, comm.size, self.seed))
        self.unpack(flats)


class Tournament(_LocalSteps):
    """LBANN's LTFB: now and then ranks meet in pairs, exchange models, and each keeps what is better on its own data.

    New pairs are drawn each time; if ranks are odd in number, one has no partner. `finish` takes the model that is
    best on all held-out examples.

    x, y: held-out examples, the same on every rank; each rank judges by its share: no batch may contain them.
    Bytes per rank: N elements to one rank, once per meeting.   Ref: Jacobs et al. 2017 and 2019 (LBANN).
    """

    def __init__(self, x: Tensor, y: Tensor, every: int = 10, seed: int = 0) -> None:
        super().__init__(every)
        self.x, self.y, self.seed = x, y, seed

    def __repr__(self) -> str:
        return f"Tournament({len(self.x)} held-out examples, every={self.every}, seed={self.seed})"

    def start(self, comm: Comm, model: nn.Module) -> None:
        if len(self.x) < comm.size:
            raise ValueError(f"{len(self.x)} held-out examples for {comm.size} ranks: each needs at least one")
        super().start(comm, model)

    def meet(self, comm: Comm, model: nn.Module) -> None:
        order = list(range(comm.size))
        random.Random(self.seed * 1_000_003 + self.taken).shuffle(order)
        place = order.index(comm.rank)
        if place ^ 1 >= comm.size:
            return
        partner, mine = order[place ^ 1], [flat.clone() for flat in self.packed()]
        theirs = [comm.sendrecv(flat, partner, new_like(flat, flat.shape), partner) for flat in mine]
        share = shard_indices(torch.arange(len(self.x)), comm.rank, comm.size)
        before = self.loss(model, share)
        self.unpack(theirs)
        if self.loss(model, share) >= before:
            self.unpack(mine)

    def finish(self, comm: Comm, model: nn.Module) -> None:
        """Give every rank the model, buffers too, of the rank that is best on all held-out examples."""
        self.require_begun()
        with comm.trace.span("finish"), torch.no_grad():
            loss = self.loss(model, torch.arange(len(self.x)))
            best = int(comm.all_gather(torch.tensor([loss], dtype=torch.float64)).argmin())
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(comm.broadcast(tensor.detach().clone(), best))

    @torch.no_grad()
    def loss(self, model: nn.Module, indices: Tensor) -> float:
        """Return the mean cross-entropy per answer on these held-out examples."""
        model.eval()
        logits = model(self.x[indices]).flatten(0, -2)
        model.train()
        return float(cross_entropy(logits, self.y[indices].flatten()))
