"""Expert parallelism: ranks share the experts of each layer, and a token travels to the ranks of those it has chosen.

    rank 0: tokens -> router -> copies by expert --+                +--> experts 0 1 --+                +--> weigh, add
                                                   +-- all-to-all --+                  +-- all-to-all --+
    rank 1: tokens -> router -> copies by expert --+   (dispatch)   +--> experts 2 3 --+   (combine)    +--> weigh, add

The batch is dealt over the same ranks: each has tokens of its own, and the loss is divided by all tokens. Backward
goes the same way back, so an expert gets the gradient of every token that came to it, of whatever rank.

| parameters                                        | backward leaves             | is added over                     |
|---------------------------------------------------|-----------------------------|-----------------------------------|
| experts.gate, .up, .down of a MixtureOfExperts    | the sum over ep             | dp: the axes of batches but ep    |
| all others: routers, shared experts, attention    | the part of this rank's     | dp and ep                         |
| router.bias                                       | nothing: update_biases      | its counts: dp; they are ep's sum |

Ref: Lepikhin et al. 2020 (GShard), arXiv:2006.16668; DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.2.2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..collectives.pairwise import all_to_all_v
from ..comm.base import Comm
from ..models.experts import GAMMA, Experts, MixtureOfExperts, imbalance
from ..units import require_int, require_number
from .consensus import require_same_model
from .data_parallel import replicate
from .tensor.cuts import PARTIAL, equal_shares
from .tensor.linear import conjugate


def dispatch(comm: Comm, copies: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Bring copies of tokens to the ranks of their experts: all-to-all in forward, combine in backward.

    Args:    copies: (sum of sent, d), different per rank, those for rank 0 first; sent[r], received[r]: how many copies
             go to rank r, and come from there.
    Returns: (sum of received, d), the copies from rank 0 first.
    Bytes per rank: of the copies for others, forward; of the copies from others, backward.
    """
    return conjugate(copies, partial(_moved, comm, sent, received), partial(_moved, comm, received, sent))


