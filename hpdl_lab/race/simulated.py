"""The simulated league: a GPT of 6.7 billion parameters on 64 GPUs, until its loss is 2.4. One GPU fails on the way.

    seconds  =  steps x seconds of a step  +  checkpoints  +  steps computed twice    +  one restart
                  |            |                    |                    |
                the law    64 simulated ranks   your interval       a secret moment

Nothing is measured: the same plan and seed give the same seconds everywhere.

    Loss         L = (N_c / N)^0.077 + (S_c / S_min)^0.76, in nats per token. Kaplan et al. 2020, arXiv:2001.08361,
                 equation 1.6 with the constants of its table 3; N is the number of parameters without embeddings.
    Batch        S = S_min (1 + B_crit / B), B_crit = 2e8 tokens / L^(1 / 0.21), equations 1.4 and 5.1 there.
    Rate         The best rate is e_max / (1 + B_crit / B). At r times this rate, a step makes (2 - r) r times the
                 progress, and from r = 2 on the training diverges. McCandlish et al. 2018, arXiv:1812.06162, section
                 2.2. e_max makes the best rate for a batch of 2 million tokens 1.2e-4, as for GPT-3 6.7B (Brown et al.
                 2020, arXiv:2005.14165, table 2.1). It is a theory of SGD; the race takes it as its rule.
    Compression  Gradients are rounded at random to 8 or 4 bits. That adds noise: w times the square of a rank's
                 gradient, w = min(d / s^2, sqrt(d) / s) for d = 512 numbers with one scale, and s = 127 or 7 levels.
                 Alistarh et al. 2017 (QSGD), arXiv:1610.02132, lemma 3.1. Only the senders' rounding counts here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from .. import schedules
from ..comm.network import PRESETS, Islands
from ..parallel.grid.machine import EFFICIENCY, PEAKS, Machine, grid_of
from ..parallel.grid.model import Prediction, predict_step
from ..parallel.grid.simulation import simulate_step
from ..parallel.grid.spec import Spec, gpt
from .plan import Disqualified, require_memory, require_one_of, require_positive

RANKS, POSITIONS = 64, 2048
TARGET = 2.4  # nats per token
MODEL = gpt("GPT-3 6.7B", 32, 4096, 32, 50304, POSITIONS, "mixed adam")  # GPT-3's table 2.1; 50,257 tokens, padded
LIMIT = 40 * 10**9  # bytes of a GPU
STORAGE = PRESETS["ethernet_25"]  # the link of the file server
RESTART_S = 300.0  # as in 15.1
BUCKET, LEVELS = 512, {16: 0, 8: 127, 4: 7}  # numbers with one scale; levels on each side of 0, by bits


class _Precision(NamedTuple):
    """A precision of the race. training: a key of grid.spec.TRAININGS; peak: flop/s of an A100."""

    training: str
    peak: float


PRECISIONS = {
    "bfloat16": _Precision("mixed adam", PEAKS["A100"]),
    "tf32": _Precision("adam", 156e12),  # NVIDIA, A100 Tensor Core GPU Architecture; 2020
}


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan for the simulated league.

    dp, pp, tp: the grid, 64 ranks in all; zero: stage of ZeRO; micro_batches: of each replica.
    batch: sequences of 2,048 tokens in a step; precision: "bfloat16" or "tf32"; gradient_bits: in messages, 16, 8 or 4.
    checkpoint_every_s: seconds of training between two checkpoints; expected_s: the time that you expect.
    Raises:  Disqualified for a value that is not allowed.
    """

    dp: int
    pp: int
    tp: int
    micro_batches: int
    batch: int
    learning_rate: float
    checkpoint_every_s: float
    expected_s: float
    zero: int = 0
    schedule: str = "1f1b"
    recompute: bool = False
    precision: str = "bfloat16"
    gradient_bits: int = 16

    def __post_init__(self) -> None:
        require_positive(dp=self.dp, pp=self.pp, tp=self.tp, batch=self.batch, learning_rate=self.learning_rate)
        require_positive(checkpoint_every_s=self.checkpoint_every_s, expected_s=self.expected_s)
        if (ranks := self.dp * self.pp * self.tp) != RANKS:
            raise Disqualified(f"dp x pp x tp = {ranks}, and the race has {RANKS} ranks")
        require_one_of("schedule", self.schedule, schedules.CATALOG)
        require_one_of("precision", self.precision, PRECISIONS)
        require_one_of("gradient_bits", self.gradient_bits, LEVELS)


class Lap(NamedTuple):
    """The times of a plan. seconds: in all; parts: {what: s}, which add up to it; steps: by the law."""

    seconds: float
    parts: dict[str, float]
    steps: float
    step_s: float


def race_machine(plan: SimulatedPlan) -> Machine:
    """Return 8 nodes of 8 A100 with 40 GB: NVLink inside, one adapter for 25 Gbit/s Ethernet per node outside."""
    peak = PRECISIONS[plan.precision].peak
    network = Islands(8, PRESETS["nvlink_3"], PRESETS["ethernet_25"], nics=1, flops_per_s=EFFICIENCY * peak)
    return Machine("8 nodes of 8 A100 on 25 Gbit/s Ethernet", network, LIMIT)


