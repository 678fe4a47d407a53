"""Two kinds of ranks for reinforcement learning: some generate answers (rollouts), others train on them.

    rank 0, generates    [ 0 ][ 1 ][ 2 ]        [ 3 ][ 4 ][ 5 ]          batches of rollouts, whose tokens go down
                            |    |    |      ^     |    |    |      ^     every 3 updates weights go up
    ranks 1, 2, train         [ 0 ][ 1 ][ 2 ]|       [ 3 ][ 4 ][ 5 ]|     gradients are added among these ranks
    staleness                   0    1    2            0    1    2        updates that the weights of a batch lack

More updates between two sends give more tokens/s, since both kinds work at the same time, and older weights.
Ref: Williams 1992 (REINFORCE), doi:10.1007/BF00992696; Espeholt et al. 2018 (IMPALA), arXiv:1802.01561; Hu et al. 2024
(OpenRLHF), arXiv:2405.11143; Fu et al. 2025 (AReaL), arXiv:2505.24298.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..collectives.chunks import bounds
from ..comm.base import Comm, Work
from ..parallel.consensus import require_same
from ..parallel.data_parallel import DataParallel
from ..units import require_int, require_number
from .engine import Engine, tokens_of
from .sampling import Sampling

Reward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RolloutPlan:
    """The division of the work of reinforcement learning among ranks; the same on every rank.

    generating: ranks that generate, the first ones. every: updates between two sends of weights.
    batch: rollouts of one update, over all ranks; new: tokens of each. lr: of Adam. seed: of the draws.
    rollout_s, row_s: virtual seconds in which a simulated rank generates a rollout, or trains on one.
    """

    every: int = 1
    updates: int = 24
    generating: int = 1
    batch: int = 32
    new: int = 24
    lr: float = 1e-3
    seed: int = 0
    rollout_s: float = 0.0
    row_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("every", "updates", "generating", "batch", "new"):
            require_int(name, getattr(self, name), 1)
        require_int("seed", self.seed)
        for name in ("lr", "rollout_s", "row_s"):
            require_number(name, getattr(self, name), 0)


@dataclass(frozen=True)
class _Record:
    """The results of a run.

    rewards: mean reward of the batch of each update; staleness: for each update, the updates that are not in the
    weights that generated its batch. first: (updates, new) int64, the first rollout of each batch.
    tokens: generated in all; seconds: of this rank, virtual on simulated ranks.
    """

    rewards: list[float]
    staleness: list[int]
    first: Tensor
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.inf


def share_of(wanted: Sequence[int]) -> Reward:
    """Return a Reward: the share of an answer's tokens that are `wanted`, (b, new) int64 -> (b,) float64."""
    return partial(_share, torch.as_tensor(wanted))


def _share(wanted: Tensor, answers: Tensor) -> Tensor:
    return torch.isin(answers, wanted).double().mean(1)


def reinforce(comm: Comm, model: nn.Module, prompt: Sequence[int], reward: Reward, plan: RolloutPlan) -> _Record:
    """Train `model` by REINFORCE on its own answers to `prompt`: first ranks generate, others train. Collective.

    Args:    model: GPT, LLaMA or DeepSeek, overwritten; all start with the weights of the first training rank.
             prompt: tokens; reward: f(answers (b, new) int64) -> (b,), the larger the better.
    Returns: Record, the same on every rank but for its seconds. Rollout i of update u draws with its own seed, so it
             depends on the number of ranks only by rounding.
    Raises:  ValueError on every rank if plans or prompts differ, no rank is left to train, or a kind has more ranks
             than a batch has rollouts; and for prompts that Engine.submit refuses.
    Messages: a part of a batch from a generating rank to each training rank that needs a row of it; one broadcast of
              the weights every plan.every updates; two all-reduces per update, of one number and of the gradients.
    """
    tokens = tokens_of(model, prompt, plan.new)
    require_same(comm, "plan", f"{plan} for the prompt {tokens}")
    generating, training = plan.generating, comm.size - plan.generating
    if training < 1 or max(generating, training) > plan.batch:
        raise ValueError(
            f"{comm.size} ranks, {generating} of them generate {plan.batch} rollouts per update: at least one has to "
            "train, and each needs a rollout"
        )
    peers = comm.split(comm.rank < generating)  # ranks of the same kind
    senders = comm.split(comm.rank <= generating)  # the generating ranks, and the first that trains
    begin = comm.trace.clock()
    if comm.rank < generating:
        table = _generate(comm, senders, model, tokens, plan)
    else:
        table = _train(comm, peers, senders, model, tokens, reward, plan)
    comm.broadcast(table, generating)  # rows: reward, staleness, tokens of the first rollout
    count, seconds = plan.updates * plan.batch * plan.new, (comm.trace.clock() - begin) / 1e9
    return _Record(table[:, 0].tolist(), table[:, 1].long().tolist(), table[:, 2:].long(), count, seconds)