def combine(comm: Comm, made: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Bring back what experts have made of what dispatch, with the same sizes, has brought: dispatch in backward.

    Args:    made: (sum of received, d), in the order in which dispatch returned the copies.
    Returns: (sum of sent, d), in the order of dispatch's copies.
    """
    return dispatch(comm, made, received, sent)


def _moved(comm: Comm, sent: Sequence[int], received: Sequence[int], x: Tensor) -> Tensor:
    return all_to_all_v(comm, x.detach().contiguous(), sent, received)


def expert_layer(comm: Comm, x: Tensor, chosen: Tensor, weights: Tensor, mine: Callable[[Tensor], Tensor]) -> Tensor:
    """Send each token to its k experts, one expert per rank, and add up the results.

        p = 2, k = 1  rank 0: tokens a b, chosen 1 0  rank 1: tokens c d e, chosen 0 0 1
        by expert             [ b | a ]                       [ c d | e ]
        dispatch              [ b | c d ] -> expert 0         [ a | e ] -> expert 1
        combine               [ B | A ]                       [ C D | E ]
        y                     A B, times their weights        C D E, times their weights

    A to E are the results of the experts for the tokens a to e.

    Args:    x: (n, d), the tokens of this rank; other ranks may have another n.
             chosen: (n, k) int64, the ranks of each token's k experts, no two equal.
             weights: (n, k), the factor of each expert's result.
             mine: f((m, d)) -> (m, d), this rank's expert, for any m. Call it once.
    Returns: (n, d): for each token the sum over its experts of weight * expert(token).
             After backward the gradients of x, weights and every expert are complete.
    Steps: first the sizes, then dispatch and combine; in backward two more all-to-alls.
    Bytes per rank: d * itemsize for each copy that goes to another rank, and as much on
        the way back; 8 bytes for the size that is sent to each rank.
    Ref: Lepikhin et al. 2020 (GShard), arXiv:2006.16668, section 3.2.
    """
    ### BEGIN SOLUTION
    k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # (n k,): copy i is of token i // k
    sent = chosen.flatten().bincount(minlength=comm.size)  # (p,)
    received = comm.all_to_all(sent)
    sizes = sent.tolist(), received.tolist()
    there = dispatch(comm, x[order // k], *sizes)
    back = combine(comm, mine(there), *sizes)  # (n k, d), by expert
    return torch.zeros_like(x).index_add(0, order // k, back * weights.flatten()[order, None])
    ### END SOLUTION


class LocalExperts(Experts):
    """This rank's share of an Experts, in the order of ranks: gate, up (E/p, hidden, d) and down (E/p, d, hidden)."""

    def __init__(self, comm: Comm, whole: Experts) -> None:
        nn.Module.__init__(self)
        cut = equal_shares(comm, len(whole.gate), 0, "the experts of a layer")
        self.cuts = {"gate": cut, "up": cut, "down": cut}
        self.gate, self.up, self.down = (cut.parameter_of(stack) for stack in (whole.gate, whole.up, whole.down))


class ExpertParallel:
    """The Exchange of ranks that share the experts: rank r has the r-th E/p of them.

    Bytes per rank, of a layer: forward and backward 2 d itemsize for each copy for another rank; 8 E for the loads.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank = comm, comm.rank

    def loads(self, counts: Tensor) -> Tensor:
        return counts[None] if self.comm.size == 1 else self.comm.all_gather(counts)

    def __call__(self, copies: Tensor, loads: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        sent, received, order, counts = self.ways(loads)
        there = dispatch(self.comm, copies, sent, received)  # by rank, then by expert
        made = experts(there[order], counts)
        return combine(self.comm, made[order.argsort()], sent, received)

    def ways(self, loads: Tensor) -> tuple[list[int], list[int], Tensor, Tensor]:
        """Return, of loads (p, E), the copies for each rank and from each, their order by expert, and their counts."""
        by_rank = loads.unflatten(1, (self.comm.size, -1))  # (p, E) -> (from, to, E/p)
        mine = by_rank[:, self.rank]  # (from, E/p): what comes here
        sent, received = by_rank[self.rank].sum(1).tolist(), mine.sum(1).tolist()
        expert = torch.arange(mine.shape[1], device=mine.device).repeat(len(mine)).repeat_interleave(mine.flatten())
        return sent, received, expert.argsort(stable=True), mine.sum(0)  # by expert, then by rank


def expert_parallel(comm: Comm, model: nn.Module, capacity: float | None = None) -> nn.Module:
    """Return this rank's part of `model`, left as it is: 1/p of each layer's experts, and all the rest. Collective.

        model = expert_parallel(mesh["ep"], model)
        loss = cross_entropy(model(x), y, reduction="sum") / examples of all ranks      x, y: this rank's
        loss.backward()                                     waits for the other ranks, as forward does
        add_partial_gradients(mesh["ep"], model)            of what every rank holds; over dp all: see the table above
        optimizer.step()
        update_biases(mesh["dp"], model)                    of replicas; loads count all ep ranks already

    Args:    comm: of the ranks that share the experts, mesh["ep"]; model: of the same structure on every rank, with
             MixtureOfExperts in it; rank 0's values are taken.
             capacity: None: dropless. Else an expert takes at most ceil(capacity * copies / E) of a layer's copies.
    Returns: nn.Module, called as `model` is; parameters have the names of the whole model's. cuts_of says how each is
             cut, gather_parameters puts them together.
    Raises:  ValueError on every rank if the ranks do not divide the experts, there are none, or the models differ.
    """
    if capacity is not None:
        require_number("capacity, times the mean load,", capacity, above=0)
    shard_experts(comm, copy.deepcopy(model))  # raises what it has to say before the first message
    require_same_model(comm, model, f"expert_parallel(capacity={capacity})")
    whole = copy.deepcopy(model)
    replicate(comm, whole)
    # but for what LocalExperts.cuts says
    whole.cuts = {name: PARTIAL for name, _ in whole.named_parameters()}  # pyrefly: ignore[bad-argument-type]
    shard_experts(comm, whole)
    for layer in mixtures_of(whole):
        layer.capacity = capacity
    return whole


def shard_experts(comm: Comm, whole: nn.Module) -> nn.Module:
    """Leave to each MixtureOfExperts of `whole` this rank's experts. No messages: all ranks have equal models.

    Raises:  ValueError as expert_parallel does.
    """
    layers = [*mixtures_of(whole)]
    if not layers:
        raise ValueError(f"a {type(whole).__name__} has no MixtureOfExperts, whose experts ranks could share")
    for layer in layers:
        layer.experts, layer.exchange = LocalExperts(comm, layer.experts), ExpertParallel(comm)
    return whole


def mixtures_of(model: nn.Module) -> Iterator[MixtureOfExperts]:
    """Return the layers with experts, in their order."""
    return (module for module in model.modules() if isinstance(module, MixtureOfExperts))


def update_biases(comm: Comm, model: nn.Module, gamma: float = GAMMA) -> None:
    """Move the router biases of all layers against the loads since the last call: at the end of a step. Collective.

    Args:    comm: of the ranks that hold the same experts, mesh["dp"]: ep ranks have counted each other's already.
    Steps: one all_reduce of the (layers, E) counts if comm has several ranks.
    """
    layers = [*mixtures_of(model)]
    counts = torch.stack([layer.counts for layer in layers])
    if comm.size > 1:
        comm.all_reduce(counts)
    for layer, count in zip(layers, counts, strict=True):
        layer.update_bias(count, gamma)


# -- what it costs, and whether it is balanced -------------------------------------------------------------------------


def bytes_per_token(top_k: int, width: int, dispatch: float = 1, combine: float = 2) -> float:
    """Return k d (dispatch + combine): what a token sends and gets in a layer if all its experts are on other ranks.

    Args:    dispatch, combine: bytes of a number on its way there and back. DeepSeek-V3 dispatches in fp8 and combines
             in bf16: 8 * 7168 * (1 + 2) = 172,032.
    Ref: DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.3.
    """
    return top_k * width * (dispatch + combine)


@dataclass(frozen=True)
class Routing:
    """The experts that tokens have chosen, and the rank, of `ranks`, of each token and expert: for lab.show.

    chosen: (n, k) int64, of the tokens of all ranks, shared among them in order, as the `experts` are.
    """

    chosen: Tensor
    experts: int
    ranks: int

    @property
    def loads(self) -> Tensor:
        """(p, E): how many copies each rank's tokens bring to each expert."""
        parts = self.chosen.tensor_split(self.ranks)
        return torch.stack([part.flatten().bincount(minlength=self.experts) for part in parts])

    @property
    def traffic(self) -> Tensor:
        """(p, p): how many copies go from each rank to each rank."""
        return self.loads.unflatten(1, (self.ranks, -1)).sum(2)

    @property
    def reached(self) -> Tensor:
        """(n,): to how many ranks each token goes."""
        hit = torch.zeros(len(self.chosen), self.ranks, dtype=torch.int64)
        return hit.scatter(1, self.chosen // (self.experts // self.ranks), 1).sum(1)

    def rows(self) -> list[dict[str, int]]:
        """Return a dict for each copy: token, source (the rank of the token), expert, rank (of the expert)."""
        source = torch.arange(self.ranks).repeat_interleave(self.loads.sum(1) // self.chosen.shape[1])
        copies = zip(source.tolist(), self.chosen.tolist(), strict=True)
        return [
            {"token": t, "source": r, "expert": e, "rank": e // (self.experts // self.ranks)}
            for t, (r, chosen) in enumerate(copies)
            for e in chosen
        ]

    def __str__(self) -> str:
        n, k = self.chosen.shape
        by_expert, by_rank = self.loads.sum(0), self.traffic.sum(0)
        stays = int(self.traffic.diagonal().sum())
        return (
            f"{n * k:,} copies of {n:,} tokens, {n * k - stays:,} to another rank; largest load over mean: "
            f"{imbalance(by_expert):.2f} of {self.experts} experts, {imbalance(by_rank):.2f} of {self.ranks} ranks"
        )


def routing(layer: MixtureOfExperts, x: Tensor, ranks: int = 1) -> Routing:
    """Return what the layer's router does with tokens x (..., d), which `ranks` share as they share the experts.

    Raises:  ValueError if the ranks do not divide the experts.
    """
    experts = len(layer.router.bias)
    if experts % require_int("ranks", ranks, 1):
        raise ValueError(f"{experts} experts cannot be shared equally by {ranks} ranks")
    with torch.no_grad():
        return Routing(layer.router(x.reshape(-1, x.shape[-1]))[0], experts, ranks)


@dataclass(frozen=True)
class Balance:
    """The course of the load while a bias was updated: loads (steps + 1, E), copies of each expert, for lab.show."""

    loads: Tensor

    @property
    def imbalances(self) -> list[float]:
        """The largest load over the mean, of each step."""
        return [imbalance(load) for load in self.loads]

    def __str__(self) -> str:
        first, *_, last = self.imbalances
        steps = len(self.loads) - 1
        return f"{steps} updates of the bias: largest load over mean {first:.2f}, then {last:.2f}"


def balance(layer: MixtureOfExperts, x: Tensor, steps: int = 100, gamma: float = GAMMA) -> Balance:
    """Route the same tokens x (..., d) `steps` times, and update the bias after each; the layer stays as it is."""
    layer, loads = copy.deepcopy(layer), []
    for _ in range(require_int("steps", steps, 1) + 1):
        loads.append(routing(layer, x).loads[0])
        layer.update_bias(loads[-1], gamma)
    return Balance(torch.stack(loads))
