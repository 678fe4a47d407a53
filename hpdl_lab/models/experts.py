"""Mixture of experts as in DeepSeek-V3: a router sends each token to the few experts that suit it best.

    tokens (n, d) -> router -> chosen (n, k), weights (n, k)
    token t       -> shared(t) + sum over its k experts of weight * expert(t)

n tokens of d numbers; E routed experts; each token takes k of them. An expert is a SwiGLU of `hidden` units. A token
and one of its experts make a copy: n k of them, sorted by expert, which an exchange brings to the experts.

Ref: DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.1.2; Wang et al. 2024, arXiv:2408.15664 (the bias).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from ..units import require_number

GAMMA = 0.001  # DeepSeek-V3's bias update speed, section 4.2
BEST_OF_GROUP = 2  # experts whose scores count for their group: the paper's K_r / M, 8 experts of 4 nodes


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): 3 d hidden parameters, and 2 hidden + d with biases.

    Ref: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias)
        self.up = nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))  # (..., d) -> (..., hidden) -> (..., d)


class Router(nn.Module):
    """The choice of k of E experts for each token, and their weights.

        s = sigmoid(x W)            affinity of a token to each expert
        chosen = top k of s + b     in the `top_groups` groups whose two best experts add up to most
        g = s / sum of chosen s * scale         without `normal`: s * scale

    The bias b decides the choice of experts, not their weights: it has no gradient, and update_bias moves it. In mixed
    precision the router stays in float32, as in DeepSeek-V3: gamma would be lost in a bias of 16 bits.
    """

    bias: Tensor

    def __init__(
        self, width: int, experts: int, top_k: int, groups: int, top_groups: int, scale: float, normal: bool = True
    ) -> None:
        super().__init__()
        self.top_k, self.groups, self.top_groups, self.scale, self.normal = top_k, groups, top_groups, scale, normal
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (chosen (n, k) int64, weights (n, k)) of x (n, d)."""
        scores = linear(x, self.weight).sigmoid()  # (n, d) @ (d, E) = (n, E)
        chosen = self.allowed(scores.detach() + self.bias).topk(self.top_k).indices
        weights = scores.gather(1, chosen)  # (n, k)
        if self.normal:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return chosen, weights * self.scale

    def allowed(self, scores: Tensor) -> Tensor:
        """Return `scores` (n, E), -inf outside of the best groups: a token goes to few nodes."""
        if self.top_groups == self.groups:
            return scores
        grouped = scores.unflatten(1, (self.groups, -1))  # (n, groups, E / groups)
        best = grouped.topk(min(BEST_OF_GROUP, grouped.shape[2])).values.sum(2).topk(self.top_groups).indices
        closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, False)
        return grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)


class Experts(nn.Module):
    """E SwiGLUs as three stacks: gate, up (E, hidden, d) and down (E, d, hidden), so that ranks can share them out."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for stack in (self.gate, self.up, self.down):
            nn.init.normal_(stack, std=stack.shape[-1] ** -0.5)

    def forward(self, copies: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs (m, d) of copies (m, d), sorted by expert, with counts (E,) of them."""
        stacks = zip(copies.split(counts.tolist()), self.gate, self.up, self.down, strict=True)
        return torch.cat([linear(silu(linear(x, gate)) * linear(x, up), down) for x, gate, up, down in stacks])