def _send_weights(senders: Comm, model: nn.Module) -> None:
    """Give the generating ranks the weights of the first training rank, the last rank of `senders`."""
    params = list(model.parameters())
    with torch.no_grad():
        flat = torch.cat([p.reshape(-1) for p in params])
        senders.broadcast(flat, senders.size - 1)
        if senders.rank < senders.size - 1:
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.copy_(part.view_as(p))  # in place, by which the engine notices that its cache is of other weights


def _parts(rows: Tensor, low: int, batch: int, ranks: int) -> list[tuple[int, Tensor]]:
    """Cut rows low, low + 1, ... of a batch by the ranks of the other kind: (number of a rank, its rows)."""
    ends = [(i, *bounds(batch, ranks, i)) for i in range(ranks)]
    return [(i, rows[max(a - low, 0) : b - low]) for i, a, b in ends if a < low + len(rows) and low < b]


def _generate(comm: Comm, senders: Comm, model: nn.Module, prompt: list[int], plan: RolloutPlan) -> Tensor:
    """Generate this rank's part of every batch, and send each training rank its rows: [updates in weights, tokens].

    Returns: room for the table of `reinforce`.
    """
    low, high = bounds(plan.batch, plan.generating, comm.rank)
    engine, sending = Engine(model, slots=min(high - low, 64)), list[Work]()
    for update in range(plan.updates):
        if update % plan.every == 0:
            for work in sending:
                work.wait()
            sending.clear()
            _send_weights(senders, model)
        with comm.trace.span("generate"):
            sampling = Sampling(temperature=1.0, seed=plan.seed + update * plan.batch + low)
            answers = torch.tensor(engine.generate([prompt] * (high - low), plan.new, sampling))
            comm.compute(plan.rollout_s * (high - low))
        rows = torch.cat([torch.full((high - low, 1), update - update % plan.every), answers], 1)
        for i, some in _parts(rows, low, plan.batch, comm.size - plan.generating):
            sending.append(comm.isend(some, plan.generating + i))
    for work in sending:
        work.wait()
    return torch.zeros(plan.updates, 2 + plan.new, dtype=torch.float64)


def _train(
    comm: Comm, peers: Comm, senders: Comm, model: nn.Module, prompt: list[int], reward: Reward, plan: RolloutPlan
) -> Tensor:
    """Train on this rank's rows of every batch. Returns the table of `reinforce`, right on the first training rank."""
    table = torch.zeros(plan.updates, 2 + plan.new, dtype=torch.float64)
    low, high = bounds(plan.batch, peers.size, peers.rank)
    strategy = DataParallel()
    strategy.start(peers, model)
    try:
        optimizer = torch.optim.Adam(model.parameters(), plan.lr)
        for update in range(plan.updates):
            if update % plan.every == 0 and peers.rank == 0:
                _send_weights(senders, model)
            rows = torch.empty(high - low, 1 + plan.new, dtype=torch.int64)
            for source, some in _parts(rows, low, plan.batch, plan.generating):
                comm.recv(some, source)
            answers = rows[:, 1:]
            with comm.trace.span("train"):
                rewards = reward(answers).double().reshape(high - low, 1)
                mean = float(peers.all_reduce(rewards.sum().reshape(1))) / plan.batch
                optimizer.zero_grad()
                logs = log_probabilities(model, prompt, answers)
                loss = -((rewards - mean) * logs).sum() / (plan.batch * plan.new)  # gradients add up to the mean's
                loss.backward()
                strategy.add_gradients(peers, model)
                optimizer.step()
                comm.compute(plan.row_s * (high - low))
            table[update] = torch.tensor([mean, update - int(rows[0, 0]), *answers[0].tolist()], dtype=torch.float64)
    finally:
        strategy.stop()
    return table


def log_probabilities(model: nn.Module, prompt: Sequence[int], answers: Tensor) -> Tensor:
    """Return the log probability of each token of `answers` to `prompt`: (b, new) int64 -> (b, new)."""
    tokens = torch.cat([torch.tensor(prompt).expand(len(answers), -1), answers], 1)
    logits = model(tokens[:, :-1])[:, len(prompt) - 1 :]  # (b, new, V)
    return logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def round_seconds(every: int, generate: float, update: float, send: float = 0.0) -> float:
    """Return the seconds between two sends of weights: `every` batches, each generated and then trained on.

    The two work at the same time on different batches, but for the first batch and the last update of a round.

    Args:    generate, update: seconds of one batch; send: of the weights.
    """
    return generate + (every - 1) * max(generate, update) + update + send