def _spec_of(plan: SimulatedPlan) -> Spec:
    """Return the model, with as many bits per gradient on the links as planned."""
    return replace(MODEL, training=PRECISIONS[plan.precision].training, sent_bits=plan.gradient_bits)


def ledger(plan: SimulatedPlan) -> Prediction:
    """Price one step by formula, with the memory of the fullest rank.

    Raises:  Disqualified for a grid that cannot be.
    """
    how = plan.schedule, plan.micro_batches, plan.recompute, False, race_machine(plan), plan.batch
    try:
        return predict_step(_spec_of(plan), grid_of(plan.dp, plan.pp, plan.tp), *how, zero=plan.zero)
    except ValueError as error:
        raise Disqualified(str(error)) from None


def least_steps() -> float:
    """Compute S_min, the steps with a batch without end.

    Raises:  ValueError if so many parameters never reach the target.
    """
    parameters = sum(layer.parameters for layer in MODEL.layers if layer.name.startswith("blocks."))
    gap = TARGET - (6.5e13 / parameters) ** 0.077
    if gap <= 0:
        raise ValueError(f"{parameters:,} parameters never reach a loss of {TARGET}")
    return float(2.1e3 * gap ** (-1 / 0.76))


def compressed_noise(plan: SimulatedPlan) -> float:
    """Compute B_crit / B, the noise of a batch over its gradient, with the noise of compression."""
    scale = 2e8 / TARGET ** (1 / 0.21) / POSITIONS / plan.batch
    levels = LEVELS[plan.gradient_bits]
    more = min(BUCKET / levels**2, math.sqrt(BUCKET) / levels) if levels and plan.dp > 1 else 0.0
    return scale * (1 + more) + more / plan.dp


def best_rate(plan: SimulatedPlan) -> float:
    """Compute the rate at which a step makes most progress."""
    highest = 1.2e-4 * (1 + 2e8 / TARGET ** (1 / 0.21) / 2e6)
    return highest / (1 + compressed_noise(plan))


def steps_to_target(plan: SimulatedPlan) -> float:
    """Compute the steps until the loss is TARGET.

    Raises:  Disqualified for a rate that diverges.
    """
    ratio = plan.learning_rate / best_rate(plan)
    if ratio >= 2:
        raise Disqualified(f"it diverges: the rate is {ratio:.1f} times the best one for this batch")
    return least_steps() * (1 + compressed_noise(plan)) / (ratio * (2 - ratio))


@lru_cache(maxsize=64)  # the reference races against every plan
def drive(plan: SimulatedPlan, seed: int) -> Lap:
    """Run a plan in virtual time: one step on 64 simulated ranks, as many as the law asks for, and one failure.

    Args:    seed: of the moment at which a GPU fails, between 20% and 80% of the training.
    Raises:  Disqualified with the reason.
    """
    found, steps = ledger(plan), steps_to_target(plan)
    require_memory(found)
    grid, machine = grid_of(plan.dp, plan.pp, plan.tp), race_machine(plan)
    how = plan.schedule, plan.micro_batches, plan.recompute, machine, plan.batch
    step_s = simulate_step(_spec_of(plan), grid, *how, zero=plan.zero)
    share = random.Random(seed).uniform(0.2, 0.8)
    written, repeated, restart = breaks(plan, steps * step_s, share)
    parts = {name: steps * seconds for name, seconds in _parts_of(found, step_s).items()}
    parts |= {"checkpoints": written, "repeated": repeated, "restart": restart}
    return Lap(sum(parts.values()), parts, steps, step_s)


def _parts_of(found: Prediction, step_s: float) -> dict[str, float]:
    """Divide a simulated step by its formula: the rank's own work stays, its waits are scaled to the rest."""
    own = {name: found.parts[name] for name in ("compute", "tp")}
    waits = {name: seconds for name, seconds in found.parts.items() if name not in own and seconds > 0} or {"bubble": 1}
    rest = step_s - sum(own.values())
    return own | {name: rest * seconds / sum(waits.values()) for name, seconds in waits.items()}


def _write_s() -> float:
    """Compute the seconds of a checkpoint: parameters and Adam's state, 14 bytes per parameter, to the file server."""
    return MODEL.parameters * 14 * STORAGE.beta


def breaks(plan: SimulatedPlan, training_s: float, share: float) -> tuple[float, float, float]:
    """Compute (s of checkpoints, s of training that is lost, s of the restart) for one failure.

    Args:    training_s: all steps once; share: of these, at which a GPU fails.
    """
    every, failed = plan.checkpoint_every_s, share * training_s
    kept = failed // every * every  # a failure between two checkpoints goes back to the first of both
    writes = math.ceil(training_s / every) - 1  # none at the end
    return writes * _write_s(), failed - kept, RESTART_S


REFERENCE = SimulatedPlan(  # not the best one
    dp=4,
    pp=8,
    tp=2,
    micro_batches=128,
    batch=512,
    learning_rate=7.5e-5,
    checkpoint_every_s=4000,
    expected_s=240_000,
    schedule="zero_bubble_h1",
    gradient_bits=8,
)