class _Exchange(Protocol):
    """The assignment of experts to p ranks, which all call a layer together, each with tokens of its own."""

    rank: int

    def loads(self, counts: Tensor) -> Tensor:
        """Return the loads of all ranks, (p, E). counts: (E,), this rank's copies by expert. Collective."""

    def __call__(self, copies: Tensor, loads: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the experts' outputs (m, d) of this rank's copies (m, d), sorted by expert. Collective."""


class _AllHere:
    """The Exchange of one rank, which has all experts."""

    rank = 0

    def loads(self, counts: Tensor) -> Tensor:
        return counts[None]

    def __call__(self, copies: Tensor, loads: Tensor, experts: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return experts(copies, loads[0])


class MixtureOfExperts(nn.Module):
    """(..., d) -> (..., d): DeepSeek-V3's feed-forward layer, y = shared(x) + sum of k weighted routed experts.

    3 d hidden (E + shared) + E d parameters; a token uses 3 d hidden (k + shared) + E d of them.

    exchange: the assignment of experts to ranks; parallel/experts.py replaces it.
    capacity: None: dropless. Else an expert takes at most ceil(capacity * n k / E) copies, n tokens of all ranks of the
    exchange; later ones, in the order of ranks and tokens, add nothing.
    chosen: (n, k), the experts of the last batch's tokens; loads: (p, E), copies that each rank had for each expert.
    counts: (E,), loads added over ranks and all batches of training since the last update_bias.
    """

    counts: Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int,
        shared: int = 1,
        groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
        normal: bool = True,
    ) -> None:
        """Make a layer whose shared expert is as wide as `shared` experts, 0: none.

        groups: of experts; a token goes to top_groups of them. scale, normal: of their weights, see Router.

        Raises:  ValueError if the groups do not divide the experts, or have fewer than top_k to choose from.
        """
        super().__init__()
        if not 1 <= top_groups <= groups or experts % groups:
            raise ValueError(
                f"{experts} experts in {groups} groups, {top_groups} per token: groups must divide experts"
            )
        if not 1 <= top_k <= experts // groups * top_groups:
            available = experts // groups * top_groups
            raise ValueError(f"a token cannot go to {top_k} of {available} experts in {top_groups} of {groups} groups")
        self.router = Router(width, experts, top_k, groups, top_groups, scale, normal)
        self.experts = Experts(width, hidden, experts)
        self.shared = SwiGLU(width, shared * hidden) if shared else None
        self.exchange: _Exchange = _AllHere()
        self.capacity: float | None = None
        self.chosen = self.loads = torch.zeros(0, dtype=torch.int64)
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])  # (n, d)
        order, weights, counts = self.route(tokens)
        loads = self.record_loads(self.exchange.loads(counts))
        if self.capacity is not None:
            loads = accepted(loads, self.capacity)
            by_expert = self.chosen.flatten()[order]
            position = (
                torch.arange(len(order), device=x.device) - (counts.cumsum(0) - counts)[by_expert]
            )  # at its expert
            order = order[position < loads[self.exchange.rank][by_expert]]
        made = self.exchange(self.permute(tokens, order), loads, self.experts)  # (m, d), m <= n k
        return self.combine(tokens, made, weights, order).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return of tokens (n, d): order (n k,) of copies by expert, then by token; weights (n, k); counts (E,)."""
        self.chosen, weights = self.router(tokens)  # (n, k)
        by_expert, order = self.chosen.flatten().sort(stable=True)
        return order, weights, by_expert.bincount(minlength=len(self.router.bias))

    def record_loads(self, loads: Tensor) -> Tensor:
        """Return loads (p, E) of a batch, which the next update of the bias counts."""
        self.loads = loads
        if self.training and not torch.is_inference_mode_enabled():
            self.counts += loads.sum(0)
        return loads

    def permute(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Return (m, d): the copies of tokens (n, d) that are listed in `order` (m,), in that order."""
        return tokens[order // self.router.top_k]

    def combine(self, tokens: Tensor, made: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        """Return the shared expert's output of tokens (n, d) plus the weighted sum of the routed experts' outputs."""
        token = order // self.router.top_k
        y = torch.zeros_like(tokens).index_add(0, token, made * weights.flatten()[order, None])  # (n, d)
        return y if self.shared is None else y + self.shared(tokens)

    @torch.no_grad()
    def update_bias(self, counts: Tensor | None = None, gamma: float = GAMMA) -> None:
        """Make experts with more copies than the mean less likely, and those with fewer more: b - gamma, b + gamma.

        This takes the place of an auxiliary loss, whose gradient would disturb the training.

        Args:    counts: (E,) copies of each expert in the batch of a step, of all ranks; by default `counts`, which
                 begins anew. gamma: the bias update speed.
        """
        require_number("gamma", gamma, 0)
        counts = self.counts if counts is None else counts
        load = counts.to(self.router.bias.dtype)
        self.router.bias += gamma * torch.sign(load.mean() - load)
        self.counts.zero_()


def accepted(loads: Tensor, capacity: float) -> Tensor:
    """Return the part (p, E) of `loads` that experts take: the first ceil(capacity * mean load), in order of ranks."""
    room = math.ceil(capacity * int(loads.sum()) / loads.shape[1])
    before = loads.cumsum(0) - loads
    return (room - before).clamp_min(0).minimum(loads)


def imbalance(counts: Tensor) -> float:
    """Return the largest load over the mean load: 1 if all are busy alike. counts: (E,) or (p,), not all 0."""
    return float(counts.max() / counts.double().mean())
